/**
 * What file.py put into the page, read back. Every damage is found here and told in one sentence.
 *
 * @typedef {import("./tokens.js").Token} Token
 *
 * @typedef {object} HeadKind what docs/heads.md defines, of one head
 * @property {string} kind
 * @property {number} score
 * @property {number} entropy as a share of that of even attention
 * @property {number} sink what it gives to the first token and to separators
 *
 * @typedef {object} SmallNumbers the small maps of a layer, a byte for each block
 * @property {number} rows
 * @property {number} columns
 * @property {number} maximum
 * @property {string} levels
 * @property {number} [sampled] one query in so many was asked; exact without it
 *
 * @typedef {object} LayerInfo
 * @property {string} name
 * @property {string} [of] the title of its recording, where the page has two
 * @property {number} num_heads
 * @property {number} q_len
 * @property {number} kv_len
 * @property {"query-key" | "weights" | "pyramid" | "map" | "live"} kind what is in this file besides
 *   the small map; pyramid: block means, see held.js; live: nothing, the page's host is asked
 * @property {number} num_kv_heads
 * @property {number} head_dim
 * @property {number} scale
 * @property {number} query_unit the stored query is over this power of two, which scale makes up for
 * @property {number} key_unit
 * @property {"float32" | "float24" | "float16"} dtype float24: float32 without its last byte
 * @property {number} deviation largest difference of a weight, measured, that dtype brings
 * @property {number} span_heads 0: no mask; 1: one mask for all heads; num_heads: one each
 * @property {number} block tokens of a block of a pyramid, each way; 64 where a layer with query and
 *   key holds means of blocks too
 * @property {number} maximum of its means
 * @property {number} octaves below it that its 255 levels span
 * @property {number} strongest how many keys of each row are held with their weights
 * @property {number} value_heads 0: there are no values
 * @property {number} value_dim
 * @property {number} value_unit the stored value is over this power of two
 * @property {SmallNumbers | null} overview null: not told yet, or not here
 * @property {(HeadKind | null)[] | null} heads null: not told, or not yet; of a layer with weights
 *   that are not numbers no head has a kind
 *
 * @typedef {object} Other what the page is told of a second recording
 * @property {number} first its first layer
 * @property {string} title
 * @property {Token[] | null} query_tokens
 * @property {Token[] | null} key_tokens
 * @property {boolean} one_text
 *
 * @typedef {object} Recording
 * @property {number} version
 * @property {string} title
 * @property {string} model
 * @property {number} batch entries in the recording; the page shows the first
 * @property {Token[] | null} query_tokens
 * @property {Token[] | null} key_tokens
 * @property {boolean} one_text the keys are the queries' own tokens
 * @property {(number | null)[]} opened layer and head of a fresh page; null: the first one here
 * @property {LayerInfo[]} layers
 * @property {Other} [other] a second recording, whose layers follow those of the first
 * @property {string} [text] that the model read, where a server can run it on another one
 * @property {number} [run] of the model
 */

const PIECE = 2 ** 18; // characters of base64 that are read at once, a multiple of 4

/** A page whose data cannot be trusted; the message is for people. */
export class Damaged extends Error {}

/**
 * @param {string | null | undefined} text of the page's JSON block
 * @returns {Recording}
 */
export function readRecording(text) {
  let raw;
  try {
    raw = JSON.parse(text ?? "");
  } catch {
    throw new Damaged("its list of layers and tokens is cut off or changed.");
  }
  if (raw?.version !== 1)
    throw new Damaged(`it has format ${String(raw?.version)}; this page reads format 1.`);
  if (!Array.isArray(raw.layers) || raw.layers.length === 0) throw new Damaged("it holds no layer.");
  for (const layer of raw.layers) {
    const counts = [layer.num_heads, layer.q_len, layer.kv_len];
    if (!counts.every((n) => Number.isInteger(n) && n > 0)) throw new Damaged("a layer has no valid shape.");
  }
  const places = Array.isArray(raw.opened) ? raw.opened : [];
  const opened = [0, 1].map((i) => (Number.isInteger(places[i]) ? places[i] : null));
  if (!raw.other) return { ...raw, opened, ...readTexts(raw) };
  const { first, title } = raw.other;
  for (const [i, layer] of raw.layers.entries()) layer.of = i < first ? raw.title : title;
  return { ...raw, opened, ...readTexts(raw), other: { ...raw.other, ...readTexts(raw.other) } };
}

