/**
 * Cells that somebody keeps, each with a note. The address of the page remembers them, so that a
 * link takes them along.
 */

import { isWhole } from "../data/block_means";
import { headNumber, layerName, type LayerInfo } from "../data/payload";
import { byId, element } from "../dom";
import type { Page as Whole, Shared } from "../main";
import { share } from "../maths/numbers";
import { named } from "../text/tokens";

type Page = Shared & Pick<Whole, "say">;

export type Pin = { layer: number; head: number; query: number; key: number; note: string };

const MOST = 12;
const LONGEST = 120; // characters of a note

/**
 * @param text of the address, which may be anything
 * @returns those of cells that are there
 */
export function pinsOf(text: string, layers: LayerInfo[]): Pin[] {
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
    const isThere = (at: unknown, count: number) => Number.isInteger(at) && Number(at) >= 0 && Number(at) < count;
    if (!info || ![isThere(head, info.num_heads), isThere(query, info.q_len), isThere(key, info.kv_len)].every(Boolean))
      return [];
    return [{ layer, head, query, key, note: String(note ?? "").slice(0, LONGEST) }];
  });
}

/** @returns as the state keeps them */
export function written(pins: Pin[]): string {
  if (pins.length === 0) return "";
  return JSON.stringify(pins.map(({ layer, head, query, key, note }) => [layer, head, query, key, note]));
}

export class Pins {
  private pane = byId("pins");
  private isNew = false; // the last one waits for its note

  constructor(readonly page: Page) {}

  private all(): Pin[] {
    return pinsOf(this.page.store.state.pins, this.page.recording.layers);
  }

  /** Pins the cell that is read, or takes its pin away. */
  toggle() {
    const { layer, head } = this.page.store.state;
    const cell = { layer, head, ...this.page.cell() };
    const rest = this.all().filter((pin) => !isSame(pin, cell));
    if (rest.length === MOST) return this.page.say(`At most ${MOST} cells can be pinned; take one away first.`);
    this.isNew = rest.length === this.all().length;
    this.page.store.set({ pins: written(this.isNew ? [...rest, { ...cell, note: "" }] : rest) });
  }

  /** @param note null: it is taken away */
  private change(pin: Pin, note: string | null) {
    const pins = this.all().flatMap((one) => (!isSame(one, pin) ? [one] : note === null ? [] : [{ ...one, note }]));
    this.page.store.set({ pins: written(pins) });
  }

  update(changed: Set<string>) {
    if (!changed.has("pins") && !changed.has("hidden")) return;
    const pins = this.all();
    this.pane.hidden = pins.length === 0;
    const list = this.pane.querySelector("ul") as HTMLElement;
    list.replaceChildren(...pins.map((pin) => this.line(pin)));
    if (this.isNew) list.querySelector<HTMLElement>("li:last-child input")?.focus();
    this.isNew = false;
  }

  private line(pin: Pin) {
    const { layer, head, query, key } = pin;
    const { queries, keys } = this.page.axes(layer);
    const { layers } = this.page.recording;
    const name = `L${layerName(layers, layer)}H${headNumber(layers, pin)} ${named(queries[query], 16)} → ${named(keys[key], 16)}`;
    const open = () => this.page.store.set({ layer, head, heads: "one", query, key, hover: null });
    const go = element("button", { type: "button", title: `Query ${query}, key ${key}`, onclick: open }, name);
    const value = element("span", { className: "value" });
    void this.read(pin, value);
    const note: HTMLInputElement = element("input", {
      value: pin.note,
      maxLength: LONGEST,
      placeholder: "Note",
      "aria-label": `Note on ${name}`,
      onchange: () => this.change(pin, note.value),
      onkeydown: ({ key }: KeyboardEvent) => ["Enter", "Escape"].includes(key) && note.blur(),
    });
    const remove = { onclick: () => this.change(pin, null), "aria-label": `Take away the pin on ${name}` };
    const away = element("button", { type: "button", ...remove }, "×");
    return element("li", {}, go, value, away, note);
  }

  /** Its weight; nothing where only means of blocks are known. */
  private async read({ layer, head, query, key }: Pin, value: HTMLElement) {
    if (!isWhole(this.page.recording.layers[layer])) return;
    const { hidden } = this.page.store.state;
    try {
      const { values } = await this.page.source.row({ layer, head, hidden }, query);
      value.textContent = share(values[key]);
    } catch {
      // What is damaged or lost, the map and the sentence say.
    }
  }
}

/** @returns are they the same cell? */
export function isSame(one: Omit<Pin, "note">, other: Omit<Pin, "note">): boolean {
  return ["layer", "head", "query", "key"].every((name) => one[name as "key"] === other[name as "key"]);
}
