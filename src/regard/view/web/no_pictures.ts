/**
 * The page of a recording without pictures. build.mjs puts this module in the place of those that it
 * names.
 */

import type * as Patches from "./data/patches";
import type * as Pictures from "./text/picture_words";
import type * as Views from "./views/image_view";

export const gridsOf: typeof Patches.gridsOf = () => [];
export const withPatches: typeof Patches.withPatches = (tokens) => tokens;
export const pictureNotes: typeof Pictures.pictureNotes = () => [];
export const ImageView = Object as unknown as typeof Views.ImageView; // page.ts makes none without grids
