/**
 * What parts of the text give to each other: sentences, lines, or what a pattern finds, as a table
 * and as flows, for the open head, its layer, or all of them.
 */

import { isWhole } from "../data/held";
import type { Head } from "../data/source";
import { choice, element } from "../dom";
import { fitted, type Pen, type Picture } from "../export/svg";
import type { Page } from "../main";
import { roundedUp } from "../map/ceiling";
import { level, tintOf } from "../maths/colours";
import { counted, digits, lasting, share } from "../maths/numbers";
import type { Span } from "../maths/shares";
import type { State } from "../state";
import { missing } from "../text/held_words";
import { parted } from "../text/parts";
import { isolated } from "../text/tokens";
import { ARROWS } from "./keys";
import { drawnRibbons, ribbons } from "./ribbons";
import type { Table } from "./views";

export interface Part {
  name: string; // its first words
  span: Span;
}

const ASKED = ["layer", "head", "hidden", "parts", "pattern", "of"];
const AGAIN = 500; // milliseconds
const NUMBERED = 14; // columns that have room for their numbers
const FIFTH = 5;
const NAMES = 230; // pixels of the names of parts in a picture
const MEANS = { head: "this head", layer: "this layer", all: "all layers" };
const WAYS = { sentences: "sentences", lines: "lines", pattern: "pattern" };
const FORMS = { table: "table", flows: "flows" };

export class SegmentsView {
  pattern = element("input", {
    type: "search",
    placeholder: "Words or a regular expression",
    "aria-label": "Pattern that finds the parts",
  });
  line: HTMLParagraphElement;
  body: HTMLDivElement;
  overflow: HTMLParagraphElement;
  asking: AbortController | null = null;
  isAsking = false;
  darkest = 1; // the share of the darkest colour
  found: { queries: Part[]; keys: Part[]; values: Float32Array } | null = null;

  constructor(
    pane: HTMLElement,
    readonly page: Page,
  ) {
    this.pattern.addEventListener("change", () =>
      page.store.set({ pattern: this.pattern.value.slice(0, 200), parts: "pattern" }),
    );
    const tools = element("div", { className: "tools pressed" });
    const parts = group("Parts", "parts", WAYS);
    parts.append(this.pattern);
    tools.append(parts, group("Mean over", "of", MEANS), group("As", "form", FORMS));
    this.line = element("p", { className: "line", role: "status" });
    this.body = element("div", { className: "scroller" });
    this.overflow = element("p", { className: "overflow", hidden: true }, "More columns on the right: scroll →");
    this.body.addEventListener("scroll", () => this.showOverflow());
    pane.append(tools, this.line, this.overflow, this.body);
    this.body.addEventListener("pointerover", (event) => this.say(event.target));
    this.body.addEventListener("focusin", (event) => {
      this.body.querySelector('[tabindex="0"]')?.setAttribute("tabindex", "-1");
      (event.target as HTMLElement | SVGElement).setAttribute("tabindex", "0");
      this.say(event.target);
    });
    this.body.addEventListener("pointerleave", () => this.tell());
    this.body.addEventListener("keydown", (event) => this.go(event));
  }

  update(state: State, changed: Set<string>) {
    if (document.activeElement !== this.pattern) this.pattern.value = state.pattern;
    if (ASKED.some((name) => changed.has(name))) void this.ask(state);
    else if (["form", "theme", "scale"].some((name) => changed.has(name))) this.draw();
  }

  async ask(state: State) {
    this.asking?.abort();
    const asking = (this.asking = new AbortController());
    this.found = null;
    this.isAsking = true;
    this.page.mended(this);
    const { queries, keys } = this.page.axes(state.layer);
    try {
      const asked = { queries: parted(queries, state), keys: parted(keys, state) };
      if (asked.queries.length === 0 || asked.keys.length === 0) return this.fail(nothing(state));
      const heads = this.heads(state);
      if (heads.length === 0)
        return this.fail(
          missing(this.page.recording.layers[state.layer], state.layer, "what parts give to each other"),
        );
      const values = await this.mean(heads, asked, state.hidden, asking.signal);
      this.found = { ...asked, values };
      this.darkest = roundedUp(values.reduce((most, value) => (value > most ? value : most), 0));
      this.draw();
      this.page.explain(this.page.store.state);
    } catch (error) {
      if (asking.signal.aborted) return;
      this.fail("");
      this.page.damaged(error as Error, this);
    } finally {
      if (!asking.signal.aborted) this.isAsking = false;
    }
  }

