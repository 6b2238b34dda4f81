/**
 * The definition: weight = exp((score - maximum) - log_normalizer) where the query may attend to the
 * key; score = scale · query·key, maximum is the largest score of the row, and log_normalizer the log
 * of the sum of exp(score - maximum). Their sum, the logsumexp, would round the log_normalizer away
 * where scores are large. Both are in the file, so any weight is one product. Those of large scores,
 * which float32 does not hold well enough, and those of weights without sinks are computed here when
 * first asked for. Sums run in double precision. A row without an allowed key has weights 0.
 */

import { blocksOf, readHeld } from "./held.js";
import { unpack } from "./payload.js";

const LARGE = 256; // scores computed in float32 move each weight by less than 2e-5 up to here

/**
 * @typedef {import("./payload.js").LayerInfo} LayerInfo
 *
 * @typedef {object} Row
 * @property {number} maximum the largest score; -Infinity where no key is left
 * @property {number} log_normalizer log of the sum of exp(score - maximum)
 *
 * @typedef {object} Layer
 * @property {LayerInfo} info
 * @property {Float32Array | null} query (num_heads, q_len, head_dim)
 * @property {Float32Array | null} key (num_kv_heads, kv_len, head_dim)
 * @property {Float32Array | null} value (value_heads, kv_len, value_dim)
 * @property {Float32Array | null} weights (num_heads, q_len, kv_len)
 * @property {import("./held.js").Held | null} held where neither is in this file
 * @property {Int32Array | null} spans (span_heads, q_len, 2): first allowed key, and the one past the last
 * @property {Uint8Array} sinks (kv_len): 1 where a key is set aside by `hide sinks`
 * @property {Float32Array | null} rows (4, num_heads, q_len): maximum and log_normalizer, then both
 *   of the row without sinks; null beside weights
 * @property {Map<number, Row>} summed rows of which the file does not hold them, or not well enough
 * @property {Float32Array | null} sums of blocks of a long layer (num_heads, rows, columns)
 *
 * @typedef {object} Which
 * @property {number} head
 * @property {boolean} hidden sinks are set aside and the rows renormalised
 */

/**
 * @param {LayerInfo} info
 * @param {Record<string, Uint8Array>} raw its numbers in base64; emptied, since both are large
 * @param {number[]} sinks
 * @returns {Promise<Layer>}
 */
export async function readLayer(info, raw, sinks) {
  const { num_heads, num_kv_heads, q_len, kv_len, head_dim, value_heads, value_dim, span_heads, dtype } = info;
  /** @param {string} name @param {typeof dtype} dtype @param {number} length */
  const numbers = async (name, dtype, length) => {
    const text = raw[name];
    delete raw[name];
    return /** @type {Float32Array} */ (await unpack(text, dtype, length));
  };
  /** @type {Layer} */
  const layer = {
    info,
    query: null,
    key: null,
    value: null,
    weights: null,
    held: null,
    spans: null,
    sinks: new Uint8Array(kv_len),
    rows: null,
    summed: new Map(),
    sums: null,
  };
  for (const position of sinks) layer.sinks[position] = 1;
  if (info.kind === "pyramid") {
    layer.held = await readHeld(info, raw);
  } else if (info.kind === "weights") {
    layer.weights = await numbers("weights", dtype, num_heads * q_len * kv_len);
  } else {
    layer.query = await numbers("query", dtype, num_heads * q_len * head_dim);
    layer.key = await numbers("key", dtype, num_kv_heads * kv_len * head_dim);
    layer.rows = await numbers("rows", "float32", 4 * num_heads * q_len);
    if (info.block > 1) {
      const { rows, columns } = blocksOf(info);
      layer.sums = summedRows(info, await numbers("means", "float24", num_heads * rows * columns));
    }
  }
  if (value_heads > 0) layer.value = await numbers("value", dtype, value_heads * kv_len * value_dim);
  if (span_heads > 0)
    layer.spans = /** @type {Int32Array} */ (await unpack(raw.spans, "int32", span_heads * q_len * 2));
  return layer;
}

