/** What the parts of a text give to each other, as a table: its sentences, words or lines, for the chosen heads. */

import { isWhole } from "../data/block_means";
import type { Which } from "../data/source";
import { Latest } from "../data/waiting";
import { choice, element, moreColumns } from "../dom";
import { fitted, type Pen, type Picture } from "../export/picture";
import type { Page as Whole, Shared } from "../main";
import { roundedUp } from "../map/ceiling";
import { headline, headsName, shown } from "../map/compare";
import { level, tintOf } from "../maths/colours";
import { counted, digits, lasting, share } from "../maths/numbers";
import { WORDS, type State } from "../state";
import { missing } from "../text/block_words";
import { joinedIn, parted, type Part } from "../text/parts";
import { isolated } from "../text/tokens";
import { moving } from "./keys";
import type { Table } from "./views";

type Page = Shared & Pick<Whole, "explain">;

/** Values: shares of whole parts, or of each of their tokens. */
type Found = { queries: Part[]; keys: Part[]; shares: Float32Array; values: Float32Array };

const ASKED = ["layer", "head", "heads", "hidden", "parts"];
const AGAIN = 500; // milliseconds
const NUMBERED = 14; // columns that have room for their numbers
const FIFTH = 5;
const LEAST = 0.001; // of the attention, that goes to no part, to be worth a sentence
const NAMES = 230; // pixels of the names of parts in a picture
const NO_PARTS = "There are no parts: the text has special tokens only.";

export class SegmentsView {
  private line = element("p", { className: "line", role: "status" });
  private body = element("div", {
    className: "scroller",
    onpointerover: ({ target }: Event) => this.say(target),
    onpointerleave: () => this.sayAll(),
    onfocusin: ({ target }: Event) => {
      this.body.querySelector('[tabindex="0"]')?.setAttribute("tabindex", "-1");
      (target as HTMLElement).tabIndex = 0;
      this.say(target);
    },
    onkeydown: moving((down, right) => this.go(down, right)),
  });
  private overflow = moreColumns(this.body);
  private latest = new Latest();
  private darkest = 1; // the share of the darkest colour
  private found: Found | null = null;

  constructor(
    pane: HTMLElement,
    private readonly page: Page,
  ) {
    const tools = element(
      "div",
      { className: "tools pressed" },
      group("Parts", "parts", WORDS.parts),
      group("Share of each", "per", WORDS.per),
    );
    pane.append(tools, this.line, this.overflow.line, this.body);
  }

  update(state: State, changed: Set<string>) {
    if (ASKED.some((name) => changed.has(name))) void this.ask(state);
    else if (changed.has("per") || changed.has("theme")) this.show();
  }

  /** @returns the heads of the table: one, or a mean of some */
  private which(): Which {
    return shown({ ...this.page.store.state, compare: "alone" }, this.page.recording.layers);
  }

  private ask(state: State) {
    this.latest.drop();
    this.page.mended(this);
    const { layers } = this.page.recording;
    const axes = this.page.axes(state.layer);
    const [queries, keys] = [parted(axes.queries, state.parts), parted(axes.keys, state.parts)];
    if (queries.length === 0 || keys.length === 0) return this.fail(NO_PARTS);
    const which = this.which();
    const terms = which.terms ?? [which];
    const partial = terms.find(({ layer }) => !isWhole(layers[layer]));
    if (partial) return this.fail(missing(layers[partial.layer], partial.layer, "what parts give to each other"));
    this.found = null;
    const asking = `Asking ${counted(terms.length, "head")} …`;
    this.line.textContent = asking;
    const spans = { queries: queries.map(({ span }) => span), keys: keys.map(({ span }) => span) };
    void this.latest.ask(
      (signal) => {
        const looking = setInterval(() => void this.look(asking, which, signal), AGAIN);
        return this.page.source.segments(which, spans, signal).finally(() => clearInterval(looking));
      },
      (shares) => {
        this.found = { queries, keys, shares, values: shares };
        this.show();
      },
      (error) => {
        this.fail("");
        this.page.damaged(error, this);
      },
    );
  }

  ceiling(): number {
    return this.darkest;
  }

