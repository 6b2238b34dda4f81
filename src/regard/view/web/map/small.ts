/** The small map of each head, and of what is shown: a sum of the small maps of its heads. */

import { NO_NUMBER } from "../data/block_means";
import { Damaged, fromBase64, type LayerInfo } from "../data/payload";
import type { Which } from "../data/source";
import { element, pixelated } from "../dom";
import { edge } from "../maths/blocks";
import { pixelOf } from "../maths/colours";
import { paletteOf, type Palette } from "./mosaic";

export interface SmallMap {
  rows: number;
  columns: number;
  means: Float32Array; // (num_heads, rows, columns): mean weight of each cell
  shares: Float32Array; // the same times the keys in a cell: what the cell receives
}

/** @returns of a layer whose small map is not known: one empty cell */
export function smallMap(info: LayerInfo): SmallMap {
  if (!info.overview) {
    const none = new Float32Array(info.num_heads);
    return { rows: 1, columns: 1, means: none, shares: none };
  }
  const { rows, columns, maximum, levels } = info.overview;
  const bytes = fromBase64(levels);
  if (bytes.length !== info.num_heads * rows * columns) throw new Damaged("a small map has the wrong size.");
  const means = Float32Array.from(bytes, (byte) => (byte === NO_NUMBER ? NaN : maximum * (byte / 254) ** 2));
  const shares = means.map((mean, i) => {
    const column = i % columns;
    return mean * (edge(column + 1, info.kv_len, columns) - edge(column, info.kv_len, columns));
  });
  return { rows, columns, means, shares };
}

export type Page = Pick<import("../main").Page, "maps" | "recording">;
type GridPage = Page & Pick<import("../main").Page, "store" | "look" | "gridCeiling">;

/**
 * @param byRow each row is divided by its highest cell
 * @returns what each cell receives; null: not known yet
 */
export function smallShares(
  { maps, recording }: Page,
  { layer, head, terms }: Which,
  byRow: boolean,
): Float32Array | null {
  const { rows, columns } = maps[layer];
  const sum = new Float32Array(rows * columns);
  for (const term of terms ?? [{ layer, head, factor: 1 }]) {
    if (!recording.layers[term.layer].overview) return null;
    addMap(sum, maps[term.layer], term, byRow);
  }
  return sum;
}

/** @returns a pixel for each cell; null: not known yet */
export function smallPicture(
  page: Page,
  which: Which,
  byRow: boolean,
  palette: (blocks: number) => Palette,
): HTMLCanvasElement | null {
  const { rows, columns } = page.maps[which.layer];
  const sum = smallShares(page, which, byRow);
  if (!sum) return null;
  const { ramp, at } = palette(columns);
  return pixelated(
    columns,
    rows,
    Uint32Array.from(sum, (share) => pixelOf(ramp, at(share))),
  );
}

function addMap(
  sum: Float32Array,
  { rows, columns, shares }: SmallMap,
  { head, factor }: { head: number; factor: number },
  byRow: boolean,
) {
  for (let row = 0; row < rows; row++) {
    const cells = shares.subarray((head * rows + row) * columns, (head * rows + row + 1) * columns);
    const divisor = byRow ? cells.reduce((most, share) => (share > most ? share : most), 0) || 1 : 1;
    cells.forEach((share, column) => (sum[row * columns + column] += (factor * share) / divisor));
  }
}

/** The small map of one head, on the scale that all heads of a grid have. */
export function headPicture(page: GridPage, layer: number, head: number): HTMLCanvasElement {
  const { scale } = page.store.state;
  const palette = (blocks: number) => paletteOf(page.look, scale, blocks, false, page.gridCeiling);
  return smallPicture(page, { layer, head, hidden: false }, scale === "row", palette) ?? element("canvas");
}
