/**
 * The definition: weight = exp((score - maximum) - log_normalizer) where the query may attend to the
 * key; score = scale · query·key, maximum is the largest score of the row, and log_normalizer the log
 * of the sum of exp(score - maximum). Their sum, the logsumexp, would round the log_normalizer away
 * where scores are large. Both are in the file, so any weight is one product. Those of large scores,
 * which float32 does not hold well enough, and those of weights without sinks are computed here when
 * first asked for. Sums run in double precision. A row without an allowed key has weights 0.
 */

import type { LayerInfo } from "../protocol/recording";
import { blocksOf } from "./block_means";

const LARGE = 256; // scores computed in float32 move each weight by less than 2e-5 up to here

export interface Row {
  maximum: number; // the largest score; -Infinity where no key is left
  log_normalizer: number; // log of the sum of exp(score - maximum)
}

export interface Layer {
  info: LayerInfo;
  query?: Float32Array; // (num_heads, q_len, head_dim)
  key?: Float32Array; // (num_kv_heads, kv_len, head_dim)
  value?: Float32Array; // (value_heads, kv_len, value_dim)
  weights?: Float32Array; // (num_heads, q_len, kv_len)
  levels?: Uint8Array; // of block means (num_heads, rows, columns), where neither is in this file
  means: Float32Array; // what each of the 256 levels stands for
  spans?: Int32Array; // (span_heads, q_len, 2): first allowed key, and the one past the last
  sinks: Uint8Array; // (kv_len): 1 where a key is set aside by `hide sinks`
  /** (4, num_heads, q_len): maximum and log_normalizer, then both of the row without sinks; none beside weights */
  rows?: Float32Array;
  summed: Map<number, Row>; // rows of which the file does not hold them, or not well enough
  blocks?: Float32Array; // means of a long layer (num_heads, rows, columns)
}

export interface Which {
  head: number;
  hidden: boolean; // sinks are set aside and the rows renormalised
}

export function rowOf(layer: Layer, which: Which, query: number): Row {
  const { num_heads, q_len } = layer.info;
  const { head, hidden } = which;
  if (layer.rows) {
    const [first, at, step] = [hidden ? 2 : 0, head * q_len + query, num_heads * q_len];
    const maximum = layer.rows[first * step + at];
    const isRough = Math.abs(maximum) >= LARGE && maximum !== -Infinity;
    if (!isRough) return { maximum, log_normalizer: layer.rows[(first + 1) * step + at] };
  }
  const place = (hidden ? num_heads * q_len : 0) + head * q_len + query;
  const row = layer.summed.get(place) ?? summed(layer, which, query);
  layer.summed.set(place, row);
  return row;
}

function summed(layer: Layer, which: Which, query: number): Row {
  const [start, stop] = allowed(layer, which.head, query);
  const row = new Float64Array(layer.info.kv_len);
  scores(layer, which, query, start, stop, row);
  let maximum = -Infinity;
  for (let key = start; key < stop; key++) maximum = Math.max(maximum, row[key]);
  if (maximum === -Infinity) return { maximum, log_normalizer: 0 };
  // Stored weights are kept as they are: they may be less than 1 together.
  if (layer.weights && !which.hidden) return { maximum, log_normalizer: -maximum };
  let sum = 0;
  for (let key = start; key < stop; key++) sum += Math.exp(row[key] - maximum);
  return { maximum, log_normalizer: Math.log(sum) };
}

/** The allowed keys of a query, as the first and the one past the last. */
export function allowed(layer: Layer, head: number, query: number): [number, number] {
  if (!layer.spans) return [0, layer.info.kv_len];
  const at = 2 * ((layer.info.span_heads > 1 ? head * layer.info.q_len : 0) + query);
  return [layer.spans[at], layer.spans[at + 1]];
}

/** Of embedded weights with a mask that is no interval, only the zeros are known, not their cause. */
export function isMaskKnown(info: LayerInfo): boolean {
  return info.kind === "query-key" || info.span_heads > 0;
}

/**
 * Which keys a query may attend to, without those that are set aside.
 * @param weights of the query
 * @returns (kv_len): 1 where it may
 */
export function maskOf(layer: Layer, { head, hidden }: Which, query: number, weights: Float64Array): Uint8Array {
  const mask = new Uint8Array(layer.info.kv_len);
  const [start, stop] = allowed(layer, head, query);
  const isKnown = isMaskKnown(layer.info);
  for (let key = start; key < stop; key++)
    mask[key] = Number((isKnown || weights[key] !== 0) && !(hidden && layer.sinks[key]));
  return mask;
}

