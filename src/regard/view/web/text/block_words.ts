/** What is read off where this file has means of blocks alone: each number says what it is. */

import { coarsest, errorOf } from "../data/block_means";
import type { LayerInfo } from "../data/payload";
import type { Which } from "../data/source";
import type { SmallMap } from "../map/small";
import { blockOf, edge } from "../maths/blocks";
import { digits, full, grouped, share } from "../maths/numbers";
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
export function meanSentence({ terms, row, query, key }: Reading, info: LayerInfo, where: string): string {
  if (terms) return `This file has block means only: what single keys get, ${where}, is not known.`;
  const [queries, keys] = [blockAt(query, info.block, info.q_len), blockAt(key, info.block, info.kv_len)];
  const part = row[key] * (keys.end - keys.first);
  return `Of ${queries.name}, about ${share(part)} of the attention goes to ${keys.name} (${meansName(info)}), ${where}.`;
}

/** @returns the number with all its digits */
export function meanValue({ row, key, terms }: Reading, info: LayerInfo): string {
  return terms ? "" : `mean weight of the block ${full(row[key])}, ${errorName(info)}`;
}

/** What must be said beside a row or a column; nothing where its weights are exact. */
export function meansAside(which: Which, layers: LayerInfo[]): string {
  const info = coarsest(which, layers);
  return info ? `; ${meansName(info)}` : "";
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
export function missing({ kind }: LayerInfo, layer: number, what: string): string {
  const only = kind === "map" ? "the small map of this layer is" : "block means of this layer are";
  return `Only ${only} in this file; ${what} needs query and key: see it with regard serve, or write the file with layers=[${layer}] or a larger limit.`;
}

/** What is quantised, what is missing, and how to get it. */
export function meansNotes(info: LayerInfo, layer: number): string[] {
  return [
    `All of query and key of this layer would make this file too large: it has ${meansName(info)}.`,
    `Every weight: regard serve, or write the file with layers=[${layer}] or a larger limit. By row, each row of blocks is over its highest mean. Sinks cannot be set aside here.`,
  ];
}

/** A cell of a small map, where there is nothing finer. */
export function blockSentence(
  { rows, columns, shares }: SmallMap,
  { q_len, kv_len, label, place, head_numbers }: LayerInfo,
  { head, layer }: { head: number; layer: number },
  { query, key }: { query: number; key: number },
): string {
  const [row, column] = [block(query, q_len, rows), block(key, kv_len, columns)];
  const value = shares[(head * rows + row.at) * columns + column.at];
  return `Of ${row.name}, about ${share(value)} of the attention goes to ${column.name} (small map), layer ${label ?? place ?? layer} head ${head_numbers?.[head] ?? head}.`;
}

function block(position: number, length: number, cells: number) {
  const at = blockOf(position, length, cells);
  const [first, last] = [edge(at, length, cells), edge(at + 1, length, cells) - 1];
  return { at, name: first === last ? `token ${first}` : `tokens ${first} to ${last}` };
}

/** The strongest blocks, as rows of a table. */
export function blockRows(means: Float32Array, info: LayerInfo, written: (weight: number) => string): HTMLElement[] {
  return strongestBlocks(means, info, LISTED).map(({ places, mean }) => {
    const row = note(places, written(mean));
    row.title = full(mean);
    return row;
  });
}
