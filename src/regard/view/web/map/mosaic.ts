/**
 * The map's picture, put together from tiles: what is there at the level that is shown, and while
 * finer tiles are on their way coarser ones or the small map in their place.
 */

import { smallShares } from "../data/small";
import type { Which } from "../data/source";
import { context2d, element, pixelated, resize } from "../dom";
import type { Palette } from "../look";
import { TILE, type Place } from "../maths/blocks";
import { pixelOf } from "../maths/colours";
import type { Session } from "../session";
import type { Pen } from "../view";
import type { Frame } from "./axes";
import type { Tile } from "./tiles";

type Shape = { q_len: number; kv_len: number };

/** The cells that are on the stage. */
export interface Part {
  level: number;
  size: number; // tokens of a cell, each way
  top: number; // first row of cells
  bottom: number; // past the last
  left: number;
  right: number;
}

const COARSER = 9; // levels up that may stand in
const SLICE = 10; // milliseconds of painting in one frame
const SHARP = 6; // device pixels of a cell from which its edges are seen as such

/** The finest level whose cells have at least one device pixel, and its cells on the stage. */
export function partOf(frame: Frame): Part {
  const side = Math.min(frame.cellWidth, frame.cellHeight) * devicePixelRatio;
  const finest = Math.max(0, Math.ceil(Math.log2(1 / side) - 1e-9));
  const size = 2 ** finest;
  return {
    level: finest,
    size,
    top: Math.floor(frame.row / size),
    bottom: Math.ceil((frame.row + frame.rows) / size - 1e-9),
    left: Math.floor(frame.column / size),
    right: Math.ceil((frame.column + frame.columns) / size - 1e-9),
  };
}

/** Its tiles, those nearest to the middle first. */
export function placesOf({ level, top, bottom, left, right }: Omit<Part, "size">): Place[] {
  const places: Place[] = [];
  for (let row = Math.floor(top / TILE); row * TILE < bottom; row++) {
    for (let column = Math.floor(left / TILE); column * TILE < right; column++) places.push({ level, row, column });
  }
  const middle = [(top + bottom) / 2 / TILE - 0.5, (left + right) / 2 / TILE - 0.5];
  const far = ({ row, column }: Place) => Math.hypot(row - middle[0], column - middle[1]);
  return places.sort((one, other) => far(one) - far(other));
}

export class Mosaic {
  private window = element("canvas");
  private enlarged = element("canvas");
  private pictures = new WeakMap<Tile, { canvas: HTMLCanvasElement; colours: string }>();
  private until = 0;
  unfinished = false;
  private palette!: (blocks: number) => Palette;
  private shape!: Shape;

  constructor(private readonly find: (place: Place) => Tile | undefined) {}

  /**
   * @param context clipped to the map
   * @param small the small map of the whole
   * @returns is every tile of the part painted?
   */
  draw(
    context: Pen,
    frame: Frame,
    part: Part,
    palette: (blocks: number) => Palette,
    small: HTMLCanvasElement | null,
    shape: Shape,
  ): boolean {
    this.palette = palette;
    this.shape = shape;
    this.until = performance.now() + SLICE;
    this.unfinished = false;
    const [width, height] = [part.right - part.left, part.bottom - part.top];
    resize(this.window, width, height);
    const window = context2d(this.window);
    window.clearRect(0, 0, width, height);
    window.imageSmoothingEnabled = false;
    const isWhole = placesOf(part).every((place) => this.painted(place));
    if (small && !isWhole) {
      const [across, down] = [(small.width / shape.kv_len) * part.size, (small.height / shape.q_len) * part.size];
      const from = [part.left * across, part.top * down, width * across, height * down] as const;
      window.drawImage(small, ...from, 0, 0, width, height);
    }
    for (let up = isWhole ? 0 : COARSER; up >= 0; up--) this.drawLevel(window, part, up);
    this.show(context, frame, part);
    return isWhole;
  }

