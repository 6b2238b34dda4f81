/** What a view of the stage is. `segments_view.ts` is a short one to read before you write another. */

import type { Reading } from "./data/reading";
import type { Ramp } from "./maths/colours";

/** The first row names the columns. */
export type Table = (string | number)[][];

export type Pen = CanvasRenderingContext2D;

/** At: from 0 to 1 of a scale. */
export type Mark = { at: number; text: string };

export interface Legend {
  ramp: Ramp;
  marks: Mark[];
  text: string; // its unit, and what its darkest colour is
}

export interface View {
  /** Each draws a part of the view while it is open, and again when a signal that it has read changes. */
  draws: (() => void)[];
  isSettled?: () => boolean; // is what it has asked for on the stage?
  parts?: () => object[]; // whose troubles are said, beside those of the view itself
  legend?: () => Legend; // of the colours; none: it has no scale
  move?: (down: number, right: number) => void; // the arrows, where they do not move the crosshair
  sentence?: (reading: Reading) => string; // what is read, where a cell alone does not say it
  table?: () => Table; // the numbers shown
}
