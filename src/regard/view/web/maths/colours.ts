/**
 * One sequential scale from ground to ink, whose stops are even to the eye (in OKLab), safe for the colour
 * blind (lightness alone orders it): to deep indigo, or to warm light. Weight 0 is the ground itself.
 * Differences go from the ground to orange where there is more, to blue where there is less: no two
 * colours that any kind of colour blindness confuses. The table, which figures use as well, has the
 * colours after the ground, at even steps.
 */

import table from "../../colours.json";

export type Scale = "fit" | "linear" | "log";

/**
 * @param value 0..255, as a screen is told it
 * @returns light, 0..1
 */
function linear(value: number): number {
  const part = value / 255;
  return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
}

/**
 * @param hex "#fafaf9"
 * @returns red, green, blue in 0..255
 */
function rgbOf(hex: string): number[] {
  return [1, 3, 5].map((at) => Number.parseInt(hex.slice(at, at + 2), 16));
}

export interface Ramp {
  packed: Uint32Array; // pixels
  css: string[]; // colours
  onTop: string[]; // the colour in which text can be read on each
}

/**
 * The 256 colours of a theme.
 * @param ground its ground, as "#fafaf9"
 */
export function ramp(theme: "light" | "dark", ground: string): Ramp {
  return through([ground, ...table.weights[theme]].map(rgbOf), 256);
}

/** The 511 colours of differences: the ground in the middle, at 255. */
export function differenceRamp(theme: "light" | "dark", ground: string): Ramp {
  const less = [...table.less[theme]].reverse();
  return through([...less, ground, ...table.more[theme]].map(rgbOf), 511);
}

/** @returns a colour for text whose contrast is at least 4.5, as WCAG 2 defines it. */
function readableOn(luminance: number): string {
  if (luminance > 0.217) return "#17181c";
  if (luminance < 0.173) return "#fbfaf7";
  return luminance > 0.179 ? "#000000" : "#ffffff";
}

/**
 * @param rgb 0..255
 * @returns relative luminance, 0..1
 */
function luminance(rgb: number[]): number {
  const [red, green, blue] = rgb.map(linear);
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

function through(stops: number[][], count: number): Ramp {
  const packed = new Uint32Array(count);
  const css: string[] = [];
  const onTop: string[] = [];
  for (let i = 0; i < count; i++) {
    const position = (i / (count - 1)) * (stops.length - 1);
    const left = Math.min(stops.length - 2, Math.floor(position));
    const mix = position - left;
    const [red, green, blue] = stops[left].map((value, c) => Math.round(value + (stops[left + 1][c] - value) * mix));
    packed[i] = (255 << 24) | (blue << 16) | (green << 8) | red;
    css.push(`rgb(${red},${green},${blue})`);
    onTop.push(readableOn(luminance([red, green, blue])));
  }
  return { packed, css, onTop };
}

/** A weight that is not a number: grey, which is on none of the scales. */
const GREY = { packed: 0xff969696, css: "rgb(150,150,150)", onTop: "#17181c" };

/**
 * @param level NaN: of no number
 * @returns the pixel
 */
export function pixelOf({ packed }: Ramp, level: number): number {
  return Number.isNaN(level) ? GREY.packed : packed[level];
}

/** @param level NaN: of no number */
export function tintOf({ css, onTop }: Ramp, level: number): { css: string; onTop: string } {
  return Number.isNaN(level) ? GREY : { css: css[level], onTop: onTop[level] };
}

/**
 * Where the log scale begins: the power of ten below half an even share. It depends on the number
 * of keys alone, so it is the same for every head that is compared.
 */
export function logFloor(keys: number): number {
  return 10 ** Math.min(-2, Math.floor(Math.log10(0.5 / keys)));
}

/**
 * Where a weight lies on the scale, as a whole number from 0 (ground) to 255; NaN for NaN.
 * @param floor of the log scale
 * @param highest weight, for the fitted scale
 */
export function level(weight: number, scale: Scale, floor: number, highest: number): number {
  if (Number.isNaN(weight)) return NaN;
  if (weight <= 0) return 0;
  let t = weight;
  if (scale === "log") t = 1 - Math.log(weight) / Math.log(floor);
  if (scale === "fit") t = highest > 0 ? weight / highest : 0;
  return Math.max(0, Math.min(255, Math.round(t * 255)));
}

/** Where a difference lies on its scale: 255 is none, 0 all less, 510 all more; NaN for NaN. */
export function differenceLevel(difference: number, scale: Scale, floor: number, highest: number): number {
  return 255 + Math.sign(difference) * level(Math.abs(difference), scale, floor, highest);
}
