/**
 * The page of one head of a short text: it has neither other heads, views and hosts, nor layers that
 * are too large for their file. build.mjs puts this module in the place of those that it names.
 */

import type * as Answers from "./data/held_answers";
import type * as Minimap from "./map/minimap";
import type * as Several from "./several";
import type * as Words from "./text/held_words";

function absent(): never {
  throw new Error("a page of one head has no such part.");
}

export const panes: typeof Several.panes = () => null;
export const moreViews: typeof Several.moreViews = () => ({});
export const menus: typeof Several.menus = () => {};
export const liveHost: typeof Several.liveHost = absent;
export const gather: typeof Several.gather = absent;
export const drawMinimap: typeof Minimap.drawMinimap = () => {};
export const followMinimap: typeof Minimap.followMinimap = () => {};
export const readHeld: typeof Answers.readHeld = absent;
export const heldAnswer: typeof Answers.heldAnswer = absent;
export const heldAside: typeof Words.heldAside = () => "";
export const heldNotes: typeof Words.heldNotes = absent;
export const heldSentence: typeof Words.heldSentence = absent;
export const heldValue: typeof Words.heldValue = absent;
export const listBlocks: typeof Words.listBlocks = absent;
export const blockAt: typeof Words.blockAt = absent;
export const blockSentence: typeof Words.blockSentence = absent;
export const errorName: typeof Words.errorName = absent;
export const meansName: typeof Words.meansName = absent;
export const missing: typeof Words.missing = absent;
