/** What the parts of a text give to each other, as a table: its sentences, words or lines, for a head or the mean of its layer. */

import { signal } from "@preact/signals-core";
import { headsName, shown } from "../data/compare";
import { roundedUp } from "../data/small";
import { termsOf, type Which } from "../data/source";
import { Latest } from "../data/waiting";
import { byId, Cells, element, inside, moreColumns } from "../dom";
import { inCell } from "../map/map";
import { legendOf } from "../map/legend";
import { level, tintOf } from "../maths/colours";
import { counted, share } from "../maths/numbers";
import { isWhole } from "../protocol/recording";
import type { Session } from "../session";
import type { State } from "../state";
import { missing } from "../text/block_words";
import { joinedIn, parted, type Part } from "../text/parts";
import { isolated } from "../text/tokens";
import type { Legend, Table, View } from "../view";

/** Shares: (queries, keys). */
type Found = { queries: Part[]; keys: Part[]; shares: Float32Array };

const NUMBERED = 14; // columns that have room for their numbers
const FIFTH = 5;
const LEAST = 0.001; // of the attention, that goes to no part, to be worth a sentence
const NO_PARTS = "There are no parts: the text has special tokens only.";

export class SegmentsView implements View {
  private pane = byId("view-segments");
  private line = inside(this.pane, ".line");
  private body = inside(this.pane, ".scroller");
  private lookForMore = moreColumns(this.pane);
  private cells = new Cells(this.body, (place) => this.say(place));
  private latest = new Latest();
  private found = signal<Found | null>(null);
  readonly draws = [() => this.ask(), () => this.show()];

  constructor(private readonly session: Session) {
    this.body.addEventListener("pointerleave", () => this.say(null));
  }

  /** @returns the heads of the table: one, or a mean of some */
  private which(): Which {
    const { layer, head, heads, hidden } = this.session.store.drawn;
    return shown({ layer, head, heads, hidden, compare: "alone", with: "" }, this.session.layers);
  }

  private ask() {
    const { layers, store } = this.session;
    const axes = this.session.axes(store.drawn.layer);
    const [queries, keys] = [axes.queries, axes.keys].map((tokens) => parted(tokens, store.drawn.parts));
    const which = this.which();
    const terms = termsOf(which);
    const partial = terms.find(({ layer }) => !isWhole(layers[layer]));
    this.latest.drop();
    this.session.mended(this);
    this.found.value = null;
    if (queries.length === 0 || keys.length === 0) return this.fail(NO_PARTS);
    if (partial) return this.fail(missing(layers, partial.layer, "what parts give to each other"));
    this.write(`Asking ${counted(terms.length, "head")} …`);
    const spans = { queries: queries.map(({ span }) => span), keys: keys.map(({ span }) => span) };
    this.session.ask(
      this,
      this.latest,
      (signal) => this.session.source.segments(which, spans, signal),
      (shares) => (this.found.value = { queries, keys, shares }),
      () => this.fail(""),
    );
  }

  private fail(text: string) {
    this.body.replaceChildren();
    this.write(text);
  }

  private write(text: string) {
    this.line.textContent = text;
  }

  /** The share of the darkest colour. */
  private darkest(): number {
    return roundedUp(this.found.value?.shares.reduce((most, value) => (value > most ? value : most), 0) ?? 0);
  }

  legend(): Legend {
    return legendOf("fit", 1, "share of a part’s attention", this.session.look.ramp, this.darkest());
  }

  private show() {
    const found = this.found.value;
    if (!found) return; // what was there stays until there is more, or a sentence says why there is not
    const hasFocus = this.body.contains(document.activeElement);
    this.body.replaceChildren(this.tabled(found));
    this.lookForMore();
    this.cells.activate(this.cells.active);
    if (hasFocus) this.cells.at(this.cells.active)?.focus({ preventScroll: true });
    else this.say(null);
  }

