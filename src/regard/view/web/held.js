/**
 * A layer that is too large for this file: of each head the mean weights of blocks, one byte each,
 * and where there is room the strongest keys of every query with their weights, as held.py keeps them.
 *
 * @typedef {import("./payload.js").LayerInfo} LayerInfo
 *
 * @typedef {object} Held
 * @property {Uint8Array} levels (num_heads, rows, columns) of blocks
 * @property {Int32Array | null} keys (num_heads, strongest, q_len), in the order of the text; null:
 *   there was no room
 * @property {Float32Array | null} weights of these keys; 0: no key
 * @property {Float32Array | null} totals of all weights of a row (num_heads, q_len); null: 1
 *
 * @typedef {object} Rest what is known of the keys that are not held
 * @property {number} share of them together
 * @property {number} most that any of them has
 */

import { unpack, unpackBytes } from "./payload.js";

export const NO_NUMBER = 255; // the level of a mean that is not a number

/**
 * @param {LayerInfo} info @param {Record<string, Uint8Array>} raw
 * @returns {Promise<Held>}
 */
export async function readHeld(info, raw) {
  const { num_heads, q_len, strongest } = info;
  const { rows, columns } = blocksOf(info);
  const levels = await unpackBytes(raw.levels, num_heads * rows * columns);
  if (strongest === 0) return { levels, keys: null, weights: null, totals: null };
  const count = num_heads * strongest * q_len;
  const keys = /** @type {Int32Array} */ (await unpack(raw.keys, "int32", count));
  const weights = /** @type {Float32Array} */ (await unpack(raw.weights, "float32", count));
  const totals = raw.totals
    ? /** @type {Float32Array} */ (await unpack(raw.totals, "float32", num_heads * q_len))
    : null;
  // Each key is stored as its distance from the one before.
  for (let at = 0; at < count; at++)
    if (Math.floor(at / q_len) % strongest > 0) keys[at] += keys[at - q_len];
  return { levels, keys, weights, totals };
}

/** @param {LayerInfo} info @returns {{rows: number, columns: number}} */
export function blocksOf({ q_len, kv_len, block }) {
  return { rows: Math.ceil(q_len / block), columns: Math.ceil(kv_len / block) };
}

/**
 * The mean that each of the 256 levels stands for.
 * @param {LayerInfo} info @returns {Float32Array}
 */
export function meansOf({ maximum, octaves }) {
  const means = Float32Array.from({ length: 256 }, (_, level) => maximum * 2 ** ((-octaves * (254 - level)) / 253));
  [means[0], means[NO_NUMBER]] = [0, NaN];
  return means;
}

/**
 * How far a stored mean may be from the real one, as a part of it.
 * @param {LayerInfo} info @returns {number}
 */
export function errorOf({ octaves }) {
  return 2 ** (octaves / 506) - 1;
}

/** Is every weight of the layer known? @param {LayerInfo} info @returns {boolean} */
export function isWhole({ kind }) {
  return kind !== "map" && kind !== "pyramid";
}

/**
 * Of what is shown, the layer whose block means are the largest; null where every weight is known.
 * @param {import("./source.js").Which} which @param {LayerInfo[]} layers
 * @returns {LayerInfo | null}
 */
export function coarsest({ layer, terms }, layers) {
  const infos = (terms ?? [{ layer }]).map((term) => layers[term.layer]);
  const held = infos.filter(({ kind }) => kind === "pyramid");
  return held.sort((one, other) => one.strongest - other.strongest || other.block - one.block)[0] ?? null;
}
