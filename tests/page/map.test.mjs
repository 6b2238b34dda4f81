import assert from "node:assert/strict";
import { test } from "node:test";
import { Axes } from "../../src/regard/view/web/map/axes";
import { headline, shown, shownName } from "../../src/regard/view/web/data/compare";
import { paletteOf } from "../../src/regard/view/web/look";
import { partOf, placesOf } from "../../src/regard/view/web/map/mosaic";
import { ceilingOf, ceilingOfAll, smallMap, smallShares } from "../../src/regard/view/web/data/small";
import { layer, tokens, WORDS } from "./recordings.mjs";

globalThis.devicePixelRatio = 1;
globalThis.document = { body: {} };
globalThis.getComputedStyle = () => ({ fontFamily: "sans-serif", fontSize: "14px" });

/** A canvas whose letters are all 7 pixels wide. */
const RULER = { measureText: (text) => ({ width: 7 * [...text].length }) };
const STAGE = { width: 600, height: 560 };

function framed(queries, keys, at = {}) {
  return new Axes(RULER).frame(STAGE, { queries, keys }, { zoom: 1, row: 0, column: 0, ...at });
}

function counted(length) {
  return tokens(Array.from({ length }, (_, i) => ` ${i}`));
}

// Frames

test("a short text has square cells of whole pixels with room for every label", () => {
  const text = tokens(WORDS);
  const frame = framed(text, text);
  assert.equal(frame.cellWidth, frame.cellHeight);
  assert.ok(Number.isInteger(frame.cellWidth) && frame.cellWidth >= 40);
  assert.deepEqual([frame.rows, frame.columns, frame.row, frame.column], [9, 9, 0, 0]);
  assert.ok(frame.left + frame.width <= STAGE.width && frame.top + frame.height <= STAGE.height);
});

test("where rows have no room for every label, the margin has room for positions", () => {
  const text = tokens(WORDS);
  const widest = Math.max(...text.map((token) => 7 * [...token.text.trim()].length));
  for (let height = 150; height < 560; height += 1) {
    const frame = new Axes(RULER).frame(
      { width: 600, height },
      { queries: text, keys: text },
      { zoom: 1, row: 0, column: 0 },
    );
    if (frame.cellHeight < 16) assert.ok(frame.left >= widest + 7 + 7 + 8, `${height} pixels: ${frame.left}`);
  }
});

test("cells grow no more than to 84 pixels", () => {
  const one = counted(1);
  assert.equal(framed(one, one).cellWidth, 84);
  const text = counted(200);
  const { most, cellWidth } = framed(text, text);
  assert.equal(framed(text, text, { zoom: most }).cellWidth, 84);
  assert.ok(most > 84 / cellWidth - 1);
});

test("on a large screen eight cells fill the stage", () => {
  const axes = { queries: counted(9), keys: counted(9) };
  const { cellWidth } = new Axes(RULER).frame({ width: 1500, height: 1100 }, axes, { zoom: 1, row: 0, column: 0 });
  assert.ok(cellWidth > 100 && cellWidth <= 1100 / 8);
});

test("maps beside each other stand at one height, also with longer words in one of them", () => {
  const [short, long] = [
    ["Life", "is"],
    ["Life", "isextraordinary"],
  ].map(tokens);
  const both = [short, long].map((text) => ({ queries: text, keys: text }));
  const frames = both.map((axes) =>
    new Axes(RULER).frame({ width: 160, height: 560 }, axes, { zoom: 1, row: 0, column: 0 }, both),
  );
  assert.deepEqual(frames[0], frames[1]);
  assert.ok(frames[0].slanted && !framed(short, short).slanted);
});

test("a part of the map keeps its margins and stays inside the matrix", () => {
  const text = counted(200);
  const [all, part] = [framed(text, text), framed(text, text, { zoom: 8, row: 190, column: -5 })];
  assert.deepEqual([part.left, part.top], [all.left, all.top]);
  assert.equal(part.row, 200 - part.rows);
  assert.equal(part.column, 0);
  assert.ok(Math.abs(part.cellWidth / (8 * all.cellWidth) - 1) < 0.1);
});

test("a matrix much longer than wide is stretched", () => {
  const frame = framed(counted(400), counted(10));
  assert.ok(frame.cellWidth >= 28 && frame.cellHeight < 2);
});

test("with more tokens than pixels the whole is still seen", () => {
  const text = counted(5000);
  const frame = framed(text, text);
  assert.ok(Math.abs(frame.rows - 5000) < 1e-6);
  assert.ok(Number.isInteger(Math.round(frame.height * 1e6) / 1e6));
});

// Parts and tiles

test("the level on the stage is the finest whose cells have a pixel", () => {
  const at = (cellWidth, more = {}) =>
    partOf({ cellWidth, cellHeight: cellWidth, row: 0, column: 0, rows: 1024, columns: 1024, ...more });
  assert.deepEqual(
    [2, 1, 0.5, 0.3, 1 / 64].map((side) => at(side).level),
    [0, 0, 1, 2, 6],
  );
  assert.deepEqual(at(0.5, { row: 3, rows: 10, column: 4.5, columns: 8 }), {
    level: 1,
    size: 2,
    top: 1,
    bottom: 7,
    left: 2,
    right: 7,
  });
});

test("tiles are asked for from the middle outwards", () => {
  const places = placesOf({ level: 2, top: 0, bottom: 768, left: 0, right: 768 });
  assert.equal(places.length, 9);
  assert.deepEqual(places[0], { level: 2, row: 1, column: 1 });
  assert.deepEqual(
    new Set(places.slice(5).map(({ row, column }) => Math.abs(row - 1) + Math.abs(column - 1))),
    new Set([2]),
  );
});

