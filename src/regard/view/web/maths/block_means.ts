/**
 * A layer that is too large for this file: of each head the mean weights of blocks, one byte each, as
 * summarised_layer.py stores them.
 */

import type { LayerInfo } from "../protocol/recording";

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
