/**
 * The text as people read it. A token is chosen with the mouse or the arrows; its tint shows where it
 * looks and who looks at it. One text stands twice, a tint for each direction; the two texts of a pair
 * or of cross-attention face each other; few tokens have lines between them.
 */

import { headNumber, layerName } from "../data/payload";
import { Latest } from "../data/waiting";
import { choice, element } from "../dom";
import type { Page as Whole, Shared } from "../main";
import type { Axis } from "../map/axes";
import { areSeveral, chosenHeads, shown, withHead, type Head } from "../map/compare";
import { level, tintOf } from "../maths/colours";
import { share } from "../maths/numbers";
import type { Cell, State } from "../state";
import { strongest, top, type Reading } from "../views/reading";
import { Flow } from "./flow";
import { meansAside } from "./block_words";
import { Lines, MOST_LINED } from "./lines";
import { secondText } from "./parts";
import { tintText } from "./prose";
import { quoted, textSentence } from "./sentence";
import type { Token } from "./tokens";
import type { Table } from "../views/views";

type Page = Shared & Pick<Whole, "isReading" | "reading">;

/** One of the two texts. */
export interface Side {
  flow: Flow;
  axis: Axis | "both"; // what its tokens are
  shows: "row" | "column" | "side"; // which weights tint it; "side": as the state says
  name: string;
  range: [number, number]; // its tokens: the first, and the one past the last
  heading: HTMLElement;
  caption: HTMLElement;
}

// Told apart with any kind of colour sight (Okabe and Ito), on light and on dark ground.
const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a6fd1", "#8c8c8c"];
const STROKE = 150; // level of the ramp, of the lines of one head
const HINT = "Point at a word; click to keep it.";
const LABELLED = 6; // of the strongest tokens have their number above them
const LEAST = 0.04; // of the strongest: less is not worth a number
const APART = 8; // characters between two numbers that do not touch

export class TextView {
  private direction = element("p", { className: "direction" });
  private turn = choice("What the tint shows", "side", { looks: "Where it looks", looked: "Who looks at it" });
  private facing = element("div", { className: "facing" });
  private toggles = element("p", {
    className: "toggles pressed",
    role: "group",
    "aria-label": "Heads whose lines are shown",
  });
  private lines: Lines;
  private sides: Side[] = [];
  private written: Token[][] = [];
  private isolated: Axis | null = null;
  private matrix = ""; // what the lines are of
  private latest = new Latest(); // lines that are asked for

  constructor(
    private readonly pane: HTMLElement,
    private readonly page: Page,
  ) {
    this.turn.className = "pressed";
    const lined = element("div", { className: "lines" }, this.toggles);
    pane.append(element("div", { className: "tools" }, this.direction, this.turn), this.facing, lined);
    this.lines = new Lines(lined, {
      point: (axis, at) => this.point(axis, at),
      choose: (axis, at) => this.choose(axis, at),
    });
  }

  /** @returns are queries and keys the same tokens? */
  private isOneText(): boolean {
    return this.written[0] === this.written[1];
  }

  /** @returns a token as the cell that is read */
  private cellOf(axis: Axis, at: number): Cell {
    return axis === "query" || this.isOneText() ? { query: at, key: null } : { query: null, key: at };
  }

  private choose(axis: Axis, at: number) {
    if (this.isOneText()) return this.page.store.set({ query: at, hover: null });
    this.page.store.set({ ...this.cellOf(axis, at), side: axis === "query" ? "looks" : "looked", hover: null });
  }

  /** @param at pointed at; null: no longer */
  private point(axis: Axis, at: number | null) {
    this.isolated = at === null ? null : axis;
    this.page.hover(at === null ? null : this.cellOf(axis, at));
    if (this.page.reading) this.connect(this.page.reading);
  }

