import assert from "node:assert/strict";
import { test } from "node:test";
import { deflateSync } from "node:zlib";
import { blocksOf, errorOf, meansOf } from "../../src/regard/view/web/maths/block_means";
import { Damaged, fromBase64, readRecording, unpack, unpackBytes } from "../../src/regard/view/web/data/unpack";
import { coarsest, headsName } from "../../src/regard/view/web/data/compare";
import { smallMap } from "../../src/regard/view/web/data/small";
import { blockAt, missing, strongestBlocks } from "../../src/regard/view/web/text/block_words";
import { sorted } from "../../src/regard/view/web/views/heads_view";
import { countRefused, notes } from "../../src/regard/view/web/views/notes";
import { introduced } from "../../src/regard/view/web/views/notable_heads";
import { layer, recording, tokens } from "./recordings.mjs";

// What stands in the file

const WHOLE = {
  version: 1,
  title: "a",
  layers: [layer()],
  opened: { layer: 0, head: 1, query: 0, key: null },
  query_tokens: { texts: ["a", " b"], special: [0] },
  one_text: true,
};

test("tokens, and of one text the same on both axes", () => {
  const read = readRecording(JSON.stringify(WHOLE));
  assert.deepEqual(read.query_tokens, [
    { text: "a", special: true },
    { text: " b", special: false },
  ]);
  assert.equal(read.key_tokens, read.query_tokens);
  assert.deepEqual(read.opened, WHOLE.opened);
});

test("of two recordings each layer says which it is of", () => {
  const other = { first: 1, title: "b", query_tokens: null, key_tokens: null, one_text: false };
  const read = readRecording(JSON.stringify({ ...WHOLE, layers: [layer(), layer()], other }));
  assert.deepEqual(
    [0, 1].map((at) => headsName({ layer: at, head: 1 }, read.layers)),
    ["layer 0 head 1 (a)", "layer 1 head 1 (b)"],
  );
});

test("layers and heads have their numbers in the model", () => {
  const part = layer({ place: 23, head_numbers: [3, 7] });
  const { layers } = readRecording(JSON.stringify({ ...WHOLE, layers: [part, layer({ place: 24 })] }));
  assert.equal(headsName({ layer: 0, head: 0 }, [layer({ place: 3, part: 1 })]), "layer 3.1 head 0");
  const heads = [0, 1].flatMap((at) => [0, 1].map((head) => headsName({ layer: at, head }, layers)));
  assert.deepEqual(heads, ["layer 23 head 3", "layer 23 head 7", "layer 24 head 0", "layer 24 head 1"]);
});

const DAMAGES = {
  "cut off": [JSON.stringify(WHOLE).slice(0, 50), "its list of layers and tokens is cut off or changed."],
  "not there": [undefined, "its list of layers and tokens is cut off or changed."],
  "of another format": [JSON.stringify({ ...WHOLE, version: 2 }), "it has format 2; this page reads format 1."],
  "without layers": [JSON.stringify({ ...WHOLE, layers: [] }), "it holds no layer."],
  "not opened": [JSON.stringify({ ...WHOLE, opened: null }), "it does not say where it opens."],
  "of no shape": [JSON.stringify({ ...WHOLE, layers: [layer({ q_len: -1 })] }), "a layer has no valid shape."],
};
for (const [name, [text, message]] of Object.entries(DAMAGES))
  test(`a list that is ${name} is damage`, () =>
    assert.throws(
      () => readRecording(text),
      (error) => error instanceof Damaged && error.message === message,
    ));

/** As packing.py packs numbers: the bytes of each apart, deflated, in base64. */
function packed(bytes, width) {
  const planes = Array.from({ length: width }, (_, plane) => bytes.filter((_, at) => at % width === plane));
  const apart = Buffer.concat(planes.map((plane) => Buffer.from(plane)));
  return new TextEncoder().encode(deflateSync(apart).toString("base64"));
}

test("numbers of 32 bits are read back", async () => {
  const numbers = Float32Array.from([0, 1, -2.5, 1e-30, NaN, 123456.789]);
  const bytes = new Uint8Array(numbers.buffer);
  assert.deepEqual(await unpack(packed(bytes, 4), "float32", 6), numbers);
  const counts = Int32Array.from([0, -1, 2 ** 30]);
  assert.deepEqual(await unpack(packed(new Uint8Array(counts.buffer), 4), "int32", 3), counts);
});

