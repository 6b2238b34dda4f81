/**
 * Tokens as flowing prose, however many: the text is cut into blocks at its own paragraphs and
 * sentences, and only the blocks near the screen are built.
 */

import { element } from "../dom";
import { level, tintOf, type Ramp } from "../maths/colours";
import type { Token } from "../protocol/recording";
import { breaksBetween, endsSentence } from "./parts";
import { inProse } from "./tokens";

export interface Block {
  first: number;
  end: number;
  paragraph: HTMLElement;
  spans: HTMLSpanElement[] | null; // null: not built
}

const LABEL_LETTER = 6; // pixels of a letter above a token
const WHOLE = 512; // tokens that are one block
const PARAGRAPH = 192; // tokens of a block that may end at a line break,
const SENTENCE = 320; // at the end of a sentence; and anywhere after WHOLE
const NEAR = 800; // pixels around the screen that are built
const FAR = 120; // pixels out of sight that are no mere step
const MARGIN = 40; // pixels kept between a token and the edge
const RISE = 4; // pixels that the number above a token rises over its line
const CHARACTERS = 60; // of a line, for the height of a block that is not built yet

/** @returns where blocks begin */
function cuts(tokens: Token[], first: number, end: number): number[] {
  const starts = [first];
  if (end - first <= WHOLE) return starts;
  for (let at = first + 1; at < end; at++) {
    const length = at - starts[starts.length - 1];
    const breaks = breaksBetween(tokens[at - 1].text, tokens[at].text);
    if ((length >= PARAGRAPH && breaks) || (length >= SENTENCE && endsSentence(tokens, at - 1)) || length >= WHOLE)
      starts.push(at);
  }
  return starts;
}

export class Flow {
  private tints = new Float32Array(this.tokens.length); // levels of the ramp; 0: no tint; NaN: no number
  private ramp: Ramp | null = null;
  private marks = new Map<string, number | null>(); // classes of tokens
  private labels = new Map<number, string>();
  private blocks: Block[];

  /**
   * @param scroller what scrolls the text; the text is added to it
   * @param hands told of the token that is pointed at (null: none), and of the one that is clicked
   */
  constructor(
    readonly scroller: HTMLElement,
    readonly tokens: Token[],
    name: string,
    hands: { point: (at: number | null) => void; choose: (at: number) => void },
    first: number = 0,
    end: number = tokens.length,
  ) {
    const holder = element("div", {
      className: "flow",
      role: "group",
      "aria-label": name,
      onpointermove: (event: Event) => hands.point(tokenAt(event)),
      onpointerleave: () => hands.point(null),
      onclick: (event: Event) => {
        const at = tokenAt(event);
        if (at !== null) hands.choose(at);
      },
    });
    const starts = cuts(tokens, first, end);
    this.blocks = starts.map((start, i) => ({
      first: start,
      end: starts[i + 1] ?? end,
      paragraph: element("p", { dir: "auto" }),
      spans: null,
    }));
    holder.append(...this.blocks.map(({ paragraph }) => paragraph));
    scroller.append(holder);
    if (scroller.childElementCount === 1) {
      scroller.addEventListener("scroll", () => this.trim(), { passive: true });
      new ResizeObserver(() => this.trim()).observe(holder);
      new ResizeObserver(() => this.trim()).observe(scroller);
    }
    if (this.blocks.length === 1) this.build(this.blocks[0]);
    else this.buildNear();
  }

  /** Leaves out a line that an edge of the scroller would cut through its letters. */
  private trim() {
    const { scroller } = this;
    const line = Number.parseFloat(getComputedStyle(scroller).lineHeight);
    const { top } = scroller.getBoundingClientRect();
    const bottom = top + scroller.clientHeight;
    const cutAt = (edge: number) => {
      const boxes = this.blocks.map(({ paragraph }) => paragraph.getBoundingClientRect());
      const box = boxes.find((one) => one.top - RISE <= edge && one.bottom - RISE > edge + 1);
      return box ? (edge - box.top + RISE) % line : 0;
    };
    const [above, below] = [cutAt(top), cutAt(bottom)];
    scroller.style.clipPath = `inset(${above > 1 ? line - above : 0}px 0 ${below > 1 ? below : 0}px)`;
  }

