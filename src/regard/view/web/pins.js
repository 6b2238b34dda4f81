/**
 * Cells that somebody keeps, each with a note. The address of the page remembers them, so that a
 * link takes them along.
 *
 * @typedef {import("./state.js").State} State
 * @typedef {import("./payload.js").LayerInfo} LayerInfo
 * @typedef {{layer: number, head: number, query: number, key: number, note: string}} Pin
 */

import { byId, element } from "./dom.js";
import { isWhole } from "./held.js";
import { share } from "./numbers.js";
import { named } from "./tokens.js";

const MOST = 12;
const LONGEST = 120; // characters of a note

/**
 * @param {string} text of the address, which may be anything @param {LayerInfo[]} layers
 * @returns {Pin[]} those of cells that are there
 */
export function pinsOf(text, layers) {
  let listed = [];
  try {
    listed = JSON.parse(text || "[]");
  } catch {
    return [];
  }
  if (!Array.isArray(listed)) return [];
  return listed.slice(0, MOST).flatMap((each) => {
    const [layer, head, query, key, note] = Array.isArray(each) ? each : [];
    const info = layers[layer];
    const isThere = (/** @type {unknown} */ at, /** @type {number} */ count) =>
      Number.isInteger(at) && Number(at) >= 0 && Number(at) < count;
    if (!info || ![isThere(head, info.num_heads), isThere(query, info.q_len), isThere(key, info.kv_len)].every(Boolean))
      return [];
    return [{ layer, head, query, key, note: String(note ?? "").slice(0, LONGEST) }];
  });
}

/** @param {Pin[]} pins @returns {string} as the state keeps them */
export function written(pins) {
  if (pins.length === 0) return "";
  return JSON.stringify(pins.map(({ layer, head, query, key, note }) => [layer, head, query, key, note]));
}

export class Pins {
  /** @param {import("./main.js").Page} page */
  constructor(page) {
    this.page = page;
    this.pane = byId("pins");
    this.latest = new AbortController();
  }

  /** @returns {Pin[]} */
  all() {
    return pinsOf(this.page.store.state.pins, this.page.recording.layers);
  }

  /** Pins the cell that is read, or takes its pin away. */
  toggle() {
    const { layer, head } = this.page.store.state;
    const cell = { layer, head, ...this.page.cell() };
    const rest = this.all().filter((pin) => !isSame(pin, cell));
    if (rest.length === MOST) return this.page.words.say(`At most ${MOST} cells can be pinned; take one away first.`);
    const isNew = rest.length === this.all().length;
    this.page.store.set({ pins: written(isNew ? [...rest, { ...cell, note: "" }] : rest) });
  }

  /** @param {Pin} pin @param {string | null} note null: it is taken away */
  change(pin, note) {
    const pins = this.all().flatMap((one) => (!isSame(one, pin) ? [one] : note === null ? [] : [{ ...one, note }]));
    this.page.store.set({ pins: written(pins) });
  }

  /** @param {Set<string>} changed */
  update(changed) {
    if (!changed.has("pins") && !changed.has("hidden")) return;
    this.latest.abort();
    this.latest = new AbortController();
    const pins = this.all();
    this.pane.hidden = pins.length === 0;
    const list = /** @type {HTMLElement} */ (this.pane.querySelector("ul"));
    list.replaceChildren(...pins.map((pin) => this.line(pin, this.latest.signal)));
  }

  /** @param {Pin} pin @param {AbortSignal} signal */
  line(pin, signal) {
    const { layer, head, query, key } = pin;
    const { queries, keys } = this.page.axes(layer);
    const name = `L${layer}H${head} ${named(queries[query], 16)} → ${named(keys[key], 16)}`;
    const go = element("button", { type: "button", title: `Query ${query}, key ${key}` }, name);
    go.addEventListener("click", () => this.page.store.set({ layer, head, heads: "one", query, key, hover: null }));
    const value = element("span", { className: "value" });
    void this.read(pin, value, signal);
    const label = `Note on ${name}`;
    const note = element("input", { value: pin.note, maxLength: LONGEST, placeholder: "Note", "aria-label": label });
    note.addEventListener("change", () => this.change(pin, note.value));
    const away = element("button", { type: "button", "aria-label": `Take away the pin on ${name}` }, "×");
    away.addEventListener("click", () => this.change(pin, null));
    return element("li", {}, go, value, away, note);
  }

  /**
   * Its weight; nothing where only means of blocks are known.
   * @param {Pin} pin @param {HTMLElement} value @param {AbortSignal} signal
   */
  async read({ layer, head, query, key }, value, signal) {
    if (!isWhole(this.page.recording.layers[layer])) return;
    const { hidden } = this.page.store.state;
    try {
      const { values } = await this.page.source.row({ layer, head, hidden }, query, signal);
      if (!signal.aborted) value.textContent = share(values[key]);
    } catch {
      // What is damaged or lost, the map and the sentence say.
    }
  }
}

/** @param {Omit<Pin, "note">} one @param {Omit<Pin, "note">} other @returns {boolean} are they the same cell? */
export function isSame(one, other) {
  return ["layer", "head", "query", "key"].every((name) => one[/** @type {"key"} */ (name)] === other[/** @type {"key"} */ (name)]);
}
