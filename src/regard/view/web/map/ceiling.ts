/**
 * The fitted scale: the weight from which on a map has its darkest colour. It is read off the small
 * maps, so it is known before the first tile, and it is the same at every zoom. Sinks do not count:
 * beside them everything else would be as pale as the ground.
 */

import type { Which } from "../data/source";
import { blockOf } from "../maths/blocks";
import { sinksOf } from "../text/tokens";
import { smallShares } from "./small";

export type Page = Pick<import("../main").Page, "maps" | "recording" | "axes">;

const ENOUGH = 0.9; // of the rows have no weight above it
const ROUND = [1, 1.5, 2, 3, 4, 5, 6, 8, 10];

/**
 * @param which heads, or their difference
 * @returns 1 where no small map is known
 */
export function ceilingOf(page: Page, which: Which): number {
  const shares = smallShares(page, which, false);
  if (!shares) return 1;
  const { rows, columns } = page.maps[which.layer];
  const { keys } = page.axes(which.layer);
  const aside = new Set(sinksOf(keys).map((key) => blockOf(key, keys.length, columns)));
  const counts = aside.size < columns ? Array.from({ length: columns }, (_, i) => !aside.has(i)) : [];
  const highest: number[] = [];
  for (let row = 0; row < rows; row++) {
    let [most, sum] = [0, 0];
    for (let column = 0; column < columns; column++) {
      if (counts[column] === false) continue;
      const share = Math.abs(shares[row * columns + column]);
      if (share > most) most = share;
      sum += share;
    }
    if (most > 0) highest.push(which.hidden ? most / sum : most);
  }
  return roundedUp(quantile(highest, ENOUGH));
}

/** One scale for every head of a grid, so that they can be compared: half of them stay below it. */
export function ceilingOfAll(page: Page): number {
  const all = page.recording.layers.flatMap(({ num_heads, overview }, layer) =>
    overview ? Array.from({ length: num_heads }, (_, head) => ceilingOf(page, { layer, head, hidden: false })) : [],
  );
  return quantile(all, 0.5) || 1;
}

/** @returns 0 of none */
function quantile(values: number[], part: number): number {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.floor(part * sorted.length))] ?? 0;
}

/** @returns a number that can be read, at most 1 */
export function roundedUp(weight: number): number {
  if (!(weight > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(weight));
  const first = ROUND.find((digit) => digit * power >= weight * 0.999) ?? 10;
  return Math.min(1, Number((first * power).toPrecision(2)));
}