  /** Blocks come and go as they are scrolled. */
  private buildNear() {
    this.scroller.style.overflowAnchor = "none"; // `holding` does it
    const byElement = new Map(this.blocks.map((block) => [block.paragraph, block]));
    const observer = new IntersectionObserver(
      (entries) =>
        this.holding(() => {
          for (const { target, isIntersecting } of entries) {
            const block = byElement.get(target as HTMLElement) as Block;
            if (isIntersecting) this.build(block);
            else this.drop(block);
          }
        }),
      { root: this.scroller, rootMargin: `${NEAR}px 0px` },
    );
    for (const { paragraph, first, end } of this.blocks) {
      let characters = 0;
      for (let at = first; at < end; at++) characters += this.tokens[at].text.length;
      paragraph.style.minHeight = `${Math.ceil(characters / CHARACTERS) * 1.72}em`;
      observer.observe(paragraph);
    }
  }

  /** The text on the screen stays where it is: a block is seldom as high as was thought. */
  private holding(change: () => void) {
    const { top } = this.scroller.getBoundingClientRect();
    const seen = this.blocks.find(({ paragraph }) => paragraph.getBoundingClientRect().bottom > top);
    const before = seen?.paragraph.getBoundingClientRect().top ?? 0;
    change();
    const moved = (seen?.paragraph.getBoundingClientRect().top ?? 0) - before;
    if (moved !== 0) this.scroller.scrollTop += moved;
  }

  private build(block: Block) {
    if (block.spans) return;
    const { first, end, paragraph } = block;
    paragraph.style.minHeight = "";
    const parts: (string | Node)[] = [];
    block.spans = Array.from({ length: end - first }, (_, i) => {
      const at = first + i;
      const token = this.tokens[at];
      // A block begins a line of its own.
      const start = i > 0 ? "" : first > 0 ? /^(\n| (?! ))/ : /^ (?! )/;
      const text = token.patch ? "" : inProse(token).replace(start, "");
      const [, space, word] = text.match(/^(\s*)(.*)$/s) as RegExpMatchArray;
      const properties = { "data-at": at, className: token.special ? "special" : token.patch ? "cell" : "" };
      const span = element("span", properties, word || space);
      // The space before a word is not tinted; a special token has none of its own.
      const apart = i > 0 && (token.special || this.tokens[at - 1].special) ? " " : "";
      parts.push(word ? space || apart : apart, span);
      return span;
    });
    paragraph.replaceChildren(...parts);
    block.spans.forEach((span, i) => this.dress(span, first + i));
  }

  /** @param block that is far from the screen */
  private drop(block: Block) {
    if (!block.spans) return;
    block.paragraph.style.minHeight = `${block.paragraph.offsetHeight}px`;
    block.paragraph.replaceChildren();
    block.spans = null;
  }

  /** @returns null where it is not built */
  private span(at: number): HTMLSpanElement | null {
    const block = this.blockOf(at);
    return block?.spans?.[at - block.first] ?? null;
  }

  private blockOf(at: number): Block | undefined {
    return this.blocks.find(({ first, end }) => at >= first && at < end);
  }

  /**
   * @param weights of all tokens; null: no tint
   * @param highest the weight that has the full tint
   */
  tint(weights: Float32Array | null, highest: number, ramp: Ramp) {
    const again = this.ramp !== ramp;
    this.ramp = ramp;
    for (const { first, end, spans } of this.blocks) {
      for (let at = first; at < end; at++) {
        const tint = weights ? level(weights[at], "fit", 0, highest) : 0;
        if (Object.is(tint, this.tints[at]) && !again) continue;
        this.tints[at] = tint;
        if (spans) this.dress(spans[at - first], at);
      }
    }
  }

  /**
   * Draws a line under one token.
   * @param name of the class
   */
  mark(name: string, at: number | null) {
    const before = this.marks.get(name) ?? null;
    if (at === before) return;
    this.marks.set(name, at);
    this.dressAgain([before, at]);
  }

  /** Numbers above tokens. */
  label(labels: Map<number, string>) {
    const before = this.labels;
    this.labels = labels;
    this.dressAgain([...before.keys(), ...labels.keys()]);
  }

