/** A picture under its patches: its own pixels in faint grey, and over them each patch in the colour of its value. */

import { boxOf, patchAt, valuesOf, type Box, type Frame, type Grid, type Patch } from "../data/patches";
import { fromBase64 } from "../data/unpack";
import { context2d, pixelated } from "../dom";
import type { Look, Palette } from "../look";
import { pixelOf } from "../maths/colours";
import type { PictureInfo } from "../protocol/recording";
import type { Pen } from "../view";

// Opacity over the ground. Every patch is as opaque as any other, so the scale stays even to the eye.
const OUTSIDE = 0.16; // where no patch is
const FAINT = 0.8; // under patches
const OVER = 0.6;
const LINED = 10; // device pixels of a patch that has lines around it

/** @returns its pixels; null: they are not in this page */
export async function decoded({ data, type }: PictureInfo): Promise<ImageBitmap | null> {
  if (data === null) return null;
  // Not an image's address: the page's policy allows none.
  return createImageBitmap(new Blob([fromBase64(data)], { type: type ?? "" }));
}

export function aspectOf({ extent: [x0, y0, x1, y1] }: Frame): number {
  return (x1 - x0) / (y1 - y0);
}

type Rectangle = [x: number, y: number, width: number, height: number];

/** What is drawn on a picture. */
export interface Tints {
  values: Float32Array | null; // of all tokens; null: the picture alone
  palette: Palette;
  marked: Patch | null;
}

/** Draws a frame over the whole of a canvas, whose pixels are those of the screen. */
export function drawFrame(
  canvas: HTMLCanvasElement,
  frame: Frame,
  pixels: ImageBitmap | null,
  look: Look,
  tints: Tints,
) {
  const pen = context2d(canvas);
  const [left, top] = frame.extent;
  const scale = canvas.width / (frame.extent[2] - left);
  const placed = ([x0, y0, x1, y1]: Box): Rectangle => {
    const [x, y] = [Math.round((x0 - left) * scale), Math.round((y0 - top) * scale)];
    return [x, y, Math.round((x1 - left) * scale) - x, Math.round((y1 - top) * scale) - y];
  };
  const { values, palette, marked } = tints;
  pen.fillStyle = look.ink.ground;
  pen.fillRect(0, 0, canvas.width, canvas.height);
  const whole = placed([0, 0, frame.picture.width, frame.picture.height]);
  const grey = (faint: number) => {
    if (!pixels) return;
    pen.drawImage(pixels, ...whole);
    pen.globalCompositeOperation = "saturation"; // of the ground, which is grey
    pen.fillRect(...whole);
    [pen.globalCompositeOperation, pen.globalAlpha] = ["source-over", 1 - faint];
    pen.fillRect(...whole);
    pen.globalAlpha = 1;
  };
  [pen.imageSmoothingEnabled, pen.imageSmoothingQuality] = [true, "high"];
  if (pixels && !values) pen.drawImage(pixels, ...whole);
  if (values) {
    grey(OUTSIDE);
    pen.save();
    pen.beginPath();
    for (const { box } of frame.grids) pen.rect(...placed(box));
    pen.clip();
    grey(FAINT);
    pen.globalAlpha = pixels ? OVER : 1;
    pen.imageSmoothingEnabled = false; // edges of patches stay sharp: there is nothing finer
    for (const grid of frame.grids) {
      const colours = Array.from(valuesOf(grid, values), (value) => pixelOf(palette.ramp, palette.at(value)));
      pen.drawImage(pixelated(grid.columns, grid.rows, colours), ...placed(grid.box));
    }
    pen.restore();
    for (const grid of frame.grids) drawLines(pen, placed(grid.box), grid, look);
  }
  if (marked && frame.grids.includes(marked.grid)) outline(pen, placed(boxOf(marked)), look);
}

/** Faint lines between patches that are large enough. */
function drawLines(pen: Pen, [x, y, width, height]: Rectangle, { rows, columns }: Grid, look: Look) {
  if (Math.min(width / columns, height / rows) < LINED) return;
  pen.fillStyle = look.ink.ground;
  pen.globalAlpha = 0.35;
  for (let row = 1; row < rows; row++) pen.fillRect(x, Math.round(y + (row * height) / rows), width, 1);
  for (let column = 1; column < columns; column++)
    pen.fillRect(Math.round(x + (column * width) / columns), y, 1, height);
  pen.globalAlpha = 1;
}

/** A line around the chosen patch, with the ground on both sides, to be seen on any picture. */
function outline(pen: Pen, [x, y, width, height]: Rectangle, look: Look) {
  const unit = Math.max(1, Math.round(devicePixelRatio));
  const around = (by: number, colour: string) => {
    pen.strokeStyle = colour;
    pen.lineWidth = by;
    pen.strokeRect(x - unit, y - unit, width + 2 * unit, height + 2 * unit);
  };
  around(5 * unit, look.ink.ground);
  around(2.5 * unit, look.ink.accent);
}

/** @returns the patch under the pointer */
export function pointed(event: MouseEvent, { grids, extent: [x0, y0, x1, y1] }: Frame): Patch | null {
  const { clientWidth, clientHeight } = event.target as HTMLElement;
  const [x, y] = [event.offsetX / clientWidth, event.offsetY / clientHeight];
  return patchAt(grids, x0 + x * (x1 - x0), y0 + y * (y1 - y0));
}

/**
 * @param aspects of pictures that stand in rows
 * @param label pixels of the line under each
 * @returns the largest height of a picture with which all of them fit; the least one where they do not
 */
export function rowHeight(
  aspects: number[],
  width: number,
  height: number,
  { gap, label, least }: { gap: number; label: number; least: number },
): number {
  const fits = (tall: number) => {
    let [rows, used] = [1, 0];
    for (const aspect of aspects) {
      const wide = tall * aspect;
      if (wide > width) return false;
      if (used > 0 && used + gap + wide > width) [rows, used] = [rows + 1, wide];
      else used += (used > 0 ? gap : 0) + wide;
    }
    return rows * tall + (rows - 1) * (gap + label) <= height;
  };
  for (let tall = Math.floor(height); tall > least; tall--) if (fits(tall)) return tall;
  return Math.min(least, ...aspects.map((aspect) => width / aspect));
}
