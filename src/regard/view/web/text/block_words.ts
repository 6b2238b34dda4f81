/** What is read off where this file has means of blocks alone: each number says what it is. */

import type { Reading } from "../data/reading";
import { errorOf } from "../maths/block_means";
import { digits, grouped, share } from "../maths/numbers";
import { top } from "../maths/weights";
import type { LayerInfo } from "../protocol/recording";

/** What the stored means are. */
export function meansName({ block }: LayerInfo): string {
  const size = grouped(block);
  return block > 1 ? `means of blocks of ${size} × ${size} tokens` : "weights in one byte each";
}

/**
 * The cell as a sentence, where the query may attend to the key.
 * @param info of the coarsest layer
 */
export function meanSentence({ terms, row, query, key }: Reading, info: LayerInfo, where: string): string {
  if (terms) return `This file has block means only: what single keys get, ${where}, is not known.`;
  const [queries, keys] = [blockAt(query, info.block, info.q_len), blockAt(key, info.block, info.kv_len)];
  return `Of ${queries.name}, about ${share(row[key])} of the attention goes to ${keys.name} (${meansName(info)}), ${where}.`;
}

/**
 * The strongest blocks of a row or a column.
 * @param shares of blocks, one for each token
 */
export function strongestBlocks(shares: Float32Array, { block }: LayerInfo, count: number) {
  const starts = shares.map((share, at) => (at % block === 0 ? share : 0));
  return top(starts, count).map((at) => ({ ...blockAt(at, block, shares.length), share: shares[at] }));
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
export function missing(layers: LayerInfo[], layer: number, what: string): string {
  return `Only block means of this layer are in this file; ${what} needs query and key: see it with ${remedy(layers, layer)}`;
}

/** What is quantised, and how exactly; what is missing, and how to get it. */
export function meansNotes(layers: LayerInfo[], layer: number): string[] {
  const info = layers[layer];
  const error = `± ${digits(errorOf(info) * 100)}\u202f% of each`; // a part of each number, not points
  return [
    `This file has not all of query and key of this layer: it has ${meansName(info)}, ${error}.`,
    `Every weight: ${remedy(layers, layer)}`,
  ];
}

/** For who wrote the file in a shell, and for who did in Python. A page of two recordings takes no layers. */
function remedy(layers: LayerInfo[], layer: number): string {
  const { of, place = layer } = layers[layer];
  const [shell, python] = of === undefined ? [`--layers ${place} or `, "layers and "] : ["", ""];
  return `regard serve, or write the file with ${shell}a larger --limit (in Python: ${python}limit of regard.page).`;
}
