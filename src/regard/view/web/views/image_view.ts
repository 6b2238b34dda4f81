/**
 * The pictures that the model saw, each patch tinted by what it gets from the chosen token, and by what it gives to
 * that; two heads side by side, or their difference; every head of the layer as a small picture.
 */

import { computed, signal, untracked } from "@preact/signals-core";
import * as compare from "../data/compare";
import * as patches from "../data/patches";
import type { Reading } from "../data/reading";
import { roundedUp } from "../data/small";
import type { Which } from "../data/source";
import { Latest } from "../data/waiting";
import { byId, element, inside, resize } from "../dom";
import { paletteOf } from "../look";
import { darkest, legendOf, showLegend } from "../map/legend";
import { aspectOf, decoded, drawFrame, pointed, rowHeight, type Tints } from "../map/patch_picture";
import { headNumber, layerName } from "../protocol/recording";
import type { Session } from "../session";
import { meansName } from "../text/block_words";
import { overlayWords } from "../text/picture_words";
import { quoted, textSentence } from "../text/sentence";
import type { Table, View } from "../view";

/** Which weights tint a picture: a row of the matrix or a column, of the open heads or of the one beside. */
interface Part {
  shows: "row" | "column";
  isOther: boolean;
  grids: patches.Grid[];
}

/** A part on the stage. */
interface Side extends Part {
  frames: { frame: patches.Frame; canvas: HTMLCanvasElement; label: HTMLElement }[];
  heading: HTMLElement;
  words: HTMLElement;
  stage: HTMLElement;
  legend: HTMLElement;
  whole: HTMLElement; // all of them
}

const GAP = 12; // pixels between two pictures
const LABEL = 18; // pixels of the line under one
const LEAST = 64; // pixels of a row of pictures
const SCROLLS = "(max-width: 1099px)"; // the page, so that a picture need not fit
const TALL = 0.62; // of such a screen
const SMALL = [40, 96]; // pixels of the longer side of a small picture
const NO_PATCHES = "The tokens of this layer stand for no picture: choose another layer.";
const NOTHING = "There is no such token here, or its weights are not in this file.";
const LOST = "A picture of this page is damaged; its patches stand on an empty ground.";

export class ImageView implements View {
  private pane = byId("view-image");
  private pictures = this.session.recording.pictures ?? [];
  private turn = inside(this.pane, ".tools [role]");
  private line = inside(this.pane, ".line");
  private stage = inside(this.pane, ".sides");
  private small = inside(this.pane, ".small-pictures");
  private about = inside(this.pane, ".caption");
  private built = computed(() =>
    JSON.stringify(this.wanted().map(({ grids, ...part }) => [part, grids.map(({ number }) => number)])),
  );
  private sides = computed(() => (this.built.value, untracked(() => this.wanted().map((part) => this.side(part)))));
  private pixels = signal<(ImageBitmap | null)[]>([]);
  private isDecoding = true;
  private size = signal(0); // changes with that of the stage
  private isPlain = signal(false); // the pictures without their tints
  private isDamaged = signal(false);
  private second = signal<Float32Array | null | undefined>(undefined); // weights of the head beside; undefined: not yet
  private heads = signal<{ layer: number; shows: Part["shows"]; at: number; weights: Float32Array[] } | null>(null);
  private latest = { second: new Latest(), heads: new Latest() };
  readonly draws = [
    () => this.stage.replaceChildren(...this.sides.value.map(({ whole }) => whole)),
    () => this.head(),
    () => this.askSecond(),
    () => this.paint(),
    () => this.askHeads(),
    () => this.paintHeads(),
  ];

  constructor(private readonly session: Session) {
    new ResizeObserver(() => this.size.value++).observe(this.stage);
    void this.decode();
  }

  private async decode() {
    const found = this.pictures.map((picture) => decoded(picture).catch(() => ((this.isDamaged.value = true), null)));
    [this.isDecoding, this.pixels.value] = [false, await Promise.all(found)];
  }

