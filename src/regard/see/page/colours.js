/**
 * One sequential scale from ground to ink, even to the eye (built in OKLab), safe for the colour
 * blind (lightness alone orders it). Weight 0 is the ground itself.
 *
 * @typedef {"linear" | "log" | "row"} Scale
 */

// [lightness, chroma, hue] at even steps: paper to deep indigo; night to warm light.
const STOPS = {
  light: [[0.985, 0.003, 270], [0.86, 0.055, 272], [0.7, 0.115, 275], [0.52, 0.17, 278], [0.36, 0.165, 280], [0.235, 0.11, 283]],
  dark: [[0.185, 0.006, 270], [0.32, 0.06, 25], [0.47, 0.115, 38], [0.64, 0.135, 55], [0.81, 0.115, 76], [0.965, 0.05, 95]],
};

/** @param {number[]} lch @returns {number[]} red, green, blue in 0..255 */
function toRgb([lightness, chroma, hue]) {
  const a = chroma * Math.cos((hue * Math.PI) / 180);
  const b = chroma * Math.sin((hue * Math.PI) / 180);
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

/**
 * The 256 colours of a theme.
 * @param {"light" | "dark"} theme
 * @returns {{packed: Uint32Array, css: string[], onTop: string[]}} pixels, CSS colours, and the
 *   colour in which text can be read on each
 */
export function ramp(theme) {
  const stops = STOPS[theme];
  const packed = new Uint32Array(256);
  /** @type {string[]} */ const css = [];
  /** @type {string[]} */ const onTop = [];
  for (let i = 0; i < 256; i++) {
    const position = (i / 255) * (stops.length - 1);
    const left = Math.min(stops.length - 2, Math.floor(position));
    const mix = position - left;
    const lch = stops[left].map((value, c) => value + (stops[left + 1][c] - value) * mix);
    const [red, green, blue] = toRgb(lch).map(Math.round);
    packed[i] = (255 << 24) | (blue << 16) | (green << 8) | red;
    css.push(`rgb(${red},${green},${blue})`);
    onTop.push(lch[0] > 0.62 ? "#17181c" : "#fbfaf7");
  }
  return { packed, css, onTop };
}

/**
 * The smallest weight that the log scale tells from nothing: a tenth of an even share, as a power
 * of ten, so that it is the same for every head that is compared.
 * @param {number} keys
 * @returns {number}
 */
export function logFloor(keys) {
  return 10 ** Math.min(-2, Math.floor(Math.log10(0.2 / keys)));
}

/**
 * Where a weight lies on the scale, as a whole number from 0 (ground) to 255.
 * @param {number} weight
 * @param {Scale} scale
 * @param {number} floor of the log scale
 * @param {number} highest weight of the row, for the scale by row
 * @returns {number}
 */
export function level(weight, scale, floor, highest) {
  if (!(weight > 0)) return 0;
  let t = weight;
  if (scale === "log") t = 1 - Math.log(weight) / Math.log(floor);
  if (scale === "row") t = highest > 0 ? weight / highest : 0;
  return Math.max(0, Math.min(255, Math.round(t * 255)));
}
