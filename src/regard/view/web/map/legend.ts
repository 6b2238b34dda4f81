/** The scale, always in sight: its colours, its units, and whether it is linear, log or by row. */

import { element, pixelated } from "../dom";
import { logFloor, type Ramp, type Scale } from "../maths/colours";
import { plain } from "../maths/numbers";

/** At: from 0 to 1. */
export type Mark = { at: number; text: string };

/**
 * The marks under the scale.
 * @param blocks of keys
 * @param ceiling of the fitted scale
 */
export function marks(scale: Scale, blocks: number, ceiling: number): Mark[] {
  if (scale === "row")
    return [
      { at: 0, text: "0" },
      { at: 0.5, text: "half" },
      { at: 1, text: "row’s highest" },
    ];
  if (scale === "fit")
    return [
      { at: 0, text: "0" },
      { at: 0.5, text: plain(ceiling * 50) },
      { at: 1, text: `${ceiling < 1 ? "≥\u202f" : ""}${plain(ceiling * 100)}\u202f%` },
    ];
  if (scale === "linear")
    return [0, 0.25, 0.5, 0.75, 1].map((at) => ({ at, text: `${at * 100}${at === 1 ? "\u202f%" : ""}` }));
  const powers = Math.round(-Math.log10(logFloor(blocks)));
  const every = powers > 4 ? 2 : 1;
  const all = Array.from({ length: powers + 1 }, (_, i) => powers - i).filter((power) => power % every === 0);
  return all.map((power) => {
    // In percent; a power of ten where digits would take the room of the next mark.
    const small = `10\u207b${"\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079"[power - 2]}`;
    const short = power > 4 ? small : plain(100 * 10 ** -power);
    return { at: 1 - power / powers, text: power === 0 ? "100\u202f%" : power === powers ? `≤\u202f${short}` : short };
  });
}

/** The marks of a difference: 0 in the middle, less on the left. */
function differenceMarks(scale: Scale, blocks: number, ceiling: number): Mark[] {
  const end = scale === "row" ? "1" : scale === "fit" ? plain(ceiling * 100) : "100";
  const found = [
    { at: 0, text: `\u2212${end}` },
    { at: 0.5, text: "0" },
    { at: 1, text: `+${end}` },
  ];
  if (scale !== "log") return found;
  const one = (1 + 2 / Math.log10(logFloor(blocks))) / 2; // where 1 point lies
  if (one < 0.1) return found;
  return [...found, { at: 0.5 - one, text: "\u22121" }, { at: 0.5 + one, text: "+1" }];
}

/** @returns of a light page; on a dark one weights are bright */
export function darkest(ceiling: number, isDifference: boolean = false): string {
  const unit = isDifference ? "points" : "%";
  const isDark = getComputedStyle(document.documentElement).colorScheme === "dark";
  return `${isDark ? "brightest" : "darkest"} = ${plain(ceiling * 100)}\u202f${unit}${ceiling < 1 ? " or more" : ""}`;
}

const KINDS = { linear: "linear", log: "log", row: "by row: each row’s highest is full" };

/**
 * @param blocks of keys
 * @param unit what a cell of the map is
 * @param ramp of weights, or of differences
 * @param ceiling the weight of the darkest colour, on the fitted scale
 */
export function drawLegend(
  legend: HTMLElement,
  scale: Scale,
  blocks: number,
  unit: string,
  ramp: Ramp,
  ceiling: number,
) {
  const canvas = legend.querySelector("canvas") as HTMLCanvasElement;
  const count = ramp.packed.length;
  const isDifference = count > 256;
  pixelated(count, 1, ramp.packed, canvas);
  const ticks = legend.querySelector(".ticks") as HTMLElement;
  ticks.replaceChildren(
    ...(isDifference ? differenceMarks : marks)(scale, blocks, ceiling).map(({ at, text }) => {
      const tick = element("span", { className: at === 0 ? "first" : at === 1 ? "last" : "" }, text);
      tick.style.left = `${at * 100}%`;
      return tick;
    }),
  );
  (legend.querySelector(".unit") as HTMLElement).textContent =
    `${unit}, ${scale === "fit" ? darkest(ceiling, isDifference) : KINDS[scale]}`;
}
