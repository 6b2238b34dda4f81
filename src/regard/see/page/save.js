/** The Save menu: what the open view shows as PNG or SVG, its numbers as CSV. */

import { paint } from "./painter.js";
import { SvgContext } from "./svg.js";

/**
 * @typedef {import("./main.js").Page} Page
 * @typedef {(string | number)[][]} Table the first row names the columns
 */

const SHARP = 2; // pixels of a PNG for each pixel of the page
const TYPES = { png: "image/png", svg: "image/svg+xml", csv: "text/csv" };

export class SaveMenu {
  /** @param {Page} page */
  constructor(page) {
    this.page = page;
    this.menu = /** @type {HTMLDetailsElement} */ (document.getElementById("save"));
    this.menu.addEventListener("click", (event) => {
      const kind = /** @type {HTMLElement} */ (event.target).dataset.save;
      if (kind) void this.save(/** @type {keyof typeof TYPES} */ (kind));
    });
    this.menu.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.close();
    });
    document.addEventListener("click", ({ target }) => {
      if (!this.menu.contains(/** @type {Node} */ (target))) this.menu.open = false;
    });
  }

  close() {
    this.menu.open = false;
    this.menu.querySelector("summary")?.focus();
  }

  /** @param {keyof typeof TYPES} kind */
  async save(kind) {
    this.close();
    const content = kind === "png" ? await this.png() : kind === "svg" ? this.svg() : this.csv();
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([content], { type: TYPES[kind] }));
    link.download = `${this.name()}.${kind}`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
  }

  /** @returns {Promise<Blob>} */
  png() {
    const { width, height } = this.section().getBoundingClientRect();
    const canvas = document.createElement("canvas");
    canvas.width = Math.ceil(width * SHARP);
    canvas.height = Math.ceil(height * SHARP);
    const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
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
    const { width, height } = this.section().getBoundingClientRect();
    const picture = new SvgContext(Math.ceil(width), Math.ceil(height), this.page.look.ink.ground);
    this.draw(picture.asCanvas());
    return picture.text();
  }

  /** @returns {string} with a mark that tells spreadsheets it is UTF-8 */
  csv() {
    const lines = this.page.views.now()?.table?.() ?? [];
    return `\ufeff${lines.map((cells) => cells.map(field).join(",")).join("\r\n")}\r\n`;
  }

  /** @param {CanvasRenderingContext2D} context */
  draw(context) {
    const view = this.page.views.now();
    if (view?.drawOn) view.drawOn(context);
    else paint(this.section(), context);
  }

  /** @returns {HTMLElement} */
  section() {
    return /** @type {HTMLElement} */ (document.getElementById(`view-${this.page.store.state.view}`));
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

/**
 * A cell of a CSV file. A text that a spreadsheet would take for a formula gets a quote in front.
 * @param {string | number} value @returns {string}
 */
function field(value) {
  if (typeof value === "number") return String(value);
  const text = /^[=+\-@\t\r]/.test(value) ? `'${value}` : value;
  return `"${text.replaceAll('"', '""')}"`;
}
