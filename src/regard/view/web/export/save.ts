/** The Save menu: what the open view shows as PNG, on paper, or its numbers as CSV. */

import { headNumber, layerName } from "../data/payload";
import { byId, context2d, element } from "../dom";
import type { Page as Whole, Shared } from "../main";
import { drawLegend } from "../map/legend";
import type { State } from "../state";
import { fitted, type Pen } from "./picture";

type Page = Shared & Pick<Whole, "legend" | "views">;

const SHARP = 2; // pixels of a PNG for each pixel of the page
const MARGIN = 16; // pixels around a picture, and under its heading
const HEADING = 92; // pixels of the title, of what is seen, and of the scale
const NARROWEST = 480; // pixels, so that the heading has room
const GIVEN_UP = "Nothing was saved: another view, layer or head was opened meanwhile.";
const NO_NUMBERS = "Nothing was saved: there are no numbers here.";
const NO_PICTURE = "Nothing was saved: there is nothing here to draw.";
const IN_FRAME = "Words have no picture. To print them, write the page to a file: regard.page(recording, path).";
const TYPES = { png: "image/png", csv: "text/csv" };

export class SaveMenu {
  private menu = byId<HTMLDetailsElement>("save");
  private status: HTMLSpanElement;
  private waiting = 0; // saves that wait

  constructor(readonly page: Page) {
    this.menu.addEventListener("click", (event) => {
      const kind = (event.target as HTMLElement).dataset.save;
      if (kind) void this.save(kind as keyof typeof TYPES | "print");
    });
    this.menu.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.close();
    });
    if (location.protocol === "about:") {
      // The frame of a notebook may not print.
      for (const part of this.menu.querySelectorAll("[data-save=print]")) part.remove();
      (this.menu.querySelector("p") as HTMLElement).textContent = IN_FRAME;
    }
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
    if (!content) return this.say(kind === "csv" ? NO_NUMBERS : NO_PICTURE);
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
    const { store, views } = this.page;
    const place = placeOf(store.state);
    this.say("");
    this.waiting++;
    while (placeOf(store.state) === place && (store.changed.size > 0 || !views.now()?.isSettled())) {
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

  /** @returns the view under its heading; null: there is nothing to draw */
  private async picture(): Promise<Blob | null> {
    const shown = this.page.views.now()?.picture?.();
    if (!shown) return null;
    const inner = Math.max(NARROWEST, Math.ceil(shown.width));
    const [width, height] = [inner + 2 * MARGIN, HEADING + Math.ceil(shown.height) + 3 * MARGIN];
    const canvas = element("canvas", { width: width * SHARP, height: height * SHARP });
    const pen = context2d(canvas);
    pen.scale(SHARP, SHARP);
    pen.fillStyle = this.page.look.ink.ground;
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
    const { look, legend, views } = this.page;
    const family = getComputedStyle(document.body).fontFamily;
    const seen = [views.now()?.caption?.(), byId("about").textContent].filter(Boolean).join(" · ");
    pen.textAlign = "left";
    pen.textBaseline = "top";
    pen.font = `600 14px ${family}`;
    pen.fillStyle = look.ink.ink;
    pen.fillText(fitted(pen, byId("title").textContent ?? "", width), 0, 0);
    pen.font = `12px ${family}`;
    pen.fillStyle = look.ink.grey;
    pen.fillText(fitted(pen, seen, width), 0, 22);
    pen.save();
    pen.translate(0, 44);
    drawLegend(pen, legend, look.ink, width);
    pen.restore();
  }

  /** @returns with a mark by which spreadsheets know UTF-8; "": there are no numbers */
  private csv(): string {
    const table = this.page.views.now()?.table?.() ?? [];
    if (table.length === 0) return "";
    return `\ufeff${table.map((cells) => cells.map(field).join(",")).join("\r\n")}\r\n`;
  }

  /** @returns letters, digits and dashes only, whatever the title says */
  private name(): string {
    const { view, layer, head } = this.page.store.state;
    const { layers } = this.page.recording;
    const place = layers[layer].label === undefined ? layerName(layers, layer) : layer;
    const title = this.page.recording.title
      .normalize("NFKD")
      .replace(/[^A-Za-z0-9]+/g, "-")
      .replace(/^-+|-+$/g, "")
      .slice(0, 40);
    return [
      title || "attention",
      view,
      ...(view === "overview" ? [] : [`layer-${place}-head-${headNumber(layers, { layer, head })}`]),
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
