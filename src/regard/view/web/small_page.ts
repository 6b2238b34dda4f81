/**
 * The page of one head of a short text: it has neither other heads, views and hosts, nor layers that
 * are too large for their file. build.mjs puts this module in the place of those that it names.
 */

import type * as Full from "./full_page";
import type * as Passes from "./data/pass";
import type * as Saving from "./views/saving";
import type * as Words from "./text/block_words";

function absent(): never {
  throw new Error("a page of one head has no such part.");
}

export const MORE_VIEWS: typeof Full.MORE_VIEWS = {};
export const panes: typeof Full.panes = () => [];
export const menus: typeof Full.menus = () => {};
export const liveHost: typeof Full.liveHost = absent;
export const gather: typeof Full.gather = absent;
export const isStored: typeof Passes.isStored = () => false;
export const blockSize: typeof Passes.blockSize = () => 1;
export const Pass = Object as unknown as typeof Passes.Pass; // a short text is never so much work
export const mapTable: typeof Saving.mapTable = () => [];
export const stepsTable: typeof Saving.stepsTable = () => [];
export const meansNotes: typeof Words.meansNotes = absent;
export const meanSentence: typeof Words.meanSentence = absent;
export const strongestBlocks: typeof Words.strongestBlocks = absent;
export const blockAt: typeof Words.blockAt = absent;
export const errorName: typeof Words.errorName = absent;
export const meansName: typeof Words.meansName = absent;
export const missing: typeof Words.missing = absent;