  private tabled({ queries, keys, shares }: Found): HTMLTableElement {
    const heads = keys.map((_, at) => this.columnHead(keys, at));
    const rows = queries.map(({ name }, row) => {
      const cells = keys.map((_, column) => this.cell(shares[row * keys.length + column], column, keys.length));
      return element("tr", { "data-row": row }, headed("row", `${row + 1} ${isolated(name)}`, "", name), ...cells);
    });
    return element(
      "table",
      {
        "aria-label": "What parts give to each other, in percent",
        className: keys.length > NUMBERED ? "dense" : "",
        style: `--columns: ${keys.length}; --rows: ${queries.length}`,
      },
      element("thead", {}, element("tr", {}, headed("col", "gives to", "corner"), ...heads)),
      element("tbody", {}, ...rows),
    );
  }

  private cell(value: number, column: number, columns: number): HTMLTableCellElement {
    const { css, onTop } = tintOf(this.session.look.ramp, level(value, "fit", 0, this.darkest()));
    const properties = {
      "data-column": column,
      tabIndex: -1,
      "aria-label": share(value),
      style: `background: ${css}; color: ${onTop}`,
    };
    return element("td", properties, columns <= NUMBERED ? inCell(value, false) : "");
  }

  /** The number of a part, and its name where no row has it; of many parts every fifth number. */
  private columnHead(keys: Part[], at: number): HTMLTableCellElement {
    const { queries, keys: tokens } = this.session.axes(this.session.store.drawn.layer);
    const { name } = keys[at];
    const isNamed = queries !== tokens;
    const isTold = isNamed || keys.length <= NUMBERED || (at + 1) % FIFTH === 0;
    const text = isTold ? `${at + 1}${isNamed ? ` ${isolated(name)}` : ""}` : "";
    const cell = headed("col", text, isNamed ? "upright" : "", name);
    cell.setAttribute("aria-label", `${at + 1} ${name}`);
    return cell;
  }

  /** @param place of a cell; null: says what all of them are */
  private say(place: number[] | null) {
    const found = this.found.value;
    if (!found) return;
    const { queries, keys, shares } = found;
    if (place) {
      const [row, column] = place;
      const [from, to] = [isolated(queries[row].name), isolated(keys[column].name)];
      const value = share(shares[row * keys.length + column]);
      return this.write(`“${from}” gives ${value} of its attention to “${to}”, ${this.over()}.`);
    }
    const { layer, parts } = this.session.store.drawn;
    const same = queries.length === keys.length;
    const what = same ? counted(keys.length, "part") : `${queries.length} × ${counted(keys.length, "part")}`;
    const rest = restText(joinedIn(this.session.axes(layer).keys, parts), parts, shares, queries.length);
    this.write(`${what}, in percent: the mean over the queries of a part, ${this.over()}.${rest}`);
  }

  private over(): string {
    const which = this.which();
    return `${headsName(which, this.session.layers)}${which.hidden ? ", without sinks" : ""}`;
  }

  table(): Table {
    const found = this.found.value;
    if (!found) return [];
    const { queries, keys, shares } = found;
    const rows = queries.map(({ name }, row) => [name, ...keys.map((_, column) => shares[row * keys.length + column])]);
    return [["part", ...keys.map(({ name }) => name)], ...rows];
  }
}

/**
 * What the table does not show.
 * @param joined in each part
 * @param shares (queries, key parts)
 */
export function restText(joined: number, parts: State["parts"], shares: Float32Array, queries: number): string {
  const rest = 1 - shares.reduce((sum, one) => sum + one, 0) / queries;
  const others = parts === "words" ? "special tokens and punctuation" : "special tokens";
  return (
    (joined > 1 ? ` Each part is of ${joined} ${parts}.` : "") +
    (rest >= LEAST ? ` On average ${share(rest)} goes to ${others}, which are in no part.` : "")
  );
}

/** @param name of a class */
function headed(scope: "row" | "col", text: string, name: string, title: string = ""): HTMLTableCellElement {
  return element("th", { scope, className: name, title }, text);
}
