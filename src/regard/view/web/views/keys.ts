/** The keyboard: one table, read by the page and shown as its help. */

import { sinksOf } from "../data/axes";
import { isOfBlocks } from "../data/compare";
import { ARROWS, byId, element } from "../dom";
import type { HeadMap } from "../map/map";
import { bringIntoView, zoomBy } from "../map/travel";
import type { Session } from "../session";
import { WORDS, type State } from "../state";

/** What the keys act upon. */
export interface Hands {
  session: Session;
  map: HeadMap;
  views: State["view"][]; // that this page has
}

interface Binding {
  keys: string[];
  shown?: string; // in the help, if not the keys themselves
  does: string;
  run: (hands: Hands, key: string, event: { shiftKey: boolean }) => void;
}

const OF_ALL: Binding[] = [
  { keys: Object.keys(ARROWS), shown: "← → ↑ ↓", does: "move the crosshair; ten at once with Shift", run: moveCell },
  { keys: ["[", "]"], does: "previous, next head", run: (hands, key) => step(hands, "head", key === "[" ? -1 : 1) },
  { keys: ["{", "}"], does: "previous, next layer", run: (hands, key) => step(hands, "layer", key === "{" ? -1 : 1) },
  {
    keys: ["m"],
    does: "the mean of all heads of the layer",
    run: ({ session: { store } }) => store.set({ heads: store.state.heads === "one" ? "mean" : "one" }),
  },
  { keys: ["c"], does: "compare with another head: beside, difference", run: (hands) => turn(hands, "compare") },
  {
    keys: ["+", "="],
    shown: "+",
    does: "zoom in; so do the wheel, a double click, two fingers",
    run: ({ map }) => zoomBy(map, 2),
  },
  { keys: ["-"], shown: "−", does: "zoom out", run: ({ map }) => zoomBy(map, 0.5) },
  { keys: ["0"], does: "the whole matrix", run: ({ session }) => session.store.set({ zoom: 1, row: 0, column: 0 }) },
  { keys: ["l"], does: "scale: fitted, 0 to 100 %, log", run: (hands) => turn(hands, "scale") },
  { keys: ["s"], does: "set sinks (the first and the special tokens) aside and renormalise", run: setSinksAside },
  { keys: ["d"], does: "in the text: where the token looks, or who looks at it", run: (hands) => turn(hands, "side") },
  { keys: ["t"], does: "fold the text", run: ({ session: { store } }) => store.set({ folded: !store.state.folded }) },
  { keys: ["/"], does: "find a token or a phrase; Enter goes on", run: () => byId("find").focus() },
];

const HELP: Binding = { keys: ["?"], does: "this help", run: openHelp };

/** Opens the help at its beginning. The attribute autofocus would make browsers warn inside a frame. */
function openHelp() {
  byId<HTMLDialogElement>("help").showModal();
  byId("help-title").focus();
}

/** What the keys do on a page, in the order of its help. */
export function bindingsOf({ views }: Pick<Hands, "views">): Binding[] {
  const keys = views.map((view) => String(WORDS.view.indexOf(view) + 1));
  const open: Binding = {
    keys,
    shown: keys.join(", "),
    does: views.join(", "),
    run: ({ session }, key) => session.store.set({ view: WORDS.view[Number(key) - 1] }),
  };
  return [...OF_ALL, open, HELP];
}

function step({ session: { store } }: Hands, what: "layer" | "head", by: number) {
  store.set({ [what]: store.state[what] + by });
}

/** The next word that a part of the state may be here. */
function turn({ session: { store } }: Hands, part: "scale" | "compare" | "side") {
  const words = WORDS[part].filter((word) => store.takes({ [part]: word }));
  store.set({ [part]: words[(words.findIndex((word) => word === store.state[part]) + 1) % words.length] });
}

function moveCell({ session, map }: Hands, key: string, event: { shiftKey: boolean }) {
  const [down, right] = ARROWS[key];
  if (session.view?.move) return session.view.move(down, right);
  const far = event.shiftKey ? 10 : 1;
  const { query, key: at } = session.cell();
  session.choose({ query: query + down * far, key: at + right * far });
  bringIntoView(map);
}

/** Sinks go, and a chosen key that is one of them with them. */
function setSinksAside({ session }: Hands) {
  const { hidden, layer, key } = session.store.state;
  if (isOfBlocks(session.store.state, session.layers)) return;
  const gone = !hidden && key !== null && sinksOf(session.axes(layer).keys).includes(key);
  session.store.set({ hidden: !hidden, key: gone ? null : key });
}

/** @returns does it do something? */
export function press(hands: Hands, key: string, event: { shiftKey: boolean }): boolean {
  const binding = bindingsOf(hands).find(({ keys }) => keys.includes(key));
  binding?.run(hands, key, event);
  return binding !== undefined;
}

export function listen(hands: Hands) {
  document.addEventListener("keydown", (event) => {
    const target = event.target as HTMLElement;
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    if (target.matches("input, select, textarea") || document.querySelector("dialog[open]")) return;
    if (press(hands, event.key, event)) event.preventDefault();
  });
  byId("keys").replaceChildren(
    ...bindingsOf(hands).map(({ keys, shown = keys.join("  "), does }) =>
      element("tr", {}, element("th", { scope: "row" }, shown), element("td", {}, does)),
    ),
  );
}
