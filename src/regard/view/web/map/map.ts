/** The large map: exact weights in tiles, coarse first, with a crosshair over it. */

import { signal } from "@preact/signals-core";
import type { TwoAxes } from "../data/axes";
import { beside, coarsest, isDifference, shown, shownName } from "../data/compare";
import { ceilingOf } from "../data/small";
import type { Which } from "../data/source";
import { context2d, inside, resize, svgElement } from "../dom";
import { paletteOf, type Palette } from "../look";
import { TILE, type Place } from "../maths/blocks";
import { tintOf } from "../maths/colours";
import { lasting } from "../maths/numbers";
import type { LayerInfo } from "../protocol/recording";
import type { Session } from "../session";
import type { State } from "../state";
import { Axes, type Frame } from "./axes";
import type { Grid } from "./cells";
import { Mosaic, partOf, placesOf, smallPicture, type Part } from "./mosaic";
import { owner, placeName, Tiles } from "./tiles";

const NUMBERS = 34; // pixels of a cell that holds a number
const QUIET = 400; // milliseconds until waiting is spoken of
const LEAST = 0.0005; // a smaller weight is 0.0 % and leaves its cell empty

export class HeadMap {
  private status = inside(this.holder, ".progress");
  readonly canvas = inside<HTMLCanvasElement>(this.holder, "canvas");
  private over = this.holder.querySelector("svg") as SVGElement; // labels and the crosshair
  private named: Frame | null = null; // whose labels the names are
  private context = context2d(this.canvas);
  private axes = new Axes(this.context);
  which = this.pick(this.session.store.state, this.session.layers);
  private size = signal(0); // changes with that of the holder
  private news = signal(0); // tiles came, or are to be painted
  readonly arranged = signal<{ frame: Frame; part: Part } | null>(null);
  private tiles = new Tiles(
    this.session.source,
    () => this.news.value++,
    (error) => {
      this.isLost = true;
      this.holder.dataset.ready = "damaged";
      this.session.damaged(error, this);
    },
  );
  private mosaic = new Mosaic((place) => this.tiles.find(this.tileName(place)));
  private since = 0;
  private isLost = false; // some of what is wanted cannot be had

  readonly draws = [() => this.arrange(), () => this.draw(), () => this.point()];

  /** @param pick what it shows */
  constructor(
    readonly holder: HTMLElement,
    readonly session: Session,
    private readonly pick: (state: Readonly<State>, layers: LayerInfo[]) => Which,
  ) {
    new ResizeObserver(() => this.size.value++).observe(holder);
  }

  get frame(): Frame | null {
    return this.arranged.value?.frame ?? null;
  }

  /** The part of the matrix that is shown, and where; asks for the tiles that are not there. */
  private arrange() {
    const { drawn } = this.session.store;
    const { zoom, row, column } = drawn;
    this.which = this.pick(drawn, this.session.layers);
    const asks = [this.size.value, this.session.again.value, this.session.maps];
    const { clientWidth, clientHeight } = this.holder;
    if (clientWidth === 0 || asks.length === 0) return;
    resize(this.canvas, Math.round(clientWidth * devicePixelRatio), Math.round(clientHeight * devicePixelRatio));
    this.context.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    this.over.setAttribute("viewBox", `0 0 ${clientWidth} ${clientHeight}`);
    const frame = this.framed({ zoom, row, column });
    const { left, top, height, cellWidth, cellHeight } = frame;
    // The whole map scrolls with what the page stands in; a part of it is moved by the finger.
    this.canvas.style.touchAction = zoom > 1 ? "none" : "";
    this.holder.dataset.frame = [left, top, cellWidth, cellHeight].join();
    this.holder.style.setProperty("--used", `${top + height + 2}px`);
    const part = partOf(frame);
    this.arranged.value = { frame, part };
    this.ask(part);
  }

  /** @returns what would be shown */
  framed(at: { zoom: number; row: number; column: number }): Frame {
    const size = { width: this.holder.clientWidth, height: this.holder.clientHeight };
    const all = onStage(this.session).map(({ layer }) => this.session.axes(layer));
    return this.axes.frame(size, this.texts, at, all);
  }

  private tileName(place: Place): string {
    return `${owner(this.which)} ${placeName(place)}`;
  }

