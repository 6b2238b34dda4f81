/** Where tokens lie in pictures: grids of patches, and how much of something lies in which part of a picture. */

import type { GridInfo, PictureInfo, Recording, Token } from "../protocol/recording";
import { Damaged } from "./unpack";

/** x0, y0, x1, y1 in pixels of a picture. */
export type Box = [number, number, number, number];

export interface Grid extends Omit<GridInfo, "tokens"> {
  tokens: Int32Array; // row by row
  number: number; // its place in the recording
}

export interface Patch {
  grid: Grid;
  row: number;
  column: number;
}

/** Grids of one picture that do not overlap: a thumbnail lies in another frame than the tiles. */
export interface Frame {
  grids: Grid[];
  picture: PictureInfo;
  extent: Box; // the picture and all patches
}

/** A sum over patches; of a patch that lies in part elsewhere its part. */
export interface Amount {
  sum: number;
  patches: number;
}

/** What lies on a picture, as a whole and in its upper left, upper right, lower left and lower right quarter. */
export interface Spread {
  picture: number;
  total: Amount;
  quarters: Amount[];
}

const read = new WeakMap<GridInfo, Grid>();

/** @returns the grids of a layer; none: its tokens stand for no picture */
export function gridsOf({ grids, other }: Pick<Recording, "grids" | "other">, layer: number): Grid[] {
  const first = other && layer >= other.first ? other.first : 0;
  const infos = (first > 0 ? other?.grids : grids) ?? [];
  return infos.flatMap((info, number) =>
    info.layers && !info.layers.includes(layer - first) ? [] : gridOf(info, number),
  );
}

function gridOf(info: GridInfo, number: number): Grid {
  const before = read.get(info);
  if (before) return before;
  const tokens = info.tokens.flatMap(([first, end]) => Array.from({ length: end - first }, (_, i) => first + i));
  if (tokens.length !== info.rows * info.columns) throw new Damaged("a grid of patches has the wrong size.");
  const grid = { ...info, tokens: Int32Array.from(tokens), number };
  read.set(info, grid);
  return grid;
}

/**
 * @param isNamed do the tokens have texts of their own?
 * @returns tokens, those of patches under the names of their places
 */
export function withPatches(tokens: Token[], grids: Grid[], isNamed: boolean): Token[] {
  if (grids.length === 0) return tokens;
  const named = isNamed ? [...tokens] : tokens.map((token, at) => ({ ...token, text: ` token ${at}` }));
  for (const { tokens: places, columns, number } of grids) {
    const of = grids.length > 1 ? ` of grid ${number}` : "";
    places.forEach((token, at) => {
      if (!(token in tokens)) throw new Damaged("a patch has no token.");
      const text = ` patch ${Math.floor(at / columns)},${at % columns}${of}`;
      named[token] = { text, special: false, patch: true };
    });
  }
  return named;
}

/** @returns null: the token stands for no part of a picture */
export function patchOf(grids: Grid[], token: number): Patch | null {
  return grids.flatMap(patchesOf).find((patch) => tokenOf(patch) === token) ?? null;
}

export function tokenOf({ grid, row, column }: Patch): number {
  return grid.tokens[row * grid.columns + column];
}

export function boxOf({ grid: { box, rows, columns }, row, column }: Patch): Box {
  const [x0, y0, x1, y1] = box;
  const [width, height] = [(x1 - x0) / columns, (y1 - y0) / rows];
  return [x0 + column * width, y0 + row * height, x0 + (column + 1) * width, y0 + (row + 1) * height];
}

/** @returns the patch at a point of a picture */
export function patchAt(grids: Grid[], x: number, y: number): Patch | null {
  for (const grid of grids) {
    const [x0, y0, x1, y1] = grid.box;
    const [row, column] = [((y - y0) / (y1 - y0)) * grid.rows, ((x - x0) / (x1 - x0)) * grid.columns].map(Math.floor);
    if (row >= 0 && column >= 0 && row < grid.rows && column < grid.columns) return { grid, row, column };
  }
  return null;
}