  /** The arrows. */
  move(down: number, right: number) {
    const { query, key, side } = this.page.store.state;
    const axis = !this.isOneText() && side === "looked" ? "key" : "query";
    const from = (axis === "query" ? query : key) ?? this.page.reading?.[axis] ?? 0;
    const last = this.written[axis === "query" ? 0 : 1].length - 1;
    const next = down ? (this.sideOf(axis, from)?.flow.beside(from, down) ?? from) : from + right;
    const to = Math.max(0, Math.min(last, next));
    this.choose(axis, to);
    this.sideOf(axis, to)?.flow.reveal(to);
    this.isolated = axis;
  }

  /** @returns the side that shows this token */
  private sideOf(axis: Axis, at: number): Side | undefined {
    return this.sides.find(
      (side) => (side.axis === axis || side.axis === "both") && at >= side.range[0] && at < side.range[1],
    );
  }

  update(state: State, changed: Set<string>) {
    const { queries, keys } = this.page.axes(state.layer);
    if (this.written[0] !== queries || this.written[1] !== keys) this.write(queries, keys);
    const { reading } = this.page;
    if (this.page.recording.layers[state.layer].kind === "map") return this.clear();
    if (reading && ["view", "theme", "side", "scale"].some((name) => changed.has(name))) this.read(reading);
    this.draw(state);
  }

  private clear() {
    for (const { flow, caption } of this.sides) {
      flow.clear();
      caption.textContent = "Only the small map of this layer is here; choose a layer that is there in full.";
    }
    this.lines.clear();
    this.matrix = "";
    this.latest.drop();
  }

  /** Lays the texts out. */
  private write(queries: Token[], keys: Token[]) {
    this.written = [queries, keys];
    this.facing.replaceChildren();
    const isOne = queries === keys;
    const cut = isOne ? secondText(keys) : null;
    if (!isOne)
      this.sides = [
        this.side(queries, "query", "column", "Queries: the text that looks"),
        this.side(keys, "key", "row", "Keys: the text that is looked at"),
      ];
    else if (cut !== null)
      this.sides = [
        this.side(keys, "both", "side", "First text", 0, cut),
        this.side(keys, "both", "side", "Second text", cut),
      ];
    else
      this.sides = [
        this.side(keys, "both", "row", "Where it looks"),
        this.side(keys, "both", "column", "Who looks at it"),
      ];
    const twice = isOne && cut === null;
    this.turn.hidden = twice;
    this.direction.className = twice ? "hint pressed" : "direction";
    if (twice) this.direction.textContent = HINT;
    this.pane.classList.toggle("few", Math.max(queries.length, keys.length) <= MOST_LINED);
    if (twice) this.scrollTogether();
  }

  private side(
    tokens: Token[],
    axis: Side["axis"],
    shows: Side["shows"],
    name: string,
    first: number = 0,
    end: number = tokens.length,
  ): Side {
    const heading = element("h2", {}, name);
    const caption = element("p", { className: "caption" });
    const pointed: Axis = axis === "both" ? "query" : axis;
    const scroller = element("div", {
      className: "reading",
      tabIndex: 0,
      role: "region",
      "aria-label": name,
      onpointerleave: () => this.point(pointed, null),
      onpointermove: (event: Event) => this.point(pointed, flow.at(event)),
      onclick: (event: Event) => {
        const at = flow.at(event);
        if (at !== null) this.choose(pointed, at);
      },
    });
    this.facing.append(element("div", { className: "side" }, heading, caption, scroller));
    const flow = new Flow(scroller, tokens, name, first, end);
    return { flow, axis, shows, name, range: [first, end], heading, caption };
  }

  /** One text that stands twice scrolls as one. */
  private scrollTogether() {
    const [{ flow: one }, { flow: other }] = this.sides;
    one.lead(other);
    const [left, right] = [one.scroller, other.scroller];
    left.addEventListener("scroll", () => (right.scrollTop = left.scrollTop));
    right.addEventListener("scroll", () => (left.scrollTop = right.scrollTop));
  }

