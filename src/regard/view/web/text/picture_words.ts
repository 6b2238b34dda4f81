/** What an overlay on pictures shows, in words: the alternative for who cannot see it. */

import { patchesOf, spreadOf, tokenOf, type Amount, type Grid } from "../data/patches";
import { counted, points, share } from "../maths/numbers";
import type { PictureInfo, Recording, Token } from "../protocol/recording";
import { named, visible } from "./tokens";

const QUARTERS = ["upper left", "upper right", "lower left", "lower right"];
const NAMED = 5; // pictures whose names are written out
const PADDED = 0.01; // of the attention, that lies outside of a picture, to be worth words
const OVERLAPPING = "Patches have seen more than their boxes: each box is the middle of what its token has seen.";

/** What is drawn, and on what. */
export interface Overlay {
  tokens: Token[]; // of the axis that has the patches
  grids: Grid[];
  pictures: PictureInfo[];
  values: Float32Array; // of all tokens
  isDifference: boolean; // of two heads
}

/** @returns the part that has most, or the largest difference */
function foremost<Of>(parts: Of[], value: (part: Of) => number): Of {
  return parts.reduce((one, other) => (Math.abs(value(other)) > Math.abs(value(one)) ? other : one));
}

/**
 * Says how much lies on the pictures, in which quarter and at which patch: of a row sums, of a column means.
 * @param name of the query whose row this is, or of the key whose column
 */
export function overlayWords(name: string, overlay: Overlay, isRow: boolean): string {
  const { tokens, grids, pictures, values, isDifference } = overlay;
  const written = (value: number) => (isDifference ? points(value) : share(value));
  const spreads = spreadOf(grids, pictures, values);
  const one = spreads.length === 1;
  const all = one ? "the picture" : `the ${spreads.length} pictures`;
  const numberOf = ({ sum, patches }: Amount) => (isRow ? sum : patches > 0 ? sum / patches : 0);
  const [whole, inside] = [spreads.map(({ total }) => total), spreads.flatMap(({ quarters }) => quarters)].map(joined);
  if (Number.isNaN(whole.sum)) return `${name}: some weights are not numbers (NaN).`;
  const spread = foremost(spreads, ({ total }) => numberOf(total));
  const quarter = foremost(spread.quarters, numberOf);
  const where = `the ${QUARTERS[spread.quarters.indexOf(quarter)]} quarter${one ? "" : ` of picture ${spread.picture}`}`;
  const patch = foremost(grids.flatMap(patchesOf).map(tokenOf), (token) => values[token]);
  if (values[patch] === 0 && isDifference) return `${name}: no difference on ${all}.`;
  if (values[patch] === 0) return isRow ? `${name} gives nothing to ${all}.` : `No patch of ${all} looks at ${name}.`;
  const to = isRow ? "to" : "in";
  const parts = [
    `${written(numberOf(quarter))} ${to} ${where}`,
    `${written(values[patch])} ${to} ${named(tokens[patch])}`,
  ];
  if (!one) parts.unshift(`${written(numberOf(spread.total))} ${to} picture ${spread.picture}`);
  const padding = whole.sum - inside.sum;
  if (isRow && Math.abs(padding) >= PADDED) parts.push(`${written(padding)} to the padding around it`);
  const much = `${written(numberOf(whole))}${isDifference ? " points" : ""} of its attention`;
  const said = isRow ? `${name} gives ${much} to ${all}` : `A patch of ${all} gives ${name} ${much} on average`;
  return `${said}: ${parts.join(", ")}.`;
}

function joined(amounts: Amount[]): Amount {
  const sum = amounts.reduce((total, each) => total + each.sum, 0);
  return { sum, patches: amounts.reduce((total, each) => total + each.patches, 0) };
}

/** What this page holds of the pictures. */
export function pictureNotes({ pictures = [], grids = [] }: Pick<Recording, "pictures" | "grids">): string[] {
  const held = pictures.filter(({ data }) => data !== null);
  const names = held.map(({ name }) => visible(name)).filter(Boolean);
  const listed = names.length === held.length && names.length <= NAMED ? `: ${names.join(", ")}` : "";
  const bare = counted(pictures.length - held.length, "picture");
  const said = {
    [`This page holds ${counted(held.length, "picture")} that the model saw${listed}.`]: held.length > 0,
    [`${bare} that the model saw, without pixels: only the size is here.`]: held.length < pictures.length,
    [OVERLAPPING]: grids.some(({ overlapping }) => overlapping),
  };
  return Object.keys(said).filter((text) => said[text]);
}
