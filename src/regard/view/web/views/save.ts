/** The Save menu: what the open view shows as PNG, on paper, or its numbers as CSV. */

import { byId, context2d, element, fittedText } from "../dom";
import { drawLegend } from "../map/legend";
import { headNumber, layerName } from "../protocol/recording";
import type { Session } from "../session";
import type { State } from "../state";
import type { Pen } from "../view";
import { titleOf } from "./controls";
import { snapshot } from "./snapshot";

const SHARP = 2; // pixels of a PNG for each pixel of the page
const MARGIN = 16; // pixels around a picture, and under its heading
const HEADING = 92; // pixels of the title, of what is seen, and of the scale
const NARROWEST = 480; // pixels, so that the heading has room
const GIVEN_UP = "Nothing was saved: another view, layer or head was opened meanwhile.";
const NO_NUMBERS = "Nothing was saved: there are no numbers here.";
const TYPES = { png: "image/png", csv: "text/csv" };

export class SaveMenu {
  private menu = byId<HTMLDetailsElement>("save");
  private status: HTMLSpanElement;
  private waiting = 0; // saves that wait

  constructor(private readonly session: Session) {
    this.menu.addEventListener("click", (event) => {
      const kind = (event.target as HTMLElement).dataset.save;
      if (kind) void this.save(kind as keyof typeof TYPES | "print");
    });
    this.menu.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.close();
    });
    // The frame of a notebook may not print.
    if (location.protocol === "about:") this.menu.querySelector("[data-save=print]")?.remove();
    this.status = element("span", { id: "saving", role: "status" });
    this.menu.after(this.status);
    document.addEventListener("click", ({ target }) => {
      if (this.menu.contains(target as Node)) return;
      this.menu.open = false;
      this.say("");
    });
  }

  private close() {
    this.menu.open = false;
    this.menu.querySelector("summary")?.focus();
  }

  private async save(kind: keyof typeof TYPES | "print") {
    this.close();
    if (!(await this.settled())) return this.say(GIVEN_UP);
    if (kind === "print") return print();
    const content = kind === "csv" ? this.csv() : await this.picture();
    if (!content) return this.say(NO_NUMBERS);
    const href = URL.createObjectURL(new Blob([content], { type: TYPES[kind] }));
    const link = element("a", { href, download: `${this.name()}.${kind}` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
  }

  /**
   * Waits, and says so, until all that is seen is there.
   * @returns false: by then something else is seen
   */
  private async settled(): Promise<boolean> {
    const { store } = this.session;
    const place = placeOf(store.state);
    this.say("");
    this.waiting++;
    while (placeOf(store.state) === place && (store.isPending() || !this.session.view?.isSettled())) {
      this.say("Saving …");
      await new Promise(requestAnimationFrame);
    }
    this.waiting--;
    this.say("");
    return placeOf(store.state) === place;
  }

  /** @param text in place of "Saving …" where nothing waits any more */
  private say(text: string) {
    const said = this.waiting > 0 ? "Saving …" : text;
    if (this.status.textContent !== said) this.status.textContent = said;
  }

  /** @returns the view under its heading */
  private async picture(): Promise<Blob | null> {
    const { view, store } = this.session;
    const shown = view?.picture?.() ?? snapshot(byId(`view-${store.state.view}`));
    const inner = Math.max(NARROWEST, Math.ceil(shown.width));
    const [width, height] = [inner + 2 * MARGIN, HEADING + Math.ceil(shown.height) + 3 * MARGIN];
    const canvas = element("canvas", { width: width * SHARP, height: height * SHARP });
    const pen = context2d(canvas);
    pen.scale(SHARP, SHARP);
    pen.fillStyle = this.session.look.ink.ground;
    pen.fillRect(0, 0, width, height);
    pen.translate(MARGIN, MARGIN);
    this.heading(pen, inner);
    pen.translate(0, HEADING + MARGIN);
    shown.draw(pen);
    return new Promise((resolve, reject) =>
      canvas.toBlob((blob) => (blob ? resolve(blob) : reject(new Error("the picture is too large"))), TYPES.png),
    );
  }

  /** The title, what is seen, and the scale. */
  private heading(pen: Pen, width: number) {
    const { look, view } = this.session;
    const { family } = look;
    const seen = [view?.caption?.(), byId("about").textContent].filter(Boolean).join(" · ");
    pen.textAlign = "left";
    pen.textBaseline = "top";
    pen.font = `600 14px ${family}`;
    pen.fillStyle = look.ink.ink;
    pen.fillText(fittedText(pen, byId("title").textContent ?? "", width), 0, 0);
    pen.font = `12px ${family}`;
    pen.fillStyle = look.ink.grey;
    pen.fillText(fittedText(pen, seen, width), 0, 22);
    pen.save();
    pen.translate(0, 44);
    if (view?.legend) drawLegend(pen, view.legend(), look.ink, width);
    pen.restore();
  }

  /** @returns with a mark by which spreadsheets know UTF-8; "": there are no numbers */
  private csv(): string {
    const table = this.session.view?.table?.() ?? [];
    if (table.length === 0) return "";
    return `\ufeff${table.map((cells) => cells.map(field).join(",")).join("\r\n")}\r\n`;
  }

  /** @returns letters, digits and dashes only, whatever the title says */
  private name(): string {
    const { store, layers } = this.session;
    const { view, layer, head } = store.state;
    const title = titleOf(this.session.recording, (text) => text)
      .normalize("NFKD")
      .replace(/[^A-Za-z0-9]+/g, "-")
      .replace(/^-+|-+$/g, "")
      .slice(0, 40);
    return [
      title || "attention",
      view,
      ...(view === "overview" ? [] : [`layer-${layerName(layers, layer)}-head-${headNumber(layers, { layer, head })}`]),
    ].join("-");
  }
}

/** @returns what a save is of */
function placeOf({ view, layer, head }: State): string {
  return [view, layer, head].join();
}

/** A cell of a CSV file. A text that a spreadsheet would take for a formula gets a quote in front. */
function field(value: string | number): string {
  if (typeof value === "number") return String(value);
  const text = /^[=+\-@\t\r]/.test(value) ? `'${value}` : value;
  return `"${text.replaceAll('"', '""')}"`;
}
