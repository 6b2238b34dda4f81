/**
 * One query step by step, as `A.steps(query)` has it in Python: what `source.steps` answers.
 *
 * @typedef {object} Part which keys are asked for; a row of 100,000 keys is never sent whole
 * @property {"weight" | "position"} by strongest first (ties to the lowest position), or as in the text
 * @property {number} start the first place of that order
 * @property {number} count
 *
 * @typedef {object} Step one key; a step that does nothing is null for every key
 * @property {number} key
 * @property {ArrayLike<number> | null} vector of the key (head_dim)
 * @property {number | null} dot query · key
 * @property {number | null} scaled times scale; null where scale is 1
 * @property {number | null} biased plus the bias
 * @property {number | null} modified by a score_mod
 * @property {number | null} capped by a softcap
 * @property {boolean} allowed may the query attend to this key?
 * @property {number | null} score what the softmax is given; null: -infinity, or not known
 * @property {number} weight
 * @property {ArrayLike<number> | null} value of the key (value_dim)
 *
 * @typedef {object} Steps
 * @property {ArrayLike<number> | null} vector of the query; null: only the weights are known
 * @property {number} scale
 * @property {boolean} masked is there a mask?
 * @property {number | null} maximum the largest score; null: -infinity, or not known
 * @property {number | null} log_normalizer log of the sum of exp(score - maximum), the sink's
 *   included; null where the maximum is
 * @property {number | null} sink the logit in the denominator that belongs to no key
 * @property {number} keys how many there are
 * @property {number} allowed how many of them the query may attend to
 * @property {number} total of the weights
 * @property {Step[]} rows the keys asked for
 * @property {ArrayLike<number> | null} output the weights times the values, over all keys (value_dim)
 */

import { allowed, isMaskKnown, rowWeights } from "./softmax.js";

/**
 * The steps of one query of a layer that is embedded in the page.
 * @param {import("./softmax.js").Layer} layer @param {import("./softmax.js").Which} which
 * @param {number} query @param {Part} part
 * @returns {Steps}
 */
export function rowSteps(layer, which, query, part) {
  const { kv_len, scale, query_unit, key_unit } = layer.info;
  const weights = new Float64Array(kv_len);
  const { maximum, log_normalizer } = rowWeights(layer, which, query, weights);
  const [start, stop] = allowed(layer, which.head, query);
  const known = isMaskKnown(layer.info);
  const may = (/** @type {number} */ key) =>
    key >= start && key < stop && !(which.hidden && layer.sinks[key]) && (known || weights[key] !== 0);
  let count = 0;
  let total = 0;
  for (let key = 0; key < kv_len; key++) {
    count += Number(may(key));
    total += weights[key];
  }
  const vector = vectorOf(layer, "query", which.head, query);
  return {
    vector,
    // Stored vectors are over a unit, which their scale makes up for.
    scale: scale / (query_unit * key_unit),
    masked: count < kv_len,
    ...(vector && Number.isFinite(maximum) ? { maximum, log_normalizer } : { maximum: null, log_normalizer: null }),
    sink: null,
    keys: kv_len,
    allowed: count,
    total,
    rows: chosen(weights, part).map((key) => stepOf(layer, which, vector, key, may(key), weights[key])),
    output: outputOf(layer, which.head, weights),
  };
}

/**
 * The weights times the values, over all keys.
 * @param {import("./softmax.js").Layer} layer @param {number} head @param {Float64Array} weights
 * @returns {Float64Array | null}
 */
function outputOf(layer, head, weights) {
  if (!layer.value) return null;
  const output = new Float64Array(layer.info.value_dim);
  for (let key = 0; key < weights.length; key++) {
    if (weights[key] === 0) continue;
    const value = /** @type {Float64Array} */ (vectorOf(layer, "value", head, key));
    for (let d = 0; d < output.length; d++) output[d] += weights[key] * value[d];
  }
  return output;
}

/**
 * @param {import("./softmax.js").Layer} layer @param {import("./softmax.js").Which} which
 * @param {Float64Array | null} query @param {number} at @param {boolean} may @param {number} weight
 * @returns {Step}
 */
function stepOf(layer, which, query, at, may, weight) {
  const { scale, query_unit, key_unit } = layer.info;
  const value = vectorOf(layer, "value", which.head, at);
  const step = { key: at, allowed: may, weight, biased: null, modified: null, capped: null, value };
  const vector = vectorOf(layer, "key", which.head, at);
  if (!query || !vector) return { ...step, vector, dot: null, scaled: null, score: null };
  const dot = vector.reduce((sum, number, d) => sum + number * query[d], 0);
  const factor = scale / (query_unit * key_unit);
  const scaled = dot * factor;
  return { ...step, vector, dot, scaled: factor === 1 ? null : scaled, score: may ? scaled : null };
}

/**
 * @param {import("./softmax.js").Layer} layer @param {"query" | "key" | "value"} of
 * @param {number} head of the queries, which some keys and values are shared by
 * @param {number} at @returns {Float64Array | null}
 */
function vectorOf(layer, of, head, at) {
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

/** @param {Float64Array} weights @param {Part} part @returns {number[]} positions of keys */
function chosen(weights, { by, start, count }) {
  const order = Uint32Array.from(weights, (_, key) => key);
  if (by === "weight") order.sort((a, b) => weights[b] - weights[a] || a - b);
  return Array.from(order.subarray(start, start + count));
}
