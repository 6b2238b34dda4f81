/** The Save menu: what the open view shows as PNG or SVG, its numbers as CSV. */

import { byId, context2d, element } from "./dom.js";
import { paint } from "./painter.js";
import { SvgContext } from "./svg.js";

/**
 * @typedef {import("./main.js").Page} Page
 * @typedef {(string | number)[][]} Table the first row names the columns
 */

const SHARP = 2; // pixels of a PNG for each pixel of the page
const MARGIN = 16; // pixels around a picture, and under its heading
const HEAD = 42; // pixels of the title and of the line under it
const GIVEN_UP = "Nothing was saved: another view, layer or head was opened meanwhile.";
const NO_NUMBERS = "Nothing was saved: there are no numbers here.";
const TYPES = { png: "image/png", svg: "image/svg+xml", csv: "text/csv" };

export class SaveMenu {
  /** @param {Page} page */
  constructor(page) {
    this.page = page;
    this.menu = /** @type {HTMLDetailsElement} */ (byId("save"));
    this.menu.addEventListener("click", (event) => {
      const kind = /** @type {HTMLElement} */ (event.target).dataset.save;
      if (kind) void this.save(/** @type {keyof typeof TYPES} */ (kind));
    });
    this.menu.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.close();
    });
    this.status = element("span", { id: "saving", role: "status" });
    this.menu.after(this.status);
    this.waiting = 0; // saves that wait
    document.addEventListener("click", ({ target }) => {
      if (this.menu.contains(/** @type {Node} */ (target))) return;
      this.menu.open = false;
      this.say("");
    });
  }

  close() {
    this.menu.open = false;
    this.menu.querySelector("summary")?.focus();
  }

  /** @param {keyof typeof TYPES} kind */
  async save(kind) {
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
   * @returns {Promise<boolean>} false: by then something else is seen
   */
  async settled() {
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

  /** @param {string} text in place of "Saving …" where nothing waits any more */
  say(text) {
    const said = this.waiting > 0 ? "Saving …" : text;
    if (this.status.textContent !== said) this.status.textContent = said;
  }

  /** @returns {Table} */
  table() {
    return this.page.views.now()?.table?.() ?? [];
  }

  /**
   * Draws while the view is as its picture: without what one presses, no higher than its content.
   * @template T @param {() => T} draw @returns {T}
   */
  pictured(draw) {
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

  /** @returns {Promise<Blob>} */
  png() {
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

  /** @returns {string} */
  svg() {
    const { width, height } = this.size();
    const picture = new SvgContext(width, height, this.page.look.ink.ground);
    this.draw(picture.asCanvas());
    return picture.text();
  }

  /** @returns {string} with a mark that tells spreadsheets it is UTF-8 */
  csv() {
    return `\ufeff${this.table().map((cells) => cells.map(field).join(",")).join("\r\n")}\r\n`;
  }

  /** @returns {{width: number, height: number}} of the picture */
  size() {
    const { width, height } = this.section().getBoundingClientRect();
    return { width: Math.ceil(width) + 2 * MARGIN, height: Math.ceil(height + this.headHeight()) + 3 * MARGIN };
  }

  /** The title and what is seen, the scale beside them or, where that is narrow, under them. */
  headHeight() {
    const legend = this.legend().offsetHeight;
    return this.isNarrow() ? HEAD + legend : Math.max(HEAD, legend);
  }

  /** @returns {boolean} is there no room for the scale beside the line under the title? */
  isNarrow() {
    const ruler = context2d(element("canvas"));
    ruler.font = this.font(12);
    const { width } = ruler.measureText(this.said());
    return width + MARGIN + this.legend().offsetWidth > this.section().offsetWidth;
  }

  /** @param {number} size pixels @returns {string} */
  font(size) {
    return `${size}px ${getComputedStyle(document.body).fontFamily}`;
  }

  /** @returns {string} what is seen, and of what */
  said() {
    const about = byId("about").textContent;
    return [this.page.views.now()?.caption?.(), about].filter(Boolean).join(" · ");
  }

  /** @param {CanvasRenderingContext2D} context */
  draw(context) {
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

  /** @param {CanvasRenderingContext2D} context @param {number} width */
  head(context, width) {
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

  /** @returns {HTMLElement} */
  section() {
    return byId(`view-${this.page.store.state.view}`);
  }

  /** @returns {HTMLElement} the scale, where the view shows one */
  legend() {
    return byId("legend");
  }

  /** @returns {string} letters, digits and dashes only, whatever the title says */
  name() {
    const { view, layer, head } = this.page.store.state;
    const title = this.page.recording.title
      .normalize("NFKD")
      .replace(/[^A-Za-z0-9]+/g, "-")
      .replace(/^-+|-+$/g, "")
      .slice(0, 40);
    return [title || "attention", view, ...(view === "overview" ? [] : [`layer-${layer}-head-${head}`])].join("-");
  }
}

/** @param {import("./state.js").State} state @returns {string} what a save is of */
function placeOf({ view, layer, head }) {
  return [view, layer, head].join();
}

/** @param {CanvasRenderingContext2D} context @param {string} text @param {number} width @returns {string} */
function fitted(context, text, width) {
  const letters = [...text];
  while (letters.length > 1 && context.measureText(letters.join("")).width > width) letters.splice(-2, 2, "…");
  return letters.join("");
}

/**
 * A cell of a CSV file. A text that a spreadsheet would take for a formula gets a quote in front.
 * @param {string | number} value @returns {string}
 */
function field(value) {
  if (typeof value === "number") return String(value);
  const text = /^[=+\-@\t\r]/.test(value) ? `'${value}` : value;
  return `"${text.replaceAll('"', '""')}"`;
}
