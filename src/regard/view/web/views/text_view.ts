/**
 * The text as people read it. A token is chosen with the mouse or the arrows; its tint shows where it
 * looks and who looks at it. One text stands twice, a tint for each direction; the two texts of a pair
 * or of cross-attention face each other; few tokens have lines between them.
 */

import { signal } from "@preact/signals-core";
import type { Axis } from "../data/axes";
import { shown } from "../data/compare";
import type { Reading } from "../data/reading";
import { Latest } from "../data/waiting";
import { byId, element, inside } from "../dom";
import { share } from "../maths/numbers";
import { strongest, top } from "../maths/weights";
import { isWhole, type Token } from "../protocol/recording";
import type { Session } from "../session";
import { Flow } from "../text/flow";
import { Lines, MOST_LINED } from "../text/lines";
import { secondText } from "../text/parts";
import { quoted, textSentence } from "../text/sentence";
import type { Table, View } from "../view";
import { KEYS, QUERIES, tintText } from "./prose";

/** One of the two texts. */
interface Side {
  flow: Flow;
  axis: Axis | "both"; // what its tokens are
  shows: "row" | "column" | "side"; // which weights tint it; "side": as the state says
  range: number[]; // its tokens: the first, and the one past the last
  heading: HTMLElement;
  caption: HTMLElement;
  revealed: string; // what it was scrolled to
}

const STROKE = 150; // level of the ramp, of the lines
const LABELLED = 6; // of the strongest tokens have their number above them
const LEAST = 0.04; // of the strongest: less is not worth a number
const STANDS_OUT = 4; // times the even share: less is not worth scrolling to
const APART = 8; // characters between two numbers that do not touch

export class TextView implements View {
  private pane = byId("view-text");
  private hint = inside(this.pane, ".hint");
  private direction = inside(this.pane, ".direction");
  private turn = inside(this.pane, ".tools [role]");
  private facing = inside(this.pane, ".facing");
  private lines = new Lines(inside(this.pane, ".lines"), {
    point: (axis, at) => this.point(axis, at),
    choose: (axis, at) => this.session.chooseToken(axis, at),
  });
  private sides: Side[] = [];
  private written: Token[][] = [];
  private isolated = signal<Axis | null>(null);
  private matrix = signal(""); // what the lines are of
  private latest = new Latest(); // lines that are asked for
  readonly draws = [() => this.write(), () => this.read(), () => this.draw(), () => this.connect()];

  constructor(private readonly session: Session) {}

  /** @param at pointed at; null: no longer */
  private point(axis: Axis, at: number | null) {
    this.isolated.value = at === null ? null : axis;
    this.session.hover(at === null ? null : this.session.cellOf(axis, at));
  }

  /** The arrows. */
  move(down: number, right: number) {
    const { query, key, side } = this.session.store.state;
    const axis = !this.session.isOneText() && side === "looked" ? "key" : "query";
    const from = (axis === "query" ? query : key) ?? this.session.reading?.[axis] ?? 0;
    const last = this.written[axis === "query" ? 0 : 1].length - 1;
    const next = down ? (this.sideOf(axis, from)?.flow.beside(from, down) ?? from) : from + right;
    const to = Math.max(0, Math.min(last, next));
    this.session.chooseToken(axis, to);
    this.sideOf(axis, to)?.flow.reveal(to);
    this.isolated.value = axis;
  }

  /** @returns the side that shows this token */
  private sideOf(axis: Axis, at: number): Side | undefined {
    const shows = ({ range: [first, end] }: Side) => at >= first && at < end;
    return this.sides.find((side) => (side.axis === axis || side.axis === "both") && shows(side));
  }