/** @param {any} raw @returns {Pick<Recording, "query_tokens" | "key_tokens">} */
function readTexts(raw) {
  const query = readTokens(raw.query_tokens);
  return { query_tokens: query, key_tokens: raw.one_text ? query : readTokens(raw.key_tokens) };
}

/** @param {{texts: string[], special: number[]} | null} tokens @returns {Token[] | null} */
function readTokens(tokens) {
  if (!tokens) return null;
  const special = new Set(tokens.special);
  return tokens.texts.map((text, i) => ({ text: String(text), special: special.has(i) }));
}

/** @param {string} text base64 @returns {Uint8Array<ArrayBuffer>} */
export function fromBase64(text) {
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
 * @param {Uint8Array} text
 * @param {LayerInfo["dtype"] | "int32"} dtype
 * @param {number} length how many numbers there must be
 * @returns {Promise<Float32Array | Int32Array>}
 */
export async function unpack(text, dtype, length) {
  const width = { float16: 2, float24: 3, float32: 4, int32: 4 }[dtype];
  const joined = new Uint8Array(4 * length);
  // The bits of a half number stand low until the table tells what they mean.
  let to = width === 2 ? 0 : 4 - width;
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
  const table = halfTable();
  const bits = new Uint32Array(joined.buffer);
  for (let i = 0; i < length; i++) numbers[i] = table[bits[i]];
  return numbers;
}

/**
 * Base64 and deflate.
 * @param {Uint8Array} text @param {number} length how many bytes there must be
 * @returns {Promise<Uint8Array>}
 */
export async function unpackBytes(text, length) {
  const bytes = new Uint8Array(length);
  await inflate(text, length, (piece, start) => bytes.set(piece, start));
  return bytes;
}

/**
 * Hands on what was deflated, piece by piece: a layer is too large to be there twice.
 * @param {Uint8Array} text base64 @param {number} length how many bytes there must be
 * @param {(piece: Uint8Array, start: number) => void} take
 */
async function inflate(text, length, take) {
  const reader = bytesOf(text).pipeThrough(new DecompressionStream("deflate")).getReader();
  let found = 0;
  try {
    for (let { done, value } = await reader.read(); !done; { done, value } = await reader.read()) {
      const piece = /** @type {Uint8Array} */ (value);
      if (found + piece.length <= length) take(piece, found);
      found += piece.length;
    }
  } catch {
    throw new Damaged("its numbers are cut off or changed.");
  }
  if (found !== length) throw new Damaged(`it has ${found} bytes where ${length} belong.`);
}

/** @param {Uint8Array} text base64 @returns {ReadableStream<Uint8Array<ArrayBuffer>>} */
function bytesOf(text) {
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

/** @type {Float32Array | null} */
let halves = null;

/** @returns {Float32Array} the value of each of the 65,536 half-precision numbers */
function halfTable() {
  if (halves) return halves;
  halves = new Float32Array(65536);
  for (let bits = 0; bits < 65536; bits++) {
    const exponent = (bits >> 10) & 31;
    const fraction = bits & 1023;
    let value = exponent === 0 ? fraction * 2 ** -24 : (1024 + fraction) * 2 ** (exponent - 25);
    if (exponent === 31) value = fraction ? NaN : Infinity;
    halves[bits] = bits & 0x8000 ? -value : value;
  }
  return halves;
}
