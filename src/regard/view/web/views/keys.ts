/** The keyboard: one table, read by the page and shown as its help. */

import { byId, element } from "../dom";
import type { Page as Whole, Shared } from "../main";
import { bringIntoView, zoomBy } from "../map/travel";
import { WORDS } from "../state";
import { sinksOf } from "../text/tokens";

type Page = Shared & Pick<Whole, "map" | "panes" | "views">;

export interface Binding {
  keys: string[];
  shown?: string; // in the help, if not the keys themselves
  does: string;
  run: (page: Page, key: string, event: { shiftKey: boolean }) => void;
}

/** Rows and columns of a step. */
export const ARROWS: Record<string, [number, number]> = {
  ArrowUp: [-1, 0],
  ArrowDown: [1, 0],
  ArrowLeft: [0, -1],
  ArrowRight: [0, 1],
};

const OF_SEVERAL: Binding[] = [
  { keys: ["[", "]"], does: "previous, next head", run: (page, key) => step(page, "head", key === "[" ? -1 : 1) },
  { keys: ["{", "}"], does: "previous, next layer", run: (page, key) => step(page, "layer", key === "{" ? -1 : 1) },
  {
    keys: ["m"],
    does: "the mean of all heads of the layer",
    run: (page) => page.store.set({ heads: page.store.state.heads === "one" ? "mean" : "one" }),
  },
  { keys: ["c"], does: "compare with another head: beside, difference", run: (page) => turn(page, "compare") },
  { keys: ["p"], does: "pin the cell with a note, or take its pin away", run: (page) => page.panes?.pins.toggle() },
];

const OF_ALL: Binding[] = [
  { keys: Object.keys(ARROWS), shown: "← → ↑ ↓", does: "move the crosshair; ten at once with Shift", run: moveCell },
  {
    keys: ["+", "="],
    shown: "+",
    does: "zoom in; so do the wheel, a double click, two fingers",
    run: (page) => zoomBy(page, 2),
  },
  { keys: ["-"], shown: "−", does: "zoom out", run: (page) => zoomBy(page, 0.5) },
  { keys: ["0"], does: "the whole matrix", run: (page) => page.store.set({ zoom: 1, row: 0, column: 0 }) },
  { keys: ["l"], does: "scale: fitted, 0 to 100 %, log, by row", run: (page) => turn(page, "scale") },
  { keys: ["s"], does: "set sinks (the first and the special tokens) aside and renormalise", run: setSinksAside },
  { keys: ["d"], does: "in the text: where the token looks, or who looks at it", run: (page) => turn(page, "side") },
  { keys: ["t"], does: "fold the text", run: (page) => page.store.set({ folded: !page.store.state.folded }) },
  { keys: ["/"], does: "find a token or a phrase; Enter goes on", run: () => byId("find").focus() },
];

const HELP: Binding = { keys: ["?"], does: "this help", run: openHelp };

/** Opens the help at its beginning. The attribute autofocus would make browsers warn inside a frame. */
function openHelp() {
  byId<HTMLDialogElement>("help").showModal();
  byId("help-title").focus();
}

/**
 * A listener for keys that move inside a part of the page, and there alone.
 * @param moves rows and columns of each key
 */
export function moving(move: (down: number, right: number) => void, moves = ARROWS) {
  return (event: KeyboardEvent) => {
    const step = moves[event.key];
    if (!step || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault(); // `listen` leaves it alone then
    move(...step);
  };
}

/** What the keys do on a page, in the order of its help. */
export function bindingsOf({ panes, views }: Pick<Page, "panes" | "views">): Binding[] {
  const there = WORDS.view.filter((view) => views.has(view));
  const keys = there.map((view) => String(WORDS.view.indexOf(view) + 1));
  const open: Binding = {
    keys,
    shown: keys.join(", "),
    does: there.join(", "),
    run: (page, key) => page.store.set({ view: WORDS.view[Number(key) - 1] }),
  };
  return [...OF_ALL.slice(0, 1), ...(panes ? OF_SEVERAL : []), ...OF_ALL.slice(1), open, HELP];
}

function step({ store }: Page, what: "layer" | "head", by: number) {
  store.set({ [what]: store.state[what] + by });
}

/** The next word that a part of the state may be. */
function turn({ store }: Page, part: "scale" | "compare" | "side") {
  const words: readonly string[] = WORDS[part];
  store.set({ [part]: words[(words.indexOf(store.state[part]) + 1) % words.length] });
}

function moveCell(page: Page, key: string, event: { shiftKey: boolean }) {
  const [down, right] = ARROWS[key];
  const view = page.views.now();
  if (view?.move) return view.move(down, right);
  const far = event.shiftKey ? 10 : 1;
  const { query, key: at } = page.cell();
  page.store.set({ query: query + down * far, key: at + right * far, hover: null });
  bringIntoView(page);
}

/** Sinks go, and a chosen key that is one of them with them. */
function setSinksAside(page: Page) {
  const { hidden, layer, key } = page.store.state;
  const gone = !hidden && key !== null && sinksOf(page.axes(layer).keys).includes(key);
  page.store.set({ hidden: !hidden, key: gone ? null : key });
}

/** @returns does it do something? */
export function press(page: Page, key: string, event: { shiftKey: boolean }): boolean {
  const binding = bindingsOf(page).find(({ keys }) => keys.includes(key));
  binding?.run(page, key, event);
  return binding !== undefined;
}

export function listen(page: Page) {
  document.addEventListener("keydown", (event) => {
    const target = event.target as HTMLElement;
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    if (target.matches("input, select, textarea") || document.querySelector("dialog[open]")) return;
    if (press(page, event.key, event)) event.preventDefault();
  });
}

export function writeHelp(table: HTMLElement, page: Page) {
  table.replaceChildren(
    ...bindingsOf(page).map(({ keys, shown = keys.join("  "), does }) =>
      element("tr", {}, element("th", { scope: "row" }, shown), element("td", {}, does)),
    ),
  );
}
