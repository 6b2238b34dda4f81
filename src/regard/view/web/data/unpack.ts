/** What page_file.py put into the page, read back. Every damage is found here and said in one sentence. */

import { blocksOf, meansOf } from "../maths/block_means";
import type { Layer } from "../maths/softmax";
import type { LayerInfo, Recording, Token } from "../protocol/recording";

const PIECE = 2 ** 18; // characters of base64 that are read at once, a multiple of 4

/** A page whose data cannot be trusted; the message is for people. */
export class Damaged extends Error {}

/** @param text of the page's JSON block */
export function readRecording(text: string | null | undefined): Recording {
  let raw;
  try {
    raw = JSON.parse(text ?? "");
  } catch {
    throw new Damaged("its list of layers and tokens is cut off or changed.");
  }
  if (raw?.version !== 1) throw new Damaged(`it has format ${String(raw?.version)}; this page reads format 1.`);
  if (!Array.isArray(raw.layers) || raw.layers.length === 0) throw new Damaged("it holds no layer.");
  for (const layer of raw.layers) {
    const counts = [layer.num_heads, layer.q_len, layer.kv_len];
    if (!counts.every((n) => Number.isInteger(n) && n > 0)) throw new Damaged("a layer has no valid shape.");
  }
  if (!raw.layers[raw.opened?.layer]) throw new Damaged("it does not say where it opens.");
  if (!raw.other) return { ...raw, ...readTexts(raw) };
  for (const [i, layer] of raw.layers.entries()) layer.of = i < raw.other.first ? raw.title : raw.other.title;
  return { ...raw, ...readTexts(raw), other: { ...raw.other, ...readTexts(raw.other) } };
}

/** Tokens as the page's JSON block has them. */
type Texts = { texts: string[]; special: number[] } | null;

function readTexts(raw: {
  query_tokens: Texts;
  key_tokens: Texts;
  one_text: boolean;
}): Pick<Recording, "query_tokens" | "key_tokens"> {
  const query = readTokens(raw.query_tokens);
  return { query_tokens: query, key_tokens: raw.one_text ? query : readTokens(raw.key_tokens) };
}

function readTokens(tokens: Texts): Token[] | null {
  if (!tokens) return null;
  const special = new Set(tokens.special);
  return tokens.texts.map((text, i) => ({ text: String(text), special: special.has(i) }));
}

/**
 * The numbers of a layer.
 * @param raw in base64; emptied, since both are large
 */
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
    if (info.block > 1) layer.blocks = await numbers("means", "float32", num_heads * rows * columns);
  }
  if (value_heads > 0) layer.value = await numbers("value", dtype, value_heads * kv_len * value_dim);
  if (span_heads > 0) layer.spans = (await unpack(raw.spans, "int32", span_heads * q_len * 2)) as Int32Array;
  return layer;
}

/** @param text base64 */
export function fromBase64(text: string): Uint8Array<ArrayBuffer> {
  let binary;
  try {
    binary = atob(text);
  } catch {
    throw new Damaged("its numbers are cut off or changed.");
  }
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

/**
 * The inverse of `packed` in packing.py: base64, deflate, the bytes of each number apart.
 * @param length how many numbers there must be
 */
export async function unpack(
  text: Uint8Array,
  dtype: LayerInfo["dtype"] | "int32",
  length: number,
): Promise<Float32Array | Int32Array> {
  const width = dtype === "float16" ? 2 : 4;
  const joined = new Uint8Array(4 * length);
  // The bits of a half number stand low at first.
  let to = 0;
  await inflate(text, length * width, (piece) => {
    for (const byte of piece) {
      joined[to] = byte;
      to += 4;
      if (to >= joined.length) to -= joined.length - 1;
    }
  });
  if (dtype === "int32") return new Int32Array(joined.buffer);
  const numbers = new Float32Array(joined.buffer);
  if (width > 2) return numbers;
  // The same exponent and fraction as a float32, which is 2^112 times too small.
  const bits = new Uint32Array(joined.buffer);
  for (let i = 0; i < length; i++) {
    const isFinite = (bits[i] & 0x7c00) < 0x7c00;
    const scale = isFinite ? 2 ** 112 : (bits[i] & 0x3ff) > 0 ? NaN : Infinity;
    bits[i] = ((bits[i] & 0x8000) << 16) | ((bits[i] & 0x7fff) << 13);
    numbers[i] *= scale;
  }
  return numbers;
}

/**
 * Base64 and deflate.
 * @param length how many bytes there must be
 */
export async function unpackBytes(text: Uint8Array, length: number): Promise<Uint8Array> {
  const bytes = new Uint8Array(length);
  await inflate(text, length, (piece, start) => bytes.set(piece, start));
  return bytes;
}

/**
 * Hands on what was deflated, piece by piece: a layer is too large to be there twice.
 * @param text base64
 * @param length how many bytes there must be
 */
async function inflate(text: Uint8Array, length: number, take: (piece: Uint8Array, start: number) => void) {
  const reader = bytesOf(text).pipeThrough(new DecompressionStream("deflate")).getReader();
  let found = 0;
  try {
    for (let { done, value } = await reader.read(); !done; { done, value } = await reader.read()) {
      const piece = value as Uint8Array;
      if (found + piece.length <= length) take(piece, found);
      found += piece.length;
    }
  } catch {
    throw new Damaged("its numbers are cut off or changed.");
  }
  if (found !== length) throw new Damaged(`it has ${found} bytes where ${length} belong.`);
}

/** @param text base64 */
function bytesOf(text: Uint8Array): ReadableStream<Uint8Array<ArrayBuffer>> {
  const letters = new TextDecoder("latin1");
  let at = 0;
  return new ReadableStream({
    pull(controller) {
      if (at >= text.length) return controller.close();
      controller.enqueue(fromBase64(letters.decode(text.subarray(at, at + PIECE))));
      at += PIECE;
    },
  });
}
