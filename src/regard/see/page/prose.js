/** The text as people read it; the tokens that give or take attention are tinted. */

import { level } from "./colours.js";
import { share } from "./numbers.js";
import { inProse } from "./tokens.js";

/**
 * @typedef {import("./tokens.js").Token} Token
 * @typedef {import("./reading.js").Reading} Reading
 * @typedef {HTMLSpanElement} Span
 */

export class Prose {
  /**
   * @param {HTMLElement} pane
   * @param {import("./main.js").Page} page
   */
  constructor(pane, page) {
    this.page = page;
    this.pane = pane;
    this.caption = /** @type {HTMLElement} */ (document.getElementById("tint"));
    /** @type {Span[]} */ this.queries = [];
    /** @type {Span[]} */ this.keys = [];
    /** @type {Token[] | null} */ this.shown = null;
    /** @type {Uint8Array} */ this.tints = new Uint8Array(0);
    /** @type {Span[]} */ this.lastTinted = [];
    /** @type {string[]} */ this.lastCss = [];
    pane.addEventListener("pointermove", (event) => this.point(event));
    pane.addEventListener("pointerleave", () => page.hover(null));
    pane.addEventListener("click", (event) => {
      const cell = this.cellAt(event);
      if (cell) page.choose(cell);
    });
  }

  /** @param {{queries: Token[], keys: Token[]}} axes writes the text, once or twice */
  write({ queries, keys }) {
    if (this.shown === keys) return;
    this.shown = keys;
    this.pane.replaceChildren();
    const one = queries === keys;
    this.queries = this.paragraph(queries, one ? "The text" : "Queries: the text that looks");
    this.keys = one ? this.queries : this.paragraph(keys, "Keys: the text that is looked at");
    this.tints = new Uint8Array(Math.max(queries.length, keys.length));
  }

  /** @param {Token[]} tokens @param {string} name @returns {Span[]} */
  paragraph(tokens, name) {
    const paragraph = document.createElement("p");
    paragraph.dir = "auto";
    paragraph.setAttribute("aria-label", name);
    const spans = tokens.map((token, i) => {
      const [, space, word] = /** @type {RegExpMatchArray} */ (inProse(token).match(/^(\s*)(.*)$/s));
      const span = document.createElement("span");
      span.textContent = word || space;
      span.dataset.at = String(i);
      if (token.special) span.className = "special";
      // The space before a word is not tinted; a special token has none of its own.
      const apart = token.special || tokens[i - 1]?.special ? " " : "";
      paragraph.append(word ? space || apart : apart, span);
      return span;
    });
    if (this.pane.childElementCount > 0 || name !== "The text") {
      const heading = document.createElement("h3");
      heading.textContent = name;
      this.pane.append(heading);
    }
    this.pane.append(paragraph);
    return spans;
  }

  /** @param {Event} event @returns {import("./state.js").Cell | null} */
  cellAt(event) {
    const span = /** @type {HTMLElement} */ (event.target).closest?.("[data-at]");
    if (!span) return null;
    const at = Number(/** @type {HTMLElement} */ (span).dataset.at);
    const isQuery = this.queries[at] === span;
    const isKey = this.keys[at] === span;
    const asQuery = isQuery && (!isKey || this.page.store.state.side === "looks");
    return asQuery ? { query: at, key: null } : { query: null, key: at };
  }

  /** @param {Event} event */
  point(event) {
    this.page.hover(this.cellAt(event));
  }

  /** @param {Reading} reading */
  read(reading) {
    const { scale, side } = this.page.store.state;
    const looks = side === "looks";
    const weights = looks ? reading.row : reading.column;
    if (!weights) return;
    const { css, onTop } = this.page.look.ramp;
    const tinted = looks ? this.keys : this.queries;
    // A tint points at words; on a log scale nearly every word would have one.
    const relative = scale !== "linear";
    const highest = relative ? weights.reduce((a, b) => Math.max(a, b), 0) : 1;
    const caption = `Full tint: ${share(highest)}${relative ? ", the strongest" : ""}`;
    if (this.lastTinted !== tinted || this.lastCss !== css) this.clear();
    this.caption.textContent = caption;
    [this.lastTinted, this.lastCss] = [tinted, css];
    tinted.forEach((span, i) => {
      const tint = level(weights[i], "row", 0, highest);
      if (tint === this.tints[i]) return;
      this.tints[i] = tint;
      span.style.backgroundColor = tint === 0 ? "" : css[tint];
      span.style.color = tint === 0 ? "" : onTop[tint];
    });
    this.mark(
      looks ? this.queries[reading.query] : this.keys[reading.key],
      looks ? this.keys[reading.key] : this.queries[reading.query],
    );
  }

  clear() {
    for (const span of [...this.queries, ...this.keys]) {
      span.removeAttribute("style");
      span.classList.remove("chosen", "other");
    }
    this.caption.textContent = "";
    this.tints.fill(0);
  }

  /** @param {Span} chosen @param {Span} other */
  mark(chosen, other) {
    for (const span of this.pane.querySelectorAll(".chosen, .other"))
      span.classList.remove("chosen", "other");
    other.classList.add("other");
    chosen.classList.add("chosen");
    if (!this.page.store.state.hover) this.scrollTo(chosen);
  }

  /** @param {Span} span */
  scrollTo(span) {
    const [box, view] = [span.getBoundingClientRect(), this.pane.getBoundingClientRect()];
    if (box.top < view.top) this.pane.scrollTop -= view.top - box.top + 40;
    if (box.bottom > view.bottom) this.pane.scrollTop += box.bottom - view.bottom + 40;
  }
}

/**
 * The next token, after one, at which a phrase begins; the phrase may run over several tokens.
 * @param {Token[]} tokens @param {string} phrase @param {number} after
 * @returns {number | null}
 */
export function find(tokens, phrase, after) {
  const wanted = phrase.trim().toLowerCase();
  if (wanted === "") return null;
  const starts = [];
  let text = "";
  for (const token of tokens) {
    starts.push(text.length);
    text += token.text.toLowerCase();
  }
  let at = text.indexOf(wanted, starts[after + 1] ?? text.length);
  if (at < 0) at = text.indexOf(wanted);
  if (at < 0) return null;
  const next = starts.findIndex((start) => start > at);
  return next < 0 ? tokens.length - 1 : next - 1;
}