  /** @returns what stands on the stage */
  private wanted(): Part[] {
    const { drawn } = this.session.store;
    const { layer, side } = drawn;
    const grids = this.session.grids(layer);
    const isOne = this.session.isOneText(layer);
    const [row, column] = (["row", "column"] as const).map((shows) => ({ shows, isOther: false, grids }));
    const one = isOne && side === "looked" ? column : row;
    const others = drawn.compare === "beside" ? this.session.grids(compare.beside(drawn).layer) : null;
    const parts = others ? [one, { ...one, isOther: true, grids: others }] : isOne ? [row, column] : [row];
    return parts.filter((part) => part.grids.length > 0);
  }

  /** Says what stands over the pictures. */
  private head() {
    const { compare: how, layer } = this.session.store.drawn;
    this.turn.hidden = how !== "beside" || !this.session.isOneText(layer);
    this.line.textContent = this.sides.value.length === 0 ? NO_PATCHES : this.isDamaged.value ? LOST : "";
  }

  private side(part: Part): Side {
    const frames = patches.framesOf(part.grids, this.pictures).map((frame) => {
      const canvas = element("canvas", { "aria-hidden": "true" });
      return { frame, canvas, label: element("figcaption", { title: frameName(frame) }, frameName(frame)) };
    });
    const at = (event: MouseEvent) => {
      const found = frames.find(({ canvas }) => canvas === event.target);
      const patch = found ? pointed(event, found.frame) : null;
      return patch && patches.tokenOf(patch);
    };
    const stage = element(
      "div",
      {
        className: "frames",
        tabIndex: 0,
        role: "application",
        "aria-roledescription": "picture",
        onpointermove: (event: MouseEvent) => {
          const token = at(event);
          this.session.hover(token === null ? null : this.session.cellOf("key", token));
        },
        onpointerleave: () => this.session.hover(null),
        onclick: (event: MouseEvent) => {
          const token = at(event);
          if (token === null) this.turnTo(event, frames);
          this.choose(token, part.shows);
        },
      },
      ...frames.map(({ canvas, label }) => element("figure", {}, canvas, label)),
    );
    const scale = [element("canvas", { "aria-hidden": "true" }), element("div", { className: "ticks" })];
    const legend = element("div", { className: "legend" }, ...scale, element("p", { className: "unit" }));
    const [heading, words] = [element("h2"), element("p", { className: "words" })];
    const whole = element("div", { className: "side" }, heading, stage, legend, words);
    return { ...part, frames, heading, words, stage, legend, whole };
  }

  /** Pictures as large as the stage allows. */
  private measure({ frames, stage }: Side, around: number) {
    const width = stage.clientWidth;
    if (width === 0) return;
    const label = frames.length > 1 ? LABEL : 0;
    const room = matchMedia(SCROLLS).matches ? innerHeight * TALL : this.stage.clientHeight - around;
    const aspects = frames.map(({ frame }) => aspectOf(frame));
    const tall = rowHeight(aspects, width, Math.max(LEAST, room) - label, { gap: GAP, label, least: LEAST });
    frames.forEach(({ canvas, label: name }, at) => {
      sized(canvas, Math.floor(tall * aspects[at]), aspects[at]);
      name.hidden = frames.length === 1;
    });
  }

  /** Keeps a token; the text beside the picture goes on in the direction of the picture. */
  private choose(token: number | null, shows?: Part["shows"]) {
    const { store } = this.session;
    if (token === null) return;
    this.session.chooseToken("key", token);
    if (shows && this.session.isOneText() && store.state.compare !== "beside")
      store.set({ side: shows === "row" ? "looks" : "looked" });
  }