/**
 * The weights of one query.
 * @param from first key
 * @param to past the last key
 * @param out (kv_len); only from..to is meant
 */
export function weightsOf(layer: Layer, which: Which, query: number, from: number, to: number, out: Float64Array) {
  out.fill(0, from, to);
  const [start, stop] = allowed(layer, which.head, query);
  const [first, end] = [Math.max(from, start), Math.min(to, stop)];
  if (layer.levels) {
    const levels = levelsOf(layer, which.head, Math.floor(query / layer.info.block));
    for (let key = first; key < end; key++) out[key] = layer.means[levels[Math.floor(key / layer.info.block)]];
    return;
  }
  const { maximum, log_normalizer } = rowOf(layer, which, query);
  if (maximum === -Infinity) return;
  scores(layer, which, query, first, end, out);
  for (let key = first; key < end; key++) out[key] = Math.exp(out[key] - maximum - log_normalizer);
}

/** The levels of a row of blocks, and of those below it. */
export function levelsOf({ info, levels }: Layer, head: number, row: number): Uint8Array {
  const { rows, columns } = blocksOf(info);
  return (levels as Uint8Array).subarray((head * rows + row) * columns);
}

/**
 * All weights of one query. They sum to 1: what float32 took from the log_normalizer is restored.
 * @param out (kv_len), overwritten
 */
export function rowWeights(layer: Layer, which: Which, query: number, out: Float64Array): Row {
  weightsOf(layer, which, query, 0, out.length, out);
  if (layer.levels) return { maximum: NaN, log_normalizer: NaN };
  // Stored weights are kept as they are: they may be less than 1 together.
  const total = layer.weights && !which.hidden ? 1 : out.reduce((sum, weight) => sum + weight, 0);
  if (total > 0 && total !== 1) for (let key = 0; key < out.length; key++) out[key] /= total;
  const { maximum, log_normalizer } = rowOf(layer, which, query);
  return { maximum, log_normalizer: total > 0 ? log_normalizer + Math.log(total) : log_normalizer };
}

/**
 * The numbers before the softmax, -Infinity for a key set aside. For embedded weights they are
 * the logarithms.
 */
function scores(layer: Layer, { head, hidden }: Which, query: number, from: number, to: number, out: Float64Array) {
  const { num_heads, num_kv_heads, q_len, kv_len, head_dim, scale } = layer.info;
  if (layer.weights) {
    const start = (head * q_len + query) * kv_len;
    for (let key = from; key < to; key++) out[key] = Math.log(layer.weights[start + key]);
  } else {
    const queries = layer.query as Float32Array;
    const keys = layer.key as Float32Array;
    const i = (head * q_len + query) * head_dim;
    const kvHead = Math.floor((head * num_kv_heads) / num_heads);
    const vector = queries.subarray(i, i + head_dim);
    products(vector, keys, kvHead * kv_len * head_dim, from, to, out);
    for (let key = from; key < to; key++) out[key] *= scale;
  }
  if (!hidden) return;
  for (let key = from; key < to; key++) if (layer.sinks[key]) out[key] = -Infinity;
}

/**
 * query·key of neighbouring keys, four at a time: one sum waits for itself, four do not.
 * @param query (head_dim)
 * @param start where the vector of key 0 begins
 */
function products(query: Float32Array, keys: Float32Array, start: number, from: number, to: number, out: Float64Array) {
  const length = query.length;
  let key = from;
  for (; key + 4 <= to; key += 4) {
    const one = start + key * length;
    const [two, three, four] = [one + length, one + 2 * length, one + 3 * length];
    let [a, b, c, e] = [0, 0, 0, 0];
    for (let d = 0; d < length; d++) {
      const number = query[d];
      a += number * keys[one + d];
      b += number * keys[two + d];
      c += number * keys[three + d];
      e += number * keys[four + d];
    }
    out[key] = a;
    out[key + 1] = b;
    out[key + 2] = c;
    out[key + 3] = e;
  }
  for (; key < to; key++) {
    let sum = 0;
    for (let d = 0; d < length; d++) sum += query[d] * keys[start + key * length + d];
    out[key] = sum;
  }
}