  read(reading: Reading) {
    const { side, hover } = this.page.store.state;
    const [queries, keys] = this.written;
    const titles = {
      row: `Where ${quoted(queries, reading.query)} looks`,
      column: `Who looks at ${quoted(keys, reading.key)}`,
    };
    const shown = side === "looks" ? "row" : "column";
    if (!this.turn.hidden) this.direction.textContent = titles[shown];
    for (const each of this.sides) {
      const shows = each.shows === "side" ? shown : each.shows;
      const isTinted = this.isOneText() || shows === shown;
      const weights = isTinted ? reading[shows] : null;
      this.tint(each, weights, meansAside(reading, this.page.recording.layers));
      if (isTinted && !weights) each.caption.textContent = "Who looks at it is being added up …";
      const mine = each.axis === "both" ? (shows === "row" ? "query" : "key") : each.axis;
      const isChosen = this.isOneText() || mine === (side === "looks" ? "query" : "key");
      each.flow.mark("chosen", isChosen ? reading[mine] : null);
      if (each.shows !== "side" && this.isOneText()) each.heading.textContent = titles[shows];
    }
    if (!hover) this.sideOf("query", reading.query)?.flow.reveal(reading.query);
    this.connect(reading);
  }

  /** @param aside what they are */
  private tint({ flow, caption, shows, range: [first, end] }: Side, weights: Float32Array | null, aside: string) {
    const highest = weights ? weights[strongest(weights)] : 0;
    flow.tint(weights, highest, this.page.look.ramp);
    if (!weights) {
      flow.label(new Map());
      caption.textContent = "";
      return;
    }
    const part = weights.subarray(first, end);
    const best = top(part, LABELLED)
      .filter((at) => part[at] >= LEAST * highest)
      .map((at) => first + at);
    flow.label(numbersAbove(flow.tokens, best, weights));
    const sum = part.reduce((total, weight) => total + weight, 0);
    const isPair = shows === "side";
    const here = isPair && this.page.store.state.side === "looks" ? `Together ${share(sum)}. ` : "";
    caption.textContent = here + tintText(part, highest, true, aside);
  }

  /** The lines, and the tints of their names. */
  private connect({ query, key, row, column }: Reading) {
    if (this.matrix === "") return;
    const { ramp } = this.page.look;
    const axis = this.isolated;
    this.lines.isolate(axis ?? "query", axis === null ? null : axis === "query" ? query : key);
    const tints = (weights: Float32Array | null) => {
      const highest = weights ? weights[strongest(weights)] : 0;
      return (at: number) => {
        const tint = weights ? level(weights[at], "row", 0, highest) : 0;
        return tint === 0 ? null : tintOf(ramp, tint);
      };
    };
    this.lines.tint("key", tints(axis === "key" ? null : row), axis === "key" ? key : null);
    this.lines.tint("query", tints(axis === "key" ? column : null), axis === "key" ? null : query);
  }

  /** The lines of the open head, or of several in colours, when there are few tokens. */
  private draw(state: State) {
    const { layers } = this.page.recording;
    const [queries, keys] = this.written;
    const few = Math.max(queries.length, keys.length) <= MOST_LINED;
    const heads = chosenHeads(state, layers);
    const isColoured = this.isColoured(state);
    const drawn = isColoured
      ? heads.map((head, i) => ({ which: { ...head, hidden: state.hidden }, colour: COLOURS[i] }))
      : [{ which: shown({ ...state, compare: "alone" }, layers), colour: this.page.look.ramp.css[STROKE] }];
    const chosen = areSeveral(state) ? heads : [];
    this.toggles.hidden = (!few && chosen.length < 2) || layers[state.layer].num_heads === 1;
    this.offer(state, chosen, few);
    const wanted = few ? JSON.stringify(drawn) : "";
    if (wanted === this.matrix) return;
    this.matrix = wanted;
    this.latest.drop();
    if (!few) return this.lines.clear();
    const place = { level: 0, row: 0, column: 0, byRow: false };
    void this.latest.ask(
      (signal) => Promise.all(drawn.map(({ which }) => this.page.source.tile(which, place, signal))),
      (tiles) => {
        this.page.mended(this);
        const matrices = tiles.map(({ values }, i) => ({ weights: values, colour: drawn[i].colour }));
        this.lines.draw(matrices, { queries, keys });
        if (this.page.reading) this.connect(this.page.reading);
      },
      (error) => {
        this.matrix = "";
        this.page.damaged(error, this);
      },
    );
  }