  /** Opens the window or tile of the layer that a point of the picture lies in. */
  private turnTo(event: MouseEvent, frames: Side["frames"]) {
    const { layers, store } = this.session;
    const frame = frames.find(({ canvas }) => canvas === event.target)?.frame;
    layers.forEach(({ place, part }, layer) => {
      if (!frame || (part ?? null) === null || place !== layers[store.state.layer].place) return;
      const grids = this.session.grids(layer).filter(({ picture }) => picture === frame.grids[0].picture);
      const patch = pointed(event, { ...frame, grids });
      if (patch) store.set({ layer, query: patches.tokenOf(patch), key: null, hover: null });
    });
  }

  /** The arrows go from patch to patch; left and right go on in the row above or below, and in the words around. */
  move(down: number, right: number) {
    const { layer } = this.session.store.state;
    const { query, key } = this.session.cell();
    const from = this.session.isOneText(layer) ? query : key;
    const grids = this.session.grids(layer);
    const patch = patches.patchOf(grids, from);
    const beyond = patch && patches.neighbour(patches.framesOf(grids, this.pictures), patch, down, right);
    const to = beyond ? patches.tokenOf(beyond) : down ? from : from + right;
    if (to in this.session.axes(layer).keys) this.choose(to);
  }

  /** @returns of a query where it looks, or of a key who looks at it */
  private async ask(which: Which, shows: Part["shows"], at: number, signal: AbortSignal): Promise<Float32Array> {
    const { source } = this.session;
    return shows === "row" ? (await source.row(which, at, signal)).values : source.column(which, at, signal);
  }

  /** Asks for the weights of the head that stands beside. */
  private askSecond() {
    const { reading, store, layers } = this.session;
    const part = this.sides.value.find(({ isOther }) => isOther);
    this.latest.second.drop();
    this.second.value = undefined;
    if (!part || !reading) return;
    const which = compare.beside(store.drawn);
    const { q_len, kv_len } = layers[which.layer];
    const at = part.shows === "row" ? reading.query : reading.key;
    const isThere = at < (part.shows === "row" ? q_len : kv_len);
    if (!isThere) return void (this.second.value = null);
    const question = (signal: AbortSignal) => this.ask(which, part.shows, at, signal);
    this.session.ask(this, this.latest.second, question, (values) => (this.second.value = values));
  }

  /** @returns the weights that tint a side, of all tokens; null: there are none; undefined: not yet */
  private valuesOf({ isOther, shows }: Part): Float32Array | null | undefined {
    return isOther ? this.second.value : (this.session.perToken?.[shows] ?? undefined);
  }

  /** Draws the pictures, and says what is seen. */
  private paint() {
    const { reading, look, store } = this.session;
    const { layer, scale } = store.drawn;
    if (!reading || reading.layer !== layer || this.size.value < 0) return;
    const sides = this.sides.value.flatMap((side) => {
      const values = this.valuesOf(side);
      return values === undefined ? [] : [{ ...side, values, most: values ? highest(side.grids, values) : 0 }];
    });
    const most = Math.max(...sides.map((side) => side.most));
    const painted = sides.map((side) => {
      const ceiling = roundedUp(store.drawn.compare === "beside" ? most : side.most);
      const isLess = compare.isDifference(reading) && !side.isOther;
      const length = side.values?.length ?? 1;
      const palette = paletteOf(look, scale, length, isLess, ceiling);
      const unit = `${isLess ? "points" : "share"} ${side.shows === "row" ? "per" : "from each"} patch`;
      showLegend(side.legend, legendOf(scale, length, unit, palette.ramp, ceiling));
      this.say(side, side.values, reading);
      return { ...side, palette };
    });
    const rest = painted.map(({ heading, legend, words }) => [heading, legend, words].map((each) => each.offsetHeight));
    const around = Math.max(...rest.map(([heading, legend, words]) => heading + legend + words + 2 * GAP));
    for (const side of painted) {
      this.measure(side, around);
      const chosen = side.shows === "row" && this.session.isOneText(layer) ? reading.query : reading.key;
      const values = this.isPlain.value ? null : side.values;
      const tints = { values, palette: side.palette, marked: patches.patchOf(side.grids, chosen) };
      for (const { frame, canvas } of side.frames) this.draw(canvas, frame, tints);
    }
    const isWhole = sides.length === this.sides.value.length && !this.isDecoding;
    this.pane.dataset.ready = isWhole ? [layer, reading.head, reading.query, reading.key].join() : "";
  }

