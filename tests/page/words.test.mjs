import assert from "node:assert/strict";
import { test } from "node:test";
import { forAxis, sinksOf } from "../../src/regard/view/web/data/axes";
import { inBlocks } from "../../src/regard/view/web/data/reading";
import { endsSentence, joinedIn, parted, secondText } from "../../src/regard/view/web/text/parts";
import { find } from "../../src/regard/view/web/views/controls";
import { tintText } from "../../src/regard/view/web/views/prose";
import { quoted, sentence, textSentence } from "../../src/regard/view/web/text/sentence";
import { restText } from "../../src/regard/view/web/views/segments_view";
import * as words from "../../src/regard/view/web/text/tokens";
import { layer, tokens, WORDS } from "./recordings.mjs";

const thin = (text) => text.replaceAll("\u202f", " ");
const HEBREW = "12מה שלומך";

// Tokens

for (const character of ["\u00ad", "\u180e", "\u3164", "\u2800", "\u115f", "\u034f", "\ufe0f", "\u{e0001}"])
  test(`an invisible character shows its number: ${character.codePointAt(0).toString(16)}`, () => {
    const number = character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
    assert.equal(words.named({ text: character, special: false }), `‹U+${number}›`);
  });

test("characters that turn, hide or break text are drawn as symbols", () => {
  assert.equal(words.visible("\u202eevil\u2066"), "‹U+202E›evil‹U+2066›");
  assert.equal(words.visible("\x00null\x7f\x1b"), "␀null␡␛");
  assert.equal(words.visible("\ud800a\udc00"), "‹U+D800›a‹U+DC00›");
  assert.equal(words.visible("😀 e\u0301 \u0915\u094d\u200d\u0937"), "😀 e\u0301 \u0915\u094d\u200d\u0937");
  assert.equal(words.visible("a\n\tb", "\n\t"), "a\n\tb");
});

test("a name is one line without space around it, and never half a character", () => {
  const name = (text, length) => words.named({ text, special: false }, length);
  assert.deepEqual(
    [" is", "a\nb", "\n\n", " ", "", "\t"].map((text) => name(text)),
    ["is", "a↵b", "↵↵", "␣", "∅", "⇥"],
  );
  assert.equal(name("abcdefgh", 5), "abcd…");
  assert.equal(name("abc😀😀", 5), "abc…");
});

test("a very long token is shortened in the prose", () => {
  const long = { text: "x".repeat(500), special: false };
  assert.equal(words.inProse(long), `${"x".repeat(120)}… (380 more characters)`);
  assert.ok(words.isShortened(long));
  assert.equal(words.inProse({ text: "x".repeat(130), special: false }), "x".repeat(130));
});

test("a name written from right to left stays apart from its sentence", () => {
  assert.equal(words.isolated(HEBREW), `\u2068${HEBREW}\u2069`);
  assert.equal(words.isolated("is"), "is");
});

test("sinks are the first and the special tokens, by name", () => {
  const story = tokens(["[CLS]", "Life", "[SEP]", " eat", "[SEP]"]);
  assert.deepEqual(sinksOf(story), [0, 2, 4]);
  assert.equal(words.sinkNames(story), "[CLS], [SEP]");
  assert.equal(words.sinkNames(tokens(["Life", " is"])), "the first token");
  assert.equal(words.sinkNames(tokens(["[A]", "[B]", "[C]", "[D]"])), "[A], [B] …");
});

test("positions stand where no text was recorded", () => {
  assert.deepEqual(forAxis(null, 2), tokens([" 0", " 1"]));
  const two = tokens(["a", "b"]);
  assert.equal(forAxis(two, 2), two);
});

// Words, sentences, parts

const TEXT = ["[CLS]", "Life", " is", " short", ".", " Eat", " dessert", " first", ".", " Then", " rest", ".", "[SEP]"];
const names = (parts) => parts.map(({ name }) => name);

test("sentences end at full stops and dots and nowhere else", () => {
  const text = tokens(
    "I told you that in 2020 nobody saw 6 of them … . Then you left .".split(" ").map((one) => ` ${one}`),
  );
  assert.deepEqual(
    names(parted(text, "sentences")).map((name) => name.slice(0, 6)),
    ["I told", ".", "Then y"],
  );
  assert.deepEqual(
    text.flatMap((_, at) => (endsSentence(text, at) ? [at] : [])),
    [11, 12, 16],
  );
  assert.ok(endsSentence(tokens(['he said."', " Then"]), 0));
  assert.ok(endsSentence(tokens(["line", "\nnext"]), 0));
});

