/**
 * Tokens as flowing prose, however many: the text is cut into blocks at its own paragraphs and
 * sentences, and only the blocks near the screen are built.
 */

import { level, tintOf } from "./colours.js";
import { element } from "./dom.js";
import { inProse } from "./tokens.js";

/**
 * @typedef {import("./tokens.js").Token} Token
 * @typedef {import("./colours.js").Ramp} Ramp
 *
 * @typedef {object} Block
 * @property {number} first
 * @property {number} end
 * @property {HTMLElement} paragraph
 * @property {HTMLSpanElement[] | null} spans null: not built
 */

const LABEL_LETTER = 6; // pixels of a letter above a token
const WHOLE = 512; // tokens that are one block
const PARAGRAPH = 192; // tokens of a block that may end at a line break,
const SENTENCE = 320; // at the end of a sentence; and anywhere after WHOLE
const NEAR = 800; // pixels around the screen that are built
const FAR = 120; // pixels out of sight that are no mere step
const MARGIN = 40; // pixels kept between a token and the edge
const CHARACTERS = 60; // of a line, for the height of a block that is not built yet
const SENTENCE_END = /[.!?\u2026]["'\u201d\u2019)\]]*\s*$/;

/**
 * Does a sentence end with this token?
 * @param {Token[]} tokens @param {number} at @returns {boolean}
 */
export function endsSentence(tokens, at) {
  const { text, special } = tokens[at];
  const next = tokens[at + 1];
  return special || !next || SENTENCE_END.test(text) || breaksBetween(text, next.text);
}

/** @param {string} text @param {string} next @returns {boolean} */
function breaksBetween(text, next) {
  return /\n\s*$/.test(text) || /^\s*\n/.test(next);
}

/** @param {Token[]} tokens @param {number} first @param {number} end @returns {number[]} where blocks begin */
function cuts(tokens, first, end) {
  const starts = [first];
  if (end - first <= WHOLE) return starts;
  for (let at = first + 1; at < end; at++) {
    const length = at - starts[starts.length - 1];
    const breaks = breaksBetween(tokens[at - 1].text, tokens[at].text);
    if (
      (length >= PARAGRAPH && breaks) ||
      (length >= SENTENCE && endsSentence(tokens, at - 1)) ||
      length >= WHOLE
    )
      starts.push(at);
  }
  return starts;
}

export class Flow {
  /**
   * @param {HTMLElement} scroller what scrolls the text; the text is added to it
   * @param {Token[]} tokens @param {string} name
   * @param {number} [first] @param {number} [end]
   */
  constructor(scroller, tokens, name, first = 0, end = tokens.length) {
    this.scroller = scroller;
    this.tokens = tokens;
    this.tints = new Float32Array(tokens.length); // levels of the ramp; 0: no tint; NaN: no number
    /** @type {Ramp | null} */ this.ramp = null;
    /** @type {Map<string, [number, number]>} */ this.marks = new Map();
    /** @type {Map<number, string>} */ this.labels = new Map();
    /** @type {Flow | null} */ this.twin = null; // the same text beside it, built as this one is
    /** @type {IntersectionObserver | null} */ this.observer = null; // null: all is built
    const holder = element("div", { className: "flow", role: "group", "aria-label": name });
    const starts = cuts(tokens, first, end);
    /** @type {Block[]} */ this.blocks = starts.map((start, i) => ({
      first: start,
      end: starts[i + 1] ?? end,
      paragraph: element("p", { dir: "auto" }),
      spans: null,
    }));
    holder.append(...this.blocks.map(({ paragraph }) => paragraph));
    scroller.append(holder);
    if (this.blocks.length === 1) this.build(this.blocks[0]);
    else this.buildNear();
  }

  /** Blocks come and go as they are scrolled. */
  buildNear() {
    // A browser that holds the text itself does so once for each of two that scroll together.
    this.scroller.style.overflowAnchor = "none";
    const byElement = new Map(this.blocks.map((block) => [block.paragraph, block]));
    const observer = (this.observer = new IntersectionObserver(
      (entries) =>
        this.holding(() => {
          for (const { target, isIntersecting } of entries) {
            const block = /** @type {Block} */ (byElement.get(/** @type {HTMLElement} */ (target)));
            if (isIntersecting) this.build(block);
            else this.drop(block);
          }
        }),
      { root: this.scroller, rootMargin: `${NEAR}px 0px` },
    ));
    for (const { paragraph, first, end } of this.blocks) {
      let characters = 0;
      for (let at = first; at < end; at++) characters += this.tokens[at].text.length;
      paragraph.style.minHeight = `${Math.ceil(characters / CHARACTERS) * 1.72}em`;
      observer.observe(paragraph);
    }
  }

  /** The text on the screen stays where it is: a block is seldom as high as was thought. @param {() => void} change */
  holding(change) {
    const { top } = this.scroller.getBoundingClientRect();
    const seen = this.blocks.find(({ paragraph }) => paragraph.getBoundingClientRect().bottom > top);
    const before = seen?.paragraph.getBoundingClientRect().top ?? 0;
    change();
    const moved = (seen?.paragraph.getBoundingClientRect().top ?? 0) - before;
    if (moved !== 0) this.scroller.scrollTop += moved;
  }

  /** The same text, scrolled with this one, comes and goes with it. @param {Flow} twin */
  lead(twin) {
    this.twin = twin;
    twin.observer?.disconnect();
  }

  /** @param {Block} block @param {(twin: Flow, block: Block) => void} change */
  inTwin(block, change) {
    if (this.twin) change(this.twin, this.twin.blocks[this.blocks.indexOf(block)]);
  }

  /** @param {Block} block */
  build(block) {
    if (block.spans) return;
    const { first, end, paragraph } = block;
    paragraph.style.minHeight = "";
    /** @type {(string | Node)[]} */ const parts = [];
    block.spans = Array.from({ length: end - first }, (_, i) => {
      const at = first + i;
      const token = this.tokens[at];
      // A block begins a line of its own.
      const text = i === 0 ? inProse(token).replace(first > 0 ? /^(\n| (?! ))/ : /^ (?! )/, "") : inProse(token);
      const [, space, word] = /** @type {RegExpMatchArray} */ (text.match(/^(\s*)(.*)$/s));
      const properties = { "data-at": at, className: token.special ? "special" : "" };
      const span = element("span", properties, word || space);
      // The space before a word is not tinted; a special token has none of its own.
      const apart = i > 0 && (token.special || this.tokens[at - 1].special) ? " " : "";
      parts.push(word ? space || apart : apart, span);
      return span;
    });
    paragraph.replaceChildren(...parts);
    block.spans.forEach((span, i) => this.dress(span, first + i));
    this.inTwin(block, (twin, same) => twin.build(same));
  }

  /** @param {Block} block that is far from the screen */
  drop(block) {
    if (!block.spans) return;
    block.paragraph.style.minHeight = `${block.paragraph.offsetHeight}px`;
    block.paragraph.replaceChildren();
    block.spans = null;
    this.inTwin(block, (twin, same) => twin.drop(same));
  }

  /** @param {number} at @returns {HTMLSpanElement | null} null where it is not built */
  span(at) {
    const block = this.blockOf(at);
    return block?.spans?.[at - block.first] ?? null;
  }

  /** @param {number} at @returns {Block | undefined} */
  blockOf(at) {
    return this.blocks.find(({ first, end }) => at >= first && at < end);
  }

  /** @param {Event} event @returns {number | null} the token that it is about */
  at(event) {
    const span = /** @type {HTMLElement} */ (event.target).closest?.("[data-at]");
    if (!span || !this.scroller.contains(span)) return null;
    const at = Number(/** @type {HTMLElement} */ (span).dataset.at);
    return this.span(at) === span ? at : null;
  }

  /**
   * @param {Float32Array | null} weights of all tokens; null: no tint
   * @param {number} highest the weight that has the full tint
   * @param {Ramp} ramp
   */
  tint(weights, highest, ramp) {
    const again = this.ramp !== ramp;
    this.ramp = ramp;
    for (const { first, end, spans } of this.blocks) {
      for (let at = first; at < end; at++) {
        const tint = weights ? level(weights[at], "row", 0, highest) : 0;
        if (Object.is(tint, this.tints[at]) && !again) continue;
        this.tints[at] = tint;
        if (spans) this.dress(spans[at - first], at);
      }
    }
  }

  /**
   * Some tokens with a line under them.
   * @param {string} name of the class @param {[number, number] | null} range first and last
   */
  mark(name, range) {
    const [first, last] = this.marks.get(name) ?? [0, -1];
    if (range && range[0] === first && range[1] === last) return;
    if (range) this.marks.set(name, range);
    else this.marks.delete(name);
    for (const [from, to] of [[first, last], range ?? [0, -1]])
      for (let at = from; at <= to; at++) {
        const span = this.span(at);
        if (span) this.dress(span, at);
      }
  }

  /** Numbers above tokens. @param {Map<number, string>} labels */
  label(labels) {
    const before = this.labels;
    this.labels = labels;
    for (const at of [...before.keys(), ...labels.keys()]) {
      const span = this.span(at);
      if (span) this.dress(span, at);
    }
  }

  /** @param {HTMLSpanElement} span @param {number} at */
  dress(span, at) {
    const tint = this.tints[at];
    const colours = tint === 0 || !this.ramp ? { css: "", onTop: "" } : tintOf(this.ramp, tint);
    span.style.backgroundColor = colours.css;
    span.style.color = colours.onTop;
    for (const name of ["chosen", "other"]) {
      const [first, last] = this.marks.get(name) ?? [0, -1];
      span.classList.toggle(name, at >= first && at <= last);
    }
    const label = this.labels.get(at);
    if (label) span.dataset.share = label;
    else delete span.dataset.share;
    if (label) span.classList.toggle("at-end", this.isAtEnd(span, label));
  }

  /** Would the number above a token be cut at the right edge? @param {HTMLSpanElement} span @param {string} label */
  isAtEnd(span, label) {
    const { right } = this.scroller.getBoundingClientRect();
    return span.getBoundingClientRect().left + label.length * LABEL_LETTER > right;
  }

  clear() {
    this.tints.fill(0);
    this.marks.clear();
    this.labels.clear();
    for (const { first, spans } of this.blocks) spans?.forEach((span, i) => this.dress(span, first + i));
  }

  /** Scrolls a token into sight: no further than it must, or with some text around it. @param {number} at */
  reveal(at) {
    const place = this.blocks.findIndex(({ first, end }) => at >= first && at < end);
    if (place < 0) return;
    if (!this.blocks[place].spans) {
      // Its neighbours too: their heights are no longer estimates.
      for (const block of this.blocks.slice(Math.max(0, place - 1), place + 2)) this.build(block);
    }
    const span = /** @type {HTMLElement} */ (this.span(at));
    const [box, view] = [span.getBoundingClientRect(), this.scroller.getBoundingClientRect()];
    const [above, below] = [view.top - box.top, box.bottom - view.bottom];
    if (above <= 0 && below <= 0) return;
    if (Math.max(above, below) > FAR) this.scroller.scrollTop += box.top - view.top - view.height / 3;
    else this.scroller.scrollTop += above > 0 ? -above - MARGIN : below + MARGIN;
  }

  /**
   * The token above or below another, as it is drawn.
   * @param {number} at @param {number} down 1 or -1 @returns {number}
   */
  beside(at, down) {
    const from = this.span(at)?.getBoundingClientRect();
    if (!from) return at;
    let best = at;
    let distance = Infinity;
    let line = from.top;
    for (let next = at + down; ; next += down) {
      const box = this.span(next)?.getBoundingClientRect();
      if (!box) break;
      if (Math.abs(box.top - line) > from.height / 2) {
        if (best !== at) break;
        line = box.top;
      }
      if (line === from.top) continue;
      const apart = Math.abs(box.left - from.left);
      if (apart >= distance) continue;
      [best, distance] = [next, apart];
    }
    return best;
  }
}
