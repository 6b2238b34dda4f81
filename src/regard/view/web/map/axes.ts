/** Where the map lies on its canvas and what stands beside it: tokens on both axes, at any zoom. */

import type { Axis, TwoAxes } from "../data/axes";
import { fittedText, svgElement } from "../dom";
import type { Token } from "../protocol/recording";
import { named } from "../text/tokens";
import type { Pen } from "../view";

export interface Frame {
  left: number; // CSS pixels from the canvas's edge to the map
  top: number;
  width: number; // of the map
  height: number;
  cellWidth: number;
  cellHeight: number;
  row: number; // first query shown; a part of one, if it is not whole
  column: number; // first key shown
  rows: number; // how many are shown, parts included
  columns: number;
  most: number; // the zoom from which cells grow no more
  slanted: boolean; // key labels do not fit side by side
}

const LARGEST = 84; // pixels of a cell, so that one token is not a poster,
const FEWEST = 8; // or so many of them fill a large screen
const SLANT = Math.PI / 3;
const APART = 4; // pixels between two labels
const NAMES = 66; // pixels of the names of the axes, in the corner
const MEASURED = 2000; // labels of a long text, to know the widest

function written(token: Token): string {
  return token.special ? named(token, 16).toUpperCase() : named(token, 16);
}

export class Axes {
  private family = getComputedStyle(document.body).fontFamily;
  private limit = 124; // pixels of the widest label
  private type = 13; // pixels of labels
  private measured = new Map<Token, { text: string; width: number }>();
  private widths = new Map<Token[], number>();

  /** @param context that measures */
  constructor(private readonly context: Pen) {}

  private setLimit(limit: number) {
    const type = Number.parseFloat(getComputedStyle(document.body).fontSize) - 1;
    if (limit === this.limit && type === this.type) return;
    this.measured.clear();
    this.widths.clear();
    [this.limit, this.type] = [limit, type];
  }

  /** @returns shortened until it fits */
  private labelOf(token: Token): { text: string; width: number } {
    let label = this.measured.get(token);
    if (!label) {
      // As the style sheet has it.
      this.context.font = token.special ? `600 ${this.type - 3}px ${this.family}` : `${this.type}px ${this.family}`;
      this.context.letterSpacing = token.special ? "0.6px" : "0px";
      const text = fittedText(this.context, written(token), this.limit);
      label = { text, width: this.context.measureText(text).width };
      this.measured.set(token, label);
    }
    return label;
  }

  /** @returns of the widest label, or nearly so in a long text */
  private widest(tokens: Token[]): number {
    let widest = this.widths.get(tokens) ?? 12;
    if (this.widths.has(tokens)) return widest;
    const every = Math.ceil(tokens.length / MEASURED);
    for (let i = 0; i < tokens.length && widest <= this.limit - 8; i += every)
      widest = Math.max(widest, this.labelOf(tokens[i]).width);
    if (widest > this.limit - 8) widest = this.limit;
    this.widths.set(tokens, widest);
    return widest;
  }

  /**
   * The margins are those of whole texts, so that nothing moves but the map itself.
   * @param all the texts of the maps on the stage, whose edges lie at one height
   */
  frame(
    stage: { width: number; height: number },
    { queries, keys }: TwoAxes,
    { zoom, row, column }: { zoom: number; row: number; column: number },
    all: TwoAxes[] = [{ queries, keys }],
  ): Frame {
    this.setLimit(Math.round(Math.max(60, Math.min(124, stage.width * 0.12))));
    const largest = Math.max(LARGEST, Math.min(stage.width, stage.height) / FEWEST);
    const sides = (["queries", "keys"] as const).map((side) => ({
      length: Math.max(...all.map((axes) => axes[side].length)),
      label: Math.max(...all.map((axes) => this.widest(axes[side]))),
    }));
    const [down, across] = sides;
    // With fewer pixels than labels need, each label carries its position: "250 the".
    const name = across.label + positionWidth(across);
    const high = stage.height - slope(name) - 20;
    const wide = stage.width - NAMES - Math.ceil(name * Math.cos(SLANT));
    const least = Math.min(wide / across.length, high / down.length);
    const counter = this.stride(Math.floor(least)) > 1 ? positionWidth(down) : 0;
    const left = Math.max(NAMES, Math.ceil(down.label + counter + 16));
    const room = { width: stage.width - left - 2, height: stage.height - 30 };
    const flat = Math.min(room.width / across.length, room.height / down.length, largest);
    const slanted = across.label > flat - 10;
    const label = across.label + (flat * 0.8 < this.type + APART ? positionWidth(across) : 0);
    const top = slanted ? slope(label) : 30;
    const right = slanted ? Math.ceil(label * Math.cos(SLANT)) : 0;
    const space = { width: room.width - right, height: stage.height - top - 20 };
    const { cellWidth, cellHeight, most } = sidesOf(space, keys.length, queries.length, zoom, largest);
    const width = Math.min(whole(space.width), keys.length * cellWidth);
    const height = Math.min(whole(space.height), queries.length * cellHeight);
    const [rows, columns] = [height / cellHeight, width / cellWidth];
    const frame = { left, top, width, height, cellWidth, cellHeight, rows, columns, most, slanted };
    const inside = (first: number, last: number) => Math.max(0, Math.min(last, first));
    return { ...frame, row: inside(row, queries.length - rows), column: inside(column, keys.length - columns) };
  }

