/**
 * What a page of several heads or of a long text has besides the map and the steps. In the page of
 * one head of a short text, build.mjs puts small_page.ts in the place of this module.
 */

import { Framed } from "./data/framed";
import { Remote } from "./data/remote";
import type { Host } from "./data/source";
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

export { gather } from "./views/gather";

/** What stands beside the stage. */
export interface Panes {
  overview: Overview;
  notable: NotableHeads;
  pins: Pins;
}

export function panes(page: Page): Panes | null {
  const overview = new Overview(byId("overview"), page.recording.layers, page.maps, page.store);
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