  /** The tile's picture, if there is one or there is time to paint it. */
  painted(place: Place): HTMLCanvasElement | null {
    const tile = this.find(place);
    if (!tile) return null;
    const { kv_len } = this.shape;
    const palette = this.palette(kv_len / 2 ** place.level);
    const picture = this.pictures.get(tile);
    if (picture?.colours === palette.name) return picture.canvas;
    if (performance.now() > this.until) {
      this.unfinished = true;
      return picture?.canvas ?? null;
    }
    const canvas = paint(tile, kv_len, palette, picture?.canvas);
    this.pictures.set(tile, { canvas, colours: palette.name });
    return canvas;
  }

  /** The tiles that are there at a level so much coarser. */
  private drawLevel(window: Pen, { level, top, bottom, left, right }: Part, up: number) {
    const times = 2 ** up;
    const [from, to] = [top, bottom].map((row) => row / times);
    const part = { level: level + up, top: from, bottom: to, left: left / times, right: right / times };
    for (const place of placesOf(part)) {
      const tile = this.painted(place);
      const [x, y] = [place.column * TILE * times - left, place.row * TILE * times - top];
      if (tile) window.drawImage(tile, x, y, tile.width * times, tile.height * times);
    }
  }

  /** The window of cells on the stage. */
  private show(context: Pen, frame: Frame, { size, left, top }: Part) {
    const { width, height } = this.window;
    const cell = { width: frame.cellWidth * size, height: frame.cellHeight * size };
    const ratio = devicePixelRatio;
    let x = frame.left + (left * size - frame.column) * frame.cellWidth;
    let y = frame.top + (top * size - frame.row) * frame.cellHeight;
    const times = Math.ceil(Math.max(cell.width, cell.height) * ratio - 1e-6);
    const isWhole = isInteger(cell.width * ratio) && isInteger(cell.height * ratio);
    let source = this.window;
    context.imageSmoothingEnabled = false;
    if (isWhole || times > SHARP) {
      [x, y] = [Math.round(x * ratio) / ratio, Math.round(y * ratio) / ratio];
    } else {
      // Cells of, say, 2.3 pixels: enlarge by a whole number, then let the browser average, so
      // that no row looks thicker than its neighbour.
      source = this.enlarged;
      resize(source, width * times, height * times);
      const large = context2d(source);
      large.clearRect(0, 0, source.width, source.height);
      large.imageSmoothingEnabled = false;
      large.drawImage(this.window, 0, 0, source.width, source.height);
      context.imageSmoothingEnabled = true;
      context.imageSmoothingQuality = "medium";
    }
    context.drawImage(source, x, y, width * cell.width, height * cell.height);
  }
}

/** @param canvas that has its picture in other colours */
function paint(tile: Tile, keys: number, { ramp, at }: Palette, canvas?: HTMLCanvasElement) {
  const { values, height, width, place } = tile;
  const size = 2 ** place.level;
  const pixels = new Uint32Array(width * height);
  const first = place.column * TILE * size;
  for (let column = 0; column < width; column++) {
    // A cell shows what all keys of its block get together: the same at every zoom.
    const count = Math.min(size, keys - first - column * size);
    for (let i = column; i < pixels.length; i += width) pixels[i] = pixelOf(ramp, at(values[i] * count));
  }
  return pixelated(width, height, pixels, canvas);
}

function isInteger(value: number): boolean {
  return Math.abs(value - Math.round(value)) < 1e-6;
}

/** @returns a pixel for each cell; null: not known yet */
export function smallPicture(
  session: Session,
  which: Which,
  palette: (blocks: number) => Palette,
  canvas?: HTMLCanvasElement,
): HTMLCanvasElement | null {
  const { rows, columns } = session.maps[which.layer];
  const shares = smallShares(session, which);
  if (!shares) return null;
  const { ramp, at } = palette(columns);
  const pixels = Uint32Array.from(shares, (share) => pixelOf(ramp, at(share)));
  return pixelated(columns, rows, pixels, canvas);
}
