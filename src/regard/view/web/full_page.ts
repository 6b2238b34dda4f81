/**
 * What a page of several heads or of a long text has besides the map and the steps. In the page of
 * one head of a short text, build.mjs puts small_page.ts in the place of this module.
 */

import { Framed } from "./data/framed";
import { Remote } from "./data/remote";
import type { HeadKind, SmallNumbers } from "./data/payload";
import type { Host, Source } from "./data/source";
import { byId } from "./dom";
import { SaveMenu } from "./export/save";
import type { Page } from "./main";
import { Overview } from "./map/overview";
import { TextView } from "./text/text";
import { Edit } from "./views/edit";
import { HeadsView } from "./views/heads_view";
import { NotableHeads } from "./views/notable_heads";
import { Pins } from "./views/pins";
import { SegmentsView } from "./views/segments";
import type { Views } from "./views/views";

/** What stands beside the stage. */
export interface Panes {
  overview: Overview;
  notable: NotableHeads;
  pins: Pins;
}

export function panes(page: Page): Panes | null {
  const overview = new Overview(byId("overview"), page);
  return { overview, notable: new NotableHeads(page), pins: new Pins(page) };
}

export function moreViews(page: Page): Views["views"] {
  return {
    overview: new HeadsView(byId("view-overview"), page),
    text: new TextView(byId("view-text"), page),
    segments: new SegmentsView(byId("view-segments"), page),
  };
}

export function menus(page: Page) {
  new SaveMenu(page);
  new Edit(page);
}

/** What answers for the heads of a recording that is not in the file. */
export function liveHost({ recording: { layers, run } }: Page): Host {
  // A notebook's frame has no address of its own.
  return location.protocol === "about:" ? new Framed() : new Remote(layers, run);
}

/** What a live host finds after the page is there. */
export interface Listener {
  onMap: (layer: number, overview: SmallNumbers) => void;
  onKinds: (kinds: (HeadKind | null)[]) => void; // of every head, layer by layer
}

/**
 * Asks a live host for the small maps and the kinds of all heads.
 * @param open the layer whose small maps come first
 * @returns when all is there, or the host answers no more
 */
export async function gather(source: Source, open: number, { onMap, onKinds }: Listener): Promise<void> {
  const nearest = source.layers.map((_, at) => at).sort((a, b) => Math.abs(a - open) - Math.abs(b - open));
  /** Asks for one layer after the other. */
  async function ask(): Promise<void> {
    for (let at = nearest.shift(); at !== undefined; at = nearest.shift()) onMap(at, await source.overview(at));
  }
  try {
    // Two at a time: a host has more than one core.
    await Promise.all([ask(), ask()]);
    onKinds(await source.heads());
  } catch {
    // The map and the sentence say that a host is lost; without kinds the maps stand in layers.
  }
}
