/** A vector as a calm picture: one cell for each number, blue below zero, orange above, 0 the ground. */

import { element, pixelated } from "../dom";
import type { Ramp } from "../maths/colours";
import { written } from "../maths/sums";

export const FEW = 4; // numbers that are quicker read than seen

/**
 * @param highest the magnitude that has the full colour
 * @param ramp of differences, its ground in the middle
 * @param name for those who do not see it
 */
export function vectorPicture(numbers: ArrayLike<number>, highest: number, ramp: Ramp, name: string): HTMLElement {
  if (numbers.length <= FEW) {
    const cells = Array.from(numbers, (number) => element("span", {}, written(number)));
    return element("span", { className: "vector" }, ...cells);
  }
  const middle = (ramp.packed.length - 1) / 2;
  const part = (number: number) => (highest > 0 ? number / highest : 0);
  const pixels = Uint32Array.from(numbers, (number) => ramp.packed[Math.round(middle + middle * part(number))]);
  const label = `${name}: ${numbers.length} numbers, ${range(numbers)}`;
  const canvas = element("canvas", { className: "vector", role: "img", "aria-label": label });
  return pixelated(numbers.length, 1, pixels, canvas);
}

/** @returns "from −1.2 to 3.1" */
function range(numbers: ArrayLike<number>): string {
  const all = Array.from(numbers);
  return `from ${written(Math.min(...all))} to ${written(Math.max(...all))}`;
}

export function largest(vectors: (ArrayLike<number> | null)[]): number {
  let highest = 0;
  for (const vector of vectors)
    for (let i = 0; i < (vector?.length ?? 0); i++)
      highest = Math.max(highest, Math.abs((vector as ArrayLike<number>)[i]));
  return highest;
}