test("all half-precision numbers are read back", async () => {
  const halves = [0x0000, 0x8000, 0x3c00, 0xc000, 0x7bff, 0x0001, 0x03ff, 0x7c00, 0xfc00, 0x7e00];
  const bytes = new Uint8Array(Uint16Array.from(halves).buffer);
  const read = await unpack(packed(bytes, 2), "float16", halves.length);
  assert.deepEqual([...read], [0, -0, 1, -2, 65504, 2 ** -24, 1023 * 2 ** -24, Infinity, -Infinity, NaN]);
});

test("numbers that are cut off, changed or too many are damage", async () => {
  const whole = packed(new Uint8Array(40).fill(7), 4);
  await assert.rejects(unpack(whole.slice(0, 12), "float32", 10), /its numbers are cut off or changed/);
  await assert.rejects(unpack(new TextEncoder().encode("####"), "float32", 10), /its numbers are cut off or changed/);
  await assert.rejects(unpack(whole, "float32", 9), /it has 40 bytes where 36 belong/);
  await assert.rejects(unpackBytes(whole, 41), /it has 40 bytes where 41 belong/);
  assert.throws(() => fromBase64("*"), Damaged);
});

// Layers that are too large

test("levels stand for means that are within the error that is told", () => {
  const info = layer({ block: 2, maximum: 0.8, octaves: 24 });
  const means = meansOf(info);
  assert.equal(means[0], 0);
  assert.ok(Number.isNaN(means[255]));
  assert.ok(Math.abs(means[254] - 0.8) < 1e-6);
  for (let level = 2; level < 255; level++)
    assert.ok(means[level] / means[level - 1] <= (1 + errorOf(info)) ** 2 + 1e-6);
  assert.deepEqual(blocksOf(info), { rows: 5, columns: 5 });
});

test("of several heads the coarsest says how exact they are", () => {
  const layers = [layer(), layer({ kind: "pyramid", block: 2 }), layer({ kind: "pyramid", block: 4 })];
  assert.equal(coarsest({ layer: 0 }, layers), null);
  const terms = [0, 1, 2].map((at) => ({ layer: at, head: 0, factor: 1 }));
  assert.equal(coarsest({ layer: 0, terms }, layers), layers[2]);
});

test("the strongest blocks are told with their tokens", () => {
  const means = Float32Array.from([0.1, 0.1, 0.3, 0.3, 0.2]);
  assert.deepEqual(
    strongestBlocks(means, { block: 2 }, 2).map(({ places }) => places),
    ["2 to 3", "4"],
  );
  assert.equal(blockAt(4, 2, 5).name, "token 4");
});

test("what is missing says how to get it", () => {
  const layers = [layer(), layer({ place: 7 }), layer({ of: "first" })];
  const said = (at) => missing(layers, at, "a row step by step").split("see it with ")[1];
  const start = "regard serve, or write the file with";
  assert.equal(said(0), `${start} --layers 0 or a larger --limit (in Python: layers and limit of regard.page).`);
  assert.match(said(1), /--layers 7 or/);
  assert.equal(said(2), `${start} a larger --limit (in Python: limit of regard.page).`);
});

test("notes say what is rounded, left out or shown of a recording", () => {
  const said = (more, file = {}) => notes(recording([layer({ dtype: "float32", ...more })], { batch: 1, ...file }), 0);
  assert.deepEqual(said({}), []);
  assert.match(
    said({ dtype: "float16", deviation: 1e-6 })[0],
    /^Queries and keys are stored in 16 bits: weights are within/,
  );
  assert.match(said({ dtype: "float16", deviation: 1e-6, spacing: 1 })[0], /points of the recording\.$/);
  assert.match(said({ dtype: "float16", deviation: 1e-6, spacing: 3 })[0], /, measured in 1 row of 3\.$/);
  assert.match(said({ dtype: "float16", kind: "weights", deviation: 1e-3 })[0], /^Weights are stored in 16 bits/);
  assert.match(said({ heads: [null, null] })[0], /not numbers \(NaN\)/);
  const another = "this is the first. Show another with recording.entry(1).";
  assert.deepEqual(said({}, { batch: 2 }), [`The recording holds 2 sequences; ${another}`]);
  assert.match(said({ place: 3, part: 1 })[0], /^Layer 3\.1 is one window or tile of the picture/);
  const [means, more] = said({ kind: "pyramid", block: 2, octaves: 24 });
  assert.match(means, /: it has means of blocks of 2 × 2 tokens, ± 3\.34\u202f% of each\.$/);
  assert.match(more, /--layers 0 or a larger --limit/);
});

