/**
 * The one state that all views share, and its address. Every change goes through `set`; views are
 * told once per frame which parts changed.
 *
 * @typedef {object} Cell
 * @property {number | null} query null: the one that gives the key the most
 * @property {number | null} key null: the one the query gives the most
 *
 * @typedef {object} State
 * @property {"overview" | "map" | "text" | "steps" | "segments"} view
 * @property {number} layer
 * @property {number} head
 * @property {number | null} query chosen; null for a moment, as in a Cell
 * @property {number | null} key chosen
 * @property {number | null} queryTo the last of several chosen queries, `query` being the first
 * @property {number | null} keyTo the last of several chosen keys
 * @property {Cell | null} hover pointed at; shown instead of the chosen cell while it lasts
 * @property {import("./colours.js").Scale} scale
 * @property {boolean} hidden sinks set aside
 * @property {"looks" | "looked"} side where the token looks, or who looks at it
 * @property {"weight" | "position"} order of the keys in the steps
 * @property {number} steps how many keys the steps show
 * @property {"place" | "kind" | "score" | "entropy" | "sink"} sort of the heads in the overview
 * @property {string} only heads of this kind, its words joined by dashes; "all"
 * @property {"any" | "low" | "middle" | "high"} entropy only heads with so much of it
 * @property {"any" | "low" | "middle" | "high"} sink only heads that give so much to sinks
 * @property {"sentences" | "lines" | "pattern"} parts of the text, in the segments
 * @property {string} pattern that finds the parts
 * @property {"head" | "layer" | "all"} of which heads the segments are the mean
 * @property {"table" | "flows"} form of the segments
 * @property {number} zoom 1: the whole matrix
 * @property {string} heads "one", "mean" of the open layer, or some as layer.head_layer.head
 * @property {"alone" | "beside" | "difference"} compare the open head with another
 * @property {string} with which other, as layer.head
 * @property {boolean} distances the map shows its diagonals
 * @property {number} row first query on the map; a part of one, if the map is moved by less
 * @property {number} column first key on the map
 * @property {"auto" | "light" | "dark"} theme
 * @property {string} pins cells that are kept with a note, as pins.js writes them
 * @property {boolean} folded the text is put away
 *
 * @typedef {(state: State, changed: Set<string>) => void} View
 */

const WORDS = {
  view: ["overview", "map", "text", "steps", "segments"],
  scale: ["fit", "linear", "log", "row"],
  side: ["looks", "looked"],
  order: ["weight", "position"],
  theme: ["auto", "light", "dark"],
  sort: ["place", "kind", "score", "entropy", "sink"],
  entropy: ["any", "low", "middle", "high"],
  sink: ["any", "low", "middle", "high"],
  parts: ["sentences", "lines", "pattern"],
  of: ["head", "layer", "all"],
  form: ["table", "flows"],
  compare: ["alone", "beside", "difference"],
};
/** @type {Record<string, RegExp>} */
const NAMES = { heads: /^(one|mean|\d{1,4}\.\d{1,4}(_\d{1,4}\.\d{1,4}){0,63})$/, with: /^\d{1,4}\.\d{1,4}$/, only: /^[a-z-]{1,30}$/, pattern: /^\P{Cc}{0,200}$/u, pins: /^\P{Cc}{0,4000}$/u };
const ALWAYS = ["layer", "head", "query", "key"];
const COUNTS = [...ALWAYS, "queryTo", "keyTo", "steps", "zoom", "row", "column"];
const FLAGS = ["hidden", "folded", "distances"];

export class Store {
  /**
   * @param {State} state the state of a fresh page
   * @param {(state: State) => State} fitted keeps every number inside the recording
   */
  constructor(state, fitted) {
    this.fresh = state;
    this.fitted = fitted;
    this.state = fitted(state);
    /** @type {View[]} */ this.views = [];
    /** @type {Set<string>} */ this.changed = new Set();
  }

  /** @param {View} view */
  subscribe(view) {
    this.views.push(view);
  }

  /** @param {Partial<State>} patch */
  set(patch) {
    const before = this.state;
    // Who chooses one token has let go of several.
    const next = { ...before, ...patch };
    if (next.query !== before.query && !("queryTo" in patch)) next.queryTo = null;
    if (next.key !== before.key && !("keyTo" in patch)) next.keyTo = null;
    const isOther = ["layer", "head", "query"].some((name) => next[/** @type {"head"} */ (name)] !== before[/** @type {"head"} */ (name)]);
    if (isOther && !("steps" in patch)) next.steps = this.fresh.steps;
    this.state = this.fitted(next);
    const waits = this.changed.size > 0;
    for (const name of /** @type {(keyof State)[]} */ (Object.keys(this.state))) {
      if (this.state[name] !== before[name]) this.changed.add(name);
    }
    if (!waits && this.changed.size > 0) requestAnimationFrame(() => this.tell());
  }

  tell() {
    const changed = this.changed;
    this.changed = new Set();
    for (const view of this.views) view(this.state, changed);
  }

  /** @returns {string} what must be remembered to come back here */
  address() {
    const parts = [];
    for (const name of [...COUNTS, ...Object.keys(WORDS), ...Object.keys(NAMES), ...FLAGS]) {
      const value = this.state[/** @type {keyof State} */ (name)];
      const fresh = this.fresh[/** @type {keyof State} */ (name)];
      const told = ALWAYS.includes(name) ? value !== null : value !== fresh;
      const said = FLAGS.includes(name) ? Number(value) : String(value);
      if (told) parts.push(`${name}=${encodeURIComponent(said)}`);
    }
    return `#${parts.join("&")}`;
  }

  /**
   * Go where an address points; what it does not say, or says wrongly, is as on a fresh page.
   * @param {string} address
   */
  go(address) {
    /** @type {Record<string, unknown>} */ const patch = { ...this.fresh };
    const named = new URLSearchParams(address.replace(/^#/, ""));
    for (const [name, text] of named) {
      if (COUNTS.includes(name) && /^\d{1,9}(\.\d{1,3})?$/.test(text)) patch[name] = Number(text);
      const words = Object.hasOwn(WORDS, name) ? WORDS[/** @type {"scale"} */ (name)] : [];
      if (words.includes(text)) patch[name] = text;
      if (Object.hasOwn(NAMES, name) && NAMES[name].test(text)) patch[name] = text;
      if (FLAGS.includes(name)) patch[name] = text === "1";
    }
    // The fresh cell is one of the fresh head.
    const isElsewhere = ["layer", "head", "query"].some((name) => named.has(name));
    if (named.has("layer") && !named.has("head")) patch.head = 0;
    if (isElsewhere && !named.has("key")) patch.key = null;
    this.set(patch);
  }
}
