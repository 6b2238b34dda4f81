/** The answers of a layer of which this file has block means alone. */

import { extent, tileOfBlocks } from "../maths/blocks";
import { allowed, type Layer } from "../maths/softmax";
import { blocksOf, meansOf } from "../maths/block_means";
import type { Question, RowQuestion, TileQuestion } from "../protocol/questions";

export function blockAnswer(layer: Layer, question: Question) {
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

function blockRow(layer: Layer, { head, query }: RowQuestion) {
  const values = new Float32Array(layer.info.kv_len);
  const mask = new Uint8Array(layer.info.kv_len);
  const [start, stop] = allowed(layer, head, query);
  const meanAt = meansIn(layer, head);
  for (let key = start; key < stop; key++) [values[key], mask[key]] = [meanAt(query, key), 1];
  return { values, mask };
}

function blockTile(layer: Layer, { head, ...place }: TileQuestion) {
  const { block } = layer.info;
  const part = extent(place, layer.info);
  const { size, height, width } = part;
  const meanAt = meansIn(layer, head);
  const values = tileOfBlocks(part, Math.min(size, block), (query, key, down, across) => {
    return meanAt(query, key) * down * across;
  });
  return { values, height, width, exact: true };
}
