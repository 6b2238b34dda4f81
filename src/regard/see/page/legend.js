/** The scale, always in sight: its colours, its units, and whether it is linear, log or by row. */

import { logFloor } from "./colours.js";
import { digits } from "./numbers.js";

/**
 * The marks under the scale.
 * @param {import("./colours.js").Scale} scale @param {number} keys
 * @returns {{at: number, text: string}[]} at: from 0 to 1
 */
export function marks(scale, keys) {
  if (scale === "row")
    return [
      { at: 0, text: "0" },
      { at: 0.5, text: "half" },
      { at: 1, text: "row’s highest" },
    ];
  if (scale === "linear")
    return [0, 0.25, 0.5, 0.75, 1].map((at) => ({ at, text: `${at * 100}${at === 1 ? "\u202f%" : ""}` }));
  const powers = Math.round(-Math.log10(logFloor(keys)));
  const every = powers > 4 ? 2 : 1;
  const all = Array.from({ length: powers + 1 }, (_, i) => powers - i).filter((power) => power % every === 0);
  return all.map((power) => {
    const short = digits(100 * 10 ** -power).replace(/\.0+$|(\.\d*?)0+$/, "$1");
    return {
      at: 1 - power / powers,
      text: power === 0 ? "100\u202f%" : power === powers ? `≤\u202f${short}` : short,
    };
  });
}

const KINDS = {
  linear: "linear",
  log: "log",
  row: "by row: each query’s highest is full",
};

/**
 * @param {HTMLElement} legend
 * @param {import("./colours.js").Scale} scale
 * @param {number} keys
 * @param {string} unit what a cell of the map is
 * @param {ReturnType<import("./colours.js").ramp>} ramp
 */
export function drawLegend(legend, scale, keys, unit, ramp) {
  const canvas = /** @type {HTMLCanvasElement} */ (legend.querySelector("canvas"));
  canvas.width = 256;
  canvas.height = 1;
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  const image = context.createImageData(256, 1);
  new Uint32Array(image.data.buffer).set(ramp.packed);
  context.putImageData(image, 0, 0);
  const ticks = /** @type {HTMLElement} */ (legend.querySelector(".ticks"));
  ticks.replaceChildren(
    ...marks(scale, keys).map(({ at, text }) => {
      const tick = document.createElement("span");
      tick.textContent = text;
      tick.style.left = `${at * 100}%`;
      return tick;
    }),
  );
  /** @type {HTMLElement} */ (legend.querySelector(".unit")).textContent = `${unit}, ${KINDS[scale]}`;
}
