/**
 * One query of one head, step by step, with the model's own numbers: a row for each key, a column
 * for each step. Every number shows the sum that made it, when pointed at or reached by the arrows.
 */

import { isWhole } from "../data/block_means";
import { choice, element } from "../dom";
import type { Page } from "../main";
import { counted, grouped, share } from "../maths/numbers";
import type { Step, Steps } from "../maths/row_steps";
import { columnsOf, PRODUCTS, productsOf, totalOf, weightedValue, written, type Column } from "../maths/sums";
import type { State } from "../state";
import { missing } from "../text/block_words";
import { quoted } from "../text/sentence";
import { named } from "../text/tokens";
import { ARROWS } from "./keys";
import { FEW, largest, vectorPicture } from "./vectors";
import type { Table } from "./views";

const MORE = 32; // keys that a press unfolds
const BAR_LEVEL = 160; // of the ramp: data, but quieter than the darkest cell
const MOVES: Record<string, [number, number]> = { ...ARROWS, Home: [0, -99], End: [0, 99] };
const NO_VALUES =
  "The output, weights times values, is not shown: there are no values here. " +
  'regard record --values keeps them; in Python, observe(model, keep="qkv").';
const VECTORS =
  "Each token’s embedding, as the layers before have changed it, times a matrix of learned numbers; a third matrix gives the value (lessons 4 and 6).";
const OUTPUT =
  "The weighted values of all keys added up; another matrix takes the outputs of all heads back to the embeddings (lessons 6 and 7).";
const NO_VECTORS =
  "Of this layer only the weights are known here; a recording that is served keeps every step of most models.";

export class StepsView {
  heading = element("h2");
  order = choice("Order of the keys", "order", { weight: "By weight", position: "By position" });
  sum: HTMLParagraphElement;
  grid: HTMLTableElement;
  more: HTMLButtonElement;
  notes: HTMLParagraphElement;
  meanings = element("dl");
  turn = 0;
  isAsking = false;
  asked = "";
  steps: Steps | null = null;
  query = 0;
  highest: { value: number; share: number; product: number };
  active = [0, 0]; // row and column of the number that the arrows are on

  constructor(
    pane: HTMLElement,
    readonly page: Page,
  ) {
    this.order.className = "choice pressed";
    this.sum = element("p", { className: "sum", "aria-live": "polite" });
    this.grid = element("table", { role: "grid" });
    this.more = element("button", { type: "button" });
    this.more.addEventListener("click", () => page.store.set({ steps: page.store.state.steps + MORE }));
    this.notes = element("p", { className: "note" });
    const summary = element("summary", {}, "What the steps are");
    const explained = element("details", { className: "explained pressed" }, summary, this.meanings);
    const scroller = element("div", { className: "scroller" }, this.grid, this.more, this.notes, explained);
    pane.append(element("div", { className: "top" }, this.heading, this.order), this.sum, scroller);
    this.highest = { value: 0, share: 0, product: 0 }; // magnitudes that have the full colour
    this.follow();
  }

