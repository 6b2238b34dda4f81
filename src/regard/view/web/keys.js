/** The keyboard: one table, read by the page and shown as its help. */

import { byId, element } from "./dom.js";
import { sinksOf } from "./tokens.js";
import { bringIntoView, zoomBy } from "./travel.js";

/**
 * @typedef {import("./main.js").Page} Page
 *
 * @typedef {object} Binding
 * @property {string[]} keys
 * @property {string} shown
 * @property {string} does
 * @property {(page: Page, key: string, event: KeyboardEvent) => void} run
 */

/** Rows and columns of a step. @type {Record<string, [number, number]>} */
export const ARROWS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
/** @type {Record<string, import("./state.js").State["view"]>} */
const VIEW_OF_KEY = { 1: "overview", 2: "map", 3: "text", 4: "steps", 5: "segments" };
const SCALES = /** @type {const} */ (["fit", "linear", "log", "row"]);

const COMPARISONS = /** @type {const} */ (["alone", "beside", "difference"]);

/** @type {Binding[]} */
export const BINDINGS = [
  {
    keys: Object.keys(ARROWS),
    shown: "← → ↑ ↓",
    does: "move the crosshair, ten at once with Shift; in the text, choose several with Shift",
    run: moveCell,
  },
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
  { keys: ["+", "="], shown: "+", does: "zoom in; so do the wheel, a double click, two fingers", run: (page) => zoomBy(page, 2) },
  { keys: ["-"], shown: "−", does: "zoom out", run: (page) => zoomBy(page, 0.5) },
  {
    keys: ["0"],
    shown: "0",
    does: "the whole matrix",
    run: (page) => page.store.set({ zoom: 1, row: 0, column: 0 }),
  },
  {
    keys: ["g"],
    shown: "g",
    does: "the diagonal and the lines of distance 1, 10, 100 …",
    run: (page) => page.store.set({ distances: !page.store.state.distances }),
  },
  {
    keys: ["m"],
    shown: "m",
    does: "the mean of all heads of the layer",
    run: (page) => page.store.set({ heads: page.store.state.heads === "one" ? "mean" : "one" }),
  },
  { keys: ["c"], shown: "c", does: "compare with another head: beside, difference", run: nextComparison },
  { keys: ["l"], shown: "l", does: "scale: fitted, 0 to 100 %, log, by row", run: nextScale },
  {
    keys: ["s"],
    shown: "s",
    does: "set sinks (the first and the special tokens) aside and renormalise",
    run: setSinksAside,
  },
  { keys: ["d"], shown: "d", does: "in the text: where the token looks, or who looks at it", run: turn },
  { keys: ["p"], shown: "p", does: "pin the cell with a note, or take its pin away", run: (page) => page.pins.toggle() },
  {
    keys: ["t"],
    shown: "t",
    does: "fold the text",
    run: (page) => page.store.set({ folded: !page.store.state.folded }),
  },
  {
    keys: ["/"],
    shown: "/",
    does: "find a token or a phrase; Enter goes on",
    run: () => byId("find").focus(),
  },
  {
    keys: Object.keys(VIEW_OF_KEY),
    shown: "1 – 5",
    does: "overview, map, text, steps, segments",
    run: (page, key) => page.store.set({ view: VIEW_OF_KEY[key] }),
  },
  { keys: ["?"], shown: "?", does: "this help", run: (page) => page.help() },
];

/** @param {Page} page @param {string} key @param {KeyboardEvent} event */
function moveCell(page, key, event) {
  const [down, right] = ARROWS[key];
  const view = page.views.now();
  if (view?.move) return view.move(down, right, event.shiftKey);
  const far = event.shiftKey ? 10 : 1;
  const { query, key: at } = page.cell();
  page.store.set({ query: query + down * far, key: at + right * far, hover: null });
  bringIntoView(page);
}

/** @param {Page} page */
function nextScale(page) {
  const at = SCALES.indexOf(page.store.state.scale);
  page.store.set({ scale: SCALES[(at + 1) % SCALES.length] });
}

/** @param {Page} page */
function nextComparison(page) {
  const at = COMPARISONS.indexOf(page.store.state.compare);
  page.store.set({ compare: COMPARISONS[(at + 1) % COMPARISONS.length] });
}

/** Sinks go, and a chosen key that is one of them with them. @param {Page} page */
function setSinksAside(page) {
  const { hidden, layer, key } = page.store.state;
  const gone = !hidden && key !== null && sinksOf(page.axes(layer).keys).includes(key);
  page.store.set({ hidden: !hidden, key: gone ? null : key });
}

/** @param {Page} page */
function turn(page) {
  page.store.set({ side: page.store.state.side === "looks" ? "looked" : "looks" });
}

/** @param {Page} page */
export function listen(page) {
  document.addEventListener("keydown", (event) => {
    const target = /** @type {HTMLElement} */ (event.target);
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    if (target.matches("input, select, textarea") || document.querySelector("dialog[open]")) return;
    const binding = BINDINGS.find(({ keys }) => keys.includes(event.key));
    if (!binding) return;
    event.preventDefault();
    binding.run(page, event.key, event);
  });
}

/** @param {HTMLElement} table */
export function writeHelp(table) {
  table.replaceChildren(
    ...BINDINGS.map(({ shown, does }) =>
      element("tr", {}, element("th", { scope: "row" }, shown), element("td", {}, does)),
    ),
  );
}
