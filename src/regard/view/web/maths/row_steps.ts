/** One query step by step, as `A.steps(query)` has it in Python: what `source.steps` answers. */

import type { Step, StepsAnswer, StepsQuestion } from "../protocol/questions";
import { maskOf, rowWeights, type Layer, type Which } from "./softmax";

/** Which keys are asked for; a row of 100,000 keys is never sent whole. */
export type Part = Pick<StepsQuestion, "by" | "start" | "count">;

/** The steps of one query of a layer that is embedded in the page. */
export function rowSteps(layer: Layer, which: Which, query: number, part: Part): StepsAnswer {
  const { kv_len, scale, query_unit, key_unit } = layer.info;
  const weights = new Float64Array(kv_len);
  const { maximum, log_normalizer } = rowWeights(layer, which, query, weights);
  const mask = maskOf(layer, which, query, weights);
  const count = mask.reduce((sum, may) => sum + may, 0);
  const vector = vectorOf(layer, "query", which.head, query);
  const factor = scale / (query_unit * key_unit); // stored vectors are over a unit, which their scale makes up for
  const stepOf = (at: number): Step => {
    const [may, weight] = [mask[at] === 1, weights[at]];
    const value = vectorOf(layer, "value", which.head, at);
    const step = { key: at, allowed: may, weight, biased: null, modified: null, capped: null, value };
    const key = vectorOf(layer, "key", which.head, at);
    if (!vector || !key) return { ...step, vector: key, dot: null, scaled: null, score: null };
    const dot = key.reduce((sum, number, d) => sum + number * vector[d], 0);
    const scaled = dot * factor;
    return { ...step, vector: key, dot, scaled: factor === 1 ? null : scaled, score: may ? scaled : null };
  };
  return {
    vector,
    scale: factor,
    masked: count < kv_len,
    ...(vector && Number.isFinite(maximum) ? { maximum, log_normalizer } : { maximum: null, log_normalizer: null }),
    sink: null,
    keys: kv_len,
    allowed: count,
    total: weights.reduce((sum, weight) => sum + weight, 0),
    rows: chosen(weights, part).map(stepOf),
    output: outputOf(layer, which.head, weights),
  };
}

/** The weights times the values, over all keys. */
function outputOf(layer: Layer, head: number, weights: Float64Array): Float64Array | null {
  if (!layer.value) return null;
  const output = new Float64Array(layer.info.value_dim);
  for (let key = 0; key < weights.length; key++) {
    if (weights[key] === 0) continue;
    const value = vectorOf(layer, "value", head, key) as Float64Array;
    for (let d = 0; d < output.length; d++) output[d] += weights[key] * value[d];
  }
  return output;
}

/** @param head of the queries, which some keys and values are shared by */
function vectorOf(layer: Layer, of: "query" | "key" | "value", head: number, at: number): Float64Array | null {
  const numbers = layer[of];
  if (!numbers) return null;
  const { num_heads, num_kv_heads, q_len, kv_len, head_dim, value_heads, value_dim } = layer.info;
  const { query_unit, key_unit, value_unit } = layer.info;
  const [heads, length, size, unit] = {
    query: [num_heads, q_len, head_dim, query_unit],
    key: [num_kv_heads, kv_len, head_dim, key_unit],
    value: [value_heads, kv_len, value_dim, value_unit],
  }[of];
  const start = (Math.floor((head * heads) / num_heads) * length + at) * size;
  return Float64Array.from(numbers.subarray(start, start + size), (number) => number * unit);
}

/** @returns positions of keys */
function chosen(weights: Float64Array, { by, start, count }: Part): number[] {
  const order = Uint32Array.from(weights, (_, key) => key);
  if (by === "weight") order.sort((a, b) => weights[b] - weights[a] || a - b);
  return Array.from(order.subarray(start, start + count));
}
