/** The answers of a layer of which this file has block means alone. */

import { divide, extent } from "../maths/blocks";
import { allowed, type Layer } from "../maths/softmax";
import { blocksOf, meansOf } from "./block_means";
import type { Answer, Question } from "./engine";

export function blockAnswer(layer: Layer, question: Question): Omit<Answer, "id"> {
  if (question.kind === "row") return blockRow(layer, question);
  if (question.kind === "column") {
    const meanAt = meansIn(layer, question.head);
    return { values: Float32Array.from({ length: layer.info.q_len }, (_, query) => meanAt(query, question.key)) };
  }
  if (question.kind === "tile") return blockTile(layer, question);
  if (question.kind === "progress") return { done: 1, seconds: 0 };
  throw new Error("not every weight of this layer is in this file.");
}

/** @returns the mean of the block that a query and a key lie in */
function meansIn({ info, levels }: Layer, head: number): (query: number, key: number) => number {
  const { rows, columns } = blocksOf(info);
  const means = meansOf(info);
  const blocks = (levels as Uint8Array).subarray(head * rows * columns);
  return (query, key) => means[blocks[Math.floor(query / info.block) * columns + Math.floor(key / info.block)]];
}

function blockRow(layer: Layer, { head, query }: Question) {
  const values = new Float32Array(layer.info.kv_len);
  const mask = new Uint8Array(layer.info.kv_len);
  const [start, stop] = allowed(layer, head, query);
  const meanAt = meansIn(layer, head);
  for (let key = start; key < stop; key++) [values[key], mask[key]] = [meanAt(query, key), 1];
  return { values, mask };
}

function blockTile(layer: Layer, question: Question) {
  const { kv_len, block } = layer.info;
  const part = extent(question, layer.info);
  const { size, first, end, from, to, height, width } = part;
  const values = new Float32Array(height * width);
  const step = Math.min(size, block);
  const meanAt = meansIn(layer, question.head);
  for (let query = first; query < end; query += step) {
    let divisor = 1;
    // The largest mean of a row of blocks stands for the highest weights of its rows.
    if (question.by_row) {
      let highest = 0;
      for (let key = 0; key < kv_len; key += block) {
        const mean = meanAt(query, key);
        if (mean > highest) highest = mean;
      }
      divisor = highest || 1;
    }
    const down = Math.min(end, query + step) - query;
    const out = Math.floor((query - first) / size) * width;
    for (let key = from; key < to; key += step) {
      const across = Math.min(to, key + step) - key;
      values[out + Math.floor((key - from) / size)] += (meanAt(query, key) * down * across) / divisor;
    }
  }
  divide(values, part);
  return { values, height, width, exact: true };
}