  /** Lays the texts out. */
  private write() {
    const { queries, keys } = this.session.axes(this.session.store.drawn.layer);
    if (this.written[0] === queries && this.written[1] === keys) return;
    this.written = [queries, keys];
    this.facing.replaceChildren();
    const isOne = queries === keys;
    const cut = isOne ? secondText(keys) : null;
    const twice = isOne && cut === null;
    const both = (shows: Side["shows"], name: string, first = 0, end = keys.length) =>
      this.side(keys, "both", shows, name, [first, end]);
    if (!isOne) this.sides = [this.side(queries, "query", "column", QUERIES), this.side(keys, "key", "row", KEYS)];
    else if (twice) this.sides = [both("row", "Where it looks"), both("column", "Who looks at it")];
    else this.sides = [both("side", "First text", 0, cut ?? 0), both("side", "Second text", cut ?? 0)];
    this.turn.hidden = this.direction.hidden = twice;
    this.hint.hidden = !twice;
    this.pane.classList.toggle("few", Math.max(queries.length, keys.length) <= MOST_LINED);
  }

  private side(tokens: Token[], axis: Side["axis"], shows: Side["shows"], name: string, range = [0, tokens.length]) {
    const heading = element("h2", {}, name);
    const caption = element("p", { className: "caption" });
    const pointed: Axis = axis === "both" ? "query" : axis;
    const scroller = element("div", { className: "reading", tabIndex: 0, role: "region", "aria-label": name });
    this.facing.append(element("div", { className: "side" }, heading, caption, scroller));
    const hands = {
      point: (at: number | null) => this.point(pointed, at),
      choose: (at: number) => this.session.chooseToken(pointed, at),
    };
    const flow = new Flow(scroller, tokens, name, hands, range[0], range[1]);
    return { flow, axis, shows, range, heading, caption, revealed: "" };
  }

  private read() {
    const { reading, store } = this.session;
    const { layer, side, hover } = store.drawn;
    if (reading?.layer !== layer) return;
    const [queries, keys] = this.written;
    const titles = {
      row: `Where ${quoted(queries, reading.query)} looks`,
      column: `Who looks at ${quoted(keys, reading.key)}`,
    };
    const wanted = side === "looks" ? "row" : "column";
    if (!this.turn.hidden) this.direction.textContent = titles[wanted];
    for (const each of this.sides) {
      const shows = each.shows === "side" ? wanted : each.shows;
      const isTinted = this.session.isOneText() || shows === wanted;
      const mine = each.axis === "both" ? (shows === "row" ? "query" : "key") : each.axis;
      const isChosen = this.session.isOneText() || mine === (side === "looks" ? "query" : "key");
      each.flow.mark("chosen", isChosen ? reading[mine] : null);
      if (each.shows !== "side" && this.session.isOneText()) each.heading.textContent = titles[shows];
      this.tint(each, isTinted ? reading[shows] : null, reading[mine], hover === null);
      if (isTinted && !reading[shows]) each.caption.textContent = "Who looks at it is being added up …";
    }
  }

  /**
   * @param chosen the token whose weights these are
   * @param scrolls to the strongest, once for each token that is chosen
   */
  private tint(side: Side, weights: Float32Array | null, chosen: number, scrolls: boolean) {
    const { flow, caption, shows, range } = side;
    const [first, end] = range;
    const highest = weights ? weights[strongest(weights)] : 0;
    flow.tint(weights, highest, this.session.look.ramp);
    if (!weights) {
      flow.label(new Map());
      caption.textContent = "";
      if (scrolls) flow.reveal(chosen);
      return;
    }
    const part = weights.subarray(first, end);
    const block = this.session.layers[this.session.store.state.layer];
    const every = block.kind === "pyramid" ? block.block : 1; // each share stands at all tokens of its block
    const best = top(part, LABELLED)
      .filter((at) => part[at] >= LEAST * highest && (at === 0 || (first + at) % every === 0))
      .map((at) => first + at);
    flow.label(numbersAbove(flow.tokens, best, weights));
    const sum = part.reduce((total, weight, i) => ((first + i) % every === 0 ? total + weight : total), 0);
    const here = shows === "side" && this.session.store.drawn.side === "looks" ? `Together ${share(sum)}. ` : "";
    caption.replaceChildren(here + tintText(part, highest, true));
    if (flow.isLong() && best.length > 0) {
      caption.append(" ", jump(flow, "the strongest", best[0]));
      if (chosen >= first && chosen < end) caption.append(" ", jump(flow, "the chosen token", chosen));
    }
    // Once more when the column has come: by then the text around it is built, and its height is known.
    const place = [chosen, best[0], this.session.reading?.column !== null].join();
    if (!scrolls || side.revealed === place) return;
    side.revealed = place;
    flow.reveal(chosen);
    if (best.length > 0 && highest * weights.length > STANDS_OUT) flow.reveal(best[0]);
  }

