/** What the theme gives: the colours of the style sheet, and those of weights. */

import { differenceLevel, differenceRamp, level, logFloor, ramp, type Ramp, type Scale } from "./maths/colours";

const INKS = ["ground", "line", "accent"] as const;

export interface Look {
  name: "light" | "dark";
  ramp: Ramp;
  differences: Ramp;
  ink: Record<(typeof INKS)[number], string>;
  mono: string; // of numbers
}

/** @param theme as the state has it */
export function lookOf(theme: "auto" | "light" | "dark"): Look {
  const root = document.documentElement;
  root.dataset.theme = theme;
  const style = getComputedStyle(root);
  const ink = Object.fromEntries(INKS.map((name) => [name, style.getPropertyValue(`--${name}`).trim()])) as Look["ink"];
  const name = style.colorScheme === "dark" ? "dark" : "light";
  const mono = style.getPropertyValue("--mono");
  return { name, ramp: ramp(name, ink.ground), differences: differenceRamp(name, ink.ground), ink, mono };
}

export interface Palette {
  name: string;
  ramp: Ramp;
  at: (share: number) => number; // which of the colours a share has
}

/**
 * The colours of a map. The log scale begins at half an even share of the blocks of keys, so it is
 * the same for every head at the same zoom.
 * @param blocks of keys
 * @param ceiling the weight of the darkest colour, on the fitted scale
 */
export function paletteOf(look: Look, scale: Scale, blocks: number, isDifference: boolean, ceiling: number): Palette {
  const floor = logFloor(blocks);
  const levelOf = isDifference ? differenceLevel : level;
  return {
    name: [scale, floor, isDifference, look.name, scale === "fit" ? ceiling : 1].join(),
    ramp: isDifference ? look.differences : look.ramp,
    at: (share) => levelOf(share, scale, floor, ceiling),
  };
}