/**
 * Means of blocks as a pass sums them: over the rows of a block, the means over its keys.
 * @param {LayerInfo} info @param {Float32Array} means (num_heads, rows, columns), overwritten
 */
function summedRows(info, means) {
  const { rows, columns } = blocksOf(info);
  for (let i = 0; i < means.length; i++) {
    const first = (Math.floor(i / columns) % rows) * info.block;
    means[i] *= Math.min(info.q_len, first + info.block) - first;
  }
  return means;
}

/** @param {Layer} layer @param {Which} which @param {number} query @returns {Row} */
export function rowOf(layer, which, query) {
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

/** @param {Layer} layer @param {Which} which @param {number} query @returns {Row} */
function summed(layer, which, query) {
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

/** @param {Row} row @returns {number} its largest weight */
export function highestOf({ maximum, log_normalizer }) {
  return maximum === -Infinity ? 0 : Math.exp(-log_normalizer);
}

/**
 * The allowed keys of a query, as the first and the one past the last.
 * @param {Layer} layer @param {number} head @param {number} query @returns {[number, number]}
 */
export function allowed(layer, head, query) {
  if (!layer.spans) return [0, layer.info.kv_len];
  const at = 2 * ((layer.info.span_heads > 1 ? head * layer.info.q_len : 0) + query);
  return [layer.spans[at], layer.spans[at + 1]];
}

/**
 * Of embedded weights with a mask that is no interval, only the zeros are known, not their cause.
 * @param {LayerInfo} info @returns {boolean}
 */
export function isMaskKnown(info) {
  return info.kind === "query-key" || info.span_heads > 0;
}

/**
 * The weights of one query.
 * @param {Layer} layer
 * @param {Which} which
 * @param {number} query
 * @param {number} from first key
 * @param {number} to past the last key
 * @param {Float64Array} out (kv_len); only from..to is meant
 */
export function weightsOf(layer, which, query, from, to, out) {
  out.fill(0, from, to);
  const { maximum, log_normalizer } = rowOf(layer, which, query);
  if (maximum === -Infinity) return;
  const [start, stop] = allowed(layer, which.head, query);
  const [first, end] = [Math.max(from, start), Math.min(to, stop)];
  scores(layer, which, query, first, end, out);
  for (let key = first; key < end; key++) out[key] = Math.exp(out[key] - maximum - log_normalizer);
}

/**
 * All weights of one query. They sum to 1: what float32 took from the log_normalizer is restored.
 * @param {Layer} layer @param {Which} which @param {number} query
 * @param {Float64Array} out (kv_len), overwritten
 * @returns {Row}
 */
export function rowWeights(layer, which, query, out) {
  weightsOf(layer, which, query, 0, out.length, out);
  // Stored weights are kept as they are: they may be less than 1 together.
  const total = layer.weights && !which.hidden ? 1 : out.reduce((sum, weight) => sum + weight, 0);
  if (total > 0 && total !== 1) for (let key = 0; key < out.length; key++) out[key] /= total;
  const { maximum, log_normalizer } = rowOf(layer, which, query);
  return { maximum, log_normalizer: total > 0 ? log_normalizer + Math.log(total) : log_normalizer };
}

/**
 * The numbers before the softmax, -Infinity for a key set aside. For embedded weights they are
 * the logarithms.
 * @param {Layer} layer
 * @param {Which} which
 * @param {number} query
 * @param {number} from
 * @param {number} to
 * @param {Float64Array} out
 */
function scores(layer, { head, hidden }, query, from, to, out) {
  const { num_heads, num_kv_heads, q_len, kv_len, head_dim, scale } = layer.info;
  if (layer.weights) {
    const start = (head * q_len + query) * kv_len;
    for (let key = from; key < to; key++) out[key] = Math.log(layer.weights[start + key]);
  } else {
    const queries = /** @type {Float32Array} */ (layer.query);
    const keys = /** @type {Float32Array} */ (layer.key);
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
 * @param {Float32Array} query (head_dim)
 * @param {Float32Array} keys @param {number} start where the vector of key 0 begins
 * @param {number} from @param {number} to @param {Float64Array} out
 */
function products(query, keys, start, from, to, out) {
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