  /** Has each chosen head a colour of its own? */
  private isColoured({ heads }: State): boolean {
    return heads.includes("_") && heads.split("_").length <= COLOURS.length;
  }

  /** A button for every head of the open layer, and for those of others that are chosen. */
  private offer(state: State, chosen: Head[], few: boolean) {
    const { layers } = this.page.recording;
    const { num_heads } = layers[state.layer];
    const mine = Array.from({ length: num_heads }, (_, head) => ({ layer: state.layer, head }));
    const all = few ? [...mine, ...chosen.filter(({ layer }) => layer !== state.layer)] : [];
    const asked = JSON.stringify([all, chosen, state.head, state.heads]);
    if (this.toggles.dataset.asked === asked) return;
    const focused = [...this.toggles.children].indexOf(document.activeElement as Element);
    const buttons = all.map(({ layer, head }) => {
      const place = chosen.findIndex((one) => one.layer === layer && one.head === head);
      const isOpen = state.heads === "one" && head === state.head;
      const number = headNumber(layers, { layer, head });
      const style = place >= 0 && this.isColoured(state) ? `background: ${COLOURS[place]}` : "";
      const properties = {
        type: "button",
        "aria-pressed": place >= 0 || isOpen,
        title: `Layer ${layerName(layers, layer)}, head ${number}: show or hide its lines`,
        onclick: () => this.page.store.set({ heads: withHead(this.page.store.state, { layer, head }) }),
      };
      const name = layer === state.layer ? `H${number}` : `L${layerName(layers, layer)}H${number}`;
      return element("button", properties, element("span", { className: "patch", style }), name);
    });
    const label = element("span", { className: "label" }, linesText(chosen.length, few));
    this.toggles.replaceChildren(label, ...buttons);
    this.toggles.dataset.asked = asked;
    if (focused > 0) (this.toggles.children[focused] as HTMLElement).focus();
  }

  sentence(reading: Reading): string {
    const [queries, keys] = this.written;
    return textSentence(reading, { queries, keys }, this.page.recording.layers);
  }

  isSettled(): boolean {
    return !this.latest.isWaiting && !this.page.isReading;
  }

  /** @returns the numbers shown; the first row names the columns */
  table(): Table {
    const { reading } = this.page;
    if (!reading) return [];
    const [queries, keys] = this.written;
    if (!this.isOneText()) {
      const looks = this.page.store.state.side === "looks";
      const [tokens, weights] = looks ? [keys, reading.row] : [queries, reading.column];
      return [
        ["position", "token", looks ? "is looked at" : "looks"],
        ...tokens.map(({ text }, at) => [at, text, weights?.[at] ?? NaN]),
      ];
    }
    return [
      ["position", "token", "is looked at", "looks"],
      ...keys.map(({ text }, at) => [at, text, reading.row[at], reading.column?.[at] ?? NaN]),
    ];
  }
}

/**
 * What the lines are of, or why there are none.
 * @param heads that are chosen
 * @param few tokens, few enough for lines
 */
export function linesText(heads: number, few: boolean): string {
  if (!few) return `Lines are drawn up to ${MOST_LINED} tokens; the tint is the mean of ${heads} heads.`;
  if (heads <= COLOURS.length) return "Lines of heads, in colours";
  return `Lines of at most ${COLOURS.length} heads have colours; these are of the mean of ${heads}.`;
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