  private draw(canvas: HTMLCanvasElement, frame: patches.Frame, tints: Tints) {
    const { width, height } = canvas.style;
    const sharp = (length: string) => Math.max(1, Math.round(Number.parseFloat(length) * devicePixelRatio));
    resize(canvas, sharp(width), sharp(height));
    drawFrame(canvas, frame, this.pixels.value[frame.grids[0].picture] ?? null, this.session.look, tints);
  }

  /** The heading of a side, and its alternative in words. */
  private say({ shows, isOther, grids, heading, words, stage }: Side, values: Float32Array | null, reading: Reading) {
    const { layers, store } = this.session;
    const which = isOther ? compare.beside(store.drawn) : reading;
    const { queries, keys } = this.session.axes(which.layer);
    const [tokens, at] = shows === "row" ? [queries, reading.query] : [keys, reading.key];
    const name = at in tokens ? quoted(tokens, at) : `token ${at}`;
    const title = shows === "row" ? `Where ${name} looks` : `Who looks at ${name}`;
    const heads = store.drawn.compare === "alone" ? "" : `: ${compare.shownName(which, layers)}`;
    heading.textContent = title + heads;
    const means = compare.coarsest(which, layers);
    const isDifference = compare.isDifference(which);
    const overlay = values && { tokens: keys, grids, pictures: this.pictures, values, isDifference };
    const said = overlay ? overlayWords(name, overlay, shows === "row") : NOTHING;
    words.textContent = said + (means ? ` These are ${meansName(means)}.` : "");
    stage.setAttribute("aria-label", `${heading.textContent}. ${words.textContent} Arrow keys move.`);
  }

  /** Asks every head of the open layer about the chosen token. */
  private askHeads() {
    const { layers, store } = this.session;
    const { layer, hidden, query, key, side } = store.drawn;
    const { num_heads } = layers[layer];
    const isShown = num_heads > 1 && this.sides.value.length > 0;
    this.small.hidden = this.about.hidden = !isShown;
    this.latest.heads.drop();
    const at = query ?? (this.session.isOneText(layer) ? key : null);
    if (!isShown || at === null) return;
    const shows = this.session.isOneText(layer) && side === "looked" ? "column" : "row";
    const heads = Array.from({ length: num_heads }, (_, head) => ({ layer, head, hidden }));
    const question = (signal: AbortSignal) => Promise.all(heads.map((which) => this.ask(which, shows, at, signal)));
    const answered = (weights: Float32Array[]) => (this.heads.value = { layer, shows, at, weights });
    this.session.ask(this, this.latest.heads, question, answered);
  }

