/**
 * One query of one head, step by step, with the model's own numbers: a row for each key, a column
 * for each step. Every number shows the sum that made it, when pointed at or reached by the arrows.
 */

import { computed, signal, untracked } from "@preact/signals-core";
import { Latest } from "../data/waiting";
import { ARROWS, byId, Cells, element, inside, moreColumns, pixelated, placeOf } from "../dom";
import type { Ramp } from "../maths/colours";
import { counted, grouped, share } from "../maths/numbers";
import { columnsOf, written, type Column } from "../maths/sums";
import type { Step, StepsAnswer as Steps } from "../protocol/questions";
import { isWhole } from "../protocol/recording";
import type { Session } from "../session";
import { missing } from "../text/block_words";
import { quoted } from "../text/sentence";
import { named } from "../text/tokens";
import type { Table, View } from "../view";

const MORE = 32; // keys that a press unfolds
const FEW = 4; // numbers of a vector that are quicker read than seen
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

export class StepsView implements View {
  private pane = byId("view-steps");
  private heading = inside(this.pane, "h2");
  private sum = inside(this.pane, ".sum");
  private grid = inside<HTMLTableElement>(this.pane, "table");
  private cells = new Cells(this.grid, (place) => this.explainNumber(place), MOVES);
  private more = byId("more");
  private notes = inside(this.pane, ".note");
  private lookForMore = moreColumns(this.pane);
  private meanings = inside(this.pane, "dl");
  private latest = new Latest();
  private found = signal<{ steps: Steps; query: number; layer: number; asked: string } | null>(null);
  private chosen = computed(() => this.session.cell(this.session.store.drawn).query);
  private columns: Column[] = [];

  readonly draws = [() => this.ask(), () => this.draw(), () => this.mark()];

  constructor(private readonly session: Session) {
    const { store } = session;
    inside<HTMLDetailsElement>(this.pane, "details").open = matchMedia("(min-width: 700px)").matches; // not on a phone
    this.more.addEventListener("click", () => store.set({ steps: store.state.steps + MORE }));
    this.grid.addEventListener("pointerleave", () => {
      session.hover(null);
      this.explainNumber(this.cells.active);
    });
    this.grid.addEventListener("click", (event) => {
      const step = this.steps?.rows[placeOf(event)?.[0] ?? -1];
      if (step) session.choose({ query: this.query, key: step.key });
    });
  }

  private get query(): number {
    return this.found.value?.query ?? 0;
  }

  private get steps(): Steps | null {
    return this.found.value?.steps ?? null;
  }

  private ask() {
    const { layers, store, source } = this.session;
    const { layer, head, hidden, order, steps: count } = store.drawn;
    const query = this.chosen.value;
    this.latest.drop();
    if (!isWhole(layers[layer])) return this.clear(missing(layers, layer, "a row step by step"));
    const asked = [layer, head, hidden, order, count, query].join();
    this.session.ask(
      this,
      this.latest,
      (signal) => source.steps({ layer, head, hidden }, query, { by: order, start: 0, count }, signal),
      (steps) => (this.found.value = { steps, query, layer, asked }),
      () => this.clear(""),
    );
  }

  private clear(reason: string) {
    this.found.value = null;
    this.grid.replaceChildren();
    this.heading.textContent = "";
    this.sum.textContent = "";
    this.more.hidden = true;
    this.notes.textContent = reason;
  }

  private draw() {
    const found = this.found.value;
    if (!found) return;
    const { steps, query } = found;
    const hasFocus = this.grid.contains(document.activeElement);
    const unfolded = document.activeElement === this.more ? this.grid.tBodies[0].rows.length : null;
    const keys = steps.masked
      ? `the ${grouped(steps.allowed)} of ${counted(steps.keys, "key")} it may attend to`
      : counted(steps.keys, "key");
    this.heading.textContent = `How ${quoted(this.axes().queries, query)} comes to its weights on ${keys}`;
    const { rows } = steps;
    this.columns = columnsOf(steps);
    const vectors = largest([steps.vector, ...rows.map(({ vector }) => vector)]);
    const highest = this.columns.map(({ vector, total }) =>
      vector ? largest([total?.vector ?? null, ...rows.map(vector)]) : 0,
    );
    this.grid.replaceChildren(
      element("thead", {}, this.head(vectors)),
      element("tbody", {}, ...rows.map((step, i) => this.row(step, i, vectors, highest))),
      element("tfoot", {}, this.last(rows.length, highest)),
    );
    this.grid.style.setProperty("--rows", String(rows.length + 1));
    this.grid.setAttribute("aria-label", this.heading.textContent);
    this.explain();
    this.grid.classList.toggle("with-values", steps.output !== null);
    const rest = steps.keys - steps.rows.length;
    this.more.hidden = rest <= 0;
    this.more.textContent = `${Math.min(MORE, rest)} more of ${grouped(rest)}`;
    const aside = this.session.store.state.hidden
      ? "The first and the special tokens are set aside, as if masked. "
      : "";
    this.notes.textContent = [
      aside,
      coloursText("Vectors", steps.vector, vectors),
      ...this.columns.map(({ vectors: name = "", vector }, i) =>
        coloursText(name, vector ? vector(rows[0]) : null, highest[i]),
      ),
      steps.vector ? (steps.output ? "" : NO_VALUES) : NO_VECTORS,
    ].join("");
    const chosen = hasFocus ? -1 : untracked(() => this.placeOfKey()); // `mark` follows it, without a new table
    const { cells } = this;
    cells.activate([chosen < 0 ? cells.active[0] : chosen, cells.active[1]]);
    if (hasFocus) cells.at(cells.active)?.focus({ preventScroll: true });
    // Where nothing is left to unfold, the focus goes on to the first key that was.
    if (unfolded !== null && this.more.hidden) cells.at([unfolded, cells.active[1]])?.focus();
    this.lookForMore();
    this.grid.dataset.ready = `${found.asked},${steps.rows.length}`;
  }

