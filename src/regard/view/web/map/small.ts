/** The small map of what is shown: a sum of the small maps of its heads. */

import type { Which } from "../data/source";
import { pixelated } from "../dom";
import { pixelOf } from "../maths/colours";
import type { Palette } from "./mosaic";
import type { SmallMap } from "./overview";

export type Page = Pick<import("../main").Page, "maps" | "recording">;

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
