/** What is read off where this file holds block means and strong keys: each number says what it is. */

import { coarsest, errorOf } from "../data/held";
import type { LayerInfo } from "../data/payload";
import { isDifference } from "../map/compare";
import type { SmallMap } from "../map/small";
import { element } from "../dom";
import { blockOf, edge } from "../maths/blocks";
import { counted, digits, full, grouped, share } from "../maths/numbers";
import type { Reading } from "../views/reading";
import { LISTED, note } from "./sentence";

/** What the stored means are, and how exact. */
export function meansName(info: LayerInfo): string {
  const size = grouped(info.block);
  const what = info.block > 1 ? `means of blocks of ${size} × ${size} tokens` : "weights in one byte each";
  return `${what}, ${errorName(info)}`;
}

/** @returns a part of each number, not points */
export function errorName(info: LayerInfo): string {
  return `± ${digits(errorOf(info) * 100)}\u202f% of each`;
}

/**
 * The cell as a sentence, where the query may attend to the key.
 * @param info of the coarsest layer
 */
export function heldSentence(
  reading: Reading,
  info: LayerInfo,
  { from, to, where, less }: { from: string; to: string; where: string; less: string },
): string {
  const { row, key, mask, terms, rest } = reading;
  if (!rest) return blocksSentence(reading, info, where);
  const weight = row[key];
  if (terms) {
    const off =
      rest.most > 0
        ? `; off by at most ${digits(rest.most * 100)} percentage points, as this file holds only the ${counted(info.strongest, "strongest key")} of a query`
        : "";
    if (!isDifference(reading)) return `${from} gives ${to} ${share(weight)} of its attention, ${where}${off}.`;
    const much = `${digits(Math.abs(weight) * 100)} percentage points ${weight < 0 ? "less" : "more"}`;
    return `${from} gives ${to} ${much} of its attention in ${where} than in ${less}${off}.`;
  }
  if (!(weight > 0) && rest.most > 0)
    return `${from} gives ${to} at most ${share(rest.most)} of its attention: it is none of the ${info.strongest} keys that this file holds of the query, ${where}.`;
  const held = row.filter((one) => one > 0);
  const rank = 1 + held.filter((one) => one > weight).length;
  const others = mask.reduce((sum, may) => sum + may, 0) - held.length;
  const left =
    rest.most > 0
      ? `; the other ${info.span_heads > 0 ? counted(others, "key") : "keys"} share ${share(rest.share)}`
      : "";
  return `${from} gives ${share(weight)} of its attention to ${to} (rank ${rank} of the ${held.length} that this file holds${left}), ${where}.`;
}

/** Where not even the strongest keys are held. */
function blocksSentence({ terms, row, query, key }: Reading, info: LayerInfo, where: string) {
  if (terms) return `This file holds block means only: what single keys get, ${where}, is not known.`;
  const [queries, keys] = [blockAt(query, info.block, info.q_len), blockAt(key, info.block, info.kv_len)];
  const part = row[key] * (keys.end - keys.first);
  return `Of ${queries.name}, about ${share(part)} of the attention goes to ${keys.name} (${meansName(info)}), ${where}.`;
}

/** @returns the number with all its digits */
export function heldValue({ row, key, terms, rest }: Reading, info: LayerInfo): string {
  if (!rest) return terms ? "" : `mean weight of the block ${full(row[key])}, ${errorName(info)}`;
  if (terms) return rest.most > 0 ? `known to ± ${full(rest.most)}: ${full(row[key])}` : full(row[key]);
  return row[key] > 0 || rest.most === 0 ? `weight ${full(row[key])}` : `weight at most ${full(rest.most)}`;
}

/** What must be said beside a row or a column; nothing where its weights are exact. */
export function heldAside(reading: Reading, shows: "row" | "column", layers: LayerInfo[]): string {
  const info = coarsest(reading, layers);
  if (!info) return "";
  return shows === "row" && reading.rest
    ? `; only the ${counted(info.strongest, "strongest key")}`
    : `; ${meansName(info)}`;
}

/**
 * The strongest blocks of a row or a column of means.
 * @param means one for each token
 */
export function strongestBlocks(
  means: Float32Array,
  { block }: LayerInfo,
  count: number,
): { places: string; mean: number }[] {
  const blocks = [];
  for (let at = 0; at < means.length; at += block)
    if (means[at] > 0) blocks.push({ ...blockAt(at, block, means.length), mean: means[at] });
  return blocks.sort((one, other) => other.mean - one.mean).slice(0, count);
}

/**
 * The block that a token lies in.
 * @param length of the text
 */
export function blockAt(at: number, block: number, length: number) {
  const first = at - (at % block);
  const end = Math.min(length, first + block);
  const isOne = end - first === 1;
  const places = isOne ? grouped(first) : `${grouped(first)} to ${grouped(end - 1)}`;
  return { first, end, places, name: `${isOne ? "token" : "tokens"} ${places}` };
}

/** Why a view has nothing to show, and how to get it. */
export function missing({ kind, strongest }: LayerInfo, layer: number, what: string): string {
  const only = kind === "map" ? "the small map" : strongest > 0 ? "block means and the strongest keys" : "block means";
  return `Only ${only} of this layer ${kind === "map" ? "is" : "are"} in this file; ${what} needs query and key: see it with regard serve, or write the file with layers=[${layer}] or a larger limit.`;
}

/** What is quantised, what is missing, and how to get it. */
export function heldNotes(info: LayerInfo, layer: number): string[] {
  const strongest = counted(info.strongest, "strongest key");
  const rows =
    info.strongest > 0
      ? `Of each query it holds the ${strongest} with their exact weights; of the other keys only what they get together.`
      : "Of single rows it holds nothing.";
  return [
    `All of query and key of this layer would make this file too large: it holds ${meansName(info)}, for the map and for who looks at a token. ${rows}`,
    `Every weight: regard serve, or write the file with layers=[${layer}] or a larger limit. By row, each row of blocks is over its highest mean. Sinks cannot be set aside here.`,
  ];
}

/** A cell of a small map, where there is nothing finer. */
export function blockSentence(
  { rows, columns, shares }: SmallMap,
  { q_len, kv_len }: LayerInfo,
  { head, layer }: { head: number; layer: number },
  { query, key }: { query: number; key: number },
): string {
  const [row, column] = [block(query, q_len, rows), block(key, kv_len, columns)];
  const value = shares[(head * rows + row.at) * columns + column.at];
  return `Of ${row.name}, about ${share(value)} of the attention goes to ${column.name} (small map), layer ${layer} head ${head}.`;
}

function block(position: number, length: number, cells: number) {
  const at = blockOf(position, length, cells);
  const [first, last] = [edge(at, length, cells), edge(at + 1, length, cells) - 1];
  return { at, name: first === last ? `token ${first}` : `tokens ${first} to ${last}` };
}

/** The strongest blocks as a table. */
export function listBlocks(
  table: HTMLElement,
  caption: string,
  means: Float32Array,
  info: LayerInfo,
  written: (weight: number) => string,
) {
  const name = element("caption", {}, `${caption} (${meansName(info)})`);
  const rows = strongestBlocks(means, info, LISTED).map(({ places, mean }) => {
    const row = note(places, written(mean));
    row.title = full(mean);
    return row;
  });
  if (rows.length === 0) rows.push(note(means.some(Number.isNaN) ? "not numbers (NaN)" : "nothing"));
  table.replaceChildren(name, element("tbody", {}, ...rows));
}
