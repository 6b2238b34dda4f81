/** A vector as a calm picture: one cell for each number, blue below zero, orange above, 0 the ground. */

import { element, pixelated } from "./dom.js";
import { written } from "./sums.js";

export const FEW = 4; // numbers that are quicker read than seen

/**
 * @param {ArrayLike<number>} numbers @param {number} highest the magnitude that has the full colour
 * @param {import("./colours.js").Ramp} ramp of differences, its ground in the middle
 * @param {string} name for those who do not see it
 * @returns {HTMLElement}
 */
export function vectorPicture(numbers, highest, ramp, name) {
  if (numbers.length <= FEW) {
    const cells = Array.from(numbers, (number) => element("span", {}, written(number)));
    return element("span", { className: "vector" }, ...cells);
  }
  const middle = (ramp.packed.length - 1) / 2;
  const part = /** @param {number} number */ (number) => (highest > 0 ? number / highest : 0);
  const pixels = Uint32Array.from(numbers, (number) => ramp.packed[Math.round(middle + middle * part(number))]);
  const label = `${name}: ${numbers.length} numbers, ${range(numbers)}`;
  const canvas = element("canvas", { className: "vector", role: "img", "aria-label": label });
  return pixelated(numbers.length, 1, pixels, canvas);
}

/** @param {ArrayLike<number>} numbers @returns {string} "from −1.2 to 3.1" */
function range(numbers) {
  const all = Array.from(numbers);
  return `from ${written(Math.min(...all))} to ${written(Math.max(...all))}`;
}

/** @param {(ArrayLike<number> | null)[]} vectors @returns {number} */
export function largest(vectors) {
  let highest = 0;
  for (const vector of vectors)
    for (let i = 0; i < (vector?.length ?? 0); i++)
      highest = Math.max(highest, Math.abs(/** @type {ArrayLike<number>} */ (vector)[i]));
  return highest;
}
