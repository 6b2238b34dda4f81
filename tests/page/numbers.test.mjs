import assert from "node:assert/strict";
import { test } from "node:test";
import { cellTable } from "../../src/regard/view/web/map/cells";
import { legendOf, marks } from "../../src/regard/view/web/map/legend";
import * as blocks from "../../src/regard/view/web/maths/blocks";
import * as colours from "../../src/regard/view/web/maths/colours";
import * as numbers from "../../src/regard/view/web/maths/numbers";
import { columnsOf } from "../../src/regard/view/web/maths/sums";
import { inCell } from "../../src/regard/view/web/map/map";
import { rankOf, strongest, top } from "../../src/regard/view/web/maths/weights";
import { tokens } from "./recordings.mjs";

const thin = (text) => text.replaceAll("\u202f", " ");

test("numbers have three digits and no exponent that a reader does not need", () => {
  const shown = [0, 0.5, 31.2345, 12345, 0.000123, 1e-10, NaN].map(numbers.digits).map(thin);
  assert.deepEqual(shown, ["0", "0.500", "31.2", "12,345", "1.23 × 10⁻⁴", "1.00 × 10⁻¹⁰", "not a number"]);
  assert.deepEqual([2.5, 10, 0.25, 100].map(numbers.plain), ["2.5", "10", "0.25", "100"]);
});

test("shares are in percent, differences in points with a sign", () => {
  assert.deepEqual([0.312, 1, 0, 1e-6, NaN].map(numbers.share).map(thin), [
    "31.2 %",
    "100 %",
    "0 %",
    "<0.001 %",
    "not a number",
  ]);
  assert.deepEqual([0.312, -0.0401, 0].map(numbers.points), ["+31.2", "−4.01", "0"]);
  assert.deepEqual([0.1, 0.99993342, 1.23456e-8].map(Math.fround).map(numbers.full), ["0.1", "0.9999", "1.235e-8"]);
  assert.deepEqual([numbers.counted(1, "token"), numbers.counted(2048, "token")], ["1 token", "2,048 tokens"]);
  assert.deepEqual([numbers.lasting(4.2), numbers.lasting(150)], ["5 s", "3 min"]);
});

// Colours

for (const [theme, ground] of [
  ["light", "#fafaf9"],
  ["dark", "#131417"],
]) {
  test(`weight 0 is the ${theme} ground, and the scale goes one way in lightness`, () => {
    const ramp = colours.ramp(theme, ground);
    const rgb = ramp.css.map((css) => css.match(/\d+/g).map(Number));
    assert.equal(`#${rgb[0].map((part) => part.toString(16).padStart(2, "0")).join("")}`, ground);
    const lightness = rgb.map(([red, green, blue]) => 0.2126 * red + 0.7152 * green + 0.0722 * blue);
    const sign = theme === "light" ? -1 : 1;
    for (let i = 8; i < 256; i += 8) assert.ok(sign * (lightness[i] - lightness[i - 8]) > 0, `level ${i}`);
    assert.equal(ramp.packed[7] >>> 0, ((255 << 24) | (rgb[7][2] << 16) | (rgb[7][1] << 8) | rgb[7][0]) >>> 0);
  });

  test(`text can be read on every ${theme} colour`, () => {
    const luminance = (css) => {
      const parts = css
        .match(/\d+/g)
        .map((part) => (part / 255 <= 0.04045 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4));
      return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
    };
    const text = { "#17181c": "rgb(23,24,28)", "#fbfaf7": "rgb(251,250,247)" };
    Object.assign(text, { "#000000": "rgb(0,0,0)", "#ffffff": "rgb(255,255,255)" });
    for (const ramp of [colours.ramp(theme, ground), colours.differenceRamp(theme, ground)])
      ramp.css.forEach((css, i) => {
        const [one, other] = [luminance(css), luminance(text[ramp.onTop[i]])].sort((a, b) => b - a);
        assert.ok((one + 0.05) / (other + 0.05) >= 4.5, css);
      });
  });

  test(`the ${theme} ground is the middle of differences`, () => {
    const ramp = colours.differenceRamp(theme, ground);
    assert.equal(ramp.css.length, 511);
    assert.equal(ramp.css[255], colours.ramp(theme, ground).css[0]);
  });
}

