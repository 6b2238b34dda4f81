/** All heads at once: a small map of each with its kind, in layers or sorted. */

import { headNumber, layerName, type HeadKind } from "../data/payload";
import { element } from "../dom";
import { fitted, type Pen, type Picture } from "../export/picture";
import type { Page as Whole, Shared } from "../main";
import { headPicture } from "../map/small";
import { counted, share } from "../maths/numbers";
import type { State } from "../state";
import { moving } from "./keys";
import { NO_KINDS } from "./notes";
import type { Table } from "./views";

type Page = Shared & Pick<Whole, "gridCeiling" | "isGathering">;

export interface Tile {
  layer: number;
  head: number;
  kind: HeadKind | null | undefined; // null: it has none; undefined: not known yet
}

const ORDERS = { place: "Place", kind: "Kind", score: "Score", entropy: "Entropy", sink: "Sinks" };
const CHOSEN = ["sort", "maps", "size"];
const NO_KIND = "no kind: not numbers (NaN)";
const LEAST = 84; // pixels of a tile in a picture, so that its kind has room
const UNDER = 42; // pixels of the words under it
const LABELS = 92; // pixels left of the tiles, for the layer's number and its entropy

export class HeadsView {
  private order = element(
    "select",
    { onchange: () => this.page.store.set({ sort: this.order.value as State["sort"] }) },
    ...Object.entries(ORDERS).map(([value, text]) => new Option(text, value)),
  );
  private choices = element("div", { className: "filters pressed" }, element("label", {}, "Sort by ", this.order));
  private count = element("p", { className: "count", role: "status" });
  private grid = element("div", {
    className: "heads",
    role: "group",
    "aria-label": "Heads. Arrow keys move, Enter opens the map.",
    onclick: ({ target }: Event) => this.open(target),
    onpointerover: ({ target }: Event) => this.say(target),
    onfocusin: ({ target }: Event) => this.say(target),
    onpointerleave: () => this.say(null),
    onfocusout: () => this.say(null),
    onkeydown: moving((down, right) => this.go(down, right)),
  });
  private details = element("p", { className: "details", hidden: true });
  private tiles: Tile[] = [];
  private tileOf = new Map<Element, Tile>();
  private columns = 1;
  private side = 0; // pixels of a tile
  private inLayers = true; // a row for each layer
  private isPainted = false; // what is on screen
  private seen = new IntersectionObserver((entries) => {
    this.isPainted = true;
    for (const { target, isIntersecting } of entries) if (isIntersecting) this.paint(target);
  });

  constructor(
    private readonly pane: HTMLElement,
    private readonly page: Page,
  ) {
    pane.append(this.choices, this.count, this.grid, this.details);
    new ResizeObserver(() => this.update(page.store.state, new Set(["size"]))).observe(pane);
  }

  update(state: State, changed: Set<string>) {
    if (state.view !== "overview" || this.grid.clientWidth === 0) return;
    if (CHOSEN.some((name) => changed.has(name)) || this.grid.childElementCount === 0) this.arrange(state);
    else if (changed.has("scale") || changed.has("theme")) this.repaint();
    if (changed.has("layer") || changed.has("head")) this.outline(state);
  }

  /** @returns every head of the recording */
  private all(): Tile[] {
    return this.page.recording.layers.flatMap(({ num_heads, heads }, layer) =>
      Array.from({ length: num_heads }, (_, head) => ({ layer, head, kind: heads?.[head] })),
    );
  }

  /** Which tiles, in which order, how large. */
  private arrange(state: State) {
    const all = this.all();
    const known = all.some(({ kind }) => Boolean(kind));
    this.choices.hidden = !known;
    this.order.value = state.sort;
    this.tiles = known ? sorted(all, state.sort) : all;
    this.count.textContent = counted(all.length, "head");
    this.inLayers = state.sort === "place" || !known;
    const most = Math.max(...this.page.recording.layers.map(({ num_heads }) => num_heads));
    const room = this.grid.clientWidth - (this.inLayers ? LABELS : 0) - 12;
    this.side = this.inLayers ? Math.max(26, Math.min(132, Math.floor(room / most) - 8)) : 108;
    this.columns = this.inLayers ? most : Math.max(1, Math.floor(room / (this.side + 12)));
    this.grid.style.setProperty("--side", `${this.side}px`);
    this.grid.classList.toggle("small", this.side < 64);
    this.seen.disconnect();
    this.isPainted = false;
    this.tileOf.clear();
    this.grid.replaceChildren(...(this.inLayers ? this.rows() : [this.row(this.tiles)]));
    this.outline(state);
  }

