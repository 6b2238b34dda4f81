/** The cell as a sentence, and the readable twin of the map: the strongest of its row and column. */

import { coarsest } from "../data/block_means";
import type { LayerInfo } from "../data/payload";
import { byId, element } from "../dom";
import type { Shared as Page } from "../main";
import type { Axis } from "../map/axes";
import { headsName, isDifference, lessName } from "../map/compare";
import { counted, digits, full, points, share } from "../maths/numbers";
import { isMaskKnown } from "../maths/softmax";
import { rankOf, strongest, top, type Reading } from "../views/reading";
import { blockAt, blockRows, meansName, meanSentence, meanValue } from "./block_words";
import { isolated, isShortened, named, sinksOf, visible, type Token, type TwoAxes } from "./tokens";

export const LISTED = 8;
const NOT_NUMBERS = "its weights are not numbers (NaN)";

/** How often each token stands in a text. */
const counts = new WeakMap<Token[], Map<string, number>>();

/** Does the same token stand elsewhere too? */
function isRepeated(tokens: Token[], at: number): boolean {
  let count = counts.get(tokens);
  if (!count) {
    count = new Map();
    for (const { text } of tokens) count.set(text.trim(), (count.get(text.trim()) ?? 0) + 1);
    counts.set(tokens, count);
  }
  return (count.get(tokens[at].text.trim()) ?? 0) > 1;
}

/** A token in a sentence; a repeated one with its position. */
export function quoted(tokens: Token[], at: number): string {
  const name = isolated(named({ ...tokens[at], special: false }));
  return isRepeated(tokens, at) ? `“${name}” (token ${at})` : `“${name}”`;
}

/** What both sentences say of a reading: which numbers these are, whose, and what is left out of them. */
function aboutOf(reading: Reading, layers: LayerInfo[]) {
  const blocks = coarsest(reading, layers);
  const aside = reading.hidden ? ", the first and the special tokens set aside" : "";
  return { blocks, means: blocks ? ` (${meansName(blocks)})` : "", where: headsName(reading, layers), aside };
}

/** What is chosen in the text: where it looks, and who looks at it. */
export function textSentence(reading: Reading, { queries, keys }: TwoAxes, layers: LayerInfo[]): string {
  const { query, key, row, column } = reading;
  const { blocks, means, where, aside } = aboutOf(reading, layers);
  const nameOf = (tokens: Token[], at: number) =>
    blocks ? blockAt(at, blocks.block, tokens.length).name : quoted(tokens, at);
  const [from, of] = [quoted(queries, query), quoted(keys, key)];
  const to = strongest(row);
  const looks = Number.isNaN(row[to])
    ? `${from}: ${NOT_NUMBERS}${means}`
    : row[to] > 0
      ? `${from} looks most at ${nameOf(keys, to)}: ${share(row[to])}${means}`
      : `${from} looks at nothing`;
  const by = column ? strongest(column) : 0;
  const looked = !column
    ? ""
    : Number.isNaN(column[by])
      ? `; of what looks at ${of} the weights are not numbers (NaN)`
      : column[by] > 0
        ? `; ${of} is looked at most by ${nameOf(queries, by)}: ${share(column[by])}${means}`
        : `; nobody looks at ${of}`;
  return `${looks}${looked}, ${where}${aside}.`;
}

/** @param isKnown whether a weight of 0 is known to be the mask's doing */
export function sentence(reading: Reading, { queries, keys }: TwoAxes, layers: LayerInfo[], isKnown: boolean): string {
  const { hidden, query, key, row, mask } = reading;
  const [from, to] = [quoted(queries, query), quoted(keys, key)];
  const { blocks, means, where, aside } = aboutOf(reading, layers);
  if (mask[key] && Number.isNaN(row[key])) return `${from}: ${NOT_NUMBERS}${means}, ${where}${aside}.`;
  if (isDifference(reading) && mask[key] && !blocks) {
    const much = `${digits(Math.abs(row[key]) * 100)} percentage points ${row[key] < 0 ? "less" : "more"} of its attention`;
    return `${from} gives ${to} ${much} in ${where} than in ${lessName(reading, layers)}${aside}.`;
  }
  const { rank, of } = rankOf(row, mask, key);
  if (of === 0) return `${from} may attend to nothing: all its weights are 0, ${where}${aside}.`;
  if (!mask[key]) {
    const isAside = hidden && sinksOf(keys).includes(key);
    const verb = isAside ? "is read without" : isKnown ? "may not attend to" : "gives nothing to";
    return `${from} ${verb} ${to}, ${where}${aside}.`;
  }
  if (blocks) return meanSentence(reading, blocks, where);
  return `${from} gives ${share(row[key])} of its attention to ${to} (rank ${rank} of ${of}), ${where}${aside}.`;
}

