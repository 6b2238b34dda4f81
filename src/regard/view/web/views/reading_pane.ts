/** The cell as a sentence, and the readable twin of the map: the strongest of its row and column. */

import type { Axis, TwoAxes } from "../data/axes";
import { coarsest, isDifference } from "../data/compare";
import type { Reading } from "../data/reading";
import { byId, element } from "../dom";
import { counted, full, grouped, points, share } from "../maths/numbers";
import { isMaskKnown } from "../maths/softmax";
import { top } from "../maths/weights";
import type { LayerInfo, Token } from "../protocol/recording";
import type { Session } from "../session";
import { strongestBlocks } from "../text/block_words";
import { isRepeated, quoted, sentence } from "../text/sentence";
import { isolated, isShortened, named, visible } from "../text/tokens";

const LISTED = 8;
const ALIKE = 3; // tokens with one number are one row

export class ReadingPane {
  private line = byId("sentence");
  private value = byId("value");
  private whole = byId("whole-token");
  private tables: Record<Axis, HTMLElement> = { key: byId("looks-table"), query: byId("looked-table") };
  private captions: Record<Axis, HTMLElement> = { key: byId("looks-caption"), query: byId("looked-caption") };
  private written: (weight: number) => string = share; // shares; of a difference points

  constructor(private readonly session: Session) {}

  draw() {
    const { reading, trouble } = this.session;
    if (reading) return this.read(reading);
    if (!trouble) return;
    this.say("");
    this.value.textContent = "";
    this.whole.hidden = true;
    for (const shown of [this.tables, this.captions].flatMap(Object.values)) shown.replaceChildren();
  }

  private say(text: string) {
    if (this.line.textContent !== text) this.line.textContent = text;
  }

  private read(reading: Reading) {
    const { layers, store, view } = this.session;
    const axes = this.session.axes(reading.layer);
    const { row, column, query, key, terms } = reading;
    this.say(view?.sentence?.(reading) ?? sentence(reading, axes, layers, isMaskKnown(layers[reading.layer])));
    const what = isDifference(reading) ? "difference" : terms ? "mean weight" : "weight";
    const blocks = coarsest(reading, layers);
    this.value.textContent = blocks || ["text", "image"].includes(store.drawn.view) ? "" : `${what} ${full(row[key])}`;
    this.written = isDifference(reading) ? points : share;
    this.list("key", `${quoted(axes.queries, query)} looks at`, row, axes.keys, blocks);
    if (column) this.list("query", `${quoted(axes.keys, key)} is looked at by`, column, axes.queries, blocks);
    this.spell(axes, reading);
    document.body.dataset.read = [reading.layer, reading.head, query, key, Number(reading.hidden)].join();
  }

  /** @param blocks the layer whose means these are, if they are means */
  private list(axis: Axis, caption: string, weights: Float32Array, tokens: Token[], blocks: LayerInfo | null) {
    const rows = blocks ? this.blockRows(axis, weights, blocks) : this.rows(axis, weights, tokens);
    if (rows.length === 0) rows.push(note(weights.some(Number.isNaN) ? "not numbers (NaN)" : "nothing"));
    const about = this.written === share ? "" : ", in points";
    this.captions[axis].textContent = caption + about;
    this.tables[axis].replaceChildren(element("tbody", {}, ...rows));
  }

  private blockRows(axis: Axis, shares: Float32Array, info: LayerInfo) {
    return strongestBlocks(shares, info, LISTED).map(({ first, places, share: value }) => {
      const onclick = () => this.session.choose({ [axis]: first });
      return line(element("button", { onclick }, places), "", this.written(value), full(value));
    });
  }

  /** The strongest tokens, those with one number in one row, and the rest of them together. */
  private rows(axis: Axis, weights: Float32Array, tokens: Token[]): HTMLElement[] {
    const best = top(weights.map(Math.abs), weights.length === LISTED + 1 ? LISTED + 1 : LISTED);
    const groups: number[][] = []; // places in the text
    for (const at of best) {
      const isOne = (other: number) => isAlike(weights[other], weights[at]);
      const alike = best.filter(isOne);
      if (alike.length < ALIKE) groups.push([at]);
      else if (alike[0] === at)
        groups.push([at, ...[...weights.keys()].filter((other) => other !== at && isOne(other))]);
    }
    const rows = groups.map(([at, ...more]) => this.row(axis, at, weights[at], tokens, more.length));
    const listed = groups.flat();
    const others = weights.length - listed.length;
    if (axis === "query" || others <= 0 || best.length < LISTED) return rows;
    const sum = (total: number, weight: number) => total + weight;
    const rest = weights.reduce(sum, 0) - listed.map((at) => weights[at]).reduce(sum, 0);
    return [...rows, note(counted(others, "other"), this.written(this.written === share ? Math.max(0, rest) : rest))];
  }

  /** @param more tokens with this number */
  private row(axis: Axis, at: number, weight: number, tokens: Token[], more: number) {
    const className = tokens[at].special ? "special" : "";
    const onclick = () => this.session.choose({ [axis]: at });
    const button = element("button", { className, onclick }, named(tokens[at], 22));
    const position = isRepeated(tokens, at) ? String(at) : "";
    const where = more > 0 ? `${position} and ${grouped(more)} more, each` : position;
    return line(button, where, this.written(weight), full(weight));
  }

  /** The whole text of a token that is too long to show. */
  private spell({ queries, keys }: TwoAxes, { query, key }: Reading) {
    const token = [queries[query], keys[key]].find(isShortened);
    this.whole.hidden = !token;
    if (!token || this.whole.dataset.text === token.text) return;
    this.whole.dataset.text = token.text;
    const [summary, body] = this.whole.children;
    summary.textContent = `All ${counted(token.text.length, "character")} of “${isolated(named(token))}”`;
    body.textContent = visible(token.text, "\n\t");
  }
}

/** @returns are they one number, as it is written? */
function isAlike(one: number, other: number): boolean {
  return Math.abs(one - other) <= 0.0005 * Math.abs(other);
}

function line(button: HTMLElement, position: string, value: string, title: string): HTMLTableRowElement {
  const token = element("span", {}, button, element("span", { className: "position" }, position));
  return element("tr", {}, element("th", { scope: "row" }, token), element("td", { title }, value));
}

/** A row that is of no token. */
function note(text: string, value: string = ""): HTMLTableRowElement {
  return element("tr", { className: "note" }, element("th", { scope: "row" }, text), element("td", {}, value));
}