  /** One row for each layer, its number and mean entropy in front. */
  private rows(): HTMLElement[] {
    return this.page.recording.layers.flatMap(({ heads }, layer) => {
      const tiles = this.tiles.filter((tile) => tile.layer === layer);
      if (tiles.length === 0) return [];
      const row = this.row(tiles);
      const label = element("p", { className: "layer" }, `Layer ${this.nameOf(layer)}`);
      const known = heads?.filter((kind) => kind !== null) ?? [];
      if (heads && known.length < heads.length) {
        label.title = NO_KINDS;
        label.append(element("span", { className: "number" }, "no kinds (NaN)"));
      } else if (heads) {
        const mean = known.reduce((sum, { entropy }) => sum + entropy, 0) / known.length;
        label.title = `Mean entropy of its heads: ${share(mean)} of that of even attention`;
        const number = element("span", { className: "number" }, `entropy ${whole(mean)}`);
        label.append(
          element("span", { className: "even" }, element("span", { style: `width: ${100 * mean}%` })),
          number,
        );
      }
      row.prepend(label);
      return [row];
    });
  }

  /** What stands under a tile. */
  private words({ layer, head, kind }: Tile) {
    const shown = shownFor(this.page.store.state.sort);
    return {
      name: `${this.inLayers ? "" : `L${this.nameOf(layer)}`}H${this.numberOf({ layer, head })}`,
      score: kind && (shown !== "score" || kind.kind !== "mixed") ? whole(kind[shown]) : "",
      kind: kind?.kind ?? "",
    };
  }

  private row(tiles: Tile[]): HTMLElement {
    const buttons = tiles.map((tile) => {
      const spans = Object.entries(this.words(tile)).map(([className, text]) => element("span", { className }, text));
      const properties = {
        type: "button",
        tabIndex: -1,
        "aria-label": described(tile.kind, `layer ${this.nameOf(tile.layer)} head ${this.numberOf(tile)}`),
      };
      const button = element("button", properties, element("canvas"), ...spans);
      this.tileOf.set(button, tile);
      this.seen.observe(button);
      return button;
    });
    return element("div", { className: "row" }, ...buttons);
  }

  private paint(button: Element) {
    const tile = this.tileOf.get(button);
    if (tile) button.querySelector("canvas")?.replaceWith(headPicture(this.page, tile.layer, tile.head));
  }

  /** What is on screen gets its colours at once, the rest when it comes into view. */
  private repaint() {
    this.seen.disconnect();
    this.isPainted = false;
    for (const button of this.tileOf.keys()) this.seen.observe(button);
  }

  /** @param state the open head, and where the Tab key goes */
  private outline({ layer, head }: State) {
    let first = true;
    for (const [button, tile] of this.tileOf) {
      const open = tile.layer === layer && tile.head === head;
      button.setAttribute("aria-pressed", String(open));
      (button as HTMLElement).tabIndex = open || first ? 0 : -1;
      first = false;
    }
  }

  private open(target: EventTarget | null) {
    const button = (target as HTMLElement).closest("button");
    const tile = button && this.tileOf.get(button);
    if (tile) this.page.store.set({ layer: tile.layer, head: tile.head, view: "map" });
  }

  /** What there is to know of a head, at its tile. */
  private say(target: EventTarget | null) {
    const button = (target as HTMLElement | null)?.closest("button");
    const tile = button && this.tileOf.get(button);
    this.details.hidden = !tile;
    if (!tile) return;
    this.details.textContent = described(tile.kind, `layer ${this.nameOf(tile.layer)} head ${this.numberOf(tile)}`);
    const [box, pane] = [button.getBoundingClientRect(), this.pane.getBoundingClientRect()];
    const left = Math.min(box.left - pane.left, pane.width - this.details.offsetWidth);
    this.details.style.left = `${Math.max(0, left)}px`;
    const below = box.bottom - pane.top + 2;
    const fits = below + this.details.offsetHeight <= pane.height;
    this.details.style.top = `${fits ? below : box.top - pane.top - this.details.offsetHeight - 2}px`;
  }

  /** The arrows go from tile to tile. */
  private go(down: number, right: number) {
    const buttons = [...this.tileOf.keys()];
    const to = buttons.indexOf(document.activeElement as Element) + down * this.columns + right;
    (buttons[Math.max(0, Math.min(buttons.length - 1, to))] as HTMLElement).focus();
  }

  isSettled(): boolean {
    return this.isPainted && !this.page.isGathering;
  }

