/** The scale, always in sight: its colours, its units, and whether it is linear or log. */

import { element, inside, pixelated } from "../dom";
import { logFloor, type Ramp, type Scale } from "../maths/colours";
import { plain } from "../maths/numbers";
import type { Legend, Mark } from "../view";

/**
 * The marks under the scale.
 * @param blocks of keys
 * @param ceiling of the fitted scale
 */
export function marks(scale: Scale, blocks: number, ceiling: number): Mark[] {
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
  const end = scale === "fit" ? plain(ceiling * 100) : "100";
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

/**
 * @param blocks of keys
 * @param unit what a cell of the map is
 * @param ramp of weights, or of differences
 * @param ceiling the weight of the darkest colour, on the fitted scale
 */
export function legendOf(scale: Scale, blocks: number, unit: string, ramp: Ramp, ceiling: number): Legend {
  const isDifference = ramp.packed.length > 256;
  return {
    ramp,
    marks: (isDifference ? differenceMarks : marks)(scale, blocks, ceiling),
    text: `${unit}, ${scale === "fit" ? darkest(ceiling, isDifference) : scale}`,
  };
}

export function showLegend(pane: HTMLElement, { ramp, marks: all, text }: Legend) {
  pixelated(ramp.packed.length, 1, ramp.packed, inside<HTMLCanvasElement>(pane, "canvas"));
  const ticks = all.map((mark) => {
    const tick = element("span", { className: mark.at === 0 ? "first" : mark.at === 1 ? "last" : "" }, mark.text);
    tick.style.left = `${mark.at * 100}%`;
    return tick;
  });
  inside(pane, ".ticks").replaceChildren(...ticks);
  inside(pane, ".unit").textContent = text;
}
