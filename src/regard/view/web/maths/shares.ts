/**
 * What parts of the text give to each other, in one head, as `seen.segments` of the library: for a
 * part of the queries the mean of its rows, added up over each part of the keys.
 */

import { rowWeights, type Layer, type Which } from "./softmax";

/** First token, and the one past the last. */
export type Span = [number, number];

export type Parts = { queries: Span[]; keys: Span[] };

/** @returns (query parts, key parts); null: nobody waits */
export async function shares(
  layer: Layer,
  which: Which,
  { queries, keys }: Parts,
  goesOn: () => Promise<boolean>,
): Promise<{ values: Float32Array } | null> {
  const row = new Float64Array(layer.info.kv_len);
  const values = new Float32Array(queries.length * keys.length);
  for (const [place, [first, end]] of queries.entries()) {
    const sums = new Float64Array(keys.length);
    let counted = 0;
    for (let query = first; query < end; query++) {
      rowWeights(layer, which, query, row);
      let whole = 0;
      keys.forEach(([from, to], part) => {
        let sum = 0;
        for (let key = from; key < to; key++) sum += row[key];
        sums[part] += sum;
        whole += sum;
      });
      // Without sinks, a query that attends to nothing else says nothing.
      if (!which.hidden || whole > 0 || row.some((weight) => weight > 0)) counted++;
      if (!(await goesOn())) return null;
    }
    sums.forEach((sum, part) => (values[place * keys.length + part] = sum / Math.max(1, counted)));
  }
  return { values };
}
