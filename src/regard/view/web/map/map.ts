/** The large map: exact weights in tiles, coarse first, with a crosshair over it. */

import { coarsest } from "../data/block_means";
import type { LayerInfo } from "../data/payload";
import type { Which } from "../data/source";
import { context2d, resize } from "../dom";
import type { Pen, Picture } from "../export/picture";
import type { Page as Whole, Shared } from "../main";
import { edge, TILE, type Place } from "../maths/blocks";
import { tintOf, type Ramp } from "../maths/colours";
import { digits, lasting, points } from "../maths/numbers";
import type { State } from "../state";
import type { Token } from "../text/tokens";
import { pinsOf } from "../views/pins";
import { Axes, type Frame, type Ink } from "./axes";
import { rangesOf, type Grid } from "./cells";
import { isDifference, shownName } from "./compare";
import { drawMinimap } from "./minimap";
import { Mosaic, paletteOf, partOf, placesOf, type Palette, type Part } from "./mosaic";
import { smallPicture, smallShares } from "./small";
import { owner, placeName, Tiles } from "./tiles";

type Page = Shared & Pick<Whole, "ceiling" | "panes">;

/** What the theme gives. */
export interface Look {
  name: string;
  ramp: Ramp;
  differences: Ramp;
  ink: Ink;
}

const NUMBERS = 34; // pixels of a cell that holds a number
const QUIET = 400; // milliseconds until waiting is spoken of
const REDRAWN = [
  ...["layer", "head", "heads", "with", "compare", "hidden", "scale"],
  ...["zoom", "row", "column", "theme", "folded", "size", "maps", "pins"],
];

export class MapView {
  private status = this.holder.querySelector(".progress") as HTMLElement;
  private canvases = [...this.holder.querySelectorAll("canvas")] as HTMLCanvasElement[];
  private base = this.canvases[0];
  readonly over = this.canvases[1];
  readonly mini = this.canvases[2];
  private context = context2d(this.base);
  private overContext = context2d(this.over);
  private axes = new Axes(this.context);
  private overAxes = new Axes(this.overContext);
  which = this.pick(this.page.store.state);
  private tiles = new Tiles(
    this.page.source,
    () => this.refresh(),
    (error) => {
      this.giveUp();
      this.page.damaged(error, this);
    },
  );
  private mosaic = new Mosaic((place) => this.tiles.find(this.tileName(place)));
  frame: Frame | null = null;
  part: Part | null = null;
  private since = 0;
  private isLost = false; // some of what is wanted cannot be had
  private onStage = 0; // of the tiles that are wanted, the first so many
  private queries: Token[] | undefined;
  private keys: Token[] | undefined;

  /** @param pick what it shows */
  constructor(
    readonly holder: HTMLElement,
    private readonly page: Page,
    private readonly pick: (state: State) => Which,
  ) {
    new ResizeObserver(() => this.update(page.store.state, new Set(["size"]))).observe(holder);
  }

  update(state: State, changed: Set<string>) {
    if (!REDRAWN.some((name) => changed.has(name)) || this.holder.clientWidth === 0) return;
    this.which = this.pick(state);
    this.arrange(state);
    this.ask(state);
    this.draw();
  }

  /** The part of the matrix that is shown, and where. */
  private arrange(state: State) {
    const { queries, keys } = this.page.axes(this.which.layer);
    for (const canvas of [this.base, this.over]) {
      const { clientWidth, clientHeight } = this.holder;
      resize(canvas, Math.round(clientWidth * devicePixelRatio), Math.round(clientHeight * devicePixelRatio));
      context2d(canvas).setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    }
    this.queries = queries;
    this.keys = keys;
    this.frame = this.framed(state);
    this.overAxes.setLimit(this.axes.limit);
    this.part = partOf(this.frame);
    const { left, top, height, cellWidth, cellHeight } = this.frame;
    // The whole map scrolls with what the page stands in; a part of it is moved by the finger.
    this.over.style.touchAction = state.zoom > 1 ? "none" : "";
    this.holder.dataset.frame = [left, top, cellWidth, cellHeight].join();
    this.holder.style.setProperty("--used", `${top + height + 2}px`);
  }