test("parts are sentences, words or lines, without special tokens; many are joined", () => {
  assert.deepEqual(parted(tokens(TEXT), "sentences"), [
    { name: "Life is short.", span: [1, 5] },
    { name: "Eat dessert first.", span: [5, 9] },
    { name: "Then rest.", span: [9, 12] },
  ]);
  assert.deepEqual(names(parted(tokens(["a\n", "b", " c\n", "d"]), "lines")), ["a", "b c", "d"]);
  const split = tokens(["Des", "sert", " first", ".", " Then", " re", "st", "[SEP]"]);
  assert.deepEqual(
    parted(split, "words").map(({ name, span }) => [name, ...span]),
    [
      ["Dessert", 0, 2],
      ["first", 2, 3],
      ["Then", 4, 5],
      ["rest", 5, 7],
    ],
  );
  const many = parted(tokens(Array(100).fill(" x.")), "sentences");
  assert.deepEqual([many.length, many[0].span, many.at(-1).span], [34, [0, 3], [99, 100]]);
  assert.deepEqual(parted(tokens(["[CLS]"]), "sentences"), []);
});

test("of the parts of a text a sentence says what they join, and what goes to none", () => {
  const said = (...given) => thin(restText(...given));
  assert.equal(joinedIn(tokens(Array(100).fill(" x")), "words"), 3);
  assert.equal(said(3, "words", Float32Array.from([1, 0, 0.5, 0.5]), 2), " Each part is of 3 words.");
  assert.equal(
    said(1, "sentences", Float32Array.from([0.5, 0.25]), 1),
    " On average 25.0 % goes to special tokens, which are in no part.",
  );
  assert.match(said(1, "words", Float32Array.from([0.5]), 1), / 50.0 % goes to special tokens and punctuation,/);
  assert.equal(said(1, "words", Float32Array.from([NaN]), 1), "");
});

test("special tokens part the two texts of a pair", () => {
  assert.equal(secondText(tokens(["[CLS]", "Life", "[SEP]", " eat", "[SEP]"])), 3);
  assert.equal(secondText(tokens(WORDS)), null);
});

// Sentences

const LAYERS = [layer(), layer()];
const EVEN = Float32Array.from([0.5, 0.25, 0.25, 0, 0, 0, 0, 0, 0]);
const text = tokens(WORDS);
const axes = { queries: text, keys: text };

function read(more, isKnown = true) {
  const mask = Uint8Array.from(EVEN, (weight) => Number(weight > 0));
  const usual = { layer: 1, head: 0, hidden: false, query: 6, key: 1, column: null };
  return sentence({ ...usual, row: EVEN, mask, ...more }, axes, LAYERS, isKnown).replaceAll("\u202f", " ");
}

test("a cell is read with its share, its rank and its head", () => {
  assert.equal(read({}), "“dessert” gives 25.0 % of its attention to “Life” (rank 2 of 3), layer 1 head 0.");
  assert.equal(read({ key: 2 }), "“dessert” gives 25.0 % of its attention to “is” (rank 3 of 3), layer 1 head 0.");
});