test("a weight has its place on each scale", () => {
  const floor = colours.logFloor(2048);
  assert.equal(floor, 1e-4);
  assert.equal(colours.logFloor(9), 0.01);
  const places = (weight) => ["linear", "log", "fit"].map((scale) => colours.level(weight, scale, floor, 0.5));
  assert.deepEqual(places(0), [0, 0, 0]);
  assert.deepEqual(places(0.5), [128, 236, 255]);
  assert.deepEqual(places(0.01), [3, 128, 5]);
  assert.deepEqual(places(1), [255, 255, 255]);
  assert.deepEqual(places(NaN), [NaN, NaN, NaN]);
  assert.equal(colours.level(1e-9, "log", floor, 1), 0);
  assert.equal(colours.level(0.5, "fit", floor, 0), 0);
});

test("a difference has its place on both sides of none", () => {
  const at = (difference) => colours.differenceLevel(difference, "fit", 0.01, 0.5);
  assert.deepEqual([-1, -0.25, 0, 0.25, 0.5].map(at), [0, 127, 255, 383, 510]);
  assert.ok(Number.isNaN(at(NaN)));
});

test("what is not a number has a colour that is on no scale", () => {
  const ramp = colours.ramp("light", "#fafaf9");
  assert.equal(colours.tintOf(ramp, NaN).css, "rgb(150,150,150)");
  assert.ok(!ramp.css.includes("rgb(150,150,150)"));
  assert.equal(colours.pixelOf(ramp, NaN), 0xff969696);
});

test("the legend says its unit and its scale", () => {
  globalThis.document = {};
  globalThis.getComputedStyle = () => ({ colorScheme: "light" });
  const [ramp, differences] = [{ packed: { length: 256 } }, { packed: { length: 511 } }];
  const said = (scale, ...more) => thin(legendOf(scale, 9, "share", ...more).text);
  assert.equal(said("linear", ramp, 1), "share, linear");
  assert.equal(said("log", ramp, 1), "share, log");
  assert.equal(said("fit", ramp, 0.08), "share, darkest = 8 % or more");
  assert.equal(said("fit", differences, 1), "share, darkest = 100 points");
  const marked = (scale) => legendOf(scale, 2048, "", differences, 0.5).marks.map(({ text }) => text);
  assert.deepEqual(
    [marked("linear"), marked("fit")],
    [
      ["−100", "0", "+100"],
      ["−50", "0", "+50"],
    ],
  );
  assert.deepEqual(marked("log"), ["−100", "0", "+100", "−1", "+1"]);
});

test("the marks under the scale say what it is", () => {
  const texts = (...asked) => marks(...asked).map(({ text }) => thin(text));
  assert.deepEqual(texts("linear", 9, 1), ["0", "25", "50", "75", "100 %"]);
  assert.deepEqual(texts("fit", 9, 0.08), ["0", "4", "≥ 8 %"]);
  assert.deepEqual(texts("fit", 9, 1), ["0", "50", "100 %"]);
  assert.deepEqual(texts("log", 9, 1), ["≤ 1", "10", "100 %"]);
  assert.deepEqual(texts("log", 200_000, 1), ["≤ 10⁻⁴", "0.01", "1", "100 %"]);
});

// Blocks

test("a tile covers its tokens, and fewer at the edge", () => {
  const shape = { q_len: 523, kv_len: 601 };
  assert.deepEqual(blocks.extent({ level: 0, row: 2, column: 2 }, shape), {
    size: 1,
    first: 512,
    end: 523,
    from: 512,
    to: 601,
    height: 11,
    width: 89,
  });
  assert.deepEqual(blocks.extent({ level: 1, row: 1, column: 1 }, shape).width, 45);
});