  /** How far the pass over a long head is, which the sums wait for. */
  private async look(asking: string, which: Which, signal: AbortSignal) {
    try {
      const { done, seconds } = await this.page.source.progress(which, false, signal);
      if (done >= 1 || signal.aborted || this.found) return;
      const left = seconds === null ? "" : `, ${lasting(seconds)}`;
      this.line.textContent = `${asking} Looking at the whole head: ${Math.floor(100 * done)} %${left}`;
    } catch {
      // What is wrong, the sums themselves say.
    }
  }

  private fail(text: string) {
    this.found = null;
    this.body.replaceChildren();
    this.line.textContent = text;
  }

  /** Draws the shares of whole parts, or of each of their tokens. */
  private show() {
    if (!this.found) return;
    const { keys, shares } = this.found;
    const sizes = keys.map(({ span: [start, stop] }) => (this.page.store.state.per === "token" ? stop - start : 1));
    const values = shares.map((one, at) => one / sizes[at % keys.length]);
    this.found.values = values;
    this.darkest = roundedUp(values.reduce((most, value) => (value > most ? value : most), 0));
    const focused = this.body.contains(document.activeElement) ? document.activeElement : null;
    this.body.replaceChildren(this.tabled(this.found));
    this.overflow.look();
    this.sayAll();
    this.page.explain(this.page.store.state);
    if (!focused) return;
    const { row, column } = (focused as HTMLElement).dataset;
    this.at(row, column)?.focus({ preventScroll: true });
  }

  private tabled({ queries, keys, values }: Found): HTMLTableElement {
    const heads = keys.map((_, at) => this.columnHead(keys, at));
    const rows = queries.map(({ name }, row) => {
      const cells = keys.map((_, column) => this.cell(values[row * keys.length + column], row, column, keys.length));
      return element("tr", {}, headed("row", `${row + 1} ${isolated(name)}`, "", name), ...cells);
    });
    return element(
      "table",
      {
        "aria-label": "What parts give to each other, in percent",
        className: keys.length > NUMBERED ? "dense" : "",
        style: `--columns: ${keys.length}`,
      },
      element("thead", {}, element("tr", {}, headed("col", "gives to", "corner"), ...heads)),
      element("tbody", {}, ...rows),
    );
  }

  private cell(value: number, row: number, column: number, columns: number): HTMLTableCellElement {
    const { css, onTop } = tintOf(this.page.look.ramp, level(value, "fit", 0, this.darkest));
    const properties = {
      "data-row": row,
      "data-column": column,
      tabIndex: row === 0 && column === 0 ? 0 : -1,
      "aria-label": share(value),
      style: `background: ${css}; color: ${onTop}`,
    };
    return element("td", properties, columns <= NUMBERED ? inCell(value) : "");
  }

  /** The number of a part, and its name where no row has it; of many parts every fifth number. */
  private columnLabel(keys: Part[], at: number) {
    const axes = this.page.axes(this.page.store.state.layer);
    const isNamed = axes.queries !== axes.keys;
    const isTold = isNamed || keys.length <= NUMBERED || (at + 1) % FIFTH === 0;
    return { isNamed, text: isTold ? `${at + 1}${isNamed ? ` ${isolated(keys[at].name)}` : ""}` : "" };
  }

  private columnHead(keys: Part[], at: number): HTMLTableCellElement {
    const { name } = keys[at];
    const { isNamed, text } = this.columnLabel(keys, at);
    const cell = headed("col", text, isNamed ? "upright" : "", name);
    cell.setAttribute("aria-label", `${at + 1} ${name}`);
    return cell;
  }

  /** @param target a cell */
  private say(target: EventTarget | null) {
    const { row, column } = (target as HTMLElement).dataset;
    if (!this.found || row === undefined || column === undefined) return this.sayAll();
    const { queries, keys, values } = this.found;
    const value = values[Number(row) * keys.length + Number(column)];
    const [from, to] = [isolated(queries[Number(row)].name), isolated(keys[Number(column)].name)];
    const each = this.page.store.state.per === "token" ? "each token of " : "";
    this.line.textContent = `“${from}” gives ${share(value)} of its attention to ${each}“${to}”, ${this.over()}.`;
  }