/** @returns those of a grid, row by row */
export function patchesOf(grid: Grid): Patch[] {
  const { columns } = grid;
  return Array.from(grid.tokens, (_, at) => ({ grid, row: Math.floor(at / columns), column: at % columns }));
}

/** @returns the next patch of a frame in a direction; null: there is none */
export function neighbour(frames: Frame[], patch: Patch, down: number, right: number): Patch | null {
  const frame = frames.find(({ grids }) => grids.includes(patch.grid));
  const [x0, y0, x1, y1] = boxOf(patch);
  const [width, height] = [x1 - x0, y1 - y0];
  return frame ? patchAt(frame.grids, x0 + (right + 0.5) * width, y0 + (down + 0.5) * height) : null;
}

/** @returns the area that two boxes share */
function shared(one: Box, other: Box): number {
  const width = Math.min(one[2], other[2]) - Math.max(one[0], other[0]);
  const height = Math.min(one[3], other[3]) - Math.max(one[1], other[1]);
  return Math.max(0, width) * Math.max(0, height);
}

/** Do two grids lie one over the other by more than the border of a patch, which may be measured? */
function overlap(one: Grid, { box }: Grid): boolean {
  const [x0, y0, x1, y1] = one.box;
  const [width, height] = [(x1 - x0) / one.columns / 4, (y1 - y0) / one.rows / 4];
  return shared([x0 + width, y0 + height, x1 - width, y1 - height], box) > 0;
}

/** @returns a frame for each picture; more of one whose grids overlap */
export function framesOf(grids: Grid[], pictures: PictureInfo[]): Frame[] {
  const frames: Frame[] = [];
  for (const grid of grids) {
    const picture = pictures[grid.picture];
    if (!picture) throw new Damaged("a grid of patches has no picture.");
    const fits = (frame: Frame) =>
      frame.grids[0].picture === grid.picture && !frame.grids.some((other) => overlap(other, grid));
    let frame = frames.find(fits);
    if (!frame) frames.push((frame = { grids: [], picture, extent: [0, 0, picture.width, picture.height] }));
    frame.grids.push(grid);
    const [x0, y0, x1, y1] = frame.extent;
    const { box } = grid;
    frame.extent = [Math.min(x0, box[0]), Math.min(y0, box[1]), Math.max(x1, box[2]), Math.max(y1, box[3])];
  }
  return frames.sort((one, other) => one.grids[0].picture - other.grids[0].picture);
}

/** The values of a grid, row by row. */
export function valuesOf({ tokens }: Grid, values: Float32Array): Float32Array {
  return Float32Array.from(tokens, (token) => values[token]);
}

/**
 * Adds up what lies on each picture and in its quarters; what lies on padding is in no quarter.
 * @param values of all tokens
 */
export function spreadOf(grids: Grid[], pictures: PictureInfo[], values: Float32Array): Spread[] {
  const none = () => ({ sum: 0, patches: 0 });
  const add = (to: Amount, value: number, part: number) => ((to.sum += part * value), (to.patches += part));
  const spreads = new Map<number, Spread>();
  for (const grid of grids) {
    const { picture } = grid;
    const fresh = { picture, total: none(), quarters: [none(), none(), none(), none()] };
    const { total, quarters } = spreads.get(picture) ?? fresh;
    spreads.set(picture, { picture, total, quarters });
    const [width, height] = [pictures[picture].width / 2, pictures[picture].height / 2];
    for (const patch of patchesOf(grid)) {
      const [box, value] = [boxOf(patch), values[tokenOf(patch)]];
      add(total, value, 1);
      quarters.forEach((quarter, i) => {
        const [left, top] = [(i % 2) * width, i < 2 ? 0 : height];
        add(quarter, value, shared(box, [left, top, left + width, top + height]) / shared(box, box));
      });
    }
  }
  return [...spreads.values()];
}
