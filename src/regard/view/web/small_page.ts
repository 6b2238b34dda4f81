/**
 * The page of one head of a short text: it has neither other heads, views and hosts, nor layers that
 * are too large for their file. build.mjs puts this module in the place of those that it names.
 */

import type * as Answers from "./data/block_answers";
import type * as Full from "./full_page";
import type * as Minimap from "./map/minimap";
import type * as Words from "./text/block_words";

function absent(): never {
  throw new Error("a page of one head has no such part.");
}

export const panes: typeof Full.panes = () => null;
export const moreViews: typeof Full.moreViews = () => ({});
export const menus: typeof Full.menus = () => {};
export const liveHost: typeof Full.liveHost = absent;
export const gather: typeof Full.gather = absent;
export const drawMinimap: typeof Minimap.drawMinimap = () => {};
export const followMinimap: typeof Minimap.followMinimap = () => {};
export const blockAnswer: typeof Answers.blockAnswer = absent;
export const meansAside: typeof Words.meansAside = () => "";
export const meansNotes: typeof Words.meansNotes = absent;
export const meanSentence: typeof Words.meanSentence = absent;
export const meanValue: typeof Words.meanValue = absent;
export const blockRows: typeof Words.blockRows = absent;
export const blockAt: typeof Words.blockAt = absent;
export const blockSentence: typeof Words.blockSentence = absent;
export const errorName: typeof Words.errorName = absent;
export const meansName: typeof Words.meansName = absent;
export const missing: typeof Words.missing = absent;
