/** The small map of what is shown: a sum of the small maps of its heads. */

import { pixelOf } from "./colours.js";

/**
 * @param {Pick<import("./main.js").Page, "maps" | "recording">} page
 * @param {import("./blend.js").Which} which
 * @param {boolean} byRow each row is divided by its highest cell
 * @param {(blocks: number) => import("./mosaic.js").Palette} palette
 * @returns {HTMLCanvasElement | null} a pixel for each cell; null: not known yet
 */
export function smallPicture({ maps, recording }, { layer, head, terms }, byRow, palette) {
  const { rows, columns } = maps[layer];
  const sum = new Float32Array(rows * columns);
  for (const term of terms ?? [{ layer, head, factor: 1 }]) {
    if (!recording.layers[term.layer].overview) return null;
    addMap(sum, maps[term.layer], term, byRow);
  }
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [columns, rows];
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  const image = context.createImageData(columns, rows);
  const { ramp, at } = palette(columns);
  new Uint32Array(image.data.buffer).set(Uint32Array.from(sum, (share) => pixelOf(ramp, at(share))));
  context.putImageData(image, 0, 0);
  return canvas;
}

/**
 * @param {Float32Array} sum @param {import("./overview.js").SmallMap} map
 * @param {{head: number, factor: number}} term @param {boolean} byRow
 */
function addMap(sum, { rows, columns, shares }, { head, factor }, byRow) {
  for (let row = 0; row < rows; row++) {
    const cells = shares.subarray((head * rows + row) * columns, (head * rows + row + 1) * columns);
    const divisor = byRow ? Math.max(...cells) || 1 : 1;
    cells.forEach((share, column) => (sum[row * columns + column] += (factor * share) / divisor));
  }
}