  private sayAll() {
    if (!this.found) return;
    const { queries, keys, shares } = this.found;
    const { layer, parts } = this.page.store.state;
    const same = queries.length === keys.length;
    const what = same ? counted(keys.length, "part") : `${queries.length} × ${counted(keys.length, "part")}`;
    this.line.textContent = `${what}, in percent: the mean over the queries of a part, ${this.over()}.${restText(joinedIn(this.page.axes(layer).keys, parts), parts, shares, queries.length)}`;
  }

  private over(): string {
    const which = this.which();
    return `${headsName(which, this.page.recording.layers)}${which.hidden ? ", without sinks" : ""}`;
  }

  /** The arrows go from cell to cell. */
  private go(down: number, right: number) {
    const { row, column } = (document.activeElement as HTMLElement).dataset;
    this.at(Number(row) + down, Number(column) + right)?.focus();
  }

  private at(row: unknown, column: unknown): HTMLElement | null {
    return this.body.querySelector(`[data-row="${row}"][data-column="${column}"]`);
  }

  isSettled(): boolean {
    return !this.latest.isWaiting;
  }

  caption(): string {
    return headline(this.which(), this.page.recording.layers);
  }

  picture(): Picture | null {
    return this.found && this.drawnTable(this.found);
  }

  private drawnTable({ queries, keys, values }: Found): Picture {
    const { ramp, ink } = this.page.look;
    const isDense = keys.length > NUMBERED;
    const [width, height] = isDense ? [17, 17] : [54, 28];
    const labels = keys.map((_, at) => this.columnLabel(keys, at));
    const top = labels.some(({ isNamed }) => isNamed) ? NAMES : 20;
    const draw = (pen: Pen) => {
      const font = (family: string) => (pen.font = `12px ${getComputedStyle(document.body).getPropertyValue(family)}`);
      [pen.textAlign, pen.textBaseline] = ["left", "middle"];
      font("font-family");
      labels.forEach(({ text, isNamed }, column) => {
        pen.save();
        pen.translate(NAMES + (column + 0.5) * width, top - 8);
        if (isNamed) pen.rotate(-Math.PI / 2);
        else pen.textAlign = "center";
        pen.fillStyle = ink.faint;
        pen.fillText(fitted(pen, text, NAMES - 10), 0, 0);
        pen.restore();
      });
      queries.forEach(({ name }, row) => {
        const y = top + row * height;
        font("font-family");
        pen.fillStyle = ink.ink;
        pen.textAlign = "left";
        pen.fillText(fitted(pen, `${row + 1} ${isolated(name)}`, NAMES - 10), 0, y + height / 2);
        font("--mono");
        pen.textAlign = "center";
        keys.forEach((_, column) => {
          const value = values[row * keys.length + column];
          const tint = tintOf(ramp, level(value, "fit", 0, this.darkest));
          const x = NAMES + column * width;
          pen.fillStyle = tint.css;
          pen.fillRect(x + 1, y + 1, width - 2, height - 2);
          pen.fillStyle = tint.onTop;
          if (!isDense) pen.fillText(inCell(value), x + width / 2, y + height / 2, width - 4);
        });
      });
    };
    return { width: NAMES + keys.length * width, height: top + queries.length * height, draw };
  }

  table(): Table {
    if (!this.found) return [];
    const { queries, keys, values } = this.found;
    const rows = queries.map(({ name }, row) => [name, ...keys.map((_, column) => values[row * keys.length + column])]);
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

/** @returns in percent */
function inCell(value: number): string {
  return value > 0 && value < 1e-5 ? "<0.001" : digits(value * 100);
}

function group(label: string, name: string, words: readonly string[]): HTMLElement {
  const buttons = choice(label, name, Object.fromEntries(words.map((word) => [word, word])));
  buttons.prepend(element("span", { className: "label" }, label));
  return buttons;
}

/** @param name of a class */
function headed(scope: "row" | "col", text: string, name: string, title: string = ""): HTMLTableCellElement {
  return element("th", { scope, className: name, title }, text);
}
