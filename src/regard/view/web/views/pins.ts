/** Cells that somebody keeps, each with a note. The address of the page remembers them, so that a link takes them along. */

import { isSame, LONGEST, MOST_PINS, pinsOf, written, type Pin } from "../data/pinned";
import { byId, element } from "../dom";
import { share } from "../maths/numbers";
import { isWhole, shortName } from "../protocol/recording";
import type { Session } from "../session";
import { named } from "../text/tokens";

export class Pins {
  private pane = byId("pins");
  private isNew = false; // the last one waits for its note

  constructor(private readonly session: Session) {}

  private all(): Pin[] {
    return pinsOf(this.session.store.state.pins, this.session.layers);
  }

  /** Pins the cell that is read, or takes its pin away. */
  toggle() {
    const { layer, head } = this.session.store.state;
    const cell = { layer, head, ...this.session.cell() };
    const rest = this.all().filter((pin) => !isSame(pin, cell));
    if (rest.length === MOST_PINS)
      return void (this.session.said.value = `At most ${MOST_PINS} cells can be pinned; take one away first.`);
    this.isNew = rest.length === this.all().length;
    this.session.store.set({ pins: written(this.isNew ? [...rest, { ...cell, note: "" }] : rest) });
  }

  /** @param note null: it is taken away */
  private change(pin: Pin, note: string | null) {
    const pins = this.all().flatMap((one) => (!isSame(one, pin) ? [one] : note === null ? [] : [{ ...one, note }]));
    this.session.store.set({ pins: written(pins) });
  }

  draw() {
    const { pins: text, hidden } = this.session.store.drawn;
    const pins = pinsOf(text, this.session.layers);
    this.pane.hidden = pins.length === 0;
    const list = this.pane.querySelector("ul") as HTMLElement;
    list.replaceChildren(...pins.map((pin) => this.line(pin, hidden)));
    if (this.isNew) list.querySelector<HTMLElement>("li:last-child input")?.focus();
    this.isNew = false;
  }

  private line(pin: Pin, hidden: boolean) {
    const { layer, head, query, key } = pin;
    const { queries, keys } = this.session.axes(layer);
    const name = `${shortName(this.session.layers, pin)} ${named(queries[query], 16)} → ${named(keys[key], 16)}`;
    const open = () => this.session.store.set({ layer, head, heads: "one", query, key, hover: null });
    const go = element("button", { type: "button", title: `Query ${query}, key ${key}`, onclick: open }, name);
    const value = element("span", { className: "value" });
    void this.read(pin, hidden, value);
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
  private async read({ layer, head, query, key }: Pin, hidden: boolean, value: HTMLElement) {
    if (!isWhole(this.session.layers[layer])) return;
    try {
      const { values } = await this.session.source.row({ layer, head, hidden }, query);
      value.textContent = share(values[key]);
    } catch {
      // What is damaged or lost, the map and the sentence say.
    }
  }
}