  private get texts(): TwoAxes {
    return this.session.axes(this.which.layer);
  }

  info(): LayerInfo {
    return this.session.layers[this.which.layer];
  }

  private ask(part: Part) {
    const { which } = this;
    this.since = performance.now();
    this.isLost = false;
    this.tiles.want(placesOf(part).map((place) => ({ name: this.tileName(place), which, place })));
    setTimeout(() => this.showProgress(), QUIET);
  }

  /** What is still on its way, and how long it will take. */
  private showProgress() {
    const { kept, progress, wanted } = this.tiles;
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
    const arranged = this.arranged.value;
    if (!arranged || this.news.value < 0 || this.holder.clientWidth === 0) return;
    this.context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    const isWhole = this.drawMap(arranged.frame, arranged.part);
    this.showProgress();
    this.mark(isWhole, arranged.part);
    if (this.mosaic.unfinished) requestAnimationFrame(() => this.news.value++);
  }

  /** @returns is it there in full? */
  private drawMap(frame: Frame, part: Part): boolean {
    const { context } = this;
    const { look, layers, store } = this.session;
    const { scale } = store.drawn;
    context.save();
    context.beginPath();
    context.rect(frame.left, frame.top, frame.width, frame.height);
    context.clip();
    const ceiling = stageCeiling(this.session);
    const palette = (blocks: number) => paletteOf(look, scale, blocks, isDifference(this.which), ceiling);
    const small = smallPicture(this.session, this.which, palette);
    const isWhole = this.mosaic.draw(context, frame, part, palette, small, this.info());
    // A mean of a block in each of its cells would look like their weights.
    const isFine = (coarsest(this.which, layers)?.block ?? 1) === 1;
    if (isWhole && isFine && part.level === 0 && frame.cellWidth >= NUMBERS)
      this.drawNumbers(frame, part, palette(this.info().kv_len));
    context.restore();
    context.strokeStyle = look.ink.line;
    context.lineWidth = 1;
    context.strokeRect(frame.left - 0.5, frame.top - 0.5, frame.width + 1, frame.height + 1);
    return isWhole;
  }

  /** Says when all that is wanted is on the stage. */
  private mark(isWhole: boolean, { level, top, bottom, left, right }: Part) {
    const numbers = [level, top, left, bottom - top, right - left];
    const name = [owner(this.which), ...numbers].join();
    this.holder.dataset.ready = isWhole && !this.mosaic.unfinished ? name : "";
    if (isWhole && this.sampled() === 1) this.session.mended(this);
  }

  /** @returns is all that is wanted on the stage, or cannot be had? */
  isSettled(): boolean {
    return this.isLost || Boolean(this.holder.dataset.ready);
  }