  /** @returns what would be shown */
  framed(at: { zoom: number; row: number; column: number }): Frame {
    const { queries, keys } = this.page.axes(this.which.layer);
    const size = { width: this.holder.clientWidth, height: this.holder.clientHeight };
    return this.axes.frame(size, queries, keys, at);
  }

  private tileName(place: Place): string {
    return `${owner(this.which, this.page.store.state.scale === "row")} ${placeName(place)}`;
  }

  info(): LayerInfo {
    return this.page.recording.layers[this.which.layer];
  }

  /** @param state asks for the tiles that are not there */
  private ask({ scale }: State) {
    if (this.info().kind === "map") return this.tiles.want([]);
    const { which } = this;
    const byRow = scale === "row";
    const places = placesOf(this.part as Part);
    this.onStage = places.length;
    // A host that knows no small map is asked for the whole, to stand in and for the minimap.
    if (!this.info().overview) places.push(this.whole());
    this.since = performance.now();
    this.isLost = false;
    this.tiles.want(places.map((place) => ({ name: this.tileName(place), which, place, byRow })));
    setTimeout(() => this.showProgress(), QUIET);
  }

  /** @returns the one tile that holds the whole */
  private whole(): Place {
    const { q_len, kv_len } = this.info();
    return { level: Math.max(0, Math.ceil(Math.log2(Math.max(q_len, kv_len) / TILE))), row: 0, column: 0 };
  }

  /** A tile came. */
  private refresh() {
    if (this.frame && this.holder.clientWidth > 0) this.draw();
  }

  /** What is still on its way, and how long it will take. */
  private showProgress() {
    const { kept, progress } = this.tiles;
    const wanted = this.tiles.wanted.slice(0, this.onStage);
    const there = wanted.filter(({ name }) => kept.has(name)).length;
    const every = this.sampled();
    let text = "";
    let part = 1;
    if (every > 1) {
      const left = progress?.seconds;
      part = progress?.done ?? 0;
      text = `sample of 1 query in ${every}; exact: ${Math.floor(part * 100)} %`;
      if (left !== null && left !== undefined && part > 0.005) text += `, ${lasting(left)}`;
    } else if (there < wanted.length && performance.now() - this.since >= QUIET) {
      part = there / wanted.length;
      text = `exact map: ${Math.floor(part * 100)} %`;
    }
    if (this.status.textContent !== text) this.status.textContent = text;
    this.holder.style.setProperty("--done", String(part));
    this.holder.classList.toggle("loading", text !== "");
    this.holder.dataset.exact = String(every === 1);
  }

  private draw() {
    this.context.clearRect(0, 0, this.base.width, this.base.height);
    const { isWhole, all } = this.drawMap(this.context, this.axes);
    drawMinimap(this.mini, all, this.frame as Frame, this.info(), this.page.look.ink);
    this.point();
    this.showProgress();
    this.mark(isWhole);
    if (this.mosaic.unfinished) requestAnimationFrame(() => this.refresh());
  }

  /** The map with its words and its crosshair. */
  picture(): Picture {
    const { top, height } = this.frame as Frame;
    return {
      width: this.holder.clientWidth,
      height: top + height + 2,
      draw: (pen) => {
        const axes = new Axes(pen);
        axes.setLimit(this.axes.limit);
        this.drawMap(pen, axes);
        this.drawCross(pen, axes);
      },
    };
  }

  /**
   * @param axes on it
   * @returns is it there in full, and a picture of the whole
   */
  private drawMap(context: Pen, axes: Axes): { isWhole: boolean; all: HTMLCanvasElement | null } {
    const frame = this.frame as Frame;
    const part = this.part as Part;
    const { state } = this.page.store;
    const { look } = this.page;
    context.save();
    context.beginPath();
    context.rect(frame.left, frame.top, frame.width, frame.height);
    context.clip();
    const ceiling = this.page.ceiling(state);
    const palette = (blocks: number) => paletteOf(look, state.scale, blocks, isDifference(this.which), ceiling);
    const small = smallPicture(this.page, this.which, state.scale === "row", palette);
    const isWhole = this.mosaic.draw(context, frame, part, palette, small, this.info());
    const all = small ?? this.mosaic.painted(this.whole());
    // A mean of a block in each of its cells would look like their weights.
    const isFine = (coarsest(this.which, this.page.recording.layers)?.block ?? 1) === 1;
    if (isWhole && isFine && part.level === 0 && frame.cellWidth >= NUMBERS)
      this.drawNumbers(context, palette(this.info().kv_len));
    this.drawPins(context, frame);
    context.restore();
    context.strokeStyle = look.ink.line;
    context.lineWidth = 1;
    context.strokeRect(frame.left - 0.5, frame.top - 0.5, frame.width + 1, frame.height + 1);
    axes.draw(frame, this.queries as Token[], this.keys as Token[], look.ink);
    return { isWhole, all };
  }