  /** All labels that have room. */
  labels(frame: Frame, { queries, keys }: TwoAxes): SVGElement[] {
    const x = frame.left - 8;
    const base = frame.top - Math.max(7, 12 - frame.cellHeight / 2); // above the first label
    const labels: SVGElement[] = [
      svgElement("text", { x, y: base - 17, class: "count end" }, "keys →"),
      svgElement("text", { x, y: base - 4, class: "count end" }, "queries ↓"),
    ];
    for (const [axis, tokens] of Object.entries({ query: queries, key: keys }) as [Axis, Token[]][]) {
      const { start, last, every } = this.span(frame, axis);
      for (let at = aligned(start, every); at <= last; at += every)
        labels.push(this.label(frame, axis, tokens[at], at, false));
    }
    return labels;
  }

  /**
   * The labels of the chosen cell.
   * @param others that give way where they would overlap, never cut in half
   */
  chosen(frame: Frame, { queries, keys }: TwoAxes, cell: Record<Axis, number>, others: SVGElement[]): SVGElement[] {
    return (["query", "key"] as const).flatMap((axis) => {
      const { start, last, side } = this.span(frame, axis);
      const at = cell[axis];
      const isThere = at >= start && at <= last;
      const isNear = (other: number) => isThere && Math.abs(other - at) * side < this.type + APART - 1;
      for (const { dataset, classList } of others)
        if (dataset.axis === axis) classList.toggle("aside", isNear(Number(dataset.at)));
      return isThere ? [this.label(frame, axis, (axis === "query" ? queries : keys)[at], at, true)] : [];
    });
  }

  /** @returns what of an axis is shown, and every how many tokens there is room for a label */
  private span({ row, rows, cellHeight, column, columns, cellWidth }: Frame, axis: Axis) {
    const [first, count, side] = axis === "query" ? [row, rows, cellHeight] : [column, columns, cellWidth];
    return { start: first - 0.5, last: first + count - 0.5, side, every: this.stride(side) };
  }

  /**
   * @param cell pixels
   * @returns every how many tokens there is room for a label
   */
  private stride(cell: number): number {
    const least = (this.type + APART) / cell;
    if (least <= 1.06) return 1;
    const power = 10 ** Math.floor(Math.log10(least));
    return power * ([1, 2, 5, 10].find((n) => n * power >= least) as number);
  }

  private label(frame: Frame, axis: Axis, token: Token, at: number, isChosen: boolean): SVGElement {
    const { left, top, row, column, cellWidth, cellHeight, slanted } = frame;
    const isQuery = axis === "query";
    const x = isQuery ? left - 8 : left + (at - column + 0.5) * cellWidth;
    const y = isQuery ? top + (at - row + 0.5) * cellHeight : top - (slanted ? 7 : 14);
    const turned = !isQuery && slanted;
    const { text, width } = this.labelOf(token);
    const anchor = isQuery ? "end" : turned ? "start" : "middle";
    const name = `${anchor} ${token.special ? "special" : ""} ${isChosen ? "chosen" : ""}`;
    const position = svgElement("text", { x: isQuery ? -width - 7 : width + 7, class: `count ${anchor}` }, String(at));
    const transform = `translate(${x} ${y})${turned ? ` rotate(${(-180 * SLANT) / Math.PI})` : ""}`;
    const isCounted = this.span(frame, axis).every > 1 && text !== String(at);
    return svgElement(
      "g",
      { transform, "data-axis": axis, "data-at": at },
      svgElement("text", { class: name }, text),
      ...(isCounted ? [position] : []),
    );
  }
}

/**
 * Square cells, of whole device pixels where they are large enough to show it, else as a whole; a
 * matrix much longer than wide may stretch.
 */
function sidesOf(
  { width, height }: { width: number; height: number },
  columns: number,
  rows: number,
  zoom: number,
  largest: number,
): { cellWidth: number; cellHeight: number; most: number } {
  const fit = [Math.min(width / columns, largest), Math.min(height / rows, largest)];
  const square = Math.min(fit[0], fit[1]);
  const long = Math.max(columns / rows, rows / columns) > 4;
  const [cellWidth, cellHeight] = fit.map((side, axis) => {
    const chosen = Math.min(largest, zoom * (long ? Math.min(side, Math.max(square, 28)) : square));
    const device = chosen * devicePixelRatio;
    if (device >= 6) return Math.floor(device + 0.01) / devicePixelRatio;
    if (zoom > 1) return chosen;
    const count = axis === 0 ? columns : rows;
    return Math.max(1, Math.floor(device * count)) / (count * devicePixelRatio);
  });
  return { cellWidth, cellHeight, most: largest / square };
}

/** @returns pixels of the widest position beside a label */
function positionWidth({ length }: { length: number }): number {
  return Math.ceil(8 + 6.5 * String(length - 1).length);
}

/** @returns pixels above the map that a slanted label takes */
function slope(label: number): number {
  return Math.ceil(label * Math.sin(SLANT) + 16);
}

/** @returns in whole device pixels */
function whole(pixels: number): number {
  return Math.max(1, Math.floor(pixels * devicePixelRatio)) / devicePixelRatio;
}

function aligned(first: number, every: number): number {
  return Math.ceil(first / every) * every;
}