  /** Shares in percent inside cells that are large enough. */
  private drawNumbers(frame: Frame, { top, bottom, left, right }: Part, { ramp, at }: Palette) {
    const { context } = this;
    const type = [10, 11, 12, 16][[40, 50, 100].filter((width) => frame.cellWidth >= width).length];
    context.font = `${type}px ${this.session.look.mono}`;
    context.letterSpacing = "0px";
    context.textAlign = "center";
    context.textBaseline = "middle";
    for (let query = top; query < bottom; query++) {
      for (let key = left; key < right; key++) {
        const weight = this.cellAt(query, key) ?? NaN;
        context.fillStyle = tintOf(ramp, at(weight)).onTop;
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
  cellAt(down: number, right: number): number | null {
    const { level, size } = this.arranged.value?.part as Part;
    const [row, column] = [Math.floor(down / TILE), Math.floor(right / TILE)];
    const tile = this.tiles.find(this.tileName({ level, row, column }));
    if (!tile) return null;
    const mean = tile.values[(down - row * TILE) * tile.width + right - column * TILE];
    return mean * Math.min(size, this.info().kv_len - right * size);
  }

  /** @returns the cells on the stage, with their tokens */
  cells(): Grid {
    const name = shownName(this.which, this.session.layers);
    return {
      name,
      ...this.texts,
      part: this.arranged.value?.part as Part,
      at: (down, right) => this.cellAt(down, right),
    };
  }

  /** @returns of how many queries one was asked; 1: the numbers are exact */
  sampled(): number {
    const { kept, wanted } = this.tiles;
    const samples = wanted.map(({ name }) => kept.get(name));
    return Math.max(1, ...samples.map((tile) => (tile?.exact === false ? (tile.sampled ?? 1) : 1)));
  }

  /** Names the tokens on both axes, those of the pointed or chosen cell with the crosshair over it. */
  private point() {
    const { frame } = this;
    if (!frame) return;
    const { query, key } = this.session.cell(this.session.store.drawn);
    const [names, marks] = this.over.children;
    if (this.named !== frame) names.replaceChildren(...this.axes.labels(frame, this.texts));
    this.named = frame;
    const chosen = this.axes.chosen(frame, this.texts, { query, key }, [...names.children] as SVGElement[]);
    marks.replaceChildren(...chosen, ...cross(frame, query, key));
  }

  /** @returns pixels from the corner of the map */
  pointOf({ offsetX, offsetY }: MouseEvent): { x: number; y: number } | null {
    return this.frame && { x: offsetX - this.frame.left, y: offsetY - this.frame.top };
  }

  at(event: MouseEvent): { query: number; key: number } | null {
    const { frame } = this;
    const { x, y } = this.pointOf(event) ?? { x: -1, y: -1 };
    if (!frame || x < 0 || y < 0 || x >= frame.width || y >= frame.height) return null;
    const query = Math.floor(frame.row + y / frame.cellHeight);
    const key = Math.floor(frame.column + x / frame.cellWidth);
    return { query, key };
  }
}

/** @returns what stands on the stage beside each other */
function onStage({ store, layers }: Session): Which[] {
  const { drawn } = store;
  return [shown(drawn, layers), ...(drawn.compare === "beside" ? [beside(drawn)] : [])];
}

/** @returns the weight of the darkest colour on the fitted scale, one for all maps on the stage */
export function stageCeiling(session: Session): number {
  return Math.max(...onStage(session).map((which) => ceilingOf(session, which)));
}

/** @returns in percent with one decimal, so that the numbers of a map line up; a difference with its sign */
export function inCell(weight: number, isDifference: boolean): string {
  if (Number.isNaN(weight)) return "NaN";
  const size = Math.abs(weight);
  if (size < LEAST) return "";
  const text = size > 0.9995 ? "100" : (size * 100).toFixed(1);
  return isDifference ? `${weight < 0 ? "\u2212" : "+"}${text}` : text;
}

/** The crosshair over a cell, where it is on the map. */
function cross(frame: Frame, query: number, key: number): SVGElement[] {
  const { left, top, width, height, cellWidth, cellHeight } = frame;
  const [right, bottom] = [left + width, top + height];
  const [x, y] = [left + (key - frame.column) * cellWidth, top + (query - frame.row) * cellHeight];
  const [middleX, middleY] = [x + cellWidth / 2, y + cellHeight / 2];
  const inRow = middleY >= top && middleY <= bottom;
  const inColumn = middleX >= left && middleX <= right;
  const rows = (cellHeight < 6 ? [middleY] : [y, y + cellHeight]).filter((edge) => edge >= top && edge <= bottom);
  const columns = (cellWidth < 6 ? [middleX] : [x, x + cellWidth]).filter((edge) => edge >= left && edge <= right);
  const lines = [
    ...(inRow ? rows.map((edge) => `M${left - 4} ${edge}H${inColumn ? Math.max(left, x) : right}`) : []),
    ...(inColumn ? columns.map((edge) => `M${edge} ${top - 4}V${inRow ? Math.max(top, y) : bottom}`) : []),
  ];
  const path = svgElement("path", { d: lines.join("") });
  if (!inRow || !inColumn) return [path];
  const grown = Math.max(0, 7 - Math.min(cellWidth, cellHeight)) / 2;
  const cell = { x: x - grown, y: y - grown, width: cellWidth + 2 * grown, height: cellHeight + 2 * grown };
  const clip = { x: left - 2, y: top - 2, width: width + 4, height: height + 4 };
  const viewBox = Object.values(clip).join(" ");
  return [path, svgElement("svg", { ...clip, viewBox }, svgElement("rect", cell))];
}
