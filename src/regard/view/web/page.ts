/** The page: makes the views and keeps them in step. */

import { effect, untracked } from "@preact/signals-core";
import { byId, element } from "./dom";
import { gather, liveHost, menus, MORE_VIEWS, panes } from "./full_page";
import { showLegend } from "./map/legend";
import type { Recording } from "./protocol/recording";
import { Session } from "./session";
import { WORDS, type State } from "./state";
import { parted } from "./text/parts";
import { visible } from "./text/tokens";
import type { View } from "./view";
import { Controls } from "./views/controls";
import { listen, type Hands } from "./views/keys";
import { MapView } from "./views/map_view";
import { notes } from "./views/notes";
import { Prose } from "./views/prose";
import { ReadingPane } from "./views/reading_pane";
import { StepsView } from "./views/steps_view";

const REMEMBERED = 150; // milliseconds between two addresses: a browser allows no more

/** Makes a page of a recording. */
export function openPage(recording: Recording) {
  const isLive = recording.layers.some(({ kind }) => kind === "live");
  const isPictured = recording.grids !== undefined;
  const made = Object.entries(MORE_VIEWS).filter(([name]) => name !== "image" || isPictured);
  const names = WORDS.view.filter((name) => name === "map" || name === "steps" || made.some(([one]) => one === name));
  const session = new Session(
    recording,
    isLive ? liveHost(recording) : null,
    // One sentence has no other parts than its words.
    ({ keys }) => (parted(keys, "sentences").length > 1 ? "sentences" : "words"),
    (name) => names.includes(name),
  );
  const { store } = session;
  for (const layer of recording.layers) layer.of &&= visible(layer.of);
  for (const view of names) (document.querySelector(`button[data-set="view=${view}"]`) as HTMLElement).hidden = false;
  store.go(location.hash);
  store.draw();
  session.start();
  const { reload } = remember(session);
  const more = panes(session);
  const map = new MapView(session);
  const hands: Hands = { session, map: map.first, views: names, more };
  menus(session, reload);
  const controls = new Controls(hands);
  listen(hands);
  const views: Partial<Record<State["view"], View>> = {
    ...Object.fromEntries(made.map(([name, make]) => [name, make(session)])),
    map,
    steps: new StepsView(session),
  };
  effect(() => controls.show());
  effect(() => {
    const opened = store.drawn.view;
    document.body.dataset.view = opened;
    for (const name of names) byId(`view-${name}`).hidden = name !== opened;
    session.view = views[opened];
  });
  drawBeside(session);
  // The views last: what stands around them says how much room they have.
  effect(() => {
    const ends = session.view?.draws.map((draw) => untracked(() => effect(draw)));
    return () => ends?.forEach((end) => end());
  });
  byId("failure").textContent = "";
  document.body.classList.add("ready");
  if (isLive) void gather(session);
}

/** What is said around the view: the cell, the text, the notes, the legend, what is missing. */
function drawBeside(session: Session) {
  const [prose, pane] = [new Prose(session), new ReadingPane(session)];
  effect(() => {
    byId("damage").hidden = session.trouble === "";
    byId("damage").textContent = session.trouble;
  });
  effect(() => {
    const said = session.maps && notes(session.recording, session.store.drawn.layer);
    byId("notes").replaceChildren(...said.map((text) => element("li", {}, text)));
  });
  effect(() => {
    const legend = session.view?.legend?.();
    byId("legend").hidden = !legend;
    if (legend) showLegend(byId("legend"), legend);
  });
  effect(() => pane.draw());
  effect(() => prose.draw());
}

/** Keeps the state in the address, and the address in the state. */
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
  const reload = (address: string) => {
    clearTimeout(remembering);
    history.replaceState(null, "", address);
    location.reload();
  };
  return { reload };
}