export class ReadingView {
  private line = byId("sentence");
  private value = byId("value");
  private whole = byId("whole-token");
  private looks = byId("looks-table");
  private looked = byId("looked-table");
  private written: (weight: number) => string = share; // shares; of a difference points

  constructor(readonly page: Page) {}

  /**
   * Nothing can be read here.
   * @param text what is said instead
   */
  clear(text: string = "") {
    this.line.textContent = text;
    this.value.textContent = "";
    this.whole.hidden = true;
    this.looks.replaceChildren();
    this.looked.replaceChildren();
  }

  say(text: string) {
    if (this.line.textContent !== text) this.line.textContent = text;
  }

  /** @param text what is read, where a cell alone does not say it */
  read(reading: Reading, text?: string) {
    const axes = this.page.axes(reading.layer);
    const inText = this.page.store.state.view === "text";
    const isKnown = isMaskKnown(this.page.recording.layers[reading.layer]);
    const { layers } = this.page.recording;
    this.say(text ?? sentence(reading, axes, layers, isKnown));
    const what = isDifference(reading) ? "difference" : reading.terms ? "mean weight" : "weight";
    const blocks = coarsest(reading, layers);
    const value = blocks ? meanValue(reading, blocks) : `${what} ${full(reading.row[reading.key])}`;
    this.value.textContent = inText ? "" : value;
    this.written = isDifference(reading) ? points : share;
    const looks = `${quoted(axes.queries, reading.query)} looks at`;
    const looked = `${quoted(axes.keys, reading.key)} is looked at by`;
    this.list(this.looks, looks, reading.row, axes.keys, "key", blocks);
    if (reading.column) this.list(this.looked, looked, reading.column, axes.queries, "query", blocks);
    this.spell(axes, reading);
  }

  /** @param blocks the layer whose means these are, if they are means */
  private list(
    table: HTMLElement,
    caption: string,
    weights: Float32Array,
    tokens: Token[],
    axis: Axis,
    blocks: LayerInfo | null,
  ) {
    const rows = blocks ? blockRows(weights, blocks, this.written) : this.rows(weights, tokens, axis);
    if (rows.length === 0) rows.push(note(weights.some(Number.isNaN) ? "not numbers (NaN)" : "nothing"));
    const about = blocks ? ` (${meansName(blocks)})` : this.written === share ? "" : ", in points";
    table.replaceChildren(element("caption", {}, caption + about), element("tbody", {}, ...rows));
  }

  private rows(weights: Float32Array, tokens: Token[], axis: Axis): HTMLElement[] {
    const best = top(weights.map(Math.abs), weights.length === LISTED + 1 ? LISTED + 1 : LISTED);
    const rows = best.map((at) => this.row(at, weights[at], tokens, axis));
    const sum = (total: number, weight: number) => total + weight;
    const rest = weights.reduce(sum, 0) - best.map((at) => weights[at]).reduce(sum, 0);
    const others = weights.length - best.length;
    if (axis === "key" && others > 0 && best.length >= LISTED)
      rows.push(note(counted(others, "other"), this.written(this.written === share ? Math.max(0, rest) : rest)));
    return rows;
  }

  private row(at: number, weight: number, tokens: Token[], axis: Axis) {
    const className = tokens[at].special ? "special" : "";
    const onclick = () => this.page.store.set({ [axis]: at, hover: null });
    const button = element("button", { className, onclick }, named(tokens[at], 22));
    const position = element("span", { className: "position" }, isRepeated(tokens, at) ? String(at) : "");
    const token = element("th", { scope: "row" }, element("span", {}, button, position));
    return element("tr", {}, token, element("td", { title: full(weight) }, this.written(weight)));
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

/** A row that is of no token. */
export function note(text: string, value: string = ""): HTMLTableRowElement {
  return element("tr", { className: "note" }, element("th", { scope: "row" }, text), element("td", {}, value));
}