  /** The pointer, the arrows and the focus, all by way of `explainNumber`. */
  follow() {
    this.grid.addEventListener("pointerover", (event) => this.explainNumber(placeOf(event)));
    this.grid.addEventListener("pointerleave", () => {
      this.page.hover(null);
      this.explainNumber(this.active);
    });
    this.grid.addEventListener("focusin", (event) => {
      const place = placeOf(event);
      if (place) this.activate(place);
    });
    this.grid.addEventListener("click", (event) => {
      const place = placeOf(event);
      const step = place && this.steps?.rows[place[0]];
      if (step) this.page.choose({ query: this.query, key: step.key });
    });
    this.grid.addEventListener("keydown", (event) => {
      const step = MOVES[event.key];
      if (!step || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      const rows = this.grid.querySelectorAll("[data-row]").length - 1;
      const columns = this.grid.querySelectorAll('[data-row="0"] [data-column]').length - 1;
      const [row, column] = [this.active[0] + step[0], this.active[1] + step[1]];
      this.cell([clamp(row, rows), clamp(column, columns)])?.focus();
    });
  }

  update(state: State, changed: Set<string>) {
    const asked = [state.layer, state.head, state.hidden, state.order, state.steps, this.page.cell().query].join();
    if (asked !== this.asked) {
      this.asked = asked;
      this.ask();
    } else if (changed.has("theme")) this.draw();
    this.mark();
  }

  ask() {
    const { layer, head, hidden, order, steps: count } = this.page.store.state;
    const { query } = this.page.cell();
    const turn = ++this.turn;
    const info = this.page.recording.layers[layer];
    this.isAsking = isWhole(info);
    if (!this.isAsking) return this.clear(missing(info, layer, "a row step by step"));
    this.page.source
      .steps({ layer, head, hidden }, query, { by: order, start: 0, count })
      .then((steps) => {
        if (turn !== this.turn) return;
        this.isAsking = false;
        [this.steps, this.query] = [steps, query];
        this.page.mended(this);
        this.draw();
      })
      .catch((error) => {
        if (turn !== this.turn) return;
        this.isAsking = false;
        this.clear("");
        this.asked = "";
        this.page.damaged(error, this);
      });
  }

  clear(reason: string) {
    this.steps = null;
    this.grid.replaceChildren();
    this.heading.textContent = "";
    this.sum.textContent = "";
    this.more.hidden = true;
    this.notes.textContent = reason;
  }

  draw() {
    const { steps } = this;
    if (!steps) return;
    const { layer, hidden } = this.page.store.state;
    const axes = this.page.axes(layer);
    const hasFocus = this.grid.contains(document.activeElement);
    const unfolded = document.activeElement === this.more ? this.grid.tBodies[0].rows.length : null;
    const name = quoted(axes.queries, this.query);
    const keys = steps.masked
      ? `the ${grouped(steps.allowed)} of ${counted(steps.keys, "key")} it may attend to`
      : counted(steps.keys, "key");
    this.heading.textContent = `How ${name} comes to its weights on ${keys}`;
    const columns = columnsOf(steps);
    const highest = largest([steps.vector, ...steps.rows.map(({ vector }) => vector)]);
    const shares = [steps.output, ...steps.rows.map(weightedValue)];
    this.highest = {
      value: largest(steps.rows.map(({ value }) => value)),
      share: largest(shares),
      product: largest(steps.rows.map(({ vector }) => productsOf(steps.vector, vector))),
    };
    const rows = steps.rows.map((step, i) => this.row(step, i, columns, highest));
    const body = element("tbody", {}, ...rows);
    const foot = element("tfoot", {}, this.last(columns, rows.length));
    this.grid.replaceChildren(this.head(columns, highest), body, foot);
    this.grid.setAttribute("aria-label", this.heading.textContent);
    this.explain(columns);
    this.grid.classList.toggle("with-values", steps.output !== null);
    const rest = steps.keys - steps.rows.length;
    this.more.hidden = rest <= 0;
    this.more.textContent = `${Math.min(MORE, rest)} more of ${grouped(rest)}`;
    const aside = hidden ? "The first and the special tokens are set aside, as if masked. " : "";
    const ends = [aside, coloursText("Vectors", steps.vector, highest)];
    ends.push(coloursText("Products", steps.vector, this.highest.product));
    ends.push(coloursText("Values", steps.output, this.highest.value));
    ends.push(coloursText("Their shares and the output", steps.output, this.highest.share));
    if (!steps.vector) ends.push(NO_VECTORS);
    else if (!steps.output) ends.push(NO_VALUES);
    this.notes.textContent = ends.join("");
    const chosen = hasFocus ? -1 : this.placeOfKey();
    const at = chosen < 0 ? clamp(this.active[0], rows.length) : chosen;
    this.activate([at, clamp(this.active[1], columns.length - 1)]);
    if (hasFocus) this.cell(this.active)?.focus({ preventScroll: true });
    // Where nothing is left to unfold, the focus goes on to the first key that was.
    if (unfolded !== null && this.more.hidden) this.cell([unfolded, this.active[1]])?.focus();
    this.mark();
    this.grid.dataset.ready = `${this.asked},${steps.rows.length}`;
  }

  /** A sentence for each step, from the vectors to the output. */
  explain(columns: Column[]) {
    const steps = columns.map(({ name, does }) => ({ name, does }));
    if (this.steps?.vector) steps.unshift({ name: "query, key", does: VECTORS });
    if (this.steps?.output) steps.push({ name: "output", does: OUTPUT });
    this.meanings.replaceChildren(
      ...steps.flatMap(({ name, does }) => [element("dt", {}, name), element("dd", {}, does)]),
      element("dd", { className: "learn" }, "regard learn 3 opens lesson 3 in a terminal; so do the others."),
    );
  }

  head(columns: Column[], highest: number) {
    const row = element("tr", {}, columnHead("key"));
    const { steps } = this;
    if (steps?.vector) {
      const cell = columnHead("");
      const name = element("span", { className: "name" }, "query, and each key");
      cell.append(name, vectorPicture(steps.vector, highest, this.page.look.differences, "query vector"));
      row.append(cell);
    }
    for (const { name } of columns) {
      const cell = columnHead(name);
      cell.classList.toggle("of-weight", name === "weight");
      row.append(cell);
    }
    return element("thead", {}, row);
  }

  row(step: Step, at: number, columns: Column[], highest: number) {
    const row = element("tr", { "data-row": at, className: step.allowed ? "" : "masked" });
    const { keys } = this.page.axes(this.page.store.state.layer);
    const token = element("bdi", { className: keys[step.key].special ? "special" : "" }, named(keys[step.key], 18));
    const position = element("span", { className: "position" }, String(step.key));
    row.append(element("th", { scope: "row" }, token, " ", position));
    if (this.steps?.vector) {
      const cell = row.insertCell();
      const { differences } = this.page.look;
      if (step.vector) cell.append(vectorPicture(step.vector, highest, differences, "key vector"));
    }
    columns.forEach(({ name: column, of, vector }, i) => {
      if (vector) {
        const { value, share: most, product } = this.highest;
        const full = column === PRODUCTS ? product : column === "value" ? value : most;
        row.append(this.vectorCell(i, vector(step) ?? [], full, column));
        return;
      }
      const cell = numberCell(i, column === "weight" ? share(step.weight) : written(of(step)));
      if (column === "weight") {
        const bar = element("span", { className: "bar-of-weight" });
        bar.style.width = `calc(var(--widest) * ${step.weight})`;
        bar.style.marginRight = `calc(var(--widest) * ${1 - step.weight})`;
        bar.style.backgroundColor = this.page.look.ramp.css[BAR_LEVEL];
        cell.append(bar);
      }
      row.append(cell);
    });
    return row;
  }

  /** The sums over all keys. */
  last(columns: Column[], at: number) {
    const row = element("tr", { "data-row": at }, element("th", { scope: "row" }, "all"));
    if (this.steps?.vector) row.insertCell();
    const steps = this.steps as Steps;
    columns.forEach(({ name: column }, i) => {
      const { text, vector } = totalOf(steps, column);
      const cell = vector ? this.vectorCell(i, vector, this.highest.share, "output") : numberCell(i, text);
      cell.classList.toggle("of-weight", column === "weight");
      row.append(cell);
    });
    return row;
  }

  /** @param name for those who do not see it */
  vectorCell(column: number, vector: ArrayLike<number>, highest: number, name: string) {
    const cell = numberCell(column, "");
    cell.replaceChildren(vectorPicture(vector, highest, this.page.look.differences, name));
    return cell;
  }

  cell([row, column]: number[]): HTMLElement | null {
    return this.grid.querySelector(`[data-row="${row}"] [data-column="${column}"]`);
  }

  /** One number of the table can be reached with Tab; the arrows go on from it. */
  activate(place: number[]) {
    this.cell(this.active)?.setAttribute("tabindex", "-1");
    this.active = place;
    this.cell(place)?.setAttribute("tabindex", "0");
    this.explainNumber(place);
  }

  /** Says which sum made a number, and reads its cell. */
  explainNumber(place: number[] | null) {
    const { steps } = this;
    if (!place || !steps) return;
    const column = columnsOf(steps)[place[1]];
    const step = steps.rows[place[0]];
    const { queries, keys } = this.page.axes(this.page.store.state.layer);
    this.grid.querySelector(".explaining")?.classList.remove("explaining");
    this.cell(place)?.classList.add("explaining");
    if (!step) {
      this.sum.textContent = totalOf(steps, column.name).sum;
      return;
    }
    const names = { query: quoted(queries, this.query), key: quoted(keys, step.key) };
    this.sum.textContent = `${names.key}: ${column.sum(step, names)}`;
    if (this.grid.matches(":hover")) this.page.hover({ query: this.query, key: step.key });
  }

  /** @returns the row of the key that is read below; -1 where it is not shown */
  placeOfKey(): number {
    const { key } = this.page.cell();
    return this.steps?.rows.findIndex((step) => step.key === key) ?? -1;
  }

  /** The key that is read below, here too: marked, and its sum shown while nobody points at another. */
  mark() {
    const { key } = this.page.cell();
    const at = this.placeOfKey();
    const isElsewhere = this.grid.matches(":hover") || this.grid.contains(document.activeElement);
    if (at >= 0 && at !== this.active[0] && !isElsewhere) this.activate([at, this.active[1]]);
    this.steps?.rows.forEach((step, i) => {
      this.grid.querySelector(`[data-row="${i}"]`)?.classList.toggle("chosen", step.key === key);
    });
  }

  /** @returns are these the steps of the chosen query? Where none is chosen, the reading chooses one. */
  isSettled(): boolean {
    return !this.isAsking && (this.page.store.state.query !== null || !this.page.reader.isReading);
  }

  /** @returns the numbers shown, those of pictures too; the first row names the columns */
  table(): Table {
    const { steps } = this;
    if (!steps) return [];
    const { queries, keys } = this.page.axes(this.page.store.state.layer);
    const columns = columnsOf(steps).filter(({ vector }) => !vector);
    const none = columns.map(() => "");
    const [vector, output] = [Array.from(steps.vector ?? []), Array.from(steps.output ?? [])];
    const rows = steps.rows.map((step) => [
      step.key,
      keys[step.key].text,
      ...columns.map(({ of }) => Number(of(step) ?? NaN)),
      ...Array.from(step.vector ?? []),
      ...Array.from(step.value ?? []),
    ]);
    const places = [...vector.map((_, d) => `vector ${d}`), ...output.map((_, d) => `value ${d}`)];
    const query = ["query", queries[this.query].text, ...none, ...vector, ...output.map(() => "")];
    const last = ["output", "", ...none, ...vector.map(() => ""), ...output];
    return [
      ["key", "token", ...columns.map(({ name }) => name), ...places],
      ...rows,
      ...(vector.length > 0 ? [query] : []),
      ...(output.length > 0 ? [last] : []),
    ];
  }
}

/** @returns row and column */
function placeOf(event: Event): number[] | null {
  const target = event.target as HTMLElement;
  const cell = target.closest("[data-column]") as HTMLElement | null;
  const row = target.closest("[data-row]") as HTMLElement | null;
  return cell && row ? [Number(row.dataset.row), Number(cell.dataset.column)] : null;
}

function clamp(value: number, last: number): number {
  return Math.max(0, Math.min(last, value));
}

/**
 * What the colours of vectors say, where they are seen as a picture.
 * @param vector one of them
 */
function coloursText(what: string, vector: ArrayLike<number> | null, highest: number): string {
  if (!vector || vector.length <= FEW) return "";
  return `${what} of ${vector.length} numbers: blue below 0, orange above, full at ${written(highest)}. `;
}

function numberCell(column: number, text: string): HTMLTableCellElement {
  return element("td", { role: "gridcell", "data-column": column, tabIndex: -1 }, element("span", {}, text));
}

function columnHead(name: string): HTMLTableCellElement {
  return element("th", { scope: "col" }, name);
}
