/** The keyboard: one table, read by the page and shown as its help. */

import { byId, element } from "../dom";
import type { Page } from "../main";
import { bringIntoView, zoomBy } from "../map/travel";
import type { State } from "../state";
import { sinksOf } from "../text/tokens";

export interface Binding {
  keys: string[];
  shown: string;
  does: string;
  run: (page: Page, key: string, event: KeyboardEvent) => void;
}

/** Rows and columns of a step. */
export const ARROWS: Record<string, [number, number]> = {
  ArrowUp: [-1, 0],
  ArrowDown: [1, 0],
  ArrowLeft: [0, -1],
  ArrowRight: [0, 1],
};
const VIEW_OF_KEY: Record<string, State["view"]> = { 1: "overview", 2: "map", 3: "text", 4: "steps", 5: "segments" };
const SCALES = ["fit", "linear", "log", "row"] as const;

const COMPARISONS = ["alone", "beside", "difference"] as const;

const OF_SEVERAL: Binding[] = [
  {
    keys: ["[", "]"],
    shown: "[  ]",
    does: "previous, next head",
    run: (page, key) => page.step("head", key === "[" ? -1 : 1),
  },
  {
    keys: ["{", "}"],
    shown: "{  }",
    does: "previous, next layer",
    run: (page, key) => page.step("layer", key === "{" ? -1 : 1),
  },
  {
    keys: ["m"],
    shown: "m",
    does: "the mean of all heads of the layer",
    run: (page) => page.store.set({ heads: page.store.state.heads === "one" ? "mean" : "one" }),
  },
  { keys: ["c"], shown: "c", does: "compare with another head: beside, difference", run: nextComparison },
  {
    keys: ["p"],
    shown: "p",
    does: "pin the cell with a note, or take its pin away",
    run: (page) => page.panes?.pins.toggle(),
  },
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
  { keys: ["0"], shown: "0", does: "the whole matrix", run: (page) => page.store.set({ zoom: 1, row: 0, column: 0 }) },
  { keys: ["l"], shown: "l", does: "scale: fitted, 0 to 100 %, log, by row", run: nextScale },
  {
    keys: ["s"],
    shown: "s",
    does: "set sinks (the first and the special tokens) aside and renormalise",
    run: setSinksAside,
  },
  { keys: ["d"], shown: "d", does: "in the text: where the token looks, or who looks at it", run: turn },
  {
    keys: ["t"],
    shown: "t",
    does: "fold the text",
    run: (page) => page.store.set({ folded: !page.store.state.folded }),
  },
  { keys: ["/"], shown: "/", does: "find a token or a phrase; Enter goes on", run: () => byId("find").focus() },
];

const HELP: Binding = { keys: ["?"], shown: "?", does: "this help", run: (page) => page.help() };

/** What the keys do on a page, in the order of its help. */
export function bindingsOf({ panes, views }: Pick<Page, "panes" | "views">): Binding[] {
  const there = Object.entries(VIEW_OF_KEY).filter(([, view]) => views.has(view));
  const [keys, names] = [there.map(([key]) => key), there.map(([, view]) => view)];
  const open: Binding = {
    keys,
    shown: keys.join(", "),
    does: names.join(", "),
    run: (page, key) => page.store.set({ view: VIEW_OF_KEY[key] }),
  };
  return [...OF_ALL.slice(0, 1), ...(panes ? OF_SEVERAL : []), ...OF_ALL.slice(1), open, HELP];
}

function moveCell(page: Page, key: string, event: KeyboardEvent) {
  const [down, right] = ARROWS[key];
  const view = page.views.now();
  if (view?.move) return view.move(down, right);
  const far = event.shiftKey ? 10 : 1;
  const { query, key: at } = page.cell();
  page.store.set({ query: query + down * far, key: at + right * far, hover: null });
  bringIntoView(page);
}

function nextScale(page: Page) {
  const at = SCALES.indexOf(page.store.state.scale);
  page.store.set({ scale: SCALES[(at + 1) % SCALES.length] });
}

function nextComparison(page: Page) {
  const at = COMPARISONS.indexOf(page.store.state.compare);
  page.store.set({ compare: COMPARISONS[(at + 1) % COMPARISONS.length] });
}

/** Sinks go, and a chosen key that is one of them with them. */
function setSinksAside(page: Page) {
  const { hidden, layer, key } = page.store.state;
  const gone = !hidden && key !== null && sinksOf(page.axes(layer).keys).includes(key);
  page.store.set({ hidden: !hidden, key: gone ? null : key });
}

function turn(page: Page) {
  page.store.set({ side: page.store.state.side === "looks" ? "looked" : "looks" });
}

export function listen(page: Page) {
  document.addEventListener("keydown", (event) => {
    const target = event.target as HTMLElement;
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    if (target.matches("input, select, textarea") || document.querySelector("dialog[open]")) return;
    const binding = bindingsOf(page).find(({ keys }) => keys.includes(event.key));
    if (!binding) return;
    event.preventDefault();
    binding.run(page, event.key, event);
  });
}

export function writeHelp(table: HTMLElement, page: Page) {
  table.replaceChildren(
    ...bindingsOf(page).map(({ shown, does }) =>
      element("tr", {}, element("th", { scope: "row" }, shown), element("td", {}, does)),
    ),
  );
}
