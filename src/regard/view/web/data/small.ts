/**
 * The small map of each head, and of what is shown: a sum of the small maps of its heads. The fitted
 * scale is read off them, so it is known before the first tile, and it is the same at every zoom.
 */

import { blockOf, edge } from "../maths/blocks";
import { NO_NUMBER } from "../maths/block_means";
import type { LayerInfo } from "../protocol/recording";
import { sinksOf, type TwoAxes } from "./axes";
import { termsOf, type Which } from "./source";
import { Damaged, fromBase64 } from "./unpack";

export interface SmallMap {
  rows: number;
  columns: number;
  shares: Float32Array; // (num_heads, rows, columns): what each cell receives
}

/** What the small maps of a recording are read from. */
export interface Maps {
  layers: LayerInfo[];
  maps: SmallMap[];
  axes: (layer: number) => TwoAxes;
}

const ENOUGH = 0.9; // of the rows have no weight above the darkest colour of the fitted scale
const ROUND = [1, 1.5, 2, 3, 4, 5, 6, 8, 10];

/** @returns of a layer whose small map is not known: one empty cell */
export function smallMap(info: LayerInfo): SmallMap {
  if (!info.overview) return { rows: 1, columns: 1, shares: new Float32Array(info.num_heads) };
  const { rows, columns, maximum, levels } = info.overview;
  const bytes = fromBase64(levels);
  if (bytes.length !== info.num_heads * rows * columns) throw new Damaged("a small map has the wrong size.");
  const shares = Float32Array.from(bytes, (byte, i) => {
    const column = i % columns;
    const keys = edge(column + 1, info.kv_len, columns) - edge(column, info.kv_len, columns);
    return byte === NO_NUMBER ? NaN : keys * maximum * (byte / 254) ** 2;
  });
  return { rows, columns, shares };
}

/** The columns of a small map that hold sinks; none where every column does. */
function sinkColumns(from: Maps, layer: number): Set<number> {
  const { keys } = from.axes(layer);
  const { columns } = from.maps[layer];
  const found = new Set(sinksOf(keys).map((key) => blockOf(key, keys.length, columns)));
  return found.size < columns ? found : new Set();
}

/**
 * What each cell of what is shown receives. Without sinks the columns that hold them are empty, and
 * the others of a row add up to 1.
 * @returns null: not known yet
 */
export function smallShares(from: Maps, which: Which): Float32Array | null {
  const { layer, hidden } = which;
  const { rows, columns } = from.maps[layer];
  const aside = hidden ? sinkColumns(from, layer) : new Set();
  const sum = new Float32Array(rows * columns);
  for (const term of termsOf(which)) {
    if (!from.layers[term.layer].overview) return null;
    const { shares } = from.maps[term.layer];
    for (let row = 0; row < rows; row++) {
      const cells = shares.subarray((term.head * rows + row) * columns).subarray(0, columns);
      const rest = hidden ? cells.reduce((all, share, column) => (aside.has(column) ? all : all + share), 0) : 1;
      const factor = rest > 0 ? term.factor / rest : NaN;
      for (let column = 0; column < columns; column++)
        if (cells[column] !== 0 && !aside.has(column)) sum[row * columns + column] += factor * cells[column];
    }
  }
  return sum;
}

/**
 * The weight from which on a map has its darkest colour. Sinks do not count: beside them everything
 * else would be as pale as the ground.
 * @param which heads, or their difference
 * @returns 1 where no small map is known
 */
export function ceilingOf(from: Maps, which: Which): number {
  const shares = smallShares(from, which);
  if (!shares) return 1;
  const { rows, columns } = from.maps[which.layer];
  const aside = sinkColumns(from, which.layer);
  const highest = Array.from({ length: rows }, (_, row) =>
    shares.subarray(row * columns, (row + 1) * columns).reduce((most, share, column) => {
      const size = aside.has(column) ? 0 : Math.abs(share);
      return size > most ? size : most;
    }, 0),
  ).filter((most) => most > 0);
  return roundedUp(quantile(highest, ENOUGH));
}

/** One scale for every head of a grid, so that they can be compared: half of them stay below it. */
export function ceilingOfAll(from: Maps, hidden: boolean): number {
  const all = from.layers.flatMap(({ num_heads, overview }, layer) =>
    overview ? Array.from({ length: num_heads }, (_, head) => ceilingOf(from, { layer, head, hidden })) : [],
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