test("notes are of both layers on the stage, and name the larger rounding", () => {
  const small = { dtype: "float16", deviation: 1e-6 };
  const said = (...layers) => notes(recording(layers.map(layer), { batch: 1 }), 0, 1);
  assert.match(said(small, { ...small, deviation: 0.012 })[0], / within 1\.20 percentage points/);
  assert.equal(said(small, { ...small, deviation: 0.012 }).length, 1);
  const [means, more, rounded] = said(small, { kind: "pyramid", block: 8, octaves: 24 });
  assert.match(means, /blocks of 8 × 8/);
  assert.match(more, /--layers 1 /);
  assert.match(rounded, /^Queries and keys are stored in 16 bits/);
});

const REFUSED = { module: "attn.1", line: "model.py:7", reason: "the weights\n    Remedy." };

test("notes say which layers were refused, and why", () => {
  const said = (refused) => notes(recording([layer({ dtype: "float32" })], { batch: 1, refused }), 0);
  assert.deepEqual(said([REFUSED]), [
    "1 layer was refused and is missing: attn.1. Reason (model.py:7): the weights Remedy.",
  ]);
  const compiled = { module: "b\u202e", line: null, reason: "it is compiled at model.py:7." };
  assert.deepEqual(said([REFUSED, compiled, { ...REFUSED, module: "attn.2" }, REFUSED]), [
    "2 layers were refused and are missing: attn.1, attn.2. Reason (model.py:7): the weights Remedy.",
    "1 layer was refused and is missing: b‹U+202E›. Reason: it is compiled at model.py:7.",
  ]);
});

test("of many refused layers and reasons the first five are named", () => {
  const many = [...Array(9).keys()].map((at) => ({ ...REFUSED, module: `${at}` }));
  const said = (refused) => notes(recording([layer({ dtype: "float32" })], { batch: 1, refused }), 0);
  assert.match(said(many)[0], /^9 layers were refused and are missing: 0, 1, 2, 3, 4 and 4 more\. Reason/);
  const reasons = said(many.map((each, at) => ({ ...each, reason: `reason ${at}` })));
  assert.equal(reasons.length, 6);
  assert.equal(reasons[5], "There are 4 more reasons in recording.refused.");
  assert.equal(countRefused(recording([layer()], { refused: [REFUSED, REFUSED] })), 1);
});

// Heads

function head(kind, score = 1, entropy = 0.5, sink = 0) {
  return { kind, score, entropy, sink };
}

const KINDS = [
  [head("self", 1, 0), head("uniform", 1, 1, 0.5)],
  [head("uniform", 0.9, 0.9, 0.5), head("self", 0.8, 0.1)],
];
const TILES = KINDS.flatMap((kinds, at) => kinds.map((kind, i) => ({ layer: at, head: i, kind })));

for (const [by, order] of [
  ["place", ["00", "01", "10", "11"]],
  ["entropy", ["01", "10", "11", "00"]],
  ["score", ["00", "01", "10", "11"]],
  ["kind", ["00", "11", "01", "10"]],
])
  test(`heads are sorted by ${by}`, () => {
    const found = sorted(TILES, by);
    assert.deepEqual(
      found.map((tile) => `${tile.layer}${tile.head}`),
      order,
    );
  });

test("a head without a kind stands last", () => {
  const tiles = [{ layer: 0, head: 0, kind: null }, ...TILES];
  assert.equal(sorted(tiles, "kind").at(-1).kind, null);
});

test("one sentence introduces a head", () => {
  const said = (kind) => introduced({ layer: "0", head: 1, kind }).replaceAll("\u202f", " ");
  assert.equal(
    said(head("previous token", 0.9)),
    "Layer 0, head 1 is a previous-token head: each token attends to the one before it (90 % of its attention on average).",
  );
  assert.equal(said(head("mixed")), "Layer 0, head 1 is a mixed head: no simple pattern takes half of its attention.");
  const induction = { ...head("induction", 0.99), here: { kind: "first-token sink", score: 0.89 } };
  assert.equal(
    said(induction),
    "Layer 0, head 1 is an induction head: each token attends to the token after its previous occurrence " +
      "(99 % in a trial made to show it). In this text it is a first-token sink (89 %).",
  );
});