test("a block of a small map holds the positions between its edges", () => {
  for (const [length, cells] of [
    [9, 9],
    [64, 32],
    [601, 32],
    [37, 5],
  ])
    for (let at = 0; at < length; at++) {
      const cell = blocks.blockOf(at, length, cells);
      assert.ok(blocks.edge(cell, length, cells) <= at && at < blocks.edge(cell + 1, length, cells));
    }
});

test("a row of weights adds the mean of each block", () => {
  const cells = new Float32Array(3);
  blocks.addRow([1, 3, 5, 7, 9], 0, 5, 2, cells, 0, 2);
  assert.deepEqual([...cells], [1, 3, 4.5]);
});

// Rows

test("ranks, the strongest and ties as topk has them", () => {
  const row = Float32Array.from([0.2, 0.4, 0.4, 0, 0]);
  const mask = Uint8Array.from([1, 1, 1, 1, 0]);
  assert.deepEqual(
    [0, 1, 2, 3].map((at) => rankOf(row, mask, at).rank),
    [3, 1, 2, 4],
  );
  assert.equal(rankOf(row, mask, 0).of, 4);
  assert.equal(strongest(row), 1);
  assert.equal(strongest(Float32Array.from([NaN, 0.1, 0.5])), 2);
  assert.equal(strongest(Float32Array.from([0, NaN, 0])), 1);
  assert.deepEqual(top(row, 2), [1, 2]);
  assert.deepEqual(top(row, 8), [1, 2, 0]);
});

test("cells are a table with their tokens; maps of one text share a heading", () => {
  const text = tokens(["a", " b", " c"]);
  const grid = {
    name: "layer 0 head 0",
    queries: text,
    keys: text,
    part: { size: 2, top: 0, bottom: 2, left: 0, right: 2 },
    at: (down, right) => (down === right ? 0.5 : null),
  };
  const rows = [
    ["share", "query", "token", "0–1 a … b", "2 c"],
    ["layer 0 head 0", "0–1", "a … b", 0.5, ""],
    ["layer 0 head 0", 2, "c", "", 0.5],
  ];
  assert.deepEqual(cellTable([grid], "share"), rows);
  assert.deepEqual(cellTable([grid, grid], "share"), [...rows, ...rows.slice(1)]);
});

// The sums of the steps

const KEYS = [
  [0, 1, 1],
  [4, 4, 0],
  [2, 3, -1],
];
const QUERY = [2, 2, 2];
const SCALE = 1 / Math.sqrt(3);

/** The second query of the notebooks, as `rowSteps` answers. */
function steps(more = {}, hides = () => false) {
  const rows = KEYS.map((vector, key) => {
    const dot = vector.reduce((sum, number, d) => sum + number * QUERY[d], 0);
    const score = hides(key) ? null : dot * SCALE;
    const none = { biased: null, modified: null, capped: null, value: null };
    return { ...none, key, vector, dot, scaled: dot * SCALE, allowed: score !== null, score, weight: 0 };
  });
  const scores = rows.map(({ score }) => score ?? -Infinity);
  const maximum = Math.max(...scores);
  const log_normalizer = Math.log(scores.reduce((sum, score) => sum + Math.exp(score - maximum), 0));
  rows.forEach((row, key) => (row.weight = Math.exp(scores[key] - maximum - log_normalizer)));
  const usual = { vector: QUERY, scale: SCALE, masked: rows.some(({ allowed }) => !allowed), sink: null, output: null };
  return { ...usual, maximum, log_normalizer, keys: 3, total: 1, rows, ...more };
}

function sums(found, row) {
  const names = { query: "“is”", key: "“x”" };
  return Object.fromEntries(columnsOf(found).map(({ name, sum }) => [name, thin(sum(found.rows[row], names))]));
}

function totalOf(found, column) {
  return columnsOf(found).find(({ name }) => name === column).total;
}