test("a palette has one name for one look", () => {
  const look = { name: "light", ramp: { packed: [] }, differences: { packed: [1] } };
  const names = [
    ["fit", 9, false, 0.5],
    ["fit", 9, false, 0.4],
    ["log", 9, false, 0.5],
    ["log", 90000, false, 0.5],
    ["linear", 9, true, 1],
  ];
  assert.equal(new Set(names.map((asked) => paletteOf(look, ...asked).name)).size, 5);
  assert.equal(paletteOf(look, "linear", 9, true, 1).at(-1), 0);
  assert.equal(paletteOf(look, "linear", 9, false, 1).at(1), 255);
});

// Several heads

const STATE = { layer: 0, head: 0, hidden: false, heads: "one", compare: "alone", with: "" };
const LAYERS = [layer(), layer({ num_heads: 3 })];

test("one head, some, all of a layer, or a difference", () => {
  assert.deepEqual(shown(STATE, LAYERS), { layer: 0, head: 0, hidden: false });
  assert.deepEqual(
    shown({ ...STATE, layer: 1, heads: "mean" }, LAYERS).terms.map(({ head }) => head),
    [0, 1, 2],
  );
  const { terms } = shown({ ...STATE, heads: "mean", compare: "difference", with: "1.0" }, LAYERS);
  assert.deepEqual(terms, [
    { layer: 0, head: 0, factor: 0.5 },
    { layer: 0, head: 1, factor: 0.5 },
    { layer: 1, head: 0, factor: -1 },
  ]);
});

test("heads on the stage have a name", () => {
  const name = (more) => shownName(shown({ ...STATE, ...more }, LAYERS), LAYERS);
  assert.equal(name({}), "layer 0 head 0");
  assert.equal(name({ heads: "mean" }), "mean of the 2 heads of layer 0");
  assert.equal(name({ compare: "difference", with: "1.2" }), "layer 0 head 0 less layer 1 head 2");
  assert.equal(headline({ layer: 1, head: 2, hidden: true }, LAYERS), "Layer 1 head 2");
});

// Small maps

/** A layer whose small map holds these shares of 254 levels, exactly. */
function mapped(rows, more = {}) {
  const levels = Uint8Array.from(rows.flat(), (share) =>
    Number.isNaN(share) ? 255 : Math.round(254 * Math.sqrt(share)),
  );
  const overview = {
    rows: rows.length,
    columns: rows[0].length,
    maximum: 1,
    levels: Buffer.from(levels).toString("base64"),
  };
  return layer({ num_heads: 1, num_kv_heads: 1, q_len: rows.length, kv_len: rows[0].length, overview, ...more });
}

function paged(...layers) {
  const text = tokens(Array.from({ length: layers[0].kv_len }, () => "word"));
  return { layers, maps: layers.map(smallMap), axes: () => ({ queries: text, keys: text }) };
}

test("a small map of blocks holds what a block of keys receives", () => {
  const map = smallMap(
    mapped(
      [
        [0.25, 0.25],
        [NaN, 1],
      ],
      { q_len: 4, kv_len: 5 },
    ),
  );
  const near = (found, expected) => assert.ok(Math.abs(found - expected) < 0.003, `${found} is not ${expected}`);
  near(map.shares[0], 0.5);
  near(map.shares[1], 0.75);
  assert.ok(Number.isNaN(map.shares[2]));
});

test("a small map of the wrong size is damage", () => {
  const info = mapped([[1]]);
  assert.throws(() => smallMap({ ...info, num_heads: 2 }), /a small map has the wrong size/);
});

test("shares of several heads are added with their factors", () => {
  const page = paged(
    mapped([
      [1, 0],
      [0, 1],
    ]),
    mapped([
      [0, 1],
      [0, 1],
    ]),
  );
  const terms = [
    { layer: 0, head: 0, factor: 1 },
    { layer: 1, head: 0, factor: -1 },
  ];
  assert.deepEqual([...smallShares(page, { layer: 0, head: 0, terms })], [1, -1, 0, 0]);
  page.layers[1].overview = null;
  assert.equal(smallShares(page, { layer: 0, head: 0, terms }), null);
});

test("the fitted scale leaves sinks aside and is a round number", () => {
  const rows = Array.from({ length: 40 }, (_, row) =>
    Array.from({ length: 40 }, (_, key) => (key === 0 ? 0.45 : key === (7 * row + 3) % 40 ? 0.0625 : 0.0125)),
  );
  const page = paged(mapped(rows));
  assert.equal(ceilingOf(page, { layer: 0, head: 0, hidden: false }), 0.08);
  assert.equal(ceilingOfAll(page, false), 0.08);
  assert.ok(ceilingOf(page, { layer: 0, head: 0, hidden: true }) > 0.08);
  assert.equal(ceilingOf(paged(layer()), { layer: 0, head: 0, hidden: false }), 1);
});

test("small maps without sinks leave their columns empty, and the rest of each row adds up to 1", () => {
  const page = paged(
    mapped([
      [0.75, 0.25, 0],
      [1, 0, 0],
      [0.5, 0.25, 0.25],
    ]),
  );
  const shares = smallShares(page, { layer: 0, head: 0, hidden: true });
  assert.deepEqual(
    Array.from(shares, (share) => Number(share.toFixed(2))),
    [0, 1, 0, 0, 0, 0, 0, 0.5, 0.5],
  );
});