  private axes() {
    return this.session.axes(this.found.value?.layer ?? this.session.store.state.layer);
  }

  /** A sentence for each step, from the vectors to the output. */
  private explain() {
    const steps = this.columns.map(({ name, does }) => ({ name, does }));
    if (this.steps?.vector) steps.unshift({ name: "query, key", does: VECTORS });
    if (this.steps?.output) steps.push({ name: "output", does: OUTPUT });
    this.meanings.replaceChildren(
      ...steps.flatMap(({ name, does }) => [element("dt", {}, name), element("dd", {}, does)]),
      element("dd", { className: "learn" }, "regard learn 3 opens lesson 3 in a terminal; so do the others."),
    );
  }

  /** @param vectors the magnitude in them that has the full colour */
  private head(vectors: number) {
    const row = element("tr", {}, columnHead("key"));
    const vector = this.steps?.vector;
    if (vector) {
      const name = element("span", { className: "name" }, "query, and each key");
      row.append(columnHead("", name, this.drawn(vector, vectors, "query vector")));
    }
    row.append(...this.columns.map(({ name }) => columnHead(name)));
    return row;
  }

  private row(step: Step, at: number, vectors: number, highest: number[]) {
    const token = this.axes().keys[step.key];
    const name = element("bdi", { className: token.special ? "special" : "" }, named(token, 18));
    const position = element("span", { className: "position" }, String(step.key));
    const row = element("tr", { "data-row": at, className: step.allowed ? "" : "masked" });
    row.append(element("th", { scope: "row" }, name, " ", position));
    if (this.steps?.vector) {
      const vector = step.vector ? [this.drawn(step.vector, vectors, "key vector")] : [];
      row.append(element("td", {}, ...vector));
    }
    this.columns.forEach(({ name: column, of, vector }, i) => {
      if (vector) row.append(numberCell(i, this.drawn(vector(step), highest[i], column)));
      else if (column === "weight") row.append(numberCell(i, share(step.weight), this.bar(step.weight)));
      else row.append(numberCell(i, written(of?.(step) ?? null)));
    });
    return row;
  }

  private bar(weight: number) {
    const colour = this.session.look.ramp.css[BAR_LEVEL];
    const [width, rest] = [weight, 1 - weight].map((part) => `calc(var(--widest) * ${part})`);
    const style = `width: ${width}; margin-right: ${rest}; background-color: ${colour}`;
    return element("span", { className: "bar-of-weight", style });
  }

  /** The sums over all keys. */
  private last(at: number, highest: number[]) {
    const row = element("tr", { "data-row": at }, element("th", { scope: "row" }, "all"));
    if (this.steps?.vector) row.append(element("td"));
    this.columns.forEach(({ name, total }, i) => {
      const cell = numberCell(i, total?.vector ? this.drawn(total.vector, highest[i], "output") : (total?.text ?? ""));
      cell.classList.toggle("of-weight", name === "weight");
      row.append(cell);
    });
    return row;
  }

  private drawn(vector: ArrayLike<number>, highest: number, name: string) {
    return vectorPicture(vector, highest, this.session.look.differences, name);
  }

