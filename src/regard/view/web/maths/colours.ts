/**
 * One sequential scale from ground to ink, even to the eye (mixed in OKLab), safe for the colour
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
 * @returns the same in OKLab
 */
function labOf(hex: string): number[] {
  const [red, green, blue] = [1, 3, 5].map((at) => linear(Number.parseInt(hex.slice(at, at + 2), 16)));
  const l = Math.cbrt(0.4122214708 * red + 0.5363325363 * green + 0.0514459929 * blue);
  const m = Math.cbrt(0.2119034982 * red + 0.6806995451 * green + 0.1073969566 * blue);
  const s = Math.cbrt(0.0883024619 * red + 0.2817188376 * green + 0.6299787005 * blue);
  return [
    0.2104542553 * l + 0.793617785 * m - 0.0040720468 * s,
    1.9779984951 * l - 2.428592205 * m + 0.4505937099 * s,
    0.0259040371 * l + 0.7827717662 * m - 0.808675766 * s,
  ];
}

/** @returns red, green, blue in 0..255 */
function toRgb([lightness, a, b]: number[]): number[] {
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  const linear = [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ];
  return linear.map((x) => 255 * Math.min(1, Math.max(0, x <= 0.0031308 ? 12.92 * x : 1.055 * x ** (1 / 2.4) - 0.055)));
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
  return through([ground, ...table.weights[theme]].map(labOf), 256);
}

/** The 511 colours of differences: the ground in the middle, at 255. */
export function differenceRamp(theme: "light" | "dark", ground: string): Ramp {
  const less = [...table.less[theme]].reverse();
  return through([...less, ground, ...table.more[theme]].map(labOf), 511);
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
    const lab = stops[left].map((value, c) => value + (stops[left + 1][c] - value) * mix);
    const [red, green, blue] = toRgb(lab).map(Math.round);
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