  /** A small picture of every head on one scale: of the frame that gets most. */
  private paintHeads() {
    const { layers, store, look } = this.session;
    const { layer, scale, head, heads } = store.drawn;
    const [side] = this.sides.value;
    const found = this.heads.value;
    if (!side || found?.layer !== layer || this.size.value < 0) return;
    const { weights, shows, at } = found;
    const ceilings = weights.map((values) => highest(side.grids, values)).sort((a, b) => a - b);
    const ceiling = roundedUp(ceilings[Math.floor(ceilings.length / 2)]);
    const palette = paletteOf(look, scale, weights[0].length, false, ceiling);
    const sums = side.frames.map(({ frame }) => weights.reduce((sum, each) => sum + sumOf(frame.grids, each), 0));
    const { frame } = side.frames[sums.indexOf(Math.max(...sums))] ?? side.frames[0];
    const room = Math.floor(this.pane.clientWidth / (weights.length + 1)) - 8;
    const wide = Math.max(SMALL[0], Math.min(SMALL[1], room));
    const small = (name: string, isOn: boolean, title: string, values: Float32Array | null, onclick: object) => {
      const canvas = element("canvas");
      sized(canvas, wide * Math.min(1, aspectOf(frame)), aspectOf(frame));
      this.draw(canvas, frame, { values, palette, marked: null });
      return element("button", { type: "button", "aria-pressed": isOn, title, onclick }, canvas, name);
    };
    const buttons = weights.map((values, each) => {
      const tile = { layer, head: each };
      const number = headNumber(layers, tile);
      const isOn = heads === "one" && each === head;
      const open = () => store.set({ ...tile, heads: "one" });
      return small(`H${number}`, isOn, `Open head ${number}`, values, open);
    });
    const turn = () => (this.isPlain.value = !this.isPlain.peek());
    const plain = small("Picture", this.isPlain.value, "The picture without its tint", null, turn);
    if (this.pixels.value[frame.grids[0].picture]) buttons.unshift(plain);
    const focused = [...this.small.children].indexOf(document.activeElement as Element);
    this.small.replaceChildren(...buttons);
    if (focused >= 0) buttons[focused]?.focus({ preventScroll: true });
    const { queries, keys } = this.session.axes(layer);
    const what = shows === "row" ? `where ${quoted(queries, at)} looks` : `who looks at ${quoted(keys, at)}`;
    const one = side.frames.length > 1 ? `, ${frameName(frame)}` : "";
    const scaled = scale === "fit" ? `; ${darkest(ceiling)}, one scale for all` : "";
    this.about.textContent = `Heads of layer ${layerName(layers, layer)}${one}: ${what}${scaled}.`;
  }

  sentence(reading: Reading): string {
    const [side] = this.sides.value;
    if (compare.isDifference(reading) && side) return side.words.textContent ?? "";
    return textSentence(reading, this.session.axes(reading.layer), this.session.layers);
  }

  isSettled(): boolean {
    return !this.isDecoding;
  }

  /** @returns a row for each patch */
  table(): Table {
    const { reading } = this.session;
    const sides = this.sides.value;
    if (!reading || sides.length === 0) return [];
    const columns = sides.map((side) => ({ grids: side.grids, values: this.valuesOf(side) }));
    const rows = sides[0].grids.flatMap((grid, number) =>
      patches
        .patchesOf(grid)
        .map((patch, at) => [
          ...[grid.tokens[at], grid.picture, grid.number, patch.row, patch.column, ...patches.boxOf(patch)],
          ...columns.map(({ grids, values }) => values?.[grids[number]?.tokens[at]] ?? NaN),
        ]),
    );
    const names = ["token", "picture", "grid", "row", "column", "x0", "y0", "x1", "y1"];
    return [[...names, ...sides.map(({ heading }) => heading.textContent ?? "")], ...rows];
  }
}

/** Gives a canvas its size on the page. */
function sized(canvas: HTMLCanvasElement, width: number, aspect: number) {
  [canvas.style.width, canvas.style.height] = [
    `${Math.max(1, width)}px`,
    `${Math.max(1, Math.round(width / aspect))}px`,
  ];
}

function frameName({ grids }: patches.Frame): string {
  const [{ picture, rows, columns }] = grids;
  return `picture ${picture}, ${grids.length > 1 ? `${grids.length} grids of ` : ""}${rows} × ${columns} patches`;
}

/** @returns the value farthest from 0 */
function highest(grids: patches.Grid[], values: Float32Array): number {
  let most = 0;
  for (const { tokens } of grids) for (const token of tokens) most = Math.max(most, Math.abs(values[token]) || 0);
  return most;
}

function sumOf(grids: patches.Grid[], values: Float32Array): number {
  return grids.reduce((sum, grid) => patches.valuesOf(grid, values).reduce((all, value) => all + (value || 0), sum), 0);
}
