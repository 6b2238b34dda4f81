/** The script of the page, which makes the views and keeps them in step, and of its worker. */

import { effect, untracked } from "@preact/signals-core";
import type { TwoAxes } from "./data/axes";
import { beside } from "./data/compare";
import { engine } from "./data/engine";
import { hostOf } from "./data/remote";
import { Damaged, readRecording } from "./data/unpack";
import { byId, element } from "./dom";
import { showLegend } from "./map/legend";
import type { Recording } from "./protocol/recording";
import { Session } from "./session";
import { WORDS, type State } from "./state";
import { parted } from "./text/parts";
import { visible } from "./text/tokens";
import type { View } from "./view";
import { Controls } from "./views/controls";
import { Edit } from "./views/edit";
import { HeadsView } from "./views/heads_view";
import { ImageView } from "./views/image_view";
import { listen, type Hands } from "./views/keys";
import { MapView } from "./views/map_view";
import { NotableHeads } from "./views/notable_heads";
import { notes } from "./views/notes";
import { Prose } from "./views/prose";
import { ReadingPane } from "./views/reading_pane";
import { SaveMenu } from "./views/save";
import { SegmentsView } from "./views/segments_view";
import { StepsView } from "./views/steps_view";
import { TextView } from "./views/text_view";

const REMEMBERED = 150; // milliseconds between two addresses: a browser allows no more

/** To add a view: a file in views/, a line here, a tab and a section in index.html, its name in state.ts. */
const VIEWS: Record<Exclude<State["view"], "map">, (session: Session) => View> = {
  overview: (session) => new HeadsView(session),
  text: (session) => new TextView(session),
  steps: (session) => new StepsView(session),
  segments: (session) => new SegmentsView(session),
  image: (session) => new ImageView(session),
};

/** Makes a page of a recording. */
function openPage(recording: Recording) {
  const isLive = recording.layers.some(({ kind }) => kind === "live");
  const isPictured = recording.grids !== undefined;
  const isOfOneHead = recording.layers.length === 1 && recording.layers[0].num_heads === 1;
  document.body.classList.toggle("one-head", isOfOneHead);
  const without = { image: !isPictured, overview: isOfOneHead } as Partial<Record<string, boolean>>;
  const names = WORDS.view.filter((name) => !without[name]);
  // One sentence has no other parts than its words.
  const partsOf = ({ keys }: TwoAxes) => (parted(keys, "sentences").length > 1 ? "sentences" : "words");
  const session = new Session(recording, isLive ? hostOf(recording) : null, partsOf, (name) => names.includes(name));
  const { store } = session;
  for (const layer of recording.layers) layer.of &&= visible(layer.of);
  for (const view of names) (document.querySelector(`button[data-set="view=${view}"]`) as HTMLElement).hidden = false;
  store.go(location.hash);
  store.draw();
  session.start();
  const reload = remember(session);
  const notable = new NotableHeads(session);
  effect(() => notable.list());
  effect(() => notable.show());
  const map = new MapView(session);
  const hands: Hands = { session, map: map.first, views: names };
  new SaveMenu(session);
  new Edit(session, reload);
  const controls = new Controls(hands);
  listen(hands);
  const made = names.map((name) => [name, name === "map" ? map : VIEWS[name](session)] as const);
  const views: Partial<Record<State["view"], View>> = Object.fromEntries(made);
  effect(() => controls.show());
  effect(() => {
    const opened = store.drawn.view;
    document.body.dataset.view = opened;
    for (const name of names) byId(`view-${name}`).hidden = name !== opened;
    session.view = views[opened];
  });
  // What is said around the view: the cell, the text, the notes, the legend, what is missing.
  const [prose, pane] = [new Prose(session), new ReadingPane(session)];
  effect(() => {
    byId("damage").hidden = session.trouble === "";
    byId("damage").textContent = session.trouble;
  });
  effect(() => {
    const { drawn } = store;
    const other = drawn.compare === "alone" ? drawn.layer : beside(drawn).layer;
    const said = session.maps && notes(session.recording, drawn.layer, other);
    byId("notes").replaceChildren(...said.map((text) => element("li", {}, text)));
  });
  effect(() => {
    const legend = session.view?.legend?.();
    byId("legend").hidden = !legend;
    if (legend) showLegend(byId("legend"), legend);
  });
  effect(() => pane.draw());
  effect(() => prose.draw());
  // The views last: what stands around them says how much room they have.
  effect(() => {
    const ends = session.view?.draws.map((draw) => untracked(() => effect(draw)));
    return () => ends?.forEach((end) => end());
  });
  byId("failure").textContent = "";
  document.body.classList.add("ready");
  if (isLive) void gather(session);
}

/**
 * Keeps the state in the address, and the address in the state.
 * @returns loads the page once more, at an address
 */
function remember({ store }: Session) {
  let remembering = 0;
  // Not location.hash: the last state may have been put back before this event comes.
  window.addEventListener("hashchange", ({ newURL }) => store.go(new URL(newURL).hash));
  effect(() => {
    const { hover, query, key } = { ...store.drawn };
    // A notebook's frame has no address of its own.
    if (hover || query === null || key === null || location.protocol === "about:") return;
    clearTimeout(remembering);
    remembering = setTimeout(() => history.replaceState(null, "", store.address()), REMEMBERED);
  });
  return (address: string) => {
    clearTimeout(remembering);
    history.replaceState(null, "", address);
    location.reload();
  };
}

/** Asks a live host for the small maps and the kinds of all heads, those of the open layer first. */
async function gather(session: Session): Promise<void> {
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

// The page and its worker run the same script.
if (typeof document === "undefined") {
  const ask = engine((answer) => postMessage(answer));
  onmessage = (event) => void ask(event.data);
  postMessage("here"); // Without this word the page works beside itself.
} else {
  try {
    openPage(readRecording(document.getElementById("recording")?.textContent));
  } catch (error) {
    const reason = error instanceof Error ? error.message : String(error);
    byId("failure").textContent =
      error instanceof Damaged
        ? `This file is damaged: ${reason} Write it again with regard to see its attention.`
        : `The page went wrong: ${reason}`;
    document.body.classList.add("failed");
  }
}
