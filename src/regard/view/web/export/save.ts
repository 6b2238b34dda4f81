/** The Save menu: what the open view shows as PNG or SVG, its numbers as CSV. */

import { byId, context2d, element } from "../dom";
import type { Page } from "../main";
import type { State } from "../state";
import { paint } from "./painter";
import { SvgContext } from "./svg";

/** The first row names the columns. */
export type Table = (string | number)[][];

const SHARP = 2; // pixels of a PNG for each pixel of the page
const MARGIN = 16; // pixels around a picture, and under its heading
const HEAD = 42; // pixels of the title and of the line under it
const GIVEN_UP = "Nothing was saved: another view, layer or head was opened meanwhile.";
const NO_NUMBERS = "Nothing was saved: there are no numbers here.";
const TYPES = { png: "image/png", svg: "image/svg+xml", csv: "text/csv" };

export class SaveMenu {
  menu = byId<HTMLDetailsElement>("save");
  status: HTMLSpanElement;
  waiting = 0; // saves that wait

  constructor(readonly page: Page) {
    this.menu.addEventListener("click", (event) => {
      const kind = (event.target as HTMLElement).dataset.save;
      if (kind) void this.save(kind as keyof typeof TYPES);
    });
    this.menu.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.close();
    });
    this.status = element("span", { id: "saving", role: "status" });
    this.menu.after(this.status);
    document.addEventListener("click", ({ target }) => {
      if (this.menu.contains(target as Node)) return;
      this.menu.open = false;
      this.say("");
    });
  }

  close() {
    this.menu.open = false;
    this.menu.querySelector("summary")?.focus();
  }

  async save(kind: keyof typeof TYPES) {
    this.close();
    if (!(await this.settled())) return this.say(GIVEN_UP);
    if (kind === "csv" && this.table().length === 0) return this.say(NO_NUMBERS);
    const content = kind === "csv" ? this.csv() : await this.pictured(() => (kind === "png" ? this.png() : this.svg()));
    const href = URL.createObjectURL(new Blob([content], { type: TYPES[kind] }));
    const link = element("a", { href, download: `${this.name()}.${kind}` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
  }

  /**
   * Waits, and says so, until all that is seen is there.
   * @returns false: by then something else is seen
   */
  async settled(): Promise<boolean> {
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
  say(text: string) {
    const said = this.waiting > 0 ? "Saving …" : text;
    if (this.status.textContent !== said) this.status.textContent = said;
  }

  table(): Table {
    return this.page.views.now()?.table?.() ?? [];
  }

  /** Draws while the view is as its picture: without what one presses, no higher than its content. */
  pictured<T>(draw: () => T): T {
    const section = this.section();
    section.style.maxHeight = `${section.offsetHeight}px`;
    document.body.classList.add("pictured");
    try {
      return draw();
    } finally {
      document.body.classList.remove("pictured");
      section.style.maxHeight = "";
    }
  }

  png(): Promise<Blob> {
    const { width, height } = this.size();
    const canvas = element("canvas", { width: width * SHARP, height: height * SHARP });
    const context = context2d(canvas);
    context.scale(SHARP, SHARP);
    context.fillStyle = this.page.look.ink.ground;
    context.fillRect(0, 0, width, height);
    this.draw(context);
    return new Promise((resolve, reject) =>
      canvas.toBlob((blob) => (blob ? resolve(blob) : reject(new Error("the picture is too large"))), TYPES.png),
    );
  }

  svg(): string {
    const { width, height } = this.size();
    const picture = new SvgContext(width, height, this.page.look.ink.ground);
    this.draw(picture.asCanvas());
    return picture.text();
  }

  /** @returns with a mark that tells spreadsheets it is UTF-8 */
  csv(): string {
    return `\ufeff${this.table()
      .map((cells) => cells.map(field).join(","))
      .join("\r\n")}\r\n`;
  }

  /** @returns of the picture */
  size(): { width: number; height: number } {
    const { width, height } = this.section().getBoundingClientRect();
    return { width: Math.ceil(width) + 2 * MARGIN, height: Math.ceil(height + this.headHeight()) + 3 * MARGIN };
  }

  /** The title and what is seen, the scale beside them or, where that is narrow, under them. */
  headHeight() {
    const legend = this.legend().offsetHeight;
    return this.isNarrow() ? HEAD + legend : Math.max(HEAD, legend);
  }

  /** @returns is there no room for the scale beside the line under the title? */
  isNarrow(): boolean {
    const ruler = context2d(element("canvas"));
    ruler.font = this.font(12);
    const { width } = ruler.measureText(this.said());
    return width + MARGIN + this.legend().offsetWidth > this.section().offsetWidth;
  }

  /** @param size pixels */
  font(size: number): string {
    return `${size}px ${getComputedStyle(document.body).fontFamily}`;
  }

  /** @returns what is seen, and of what */
  said(): string {
    const about = byId("about").textContent;
    return [this.page.views.now()?.caption?.(), about].filter(Boolean).join(" · ");
  }

  draw(context: CanvasRenderingContext2D) {
    const section = this.section();
    const legend = this.legend();
    const view = this.page.views.now();
    const right = section.offsetWidth - legend.offsetWidth;
    context.translate(MARGIN, MARGIN);
    this.head(context, this.isNarrow() ? section.offsetWidth : right - MARGIN);
    context.save();
    context.translate(this.isNarrow() ? 0 : right, this.isNarrow() ? HEAD : 0);
    paint(legend, context);
    context.restore();
    context.translate(0, this.headHeight() + MARGIN);
    paint(section, context, view?.drawers?.());
  }

  head(context: CanvasRenderingContext2D, width: number) {
    const { ink } = this.page.look;
    const title = byId("title").textContent ?? "";
    context.textAlign = "left";
    context.textBaseline = "top";
    context.font = `600 ${this.font(14)}`;
    context.fillStyle = ink.ink;
    context.fillText(fitted(context, title, width), 0, 0);
    context.font = this.font(12);
    context.fillStyle = ink.grey;
    context.fillText(fitted(context, this.said(), width), 0, 22);
  }

  section(): HTMLElement {
    return byId(`view-${this.page.store.state.view}`);
  }

  /** @returns the scale, where the view shows one */
  legend(): HTMLElement {
    return byId("legend");
  }

  /** @returns letters, digits and dashes only, whatever the title says */
  name(): string {
    const { view, layer, head } = this.page.store.state;
    const title = this.page.recording.title
      .normalize("NFKD")
      .replace(/[^A-Za-z0-9]+/g, "-")
      .replace(/^-+|-+$/g, "")
      .slice(0, 40);
    return [title || "attention", view, ...(view === "overview" ? [] : [`layer-${layer}-head-${head}`])].join("-");
  }
}

/** @returns what a save is of */
function placeOf({ view, layer, head }: State): string {
  return [view, layer, head].join();
}

function fitted(context: CanvasRenderingContext2D, text: string, width: number): string {
  const letters = [...text];
  while (letters.length > 1 && context.measureText(letters.join("")).width > width) letters.splice(-2, 2, "…");
  return letters.join("");
}

/** A cell of a CSV file. A text that a spreadsheet would take for a formula gets a quote in front. */
function field(value: string | number): string {
  if (typeof value === "number") return String(value);
  const text = /^[=+\-@\t\r]/.test(value) ? `'${value}` : value;
  return `"${text.replaceAll('"', '""')}"`;
}