test("every number tells the sum that made it", () => {
  assert.deepEqual(
    sums(
      steps({}, (key) => key === 2),
      0,
    ),
    {
      "query × key": "query·key = 2×0 + 2×1 + 2×1 = 4",
      "query·key": "query·key = 2×0 + 2×1 + 2×1 = 4",
      "× 1/√3": "scaled = 4 × 1/√3 = 2.31",
      mask: "mask: “is” may attend to “x”",
      "exp(score)": "exp(2.31) = 10.1",
      weight: "weight = 10.1 / 10,286, the sum over all keys = 0.0979 %",
    },
  );
});

test("a masked key says why it weighs nothing", () => {
  const said = sums(
    steps({}, (key) => key === 2),
    2,
  );
  assert.equal(said.mask, "mask: “is” may not attend to “x”, so the score becomes −∞");
  assert.equal(said["exp(score)"], "exp(−∞) = 0");
  assert.equal(said["query·key"], "query·key = 2×2 + 2×3 + 2×(−1) = 8");
});

test("the last row adds up", () => {
  const found = steps();
  const total = [4, 16, 8].reduce((sum, dot) => sum + Math.exp(dot * SCALE), 0);
  assert.equal(
    totalOf(found, "exp(score)").sum,
    `The sum of exp(score) over all 3 keys = ${numbers.grouped(Math.round(total))}`,
  );
  assert.equal(thin(totalOf(found, "weight").text), "100 %");
  assert.equal(
    totalOf({ ...found, keys: 1 }, "weight").sum.replaceAll("\u202f", " "),
    "The weights add up to 100 % over its one key.",
  );
});

test("of many products the largest are told, and what the others add", () => {
  const [query, key] = [64, 3].map((step) => Array.from({ length: 64 }, (_, d) => Math.sin(step * d + 1)));
  const products = query.map((number, d) => number * key[d]);
  const dot = products.reduce((sum, product) => sum + product, 0);
  const found = steps({ vector: query, scale: 1 / 8 });
  found.rows[0] = { ...found.rows[0], vector: key, dot };
  const said = sums(found, 0)["query·key"];
  assert.equal(said.match(/×/g).length, 6);
  const largest = products.toSorted((a, b) => Math.abs(b) - Math.abs(a)).slice(0, 6);
  const rest = dot - largest.reduce((sum, product) => sum + product, 0);
  const told = said.match(/the 6 largest of 64 products; the others add (\S+)\.$/)[1].replace("−", "-");
  assert.ok(Math.abs(Number(told) - rest) <= 0.0051 * Math.abs(rest));
  assert.ok(columnsOf(found).some(({ name }) => name === "× 1/8"));
});

test("large scores are shifted so that their exponential can be read", () => {
  const shift = (maximum) => {
    const found = { ...steps(), maximum };
    return columnsOf(found).find(({ name }) => name.startsWith("exp")).name;
  };
  // The largest score as it is shown: whoever subtracts what is seen gets what is shown.
  assert.equal(shift(27.1469), "exp(score − 27.1)");
  assert.equal(shift(-1234.6), "exp(score + 1235)");
  assert.equal(shift(9), "exp(score)");
});

test("values and the output are told as vectors", () => {
  const found = steps({ output: [3, -0.5] });
  found.rows[1].value = [4, -1];
  found.rows[1].weight = 0.5;
  const said = sums(found, 1);
  assert.equal(said.value, "value = (4, −1)");
  assert.equal(said["weight × value"], "weight × value = 50.0 % × (4, −1) = (2, −0.500)");
  const total = totalOf(found, "weight × value");
  assert.equal(total.sum, "output = the sum of weight × value over all 3 keys = (3, −0.500)");
});

test("numbers in cells have one decimal, and a tiny weight leaves its cell empty", () => {
  const said = (weight, isDifference = false) => inCell(weight, isDifference);
  assert.deepEqual(
    [0, 1e-6, 0.0004, 0.0006, 0.031, 0.5689, 0.9999, NaN].map((weight) => said(weight)),
    ["", "", "", "0.1", "3.1", "56.9", "100", "NaN"],
  );
  assert.deepEqual(
    [0.0001, 0.25, -0.25].map((weight) => said(weight, true)),
    ["", "+25.0", "−25.0"],
  );
});
