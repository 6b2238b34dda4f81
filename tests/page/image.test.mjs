import assert from "node:assert/strict";
import { test } from "node:test";
import { sinksOf } from "../../src/regard/view/web/data/axes";
import * as patches from "../../src/regard/view/web/data/patches";
import { rowHeight } from "../../src/regard/view/web/map/patch_picture";
import { parted } from "../../src/regard/view/web/text/parts";
import * as words from "../../src/regard/view/web/text/picture_words";
import { recording, tokens } from "./recordings.mjs";

const PICTURE = { name: "a.png", width: 40, height: 20, type: null, data: null };
const thin = (text) => text.replaceAll("\u202f", " ");

/** A grid of 2 x 4 patches after a class token. */
function info(more = {}) {
  return { picture: 0, rows: 2, columns: 4, box: [0, 0, 40, 20], tokens: [[1, 9]], ...more };
}

function grids(...infos) {
  return patches.gridsOf({ grids: infos }, 0);
}

/** Values of nine tokens: the first, and eight patches. */
function overlay(values, all = grids(info()), pictures = [PICTURE]) {
  const texts = tokens(Array.from({ length: values.length }, () => "<image>"));
  const named = patches.withPatches(texts, all, true);
  return { tokens: named, grids: all, pictures, values: Float32Array.from(values) };
}

// Places

test("runs of tokens lie row by row in the box of their grid", () => {
  const [grid] = grids(info({ tokens: [[1, 5], [6, 10]], box: [10, 0, 30, 20] })); // prettier-ignore
  assert.deepEqual([...grid.tokens], [1, 2, 3, 4, 6, 7, 8, 9]);
  const patch = patches.patchOf([grid], 7);
  assert.deepEqual([patch.row, patch.column], [1, 1]);
  assert.deepEqual(patches.boxOf(patch), [15, 10, 20, 20]);
  assert.equal(patches.tokenOf(patches.patchAt([grid], 17, 12)), 7);
  assert.equal(patches.patchOf([grid], 5), null);
  for (const [x, y] of [[9, 5], [31, 5], [15, 20], [15, -1]]) assert.equal(patches.patchAt([grid], x, y), null); // prettier-ignore
});

test("a grid that does not fit its tokens or has no picture is damage", () => {
  assert.throws(() => grids(info({ tokens: [[1, 8]] })), /wrong size/);
  assert.throws(() => patches.framesOf(grids(info({ picture: 1 })), [PICTURE]), /no picture/);
  assert.throws(() => patches.withPatches(tokens(["a", "b"]), grids(info()), true), /no token/);
});

test("grids belong to the layers that name them, and to their own recording", () => {
  const own = info({ layers: [1] });
  const others = { first: 2, grids: [info({ layers: [0] })] };
  const found = [0, 1, 2, 3].map((at) => patches.gridsOf({ grids: [own], other: others }, at).length);
  assert.deepEqual(found, [0, 1, 1, 0]);
  assert.deepEqual(patches.gridsOf(recording(), 0), []);
});

test("a thumbnail stands in another frame than the tiles, and pictures apart", () => {
  const tile = (x, first) => info({ box: [x, 0, x + 20, 20], tokens: [[first, first + 8]] });
  const all = grids(info(), tile(0, 10), tile(20, 20), info({ picture: 1, tokens: [[30, 38]] }));
  const frames = patches.framesOf(all, [PICTURE, PICTURE]);
  assert.deepEqual(frames.map((frame) => frame.grids.map(({ number }) => number)), [[0], [1, 2], [3]]); // prettier-ignore
});

test("padding around a picture belongs to its frame", () => {
  const [frame] = patches.framesOf(grids(info({ box: [0, -10, 40, 30] })), [PICTURE]);
  assert.deepEqual(frame.extent, [0, -10, 40, 30]);
});

test("the arrows go from tile to tile and end at the edge", () => {
  const all = grids(info({ box: [0, 0, 20, 20] }), info({ box: [20, 0, 40, 20], tokens: [[10, 18]] }));
  const frames = patches.framesOf(all, [PICTURE]);
  const next = (token, down, right) => {
    const to = patches.neighbour(frames, patches.patchOf(all, token), down, right);
    return to && patches.tokenOf(to);
  };
  assert.deepEqual([next(1, 0, 1), next(1, 1, 0), next(4, 0, 1), next(14, 0, -1)], [2, 5, 10, 8]);
  assert.deepEqual([next(1, -1, 0), next(1, 0, -1), next(17, 0, 1)], [null, null, null]);
});

// Tokens

