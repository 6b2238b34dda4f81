/** A layer of which this file holds block means and strong keys: read, and asked. */

import { divide, extent } from "../maths/blocks";
import { allowed, type Layer } from "../maths/softmax";
import type { Answer, Question } from "./engine";
import { blocksOf, meansOf, NO_NUMBER, type Held } from "./held";
import { unpack, unpackBytes, type LayerInfo } from "./payload";

export async function readHeld(info: LayerInfo, raw: Record<string, Uint8Array>): Promise<Held> {
  const { num_heads, q_len, strongest } = info;
  const { rows, columns } = blocksOf(info);
  const levels = await unpackBytes(raw.levels, num_heads * rows * columns);
  if (strongest === 0) return { levels, keys: null, weights: null, totals: null };
  const count = num_heads * strongest * q_len;
  const keys = (await unpack(raw.keys, "int32", count)) as Int32Array;
  const weights = (await unpack(raw.weights, "float32", count)) as Float32Array;
  const totals = raw.totals ? ((await unpack(raw.totals, "float32", num_heads * q_len)) as Float32Array) : null;
  // Each key is stored as its distance from the one before.
  for (let at = 0; at < count; at++) if (Math.floor(at / q_len) % strongest > 0) keys[at] += keys[at - q_len];
  return { levels, keys, weights, totals };
}

export function heldAnswer(layer: Layer, question: Question): Omit<Answer, "id"> {
  if (question.kind === "row") return heldRow(layer, question);
  if (question.kind === "column") return { values: heldColumn(layer, question) };
  if (question.kind === "tile") return heldTile(layer, question);
  if (question.kind === "progress") return { done: 1, seconds: 0 };
  throw new Error("not every weight of this layer is in this file.");
}

/** The strongest keys; without them the means of its row of blocks. */
function heldRow(layer: Layer, { head, query: at }: Question) {
  const { kv_len, q_len, block, strongest } = layer.info;
  const { levels, keys, weights, totals } = layer.held as Held;
  const values = new Float32Array(kv_len);
  const mask = new Uint8Array(kv_len);
  const [start, stop] = allowed(layer, head, at);
  mask.fill(1, start, stop);
  if (!keys || !weights) {
    const { rows, columns } = blocksOf(layer.info);
    const means = meansOf(layer.info);
    const from = (head * rows + Math.floor(at / block)) * columns;
    for (let key = start; key < stop; key++) values[key] = means[levels[from + Math.floor(key / block)]];
    return { values, mask };
  }
  let [held, share, most] = [0, totals ? totals[head * q_len + at] : 1, Infinity];
  if (Number.isNaN(share)) return { values: values.fill(NaN, start, stop), mask, rest: { share, most: NaN } };
  for (let rank = 0; rank < strongest; rank++) {
    const place = (head * strongest + rank) * q_len + at;
    const weight = weights[place];
    if (!(weight > 0)) continue;
    values[keys[place]] = weight;
    held++;
    share -= weight;
    most = Math.min(most, weight);
  }
  // Where fewer are held, or all that are allowed, there are no others.
  const isAll = held < strongest || held === stop - start;
  return { values, mask, rest: isAll ? { share: 0, most: 0 } : { share: Math.max(0, share), most } };
}

function heldColumn(layer: Layer, { head, key: at }: Question): Float32Array {
  const { q_len, block } = layer.info;
  const { rows, columns } = blocksOf(layer.info);
  const { levels } = layer.held as Held;
  const means = meansOf(layer.info);
  const column = Math.floor(at / block);
  return Float32Array.from({ length: q_len }, (_, query) => {
    const row = head * rows + Math.floor(query / block);
    return means[levels[row * columns + column]];
  });
}

function heldTile(layer: Layer, question: Question) {
  const { head, by_row } = question;
  const { block } = layer.info;
  const part = extent(question, layer.info);
  const { size, first, end, from, to, height, width } = part;
  const values = new Float32Array(height * width);
  const step = Math.min(size, block);
  const highest = by_row ? highestOf(layer, head) : null;
  const { rows, columns } = blocksOf(layer.info);
  const { levels } = layer.held as Held;
  const means = meansOf(layer.info);
  for (let query = first; query < end; query += step) {
    const row = Math.floor(query / block);
    const [down, divisor] = [Math.min(end, query + step) - query, highest?.[row] || 1];
    const out = Math.floor((query - first) / size) * width;
    for (let key = from; key < to; key += step) {
      const across = Math.min(to, key + step) - key;
      const mean = means[levels[(head * rows + row) * columns + Math.floor(key / block)]];
      values[out + Math.floor((key - from) / size)] += (mean * down * across) / divisor;
    }
  }
  divide(values, part);
  return { values, height, width, exact: true };
}

/** The largest mean of each row of blocks, which stands for the highest weights of its rows. */
function highestOf(layer: Layer, head: number) {
  const { rows, columns } = blocksOf(layer.info);
  const { levels } = layer.held as Held;
  const means = meansOf(layer.info);
  return Float32Array.from({ length: rows }, (_, row) => {
    const start = (head * rows + row) * columns;
    const known = levels.subarray(start, start + columns).filter((level) => level !== NO_NUMBER);
    return means[known.reduce((a, b) => Math.max(a, b), 0)];
  });
}