test("in a text a token is read with what it looks at most, and what looks at it most", () => {
  const reading = { layer: 1, head: 0, hidden: false, query: 6, key: 6, row: EVEN, column: null };
  const read = (more) => textSentence({ ...reading, ...more }, axes, LAYERS).replaceAll("\u202f", " ");
  assert.equal(read({}), "“dessert” looks most at “[CLS]”: 50.0 %, layer 1 head 0.");
  assert.match(read({ column: EVEN }), /; “dessert” is looked at most by “\[CLS\]”: 50\.0 %, layer/);
  assert.match(read({ column: new Float32Array(9) }), /; nobody looks at “dessert”, layer/);
  assert.match(read({ row: new Float32Array(9).fill(NaN) }), /^“dessert”: its weights are not numbers \(NaN\), layer/);
  const large = [layer(), layer({ kind: "pyramid", block: 4, octaves: 0 })];
  assert.match(
    textSentence(reading, axes, large),
    /^“dessert” looks most at tokens 0 to 3: .* \(means of blocks of 4 × 4/,
  );
});

test("a masked key is told as such where the mask is known", () => {
  assert.equal(read({ key: 5 }), "“dessert” may not attend to “eat”, layer 1 head 0.");
  assert.equal(read({ key: 5 }, false), "“dessert” gives nothing to “eat”, layer 1 head 0.");
});

test("a row without keys, and one that is not numbers", () => {
  const none = { row: new Float32Array(9), mask: new Uint8Array(9) };
  assert.equal(read(none), "“dessert” may attend to nothing: all its weights are 0, layer 1 head 0.");
  const wrong = { row: new Float32Array(9).fill(NaN), mask: new Uint8Array(9).fill(1) };
  assert.equal(read(wrong), "“dessert”: its weights are not numbers (NaN), layer 1 head 0.");
});

test("without sinks, a sink is read without and a later key is still masked", () => {
  const aside = ", the first and the special tokens set aside.";
  const mask = Uint8Array.from([0, 1, 1, 0, 0, 0, 0, 0, 0]);
  assert.equal(read({ hidden: true, key: 0, mask }), `“dessert” is read without “[CLS]”, layer 1 head 0${aside}`);
  assert.equal(read({ hidden: true, key: 7, mask }), `“dessert” may not attend to “first”, layer 1 head 0${aside}`);
});

test("a mean and a difference name their heads", () => {
  const half = [0, 1].map((head) => ({ layer: 1, head, factor: 0.5 }));
  assert.match(read({ terms: half }), /\(rank 2 of 3\), mean of the 2 heads of layer 1\.$/);
  const terms = [
    { layer: 1, head: 0, factor: 1 },
    { layer: 0, head: 1, factor: -1 },
  ];
  const row = Float32Array.from(EVEN, (weight) => -weight);
  assert.equal(
    read({ terms, row }),
    "“dessert” gives “Life” 25.0 percentage points less of its attention in layer 1 head 0 than in layer 0 head 1.",
  );
});

test("a repeated token says its position, and one from right to left turns nothing", () => {
  const twice = tokens(["a", " b", " a"]);
  assert.deepEqual([quoted(twice, 1), quoted(twice, 2)], ["“b”", "“a” (token 2)"]);
  assert.equal(quoted(tokens([HEBREW]), 0), `“\u2068${HEBREW}\u2069”`);
});

test("of block means a sentence names both blocks", () => {
  const large = [layer(), layer({ kind: "pyramid", block: 4, octaves: 24 })];
  const mask = new Uint8Array(9).fill(1);
  const reading = { layer: 1, head: 0, hidden: false, query: 6, key: 1, row: EVEN.map(() => 0.5), mask, column: null };
  const said = (more) => thin(sentence({ ...reading, ...more }, axes, large, true));
  assert.match(
    said({}),
    /^Of tokens 4 to 7, about 50\.0 % of the attention goes to tokens 0 to 3 \(means of blocks of 4 × 4 tokens\), layer 1 head 0\.$/,
  );
  const terms = [0, 1].map((head) => ({ layer: 1, head, factor: 0.5 }));
  assert.equal(
    said({ terms }),
    "This file has block means only: what single keys get, mean of the 2 heads of layer 1, is not known.",
  );
  mask[1] = 0;
  assert.equal(said({}), "“dessert” may not attend to “Life”, layer 1 head 0.");
  assert.match(
    said({ query: 6, key: 2, row: EVEN.map(() => NaN) }),
    /are not numbers \(NaN\) \(means of blocks of 4 × 4/,
  );
});

test("a tint says its strongest weight, and what is not a number", () => {
  const said = (weights, ...more) => thin(tintText(Float32Array.from(weights), ...more));
  assert.equal(said([0.5, 0], 0.5, true), "Full tint: 50.0 %, the strongest");
  assert.equal(said([0.5, NaN], 1, false), "Full tint: 100 %; grey: not numbers (NaN)");
  assert.equal(said([NaN], NaN, true), "Not numbers (NaN)");
});

test("a phrase is found after a token, then from the start, over several tokens", () => {
  const found = (phrase, after) => find(text, phrase, after);
  assert.equal(found("DESSERT FIRST", 0), 6);
  assert.equal(found("is", 2), 2);
  assert.equal(found("never", 0), null);
  assert.equal(found("  ", 0), null);
});

test("where only means of blocks are known, one number says what a block gets", () => {
  const large = [layer({ kind: "pyramid", block: 4, octaves: 24 })];
  const row = Float32Array.from([0.125, 0.125, 0.125, 0.125, 0.0625, 0.0625, 0.0625, 0.0625, 0.25]);
  const reading = { layer: 0, head: 0, query: 6, key: 8, row, column: row };
  const shares = inBlocks(reading, large);
  assert.deepEqual([...shares.row], [0.5, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25, 0.25]);
  assert.deepEqual([...shares.column], [...row]); // the last block has one key
  const most = inBlocks({ ...reading, row: row.map(() => 0.255) }, large).row; // rounded to a byte
  assert.deepEqual([...most.slice(0, 8)], Array(8).fill(1));
  assert.equal(inBlocks(reading, [layer()]), reading);
});
