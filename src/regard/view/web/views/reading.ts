/**
 * What is read off at the pointed or chosen cell: the whole row of its query and the whole column
 * of its key. One reading at a time; a newer one replaces an older that is still being computed.
 */

import type { Rest } from "../data/held";
import { addedRests, type Head, type Source, type Term } from "../data/source";
import { shown } from "../map/compare";
import type { State } from "../state";

export interface Reading {
  layer: number;
  head: number;
  hidden: boolean;
  terms?: Term[]; // several heads: a mean or a difference
  query: number;
  key: number;
  queryTo: number | null; // the last of several queries, of which the row is the mean
  keyTo: number | null; // the last of several keys, of which the column is the sum
  row: Float32Array; // weights of the query, one for each key
  mask: Uint8Array; // which keys the query may attend to
  rest?: Rest; // of the keys whose weights this file does not hold
  /** weights of the key, one from each query; null: on its way */
  column: Float32Array | null;
}

/** What changes a reading. */
const CAUSES = "view layer head heads compare with hidden query key queryTo keyTo hover".split(" ");
const ONE = { queryTo: null, keyTo: null };
/** Views that compare no heads, and those that show one alone. */
const ONLY: Partial<Record<State["view"], Partial<State>>> = {
  text: { compare: "alone" },
  steps: { compare: "alone", heads: "one" },
};

export class Reader {
  latest = new AbortController();
  isReading = false;

  /** @param isOneText are the keys of a layer the queries' own tokens? */
  constructor(
    readonly source: Source,
    readonly onReading: (reading: Reading) => void,
    readonly onDamage: (error: Error) => void,
    readonly isOneText: (layer: number) => boolean,
  ) {}

  update(state: State, changed: Set<string>) {
    if (!CAUSES.some((name) => changed.has(name))) return;
    this.latest.abort();
    const { signal } = (this.latest = new AbortController());
    this.isReading = this.source.layers[state.layer].kind !== "map";
    if (!this.isReading) return;
    this.read(state, signal, (reading) => signal.aborted || this.onReading(reading))
      .catch((error) => {
        if (!signal.aborted) this.onDamage(error);
      })
      .finally(() => {
        if (!signal.aborted) this.isReading = false;
      });
  }

  /** The row is there at once; the column may take longer and comes in a second reading. */
  async read(state: State, signal: AbortSignal, onReading: (reading: Reading) => void) {
    const isText = state.view === "text";
    const which = shown({ ...state, ...ONLY[state.view] }, this.source.layers);
    // Several tokens are chosen in the text, and read there.
    let { queryTo, keyTo } = state.hover || !isText ? ONE : state;
    let { query, key } = state.hover ?? state;
    if (isText && this.isOneText(state.layer)) {
      // Where a token looks and who looks at it: one token, both ways.
      query ??= key;
      [key, keyTo] = [query, queryTo];
    }
    let column = null;
    if (query === null) {
      key ??= 0;
      column = await this.columns(which, key, keyTo ?? key, signal);
      query = strongest(column);
    }
    const { row, mask, rest } = await this.rows(which, query, queryTo ?? query, signal);
    key ??= strongest(row);
    const reading = { ...which, query, key, queryTo, keyTo, row, mask, rest };
    if (!column) {
      onReading({ ...reading, column: null });
      column = await this.columns(which, key, keyTo ?? key, signal);
    }
    onReading({ ...reading, column });
  }

  /** The mean of some rows, and the keys that any of them may attend to. */
  async rows(
    which: Head,
    first: number,
    last: number,
    signal: AbortSignal,
  ): Promise<Pick<Reading, "row" | "mask" | "rest">> {
    const { values: row, mask, rest } = await this.source.row(which, first, signal);
    const count = last - first + 1;
    const rests = [rest];
    for (let query = first + 1; query <= last && !signal.aborted; query++) {
      const next = await this.source.row(which, query, signal);
      for (let key = 0; key < row.length; key++) {
        row[key] += next.values[key];
        mask[key] |= next.mask[key];
      }
      rests.push(next.rest);
    }
    const mean = count > 1 ? row.map((weight) => weight / count) : row;
    return {
      row: mean,
      mask,
      rest: addedRests(
        rests,
        rests.map(() => ({ factor: 1 / count })),
      ),
    };
  }

  /** What each query gives to some keys together. */
  async columns(which: Head, first: number, last: number, signal: AbortSignal): Promise<Float32Array> {
    const column = await this.source.column(which, first, signal);
    for (let key = first + 1; key <= last && !signal.aborted; key++) {
      const next = await this.source.column(which, key, signal);
      for (let query = 0; query < column.length; query++) column[query] += next[query];
    }
    return column;
  }
}

/** @returns the lowest index of the largest; where none is above 0, of a NaN */
export function strongest(weights: Float32Array): number {
  let best = 0;
  for (let i = 1; i < weights.length; i++) if (weights[i] > weights[best] || Number.isNaN(weights[best])) best = i;
  const unknown = weights[best] > 0 ? -1 : weights.findIndex(Number.isNaN);
  return unknown < 0 ? best : unknown;
}

/** The rank of one weight among the allowed ones, ties to the lowest index, as topk has it. */
export function rankOf(weights: Float32Array, mask: Uint8Array, at: number): { rank: number; of: number } {
  let rank = 1;
  let of = 0;
  for (let i = 0; i < weights.length; i++) {
    of += mask[i];
    if (weights[i] > weights[at] || (weights[i] === weights[at] && i < at && mask[i])) rank++;
  }
  return { rank, of };
}

/** The positions of the largest weights above 0, in falling order. */
export function top(weights: Float32Array, count: number): number[] {
  const best: number[] = [];
  for (let i = 0; i < weights.length; i++) {
    if (!(weights[i] > 0)) continue;
    if (best.length === count && weights[i] <= weights[best[count - 1]]) continue;
    let at = best.length;
    while (at > 0 && weights[best[at - 1]] < weights[i]) at--;
    best.splice(at, 0, i);
    if (best.length > count) best.pop();
  }
  return best;
}