  /** A dot in the corner of each pinned cell of the head on the stage. */
  private drawPins(context: Pen, frame: Frame) {
    const { layer, head, terms } = this.which;
    context.fillStyle = this.page.look.ink.accent;
    const { panes, store, recording } = this.page;
    for (const pin of terms || !panes ? [] : pinsOf(store.state.pins, recording.layers)) {
      if (pin.layer !== layer || pin.head !== head) continue;
      const x = frame.left + (pin.key + 1 - frame.column) * frame.cellWidth;
      const y = frame.top + (pin.query - frame.row) * frame.cellHeight;
      const side = Math.max(4, Math.min(8, frame.cellWidth / 4));
      context.fillRect(x - side, y, side, side);
    }
  }

  /** Says when all that is wanted is on the stage. */
  private mark(isWhole: boolean) {
    const { level, top, bottom, left, right } = this.part as Part;
    const numbers = [level, top, left, bottom - top, right - left];
    const name = [owner(this.which, this.page.store.state.scale === "row"), ...numbers].join();
    if (this.info().kind === "map") this.holder.dataset.ready = "small map";
    else this.holder.dataset.ready = isWhole && !this.mosaic.unfinished ? name : "";
    if (isWhole && this.sampled() === 1) this.page.mended(this);
  }

  private giveUp() {
    this.isLost = true;
    this.holder.dataset.ready = "damaged";
  }

  /** @returns is all that is wanted on the stage, or cannot be had? */
  isSettled(): boolean {
    return this.isLost || Boolean(this.holder.dataset.ready);
  }

  /** Shares in percent inside cells that are large enough. */
  private drawNumbers(context: Pen, { ramp, at }: Palette) {
    if (this.page.store.state.scale === "row") return;
    const frame = this.frame as Frame;
    const { top, bottom, left, right } = this.part as Part;
    context.font = `${frame.cellWidth < 40 ? 10 : frame.cellWidth < 50 ? 11 : 12}px ${getComputedStyle(document.body).getPropertyValue("--mono")}`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    for (let query = top; query < bottom; query++) {
      for (let key = left; key < right; key++) {
        const weight = this.cellAt(query, key) ?? NaN;
        context.fillStyle = weight === 0 ? this.page.look.ink.line : tintOf(ramp, at(weight)).onTop;
        const x = frame.left + (key + 0.5 - frame.column) * frame.cellWidth;
        const y = frame.top + (query + 0.5 - frame.row) * frame.cellHeight;
        context.fillText(inCell(weight, isDifference(this.which)), x, y, frame.cellWidth - 4);
      }
    }
  }

  /**
   * What a cell of the level on the stage shows: of its queries the mean share that its keys get together.
   * @returns null: not there yet
   */
  private cellAt(down: number, right: number): number | null {
    const { level, size } = this.part as Part;
    const [row, column] = [Math.floor(down / TILE), Math.floor(right / TILE)];
    const tile = this.tiles.find(this.tileName({ level, row, column }));
    if (!tile) return null;
    const mean = tile.values[(down - row * TILE) * tile.width + right - column * TILE];
    return mean * Math.min(size, this.info().kv_len - right * size);
  }