  caption(): string {
    return this.count.textContent ?? "";
  }

  /** All tiles in their rows, with those that are scrolled out of sight. */
  picture(): Picture {
    const side = Math.max(LEAST, this.side);
    const left = this.inLayers ? 64 : 0;
    const layers = this.page.recording.layers.map((_, layer) => this.tiles.filter((tile) => tile.layer === layer));
    const count = Math.ceil(this.tiles.length / this.columns);
    const chunks = Array.from({ length: count }, (_, i) => this.tiles.slice(i * this.columns, (i + 1) * this.columns));
    const rows = (this.inLayers ? layers : chunks).filter(({ length }) => length > 0);
    const draw = (pen: Pen) => {
      pen.font = `11px ${getComputedStyle(document.body).fontFamily}`;
      rows.forEach((tiles, row) => {
        const y = row * (side + UNDER);
        pen.fillStyle = this.page.look.ink.grey;
        [pen.textAlign, pen.textBaseline] = ["left", "top"];
        if (this.inLayers) pen.fillText(`Layer ${this.nameOf(tiles[0].layer)}`, 0, y);
        tiles.forEach((tile, at) => this.drawTile(pen, tile, { x: left + at * (side + 8), y, side }));
      });
    };
    return { width: left + this.columns * (side + 8), height: rows.length * (side + UNDER), draw };
  }

  private drawTile(pen: Pen, tile: Tile, { x, y, side }: { x: number; y: number; side: number }) {
    const { ink } = this.page.look;
    const { layer, head } = this.page.store.state;
    const isOpen = tile.layer === layer && tile.head === head;
    const { name, score, kind } = this.words(tile);
    const map = headPicture(this.page, tile.layer, tile.head);
    pen.imageSmoothingEnabled = map.width > 2 * side;
    pen.drawImage(map, x, y, side, side);
    pen.strokeStyle = isOpen ? ink.accent : ink.line;
    pen.lineWidth = isOpen ? 2 : 1;
    pen.strokeRect(x - 0.5, y - 0.5, side + 1, side + 1);
    pen.fillStyle = ink.faint;
    pen.textAlign = "left";
    pen.fillText(name, x, y + side + 5);
    pen.textAlign = "right";
    pen.fillText(score, x + side, y + side + 5);
    pen.textAlign = "left";
    pen.fillStyle = ink.ink;
    pen.fillText(fitted(pen, kind, side + 4), x, y + side + 19);
  }

  private nameOf(layer: number): string {
    return layerName(this.page.recording.layers, layer);
  }

  private numberOf(tile: Pick<Tile, "layer" | "head">): number {
    return headNumber(this.page.recording.layers, tile);
  }

  table(): Table {
    const { layers } = this.page.recording;
    const rows = this.tiles.map(({ layer, head, kind }) => [
      layers[layer].label ?? layers[layer].place ?? layer,
      this.numberOf({ layer, head }),
      ...(kind ? [kind.kind, kind.score, kind.entropy, kind.sink] : kind === null ? [NO_KIND] : []),
    ]);
    return [["layer", "head", "kind", "score", "entropy", "sink"], ...rows];
  }
}

/** @returns the strongest first */
export function sorted(tiles: Tile[], by: State["sort"]): Tile[] {
  if (by === "place") return tiles;
  const score = ({ kind }: Tile) => kind?.score ?? -1;
  if (by === "kind") {
    const name = ({ kind }: Tile) => kind?.kind ?? "";
    const none = ({ kind }: Tile) => Number(!kind);
    return [...tiles].sort((a, b) => none(a) - none(b) || name(a).localeCompare(name(b)) || score(b) - score(a));
  }
  return [...tiles].sort((a, b) => (b.kind?.[by] ?? -1) - (a.kind?.[by] ?? -1));
}

/** The number beside the kind. */
function shownFor(sort: State["sort"]): "score" | "entropy" | "sink" {
  return sort === "entropy" || sort === "sink" ? sort : "score";
}

/** @returns a sentence for who cannot see the map */
function described(kind: Tile["kind"], name: string): string {
  if (!kind) return kind === null ? `${name}, ${NO_KIND}` : name;
  const parts = [
    kind.kind === "mixed" ? "" : `score ${share(kind.score)}`,
    `entropy ${share(kind.entropy)}`,
    `sinks ${share(kind.sink)}`,
  ];
  return `${name}, ${kind.kind}, ${parts.filter(Boolean).join(", ")}`;
}

function whole(part: number): string {
  return `${Math.round(part * 100)}\u202f%`;
}