  /** Says which sum made a number, and reads its cell. */
  private explainNumber(place: number[] | null) {
    const { steps } = this;
    if (!place || !steps) return;
    const column = this.columns[place[1]];
    const step = steps.rows[place[0]];
    const { queries, keys } = this.axes();
    this.grid.querySelector(".explaining")?.classList.remove("explaining");
    this.cells.at(place)?.classList.add("explaining");
    if (!step) return void (this.sum.textContent = column.total?.sum ?? "");
    const names = { query: quoted(queries, this.query), key: quoted(keys, step.key) };
    this.sum.textContent = `${names.key}: ${column.sum(step, names)}`;
    if (this.grid.matches(":hover")) this.session.hover({ query: this.query, key: step.key });
  }

  /** @returns the row of the key that is read below; -1 where it is not shown */
  private placeOfKey(): number {
    const { key } = this.session.cell(this.session.store.drawn);
    return this.steps?.rows.findIndex((step) => step.key === key) ?? -1;
  }

  /** The key that is read below, here too: marked, and its sum shown while nobody points at another. */
  private mark() {
    const { key } = this.session.cell(this.session.store.drawn);
    const at = this.placeOfKey();
    const isElsewhere = this.grid.matches(":hover") || this.grid.contains(document.activeElement);
    const [row, column] = this.cells.active;
    if (at >= 0 && at !== row && !isElsewhere) this.cells.activate([at, column]);
    this.steps?.rows.forEach((step, i) => {
      this.grid.querySelector(`[data-row="${i}"]`)?.classList.toggle("chosen", step.key === key);
    });
  }

  /** The numbers of vectors are written out. */
  table(): Table {
    const { steps } = this;
    if (!steps) return [];
    const { queries, keys } = this.axes();
    const columns = this.columns.filter(({ vector }) => !vector);
    const none = columns.map(() => "");
    const [vector, output] = [Array.from(steps.vector ?? []), Array.from(steps.output ?? [])];
    const rows = steps.rows.map((step) => [
      step.key,
      keys[step.key].text,
      ...columns.map(({ of }) => Number(of?.(step) ?? NaN)),
      ...Array.from(step.vector ?? []),
      ...Array.from(step.value ?? []),
    ]);
    const places = [...vector.map((_, d) => `vector ${d}`), ...output.map((_, d) => `value ${d}`)];
    const query = ["query", queries[this.query].text, ...none, ...vector, ...output.map(() => "")];
    return [
      ["key", "token", ...columns.map(({ name }) => name), ...places],
      ...rows,
      ...(vector.length > 0 ? [query] : []),
      ...(output.length > 0 ? [["output", "", ...none, ...vector.map(() => ""), ...output]] : []),
    ];
  }
}

/**
 * What the colours of vectors say, where they are seen as a picture.
 * @param vector one of them
 */
function coloursText(what: string, vector: ArrayLike<number> | null, highest: number): string {
  if (!vector || vector.length <= FEW) return "";
  return `${what} of ${vector.length} numbers: blue below 0, orange above, full at ${written(highest)}. `;
}

function numberCell(column: number, content: string | Node, ...more: Node[]): HTMLTableCellElement {
  const first = typeof content === "string" ? element("span", {}, content) : content;
  return element("td", { role: "gridcell", "data-column": column, tabIndex: -1 }, first, ...more);
}

function columnHead(name: string, ...content: Node[]): HTMLTableCellElement {
  return element("th", { scope: "col", className: name === "weight" ? "of-weight" : "" }, name, ...content);
}

/**
 * A vector as a calm picture: one cell for each number, blue below zero, orange above, 0 the ground.
 * @param highest the magnitude that has the full colour
 * @param ramp of differences, its ground in the middle
 * @param name for those who do not see it
 */
function vectorPicture(numbers: ArrayLike<number>, highest: number, ramp: Ramp, name: string): HTMLElement {
  if (numbers.length <= FEW) {
    const cells = Array.from(numbers, (number) => element("span", {}, written(number)));
    return element("span", { className: "vector" }, ...cells);
  }
  const middle = (ramp.packed.length - 1) / 2;
  const part = (number: number) => (highest > 0 ? number / highest : 0);
  const pixels = Uint32Array.from(numbers, (number) => ramp.packed[Math.round(middle + middle * part(number))]);
  const label = `${name}: ${numbers.length} numbers, ${range(numbers)}`;
  const canvas = element("canvas", { className: "vector", role: "img", "aria-label": label });
  return pixelated(numbers.length, 1, pixels, canvas);
}

/** @returns "from −1.2 to 3.1" */
function range(numbers: ArrayLike<number>): string {
  const all = Array.from(numbers);
  return `from ${written(Math.min(...all))} to ${written(Math.max(...all))}`;
}

function largest(vectors: (ArrayLike<number> | null)[]): number {
  let highest = 0;
  for (const vector of vectors)
    for (let i = 0; i < (vector?.length ?? 0); i++)
      highest = Math.max(highest, Math.abs((vector as ArrayLike<number>)[i]));
  return highest;
}