  /** The cells on the stage. */
  grid(): Grid {
    const { layer } = this.which;
    const { q_len, kv_len, kind } = this.info();
    const grid = { name: shownName(this.which, this.page.recording.layers), ...this.page.axes(layer) };
    if (kind === "map") {
      const { rows, columns } = this.page.maps[layer];
      const shares = smallShares(this.page, this.which, this.page.store.state.scale === "row");
      return {
        ...grid,
        rows: rangesOf(0, rows, (at) => edge(at, q_len, rows)),
        columns: rangesOf(0, columns, (at) => edge(at, kv_len, columns)),
        at: (row, column) => shares?.[row * columns + column] ?? null,
      };
    }
    const { size, top, bottom, left, right } = this.part as Part;
    return {
      ...grid,
      rows: rangesOf(top, bottom, (at) => Math.min(q_len, at * size)),
      columns: rangesOf(left, right, (at) => Math.min(kv_len, at * size)),
      at: (row, column) => this.cellAt(top + row, left + column),
    };
  }

  /** @returns of how many queries one was asked; 1: the numbers are exact */
  sampled(): number {
    const { kept } = this.tiles;
    const samples = this.tiles.wanted.slice(0, this.onStage).map(({ name }) => kept.get(name));
    return Math.max(1, ...samples.map((tile) => (tile?.exact === false ? (tile.sampled ?? 1) : 1)));
  }

  point() {
    if (!this.frame) return;
    this.overContext.clearRect(0, 0, this.over.width, this.over.height);
    this.drawCross(this.overContext, this.overAxes);
  }

  /**
   * The crosshair over the pointed or chosen cell, its two tokens named.
   * @param axes on it
   */
  private drawCross(context: Pen, axes: Axes) {
    const frame = this.frame as Frame;
    const { ink } = this.page.look;
    const { query, key } = this.page.cell();
    const { left, top, width, height, cellWidth, cellHeight } = frame;
    const [x, y] = [left + (key - frame.column) * cellWidth, top + (query - frame.row) * cellHeight];
    const onMap = {
      row: y + cellHeight / 2 >= top && y + cellHeight / 2 <= top + height,
      column: x + cellWidth / 2 >= left && x + cellWidth / 2 <= left + width,
    };
    context.strokeStyle = ink.accent;
    context.lineWidth = 1;
    context.beginPath();
    if (onMap.row) {
      for (const edge of cellHeight < 6 ? [y + cellHeight / 2] : [y, y + cellHeight])
        if (edge >= top && edge <= top + height)
          lineTo(context, left - 4, edge, onMap.column ? Math.max(left, x) : left + width, edge);
    }
    if (onMap.column) {
      for (const edge of cellWidth < 6 ? [x + cellWidth / 2] : [x, x + cellWidth])
        if (edge >= left && edge <= left + width)
          lineTo(context, edge, top - 4, edge, onMap.row ? Math.max(top, y) : top + height);
    }
    context.stroke();
    if (onMap.row && onMap.column) {
      const grown = Math.max(0, 7 - Math.min(cellWidth, cellHeight)) / 2;
      context.lineWidth = 2;
      context.save();
      context.beginPath();
      context.rect(left - 2, top - 2, width + 4, height + 4);
      context.clip();
      context.strokeRect(x - grown, y - grown, cellWidth + 2 * grown, cellHeight + 2 * grown);
      context.restore();
    }
    if (onMap.row) axes.name(frame, "query", (this.queries as Token[])[query], query, ink);
    if (onMap.column) axes.name(frame, "key", (this.keys as Token[])[key], key, ink);
  }

  at({ offsetX, offsetY }: { offsetX: number; offsetY: number }): { query: number; key: number } | null {
    const frame = this.frame;
    if (!frame) return null;
    const [x, y] = [offsetX - frame.left, offsetY - frame.top];
    if (x < 0 || y < 0 || x >= frame.width || y >= frame.height) return null;
    const query = Math.floor(frame.row + y / frame.cellHeight);
    const key = Math.floor(frame.column + x / frame.cellWidth);
    return { query, key };
  }
}

/** @returns in percent; a difference with its sign */
function inCell(weight: number, isDifference: boolean): string {
  if (Number.isNaN(weight)) return "NaN";
  const size = Math.abs(weight);
  if (size > 0 && size < 0.00001) return "<0.001";
  return isDifference ? points(weight) : digits(weight * 100);
}

function lineTo(context: Pen, fromX: number, fromY: number, toX: number, toY: number) {
  context.moveTo(fromX, fromY);
  context.lineTo(toX, toY);
}