  private dressAgain(places: (number | null)[]) {
    for (const at of places) {
      const span = at === null ? null : this.span(at);
      if (span) this.dress(span, at as number);
    }
  }

  private dress(span: HTMLSpanElement, at: number) {
    const tint = this.tints[at];
    const colours = tint === 0 || !this.ramp ? { css: "", onTop: "" } : tintOf(this.ramp, tint);
    // A space would be a bar: it has a line under it.
    const isBlank = !this.tokens[at].special && this.tokens[at].text.trim() === "";
    span.style.backgroundColor = isBlank ? "" : colours.css;
    span.style.boxShadow = isBlank && colours.css ? `0 2px ${colours.css}` : "";
    span.style.color = isBlank ? "" : colours.onTop;
    for (const name of ["chosen", "other"]) span.classList.toggle(name, this.marks.get(name) === at);
    const label = this.labels.get(at);
    if (label) span.dataset.share = label;
    else delete span.dataset.share;
    // Would the number above the token be cut at the right edge?
    const room = label ? this.scroller.getBoundingClientRect().right - span.getBoundingClientRect().left : 0;
    if (label) span.classList.toggle("at-end", label.length * LABEL_LETTER > room);
  }

  clear() {
    this.tints.fill(0);
    this.marks.clear();
    this.labels.clear();
    for (const { first, spans } of this.blocks) spans?.forEach((span, i) => this.dress(span, first + i));
  }

  /** @returns is there more than is seen at once? */
  isLong(): boolean {
    return this.scroller.scrollHeight > this.scroller.clientHeight + 1;
  }

  /**
   * Scrolls a token into sight: no further than it must, or with some text around it.
   * @param beside another one, which is seen, too, where both fit
   */
  reveal(at: number, beside: number = at) {
    this.scrollTo(at);
    const before = this.scroller.scrollTop;
    if (Math.abs(beside - at) <= WHOLE) this.scrollTo(beside);
    if (Math.max(...this.beyond(this.span(at))) > 0) this.scroller.scrollTop = before;
  }

  private scrollTo(at: number) {
    const place = this.blocks.findIndex(({ first, end }) => at >= first && at < end);
    if (place < 0) return;
    if (!this.blocks[place].spans) {
      // Its neighbours too: their heights are no longer estimates.
      for (const block of this.blocks.slice(Math.max(0, place - 1), place + 2)) this.build(block);
    }
    const [above, below] = this.beyond(this.span(at));
    if (above <= 0 && below <= 0) return;
    if (Math.max(above, below) > FAR) this.scroller.scrollTop -= above + this.scroller.clientHeight / 3;
    else this.scroller.scrollTop += above > 0 ? -above - MARGIN : below + MARGIN;
  }

  /** @returns how far a token is out of sight, at the top and at the bottom */
  private beyond(span: HTMLElement | null): [above: number, below: number] {
    const view = this.scroller.getBoundingClientRect();
    const { top, bottom } = span?.getBoundingClientRect() ?? view;
    return [view.top - top, bottom - view.bottom];
  }

  /**
   * The token above or below another, as it is drawn.
   * @param down 1 or -1
   */
  beside(at: number, down: number): number {
    const from = this.span(at)?.getBoundingClientRect();
    if (!from) return at;
    const boxes = this.blocks.flatMap(
      ({ first, spans }) => spans?.map((span, i) => ({ next: first + i, box: span.getBoundingClientRect() })) ?? [],
    );
    const beyond = boxes
      .map(({ next, box }) => ({ next, lines: (down * (box.top - from.top)) / from.height, left: box.left }))
      .filter(({ lines }) => lines > 0.5);
    const nearest = Math.min(...beyond.map(({ lines }) => lines));
    const far = ({ left }: { left: number }) => Math.abs(left - from.left);
    const line = beyond.filter(({ lines }) => lines < nearest + 0.5).sort((one, other) => far(one) - far(other));
    return line[0]?.next ?? at;
  }
}

/** @returns the token that an event is about */
function tokenAt({ target }: Event): number | null {
  const { at } = (target as HTMLElement).closest<HTMLElement>("[data-at]")?.dataset ?? {};
  return at === undefined ? null : Number(at);
}
