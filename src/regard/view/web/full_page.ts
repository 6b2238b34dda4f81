/**
 * What a page of several heads or of a long text has besides the map and the steps. In the page of
 * one head of a short text, build.mjs puts small_page.ts in the place of this module.
 */

import { effect } from "@preact/signals-core";
import { Framed } from "./data/framed";
import { Remote } from "./data/remote";
import type { Host } from "./data/source";
import type { Recording } from "./protocol/recording";
import type { Session } from "./session";
import type { State } from "./state";
import { Edit } from "./views/edit";
import { OF_SEVERAL } from "./views/head_keys";
import { HeadsView } from "./views/heads_view";
import { ImageView } from "./views/image_view";
import type { Binding } from "./views/keys";
import { NotableHeads } from "./views/notable_heads";
import { SaveMenu } from "./views/save";
import { SegmentsView } from "./views/segments_view";
import { TextView } from "./views/text_view";
import type { View } from "./view";

/** To add a view: a file in views/, a line here, a tab and a section in index.html, its name in state.ts. */
export const MORE_VIEWS: Partial<Record<State["view"], (session: Session) => View>> = {
  overview: (session) => new HeadsView(session),
  text: (session) => new TextView(session),
  segments: (session) => new SegmentsView(session),
  image: (session) => new ImageView(session),
};

/** @returns the keys that act upon them */
export function panes(session: Session): Binding[] {
  const notable = new NotableHeads(session);
  effect(() => notable.list());
  effect(() => notable.show());
  return OF_SEVERAL;
}

/** @param reload opens the page again, at an address */
export function menus(session: Session, reload: (address: string) => void) {
  new SaveMenu(session);
  new Edit(session, reload);
}

/** What answers for the heads of a recording that is not in the file. */
export function liveHost({ layers, run }: Recording): Host {
  // A notebook's frame has no address of its own.
  return location.protocol === "about:" ? new Framed() : new Remote(layers, run);
}

/** Asks a live host for the small maps and the kinds of all heads, those of the open layer first. */
export async function gather(session: Session): Promise<void> {
  const { layers, recording, source, store } = session;
  const open = store.state.layer;
  const nearest = layers.map((_, at) => at).sort((a, b) => Math.abs(a - open) - Math.abs(b - open));
  /** Asks for one layer after the other. */
  async function ask(): Promise<void> {
    for (let at = nearest.shift(); at !== undefined; at = nearest.shift()) {
      layers[at].overview = await source.overview(at);
      session.gathered([at]);
    }
  }
  try {
    // Two at a time: a host has more than one core.
    await Promise.all([ask(), ask()]);
    const { heads, ...found } = await source.heads();
    for (const layer of layers) layer.heads = heads.splice(0, layer.num_heads);
    Object.assign(recording, found);
  } catch {
    // The map and the sentence say that a host is lost; without kinds the maps stand in layers.
  }
  session.gathered([], true);
}