  ceiling(): number {
    return this.darkest;
  }

  /** The heads that the mean is over. */
  heads({ layer, head, of }: State): { layer: number; head: number }[] {
    const { q_len, kv_len } = this.page.recording.layers[layer];
    return this.page.recording.layers.flatMap((info, place) => {
      const alike = info.q_len === q_len && info.kv_len === kv_len && isWhole(info);
      if (!alike || info.of !== this.page.recording.layers[layer].of || (of !== "all" && place !== layer)) return [];
      const all = Array.from({ length: info.num_heads }, (_, one) => ({ layer: place, head: one }));
      return of === "head" ? [all[head]] : all;
    });
  }

  async mean(
    heads: { layer: number; head: number }[],
    asked: { queries: Part[]; keys: Part[] },
    hidden: boolean,
    signal: AbortSignal,
  ): Promise<Float32Array> {
    const parts = { queries: asked.queries.map(({ span }) => span), keys: asked.keys.map(({ span }) => span) };
    const sum = new Float64Array(parts.queries.length * parts.keys.length);
    for (const [done, head] of heads.entries()) {
      const part = heads.length > 1 ? `: ${Math.floor((100 * done) / heads.length)} %` : " …";
      const asking = `Asking ${counted(heads.length, "head")}${part}`;
      this.line.textContent = asking;
      const looking = setInterval(() => void this.look(asking, { ...head, hidden }, signal), AGAIN);
      try {
        const values = await this.page.source.segments({ ...head, hidden }, parts, signal);
        values.forEach((value, at) => (sum[at] += value / heads.length));
      } finally {
        clearInterval(looking);
      }
    }
    return Float32Array.from(sum);
  }

  /** How far the pass over a long head is, which the sums wait for. */
  async look(asking: string, head: Head, signal: AbortSignal) {
    try {
      const { done, seconds } = await this.page.source.progress(head, false, signal);
      if (done >= 1 || signal.aborted || this.found) return;
      const left = seconds === null ? "" : `, ${lasting(seconds)}`;
      this.line.textContent = `${asking} Looking at the whole head: ${Math.floor(100 * done)} %${left}`;
    } catch {
      // What is wrong, the sums themselves say.
    }
  }

  fail(text: string) {
    this.found = null;
    this.body.replaceChildren();
    this.line.textContent = text;
  }

  draw() {
    if (!this.found) return;
    const { state } = this.page.store;
    const picture = state.form === "flows" ? ribbons(this.found, this.room()) : this.tabled(this.found);
    const focused = this.body.contains(document.activeElement) ? document.activeElement : null;
    this.body.replaceChildren(picture);
    this.showOverflow();
    this.tell();
    if (focused) this.focus((focused as HTMLElement | SVGElement).dataset);
  }

  room() {
    const { clientWidth, clientHeight } = this.body;
    return { look: this.page.look, ceiling: this.darkest, width: clientWidth - 8, height: clientHeight - 8 };
  }

  /** Says that there are more columns than fit: a scroll bar may be invisible until it is used. */
  showOverflow() {
    const { scrollLeft, scrollWidth, clientWidth } = this.body;
    const rest = scrollWidth - clientWidth - scrollLeft;
    this.overflow.hidden = rest < 2;
  }

  /** The cell or flow of two parts; where they have no flow, the first. */
  focus({ row, column }: DOMStringMap) {
    const same = this.body.querySelector(`[data-row="${row}"][data-column="${column}"]`);
    const one = (same ?? this.body.querySelector('[tabindex="0"]')) as HTMLElement | SVGElement | null;
    one?.focus({ preventScroll: true });
  }

  tabled({ queries, keys, values }: NonNullable<SegmentsView["found"]>): HTMLTableElement {
    const { ramp } = this.page.look;
    const table = element("table", { "aria-label": "What parts give to each other, in percent" });
    table.classList.toggle("dense", keys.length > NUMBERED);
    table.style.setProperty("--columns", String(keys.length));
    const head = table.createTHead().insertRow();
    head.append(headed("col", "gives to", "corner"), ...keys.map((_, at) => this.columnHead(keys, at)));
    const body = table.createTBody();
    queries.forEach(({ name }, row) => {
      const line = body.insertRow();
      line.append(headed("row", `${row + 1} ${isolated(name)}`, "", name));
      keys.forEach((_, column) => {
        const value = values[row * keys.length + column];
        const cell = line.insertCell();
        const tint = tintOf(ramp, level(value, "fit", 0, this.darkest));
        cell.style.background = tint.css;
        cell.style.color = tint.onTop;
        cell.dataset.row = String(row);
        cell.dataset.column = String(column);
        cell.tabIndex = row === 0 && column === 0 ? 0 : -1;
        cell.setAttribute("aria-label", share(value));
        if (keys.length <= NUMBERED) cell.textContent = inCell(value);
      });
    });
    return table;
  }

