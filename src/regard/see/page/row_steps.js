/**
 * One query step by step: what `source.steps(head, query, most)` answers. The numbers, the names of
 * the columns and their order are those of `A.steps(query, most=most)` in Python. Sinks stay where
 * they are: these are the model's own steps.
 *
 * @typedef {number | boolean | null} Entry null: none, or not finite, as the score of a masked key
 *
 * @typedef {object} Steps
 * @property {number[]} keys the strongest, by rising position
 * @property {Record<string, Entry[]>} columns "query·key", "scaled", "biased", "modified",
 *   "capped", "mask", "score", "weight", "× value 0", ...; those that do nothing are left out. Each
 *   has the keys', then the sink's if there is one, that of all other keys if there are, and the sum
 * @property {ArrayLike<number> | null} query its vector (head_dim); null: only the scores are known
 * @property {ArrayLike<number>[] | null} key the vector of each key of `keys`
 * @property {number | null} scale that query·key is multiplied with
 * @property {ArrayLike<number>[]} [value] the value of each key of `keys`, where values are known
 * @property {ArrayLike<number>} [output] the weights times the values, of all keys
 */

import { top } from "./reading.js";
import { allowed, isMaskKnown, rowWeights } from "./softmax.js";

/**
 * The steps of one query of a layer that is embedded in the page.
 * @param {import("./softmax.js").Layer} layer @param {number} head @param {number} query
 * @param {number} most
 * @returns {Steps}
 */
export function rowSteps(layer, head, query, most) {
  const { num_heads, num_kv_heads, kv_len, scale, query_unit, key_unit } = layer.info;
  const row = new Float64Array(kv_len);
  rowWeights(layer, { head, hidden: false }, query, row);
  const keys = strongest(row, most);
  const weights = keys.map((key) => row[key]);
  const [start, stop] = allowed(layer, head, query);
  const may = keys.map((key) => key >= start && key < stop && (isMaskKnown(layer.info) || row[key] !== 0));
  const vector = vectorOf(layer, "query", head, query);
  const kvHead = Math.floor((head * num_kv_heads) / num_heads);
  const vectors = vector && keys.map((key) => /** @type {Float64Array} */ (vectorOf(layer, "key", kvHead, key)));
  // Stored vectors are over a unit, which the stored scale makes up for.
  const factor = vector ? scale / (query_unit * key_unit) : null;
  const none = keys.length < kv_len ? [null, null] : [null];
  /** @type {Record<string, Entry[]>} */ const columns = {};
  if (vector && vectors && factor !== null) {
    const dots = vectors.map((key) => key.reduce((sum, number, d) => sum + number * vector[d], 0));
    const scores = dots.map((dot) => dot * factor);
    columns["query·key"] = [...dots, ...none];
    if (factor !== 1) columns.scaled = [...scores, ...none];
    if (layer.spans) columns.mask = [...may, ...none];
    columns.score = [...scores.map((score, i) => (may[i] ? score : null)), ...none];
  } else if (may.includes(false)) columns.mask = [...may, ...none];
  const total = row.reduce((sum, weight) => sum + weight, 0);
  const others = total - weights.reduce((sum, weight) => sum + weight, 0);
  columns.weight = [...weights, ...(none.length > 1 ? [others] : []), total];
  return { keys, columns, query: vector, key: vectors, scale: factor };
}

/** @param {Float64Array} row @param {number} most @returns {number[]} positions, rising */
function strongest(row, most) {
  const best = top(Float32Array.from(row), most);
  // Keys of weight 0 come last, in the order of the text.
  const taken = new Set(best);
  for (let key = 0; best.length < Math.min(most, row.length); key++) if (!taken.has(key)) best.push(key);
  return best.sort((a, b) => a - b);
}

/**
 * @param {import("./softmax.js").Layer} layer @param {"query" | "key"} of
 * @param {number} head @param {number} at @returns {Float64Array | null}
 */
function vectorOf(layer, of, head, at) {
  const numbers = layer[of];
  if (!numbers) return null;
  const { head_dim, q_len, kv_len, query_unit, key_unit } = layer.info;
  const [length, unit] = of === "query" ? [q_len, query_unit] : [kv_len, key_unit];
  const start = (head * length + at) * head_dim;
  return Float64Array.from(numbers.subarray(start, start + head_dim), (number) => number * unit);
}
