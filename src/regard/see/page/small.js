/** The small map of what is shown: a sum of the small maps of its heads. */

/**
 * @param {(import("./overview.js").SmallMap | null)[]} maps of each layer; null: not known yet
 * @param {import("./blend.js").Which} which
 * @param {boolean} byRow each row is divided by its highest cell
 * @param {(blocks: number) => import("./mosaic.js").Palette} palette
 * @returns {HTMLCanvasElement | null} a pixel for each cell
 */
export function smallPicture(maps, { layer, head, terms }, byRow, palette) {
  const first = maps[layer];
  if (!first) return null;
  const { rows, columns } = first;
  const sum = new Float32Array(rows * columns);
  for (const term of terms ?? [{ layer, head, factor: 1 }]) {
    const map = maps[term.layer];
    if (!map || map.rows !== rows || map.columns !== columns) return null;
    addMap(sum, map, term, byRow);
  }
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [columns, rows];
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  const image = context.createImageData(columns, rows);
  const { ramp, at } = palette(columns);
  new Uint32Array(image.data.buffer).set(Uint32Array.from(sum, (share) => ramp.packed[at(share)]));
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
