/** A vector as a calm picture: one cell for each number, blue below zero, orange above, 0 the ground. */

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
    const text = document.createElement("span");
    text.className = "vector";
    text.append(...Array.from(numbers, (number) => cell(written(number))));
    return text;
  }
  const canvas = document.createElement("canvas");
  canvas.className = "vector";
  canvas.width = numbers.length;
  canvas.height = 1;
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `${name}: ${numbers.length} numbers, ${range(numbers)}`);
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  const image = context.createImageData(numbers.length, 1);
  const pixels = new Uint32Array(image.data.buffer);
  const middle = (ramp.packed.length - 1) / 2;
  for (let i = 0; i < numbers.length; i++) {
    const part = highest > 0 ? numbers[i] / highest : 0;
    pixels[i] = ramp.packed[Math.round(middle + middle * part)];
  }
  context.putImageData(image, 0, 0);
  return canvas;
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

/** @param {string} text @returns {HTMLElement} */
function cell(text) {
  const span = document.createElement("span");
  span.textContent = text;
  return span;
}
