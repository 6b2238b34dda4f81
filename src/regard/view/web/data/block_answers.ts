/** The answers of a layer of which this file has block means alone. */

import { extent, tileOfBlocks } from "../maths/blocks";
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

function blockTile(layer: Layer, { head, by_row, ...place }: Question) {
  const { kv_len, block } = layer.info;
  const part = extent(place, layer.info);
  const { size, height, width } = part;
  const meanAt = meansIn(layer, head);
  // The largest mean of a row of blocks stands for the highest weights of its rows.
  const highest = Array.from({ length: by_row ? blocksOf(layer.info).rows : 0 }, (_, row) => {
    let most = 0;
    for (let key = 0; key < kv_len; key += block) most = Math.max(most, meanAt(row * block, key) || 0);
    return most;
  });
  const values = tileOfBlocks(part, Math.min(size, block), (query, key, down, across) => {
    return (meanAt(query, key) * down * across) / (highest[Math.floor(query / block)] || 1);
  });
  return { values, height, width, exact: true };
}
