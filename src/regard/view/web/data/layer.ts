/** The numbers of a layer, read from the page. */

import { blocksOf, meansOf } from "../maths/block_means";
import type { Layer } from "../maths/softmax";
import type { LayerInfo } from "../protocol/recording";
import { unpack, unpackBytes } from "./unpack";

/** @param raw its numbers in base64; emptied, since both are large */
export async function readLayer(info: LayerInfo, raw: Record<string, Uint8Array>, sinks: number[]): Promise<Layer> {
  const { num_heads, num_kv_heads, q_len, kv_len, head_dim, value_heads, value_dim, span_heads, dtype } = info;
  const numbers = async (name: string, dtype: LayerInfo["dtype"] | "int32", length: number) => {
    const text = raw[name];
    delete raw[name];
    return (await unpack(text, dtype, length)) as Float32Array;
  };
  const layer: Layer = { info, means: meansOf(info), sinks: new Uint8Array(kv_len), summed: new Map() };
  for (const position of sinks) layer.sinks[position] = 1;
  const { rows, columns } = blocksOf(info);
  if (info.kind === "pyramid") {
    layer.levels = await unpackBytes(raw.levels, num_heads * rows * columns);
  } else if (info.kind === "weights") {
    layer.weights = await numbers("weights", dtype, num_heads * q_len * kv_len);
  } else {
    layer.query = await numbers("query", dtype, num_heads * q_len * head_dim);
    layer.key = await numbers("key", dtype, num_kv_heads * kv_len * head_dim);
    layer.rows = await numbers("rows", "float32", 4 * num_heads * q_len);
    if (info.block > 1) layer.sums = summedRows(info, await numbers("means", "float32", num_heads * rows * columns));
  }
  if (value_heads > 0) layer.value = await numbers("value", dtype, value_heads * kv_len * value_dim);
  if (span_heads > 0) layer.spans = (await unpack(raw.spans, "int32", span_heads * q_len * 2)) as Int32Array;
  return layer;
}

/**
 * Means of blocks as a pass sums them: over the rows of a block, the means over its keys.
 * @param means (num_heads, rows, columns), overwritten
 */
function summedRows(info: LayerInfo, means: Float32Array) {
  const { rows, columns } = blocksOf(info);
  for (let i = 0; i < means.length; i++) {
    const first = (Math.floor(i / columns) % rows) * info.block;
    means[i] *= Math.min(info.q_len, first + info.block) - first;
  }
  return means;
}