test("patches are named by their places, are no sinks, and are one part of a text", () => {
  const texts = tokens(["[CLS]", ...Array(8).fill("[IMG]"), " a", " dog"]);
  const named = patches.withPatches(texts, grids(info()), true);
  assert.deepEqual([named[1].text, named[8].text, named[9].text], [" patch 0,0", " patch 1,3", " a"]);
  assert.deepEqual(sinksOf(named), [0]);
  assert.deepEqual(
    parted(named, "words").map(({ span }) => span),
    [[1, 9], [9, 10], [10, 11]], // prettier-ignore
  );
  const unnamed = patches.withPatches(tokens([" 0", ...Array(8).fill(" 1")]), grids(info()), false);
  assert.equal(unnamed[0].text, " token 0");
  const rest = info({ rows: 1, columns: 2, tokens: [[9, 11]] });
  const two = patches.withPatches(texts, grids(info(), rest), true);
  assert.equal(two[9].text, " patch 0,0 of grid 1");
});

// Numbers

test("quarters share a patch that lies over their border, and padding is in none", () => {
  const [grid] = grids(info({ rows: 1, columns: 1, tokens: [[1, 2]], box: [0, -20, 40, 20] }));
  const [spread] = patches.spreadOf([grid], [PICTURE], Float32Array.from([0, 0.8]));
  assert.ok(Math.abs(spread.total.sum - 0.8) < 1e-6);
  for (const { sum, patches: count } of spread.quarters) {
    assert.ok(Math.abs(sum - 0.1) < 1e-6);
    assert.equal(count, 1 / 8);
  }
});

test("pictures are as high as fits, side by side or in rows", () => {
  const usual = { gap: 10, label: 0, least: 20 };
  assert.equal(rowHeight([1], 300, 200, usual), 200);
  assert.equal(rowHeight([2], 300, 200, usual), 150);
  assert.equal(rowHeight([1, 1], 210, 100, usual), 100);
  assert.equal(rowHeight([1, 1], 150, 150, usual), 70);
  assert.equal(rowHeight(Array(50).fill(1), 100, 100, usual), 20);
  assert.equal(rowHeight([10], 100, 100, usual), 10);
});

// Words

test("words say how much lies on the picture, in which quarter, and at which patch", () => {
  const shown = overlay([0.2, 0.1, 0, 0, 0, 0.3, 0.2, 0.2, 0]);
  assert.equal(
    thin(words.overlayWords("“dog”", shown, true)),
    "“dog” gives 80.0 % of its attention to the picture: 50.0 % to the lower left quarter, 30.0 % to patch 1,0.",
  );
  assert.equal(
    thin(words.overlayWords("“dog”", shown, false)),
    "A patch of the picture gives “dog” 10.0 % of its attention on average: 25.0 % in the lower left quarter, " +
      "30.0 % in patch 1,0.",
  );
});

test("words name the picture among several, and what is on padding", () => {
  const second = info({ rows: 1, tokens: [[5, 9]], picture: 1, box: [0, 0, 80, 20] });
  const all = grids(info({ rows: 1, tokens: [[1, 5]] }), second);
  const values = [0, 0.1, 0, 0, 0, 0.25, 0, 0.25, 0];
  assert.equal(
    thin(words.overlayWords("“dog”", overlay(values, all, [PICTURE, PICTURE]), true)),
    "“dog” gives 60.0 % of its attention to the 2 pictures: 50.0 % to picture 1, 12.5 % to the upper left quarter of " +
      "picture 1, 25.0 % to patch 0,0 of grid 1, 25.0 % to the padding around it.",
  );
});

test("words say where there is nothing, and where there are no numbers", () => {
  const nothing = overlay(Array(9).fill(0));
  assert.equal(words.overlayWords("“dog”", nothing, true), "“dog” gives nothing to the picture.");
  assert.equal(words.overlayWords("“dog”", nothing, false), "No patch of the picture looks at “dog”.");
  const same = { ...nothing, isDifference: true };
  assert.equal(words.overlayWords("“dog”", same, true), "“dog”: no difference on the picture.");
  const unknown = overlay([0, NaN, ...Array(7).fill(0.1)]);
  assert.equal(words.overlayWords("“dog”", unknown, true), "“dog”: some weights are not numbers (NaN).");
});

test("a difference is in points, more or less", () => {
  const less = { ...overlay([0, 0.1, 0, 0, 0, -0.3, 0, 0, 0]), isDifference: true };
  assert.equal(
    words.overlayWords("“dog”", less, true),
    "“dog” gives −20.0 points of its attention to the picture: −30.0 to the lower left quarter, −30.0 to patch 1,0.",
  );
  assert.equal(
    words.overlayWords("“dog”", less, false),
    "A patch of the picture gives “dog” −2.50 points of its attention on average: −15.0 in the lower left quarter, " +
      "−30.0 in patch 1,0.",
  );
});

test("a page says which pictures it holds", () => {
  const held = { ...PICTURE, type: "image/png", data: "AA" };
  const note = "This page holds 1 picture that the model saw: a.png.";
  assert.deepEqual(words.pictureNotes({ pictures: [held], grids: [info()] }), [note]);
  assert.match(words.pictureNotes({ pictures: [PICTURE], grids: [info()] })[0], /^1 picture .* without pixels/);
  assert.match(words.pictureNotes({ pictures: [], grids: [info({ overlapping: true })] })[0], /more than their boxes/);
  assert.deepEqual(words.pictureNotes({}), []);
});