  /** Only the lines of one token, and the tints of their names. */
  private connect() {
    const { reading, look } = this.session;
    if (this.matrix.value === "" || !reading) return;
    const { query, key, row, column } = reading;
    const axis = this.isolated.value;
    this.lines.isolate(axis ?? "query", axis === null ? null : axis === "query" ? query : key);
    this.lines.tint("key", axis === "key" ? null : row, look.ramp, axis === "key" ? key : null);
    this.lines.tint("query", axis === "key" ? column : null, look.ramp, axis === "key" ? null : query);
  }

  /** The lines of what is shown, when there are few tokens. */
  private draw() {
    const { layers, store, look, source } = this.session;
    const { layer, head, heads, hidden } = store.drawn;
    const [queries, keys] = this.written;
    const which = shown({ layer, head, heads, hidden, compare: "alone", with: "" }, layers);
    const few = Math.max(queries.length, keys.length) <= MOST_LINED && isWhole(layers[layer]);
    const colour = look.ramp.css[STROKE];
    const wanted = few ? JSON.stringify([which, colour]) : "";
    if (wanted !== "" && wanted === this.matrix.peek()) return;
    this.matrix.value = "";
    this.latest.drop();
    if (!few) return this.lines.clear();
    const question = (signal: AbortSignal) => source.tile(which, { level: 0, row: 0, column: 0 }, signal);
    this.session.ask(this, this.latest, question, ({ values }) => {
      this.lines.draw(values, colour, { queries, keys });
      this.matrix.value = wanted;
    });
  }

  sentence(reading: Reading): string {
    return textSentence(reading, this.session.axes(reading.layer), this.session.layers);
  }

  /** @returns the numbers shown; the first row names the columns */
  table(): Table {
    const { reading } = this.session;
    if (!reading) return [];
    const [queries, keys] = this.written;
    const one = this.session.isOneText();
    const looks = this.session.store.state.side === "looks";
    const all = Object.entries({ "is looked at": reading.row, looks: reading.column });
    const shown = all.filter(([name]) => one || looks === (name === "is looked at"));
    const tokens = one || looks ? keys : queries;
    return [
      ["position", "token", ...shown.map(([name]) => name)],
      ...tokens.map(({ text }, at) => [at, text, ...shown.map(([, weights]) => weights?.[at] ?? NaN)]),
    ];
  }
}

/** A button that scrolls a text. */
function jump(flow: Flow, to: string, at: number): HTMLElement {
  const properties = { type: "button", className: "jump pressed", onclick: () => flow.reveal(at) };
  return element("button", properties, `Go to ${to}`);
}

/**
 * The numbers of the strongest tokens, where they do not touch.
 * @param strongest in falling order
 */
function numbersAbove(tokens: Token[], strongest: number[], weights: Float32Array): Map<number, string> {
  const labels = new Map();
  for (const at of strongest) {
    const touches = [...labels.keys()].some((other) => {
      const [left, right] = at < other ? [at, other] : [other, at];
      let characters = 0;
      for (let i = left; i < right && characters < APART; i++) characters += tokens[i].text.length;
      return characters < APART;
    });
    if (!touches) labels.set(at, share(weights[at]));
  }
  return labels;
}
