/** The small map of what is shown: a sum of the small maps of its heads. */

import { pixelOf } from "./colours.js";
import { pixelated } from "./dom.js";

/**
 * @typedef {Pick<import("./main.js").Page, "maps" | "recording">} Page
 * @typedef {import("./source.js").Which} Which
 */

/**
 * @param {Page} page @param {Which} which @param {boolean} byRow each row is divided by its highest cell
 * @returns {Float32Array | null} what each cell receives; null: not known yet
 */
export function smallShares({ maps, recording }, { layer, head, terms }, byRow) {
  const { rows, columns } = maps[layer];
  const sum = new Float32Array(rows * columns);
  for (const term of terms ?? [{ layer, head, factor: 1 }]) {
    if (!recording.layers[term.layer].overview) return null;
    addMap(sum, maps[term.layer], term, byRow);
  }
  return sum;
}

/**
 * @param {Page} page @param {Which} which @param {boolean} byRow
 * @param {(blocks: number) => import("./mosaic.js").Palette} palette
 * @returns {HTMLCanvasElement | null} a pixel for each cell; null: not known yet
 */
export function smallPicture(page, which, byRow, palette) {
  const { rows, columns } = page.maps[which.layer];
  const sum = smallShares(page, which, byRow);
  if (!sum) return null;
  const { ramp, at } = palette(columns);
  return pixelated(columns, rows, Uint32Array.from(sum, (share) => pixelOf(ramp, at(share))));
}

/**
 * @param {Float32Array} sum @param {import("./overview.js").SmallMap} map
 * @param {{head: number, factor: number}} term @param {boolean} byRow
 */
function addMap(sum, { rows, columns, shares }, { head, factor }, byRow) {
  for (let row = 0; row < rows; row++) {
    const cells = shares.subarray((head * rows + row) * columns, (head * rows + row + 1) * columns);
    const divisor = byRow ? cells.reduce((most, share) => (share > most ? share : most), 0) || 1 : 1;
    cells.forEach((share, column) => (sum[row * columns + column] += (factor * share) / divisor));
  }
}