  /** The number of a part, and its name where no row has it; of many parts every fifth number. */
  columnLabel(keys: Part[], at: number) {
    const axes = this.page.axes(this.page.store.state.layer);
    const isNamed = axes.queries !== axes.keys;
    const isTold = isNamed || keys.length <= NUMBERED || (at + 1) % FIFTH === 0;
    return { isNamed, text: isTold ? `${at + 1}${isNamed ? ` ${isolated(keys[at].name)}` : ""}` : "" };
  }

  columnHead(keys: Part[], at: number): HTMLTableCellElement {
    const { name } = keys[at];
    const { isNamed, text } = this.columnLabel(keys, at);
    const cell = headed("col", text, isNamed ? "upright" : "", name);
    cell.setAttribute("aria-label", `${at + 1} ${name}`);
    return cell;
  }

  /** @param target a cell or a ribbon */
  say(target: EventTarget | null) {
    const { row, column } = (target as HTMLElement | SVGElement).dataset;
    if (!this.found || row === undefined || column === undefined) return this.tell();
    const { queries, keys, values } = this.found;
    const value = values[Number(row) * keys.length + Number(column)];
    const [from, to] = [isolated(queries[Number(row)].name), isolated(keys[Number(column)].name)];
    this.line.textContent = `“${from}” gives ${share(value)} of its attention to “${to}”, ${this.over()}.`;
  }

  tell() {
    if (!this.found) return;
    const { queries, keys } = this.found;
    const same = queries.length === keys.length;
    const what = same ? counted(keys.length, "part") : `${queries.length} × ${counted(keys.length, "part")}`;
    this.line.textContent = `${what}, in percent: the mean over the queries of a part, ${this.over()}.`;
  }

  over(): string {
    const { layer, head, of, hidden } = this.page.store.state;
    const sinks = hidden ? ", without sinks" : "";
    const heads = this.heads(this.page.store.state).length;
    if (of === "head") return `layer ${layer} head ${head}${sinks}`;
    const all = this.page.recording.layers.every(isWhole) ? "all layers" : "the layers that are here in full";
    return `mean over ${counted(heads, "head")} of ${of === "layer" ? `layer ${layer}` : all}${sinks}`;
  }

  /** @param event arrows go from cell to cell, or from flow to flow */
  go(event: KeyboardEvent) {
    const step = ARROWS[event.key];
    const target = event.target as HTMLElement | SVGElement;
    const { row, column } = target.dataset;
    if (!step || row === undefined || column === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    const [down, right] = step;
    const flows = [...(this.body.querySelectorAll("path") as NodeListOf<SVGElement>)];
    const cell = `td[data-row="${Number(row) + down}"][data-column="${Number(column) + right}"]`;
    const next = (
      target instanceof SVGElement ? flows[flows.indexOf(target) + down + right] : this.body.querySelector(cell)
    ) as HTMLElement | SVGElement | null | undefined;
    next?.focus();
  }

  isSettled(): boolean {
    return !this.isAsking;
  }

  caption(): string {
    const over = this.over();
    return over[0].toUpperCase() + over.slice(1);
  }

  picture(): Picture | null {
    if (!this.found) return null;
    const isFlows = this.page.store.state.form === "flows";
    return isFlows ? drawnRibbons(this.found, this.room()) : this.drawnTable(this.found);
  }

  drawnTable({ queries, keys, values }: NonNullable<SegmentsView["found"]>): Picture {
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

/** @returns in percent */
function inCell(value: number): string {
  return value > 0 && value < 1e-5 ? "<0.001" : digits(value * 100);
}

/** Why there are no parts. */
function nothing({ parts, pattern }: State): string {
  if (parts !== "pattern") return "There are no parts: the text has special tokens only.";
  return pattern ? "Nothing in the text fits the pattern." : "Type a pattern.";
}

function group(label: string, name: string, ways: Record<string, string>): HTMLElement {
  const words = choice(label, name, ways);
  words.prepend(element("span", { className: "label" }, label));
  return words;
}

/** @param name of a class */
function headed(scope: "row" | "col", text: string, name: string, title: string = ""): HTMLTableCellElement {
  return element("th", { scope, className: name, title }, text);
}
