/**
 * A layer that is too large for this file: of each head the mean weights of blocks, one byte each,
 * and where there is room the strongest keys of every query with their weights, as summarised_layer.py keeps them.
 */

import type { LayerInfo } from "./payload";
import type { Which } from "./source";

export interface Held {
  levels: Uint8Array; // (num_heads, rows, columns) of blocks
  /** (num_heads, strongest, q_len), in the order of the text; null: there was no room */
  keys: Int32Array | null;
  weights: Float32Array | null; // of these keys; 0: no key
  totals: Float32Array | null; // of all weights of a row (num_heads, q_len); null: 1
}

/** What is known of the keys that are not held. */
export interface Rest {
  share: number; // of them together
  most: number; // that any of them has
}

export const NO_NUMBER = 255; // the level of a mean that is not a number

export function blocksOf({ q_len, kv_len, block }: LayerInfo): { rows: number; columns: number } {
  return { rows: Math.ceil(q_len / block), columns: Math.ceil(kv_len / block) };
}

/** The mean that each of the 256 levels stands for. */
export function meansOf({ maximum, octaves }: LayerInfo): Float32Array {
  const means = Float32Array.from({ length: 256 }, (_, level) => maximum * 2 ** ((-octaves * (254 - level)) / 253));
  [means[0], means[NO_NUMBER]] = [0, NaN];
  return means;
}

/** How far a stored mean may be from the real one, as a part of it. */
export function errorOf({ octaves }: LayerInfo): number {
  return 2 ** (octaves / 506) - 1;
}

/** Is every weight of the layer known? */
export function isWhole({ kind }: LayerInfo): boolean {
  return kind !== "map" && kind !== "pyramid";
}

/** Of what is shown, the layer whose block means are the largest; null where every weight is known. */
export function coarsest({ layer, terms }: Which, layers: LayerInfo[]): LayerInfo | null {
  const infos = (terms ?? [{ layer }]).map((term) => layers[term.layer]);
  const held = infos.filter(({ kind }) => kind === "pyramid");
  return held.sort((one, other) => one.strongest - other.strongest || other.block - one.block)[0] ?? null;
}
