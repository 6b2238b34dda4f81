/** All heads at once: a small map of each. Beside the stage it is the way to move; as a view it has their kinds. */

import { effect, signal } from "@preact/signals-core";
import { byId, element, inside, moving } from "../dom";
import { darkest, legendOf } from "../map/legend";
import { paletteOf } from "../look";
import { smallPicture } from "../map/mosaic";
import { counted, share } from "../maths/numbers";
import type { HeadKind } from "../protocol/questions";
import { headNumber, layerName, ownLayers, shortName } from "../protocol/recording";
import type { Session } from "../session";
import type { State } from "../state";
import { NO_KINDS } from "./notes";
import type { Legend, Table, View } from "../view";

export interface Tile {
  layer: number;
  head: number;
  kind: HeadKind | null | undefined; // null: it has none; undefined: not known yet
}

const NO_KIND = "no kind: not numbers (NaN)";
const LABELS = 92; // pixels left of the tiles, for the layer's number and its entropy
const SORTED = 108; // pixels of a tile that is in no layer; its kind takes one line
const UNDER = 60; // pixels of the words under a tile
const NUMBERS = 24; // the same beside the stage, for the number alone

export class HeadsView implements View {
  private layers = ownLayers(this.session.recording);
  private most = Math.max(...this.layers.map(({ num_heads }) => num_heads));
  private order = byId<HTMLSelectElement>("sort");
  private stage = byId("view-overview");
  private choices = inside(this.stage, ".filters");
  private count = inside(this.stage, ".count");
  private details = inside(this.stage, ".details");
  private grid = byId("heads");
  private tiles: Tile[] = [];
  private columns = 1;
  private side = 0; // pixels of a tile
  private isLarge = false; // on the stage, with the kinds
  private inLayers = true; // a row for each layer
  private pane = byId("overview");
  private heading = inside(this.pane, "h2");
  private about = inside(this.pane, ".caption");
  private size = signal(0); // changes with that of the stage
  private arranged = signal(new Map<Element, Tile>()); // by their buttons
  private pointed = signal<Tile | undefined>(undefined);
  readonly draws = []; // it is drawn beside other views, too

  constructor(private readonly session: Session) {
    this.order.addEventListener("change", () => session.store.set({ sort: this.order.value as State["sort"] }));
    this.grid.addEventListener("click", ({ target }) => this.open(target));
    const onKey = moving((down, right) => this.go(down, right));
    this.grid.addEventListener("keydown", onKey);
    const point = ({ type, target }: Event) => {
      this.pointed.value = ["pointerover", "focusin"].includes(type) ? this.tileAt(target) : undefined;
    };
    for (const name of ["pointerover", "focusin", "pointerleave", "focusout"]) this.grid.addEventListener(name, point);
    new ResizeObserver(() => this.size.value++).observe(this.stage);
    window.addEventListener("resize", () => this.size.value++);
    effect(() => this.arrange());
    effect(() => this.repaint());
    effect(() => this.outline());
    effect(() => this.say());
  }

  /** @returns every head of the recording */
  private all(): Tile[] {
    return this.layers.flatMap(({ num_heads, heads }, layer) =>
      Array.from({ length: num_heads }, (_, head) => ({ layer, head, kind: heads?.[head] })),
    );
  }

  /** Which tiles, in which order, how large, and where. */
  private arrange() {
    const { sort, view } = this.session.store.drawn;
    const all = this.session.maps && this.all();
    this.isLarge = view === "overview";
    const before = this.isLarge ? this.details : this.heading;
    if (this.grid.previousSibling !== before) {
      this.grid.replaceChildren(); // large tiles would make the pane as wide as they are
      before.after(this.grid);
    }
    if (this.size.value < 0 || this.grid.parentElement?.clientWidth === 0) return;
    const known = this.isLarge && all.some(({ kind }) => Boolean(kind));
    this.choices.hidden = !known;
    this.order.value = sort;
    this.tiles = known ? sorted(all, sort) : all;
    this.count.textContent = counted(all.length, "head");
    this.inLayers = sort === "place" || !known;
    const width = this.grid.clientWidth - 12;
    const step = this.stepBeside();
    const [side, abreast] = this.isLarge && this.inLayers ? this.fitted(width) : [SORTED, 1];
    this.side = this.isLarge ? side : step - (step >= 18 ? 4 : 3);
    this.columns = this.inLayers ? this.most : Math.max(1, Math.floor(width / (this.side + 12)));
    this.grid.style.setProperty("--side", `${this.side}px`);
    this.grid.style.setProperty("--gap", `${step - this.side}px`);
    this.grid.className = ["heads", this.isLarge ? "" : "beside", this.side < 64 ? "small" : ""].join(" ");
    const rows = this.isLarge && !this.inLayers ? [this.row(this.tiles)] : this.rows();
    this.grid.style.setProperty("--lines", String(Math.ceil(rows.length / abreast)));
    this.grid.replaceChildren(...(this.isLarge ? [] : [this.numbers()]), ...rows);
    const buttons = rows.flatMap((row) => [...row.querySelectorAll("button")]);
    this.arranged.value = new Map(buttons.map((button, at) => [button, this.tiles[at]]));
  }

  /** @returns the pixels of a tile that fills the width, and how many layers stand abreast where one each is far to scroll */
  private fitted(width: number): [number, number] {
    const side = (abreast: number) =>
      Math.max(26, Math.min(Math.floor((width / abreast - LABELS) / this.most) - 8, Math.floor(0.6 * innerHeight)));
    const isFar = (abreast: number) =>
      Math.ceil(this.layers.length / abreast) * (side(abreast) + UNDER) > 1.5 * innerHeight;
    let abreast = 1;
    while (abreast < this.layers.length && isFar(abreast) && side(abreast + 1) >= SORTED) abreast++;
    return [side(abreast), abreast];
  }

  /** @returns from one tile to the next, as far as the pane allows: what stands under the tiles is seen too */
  private stepBeside(): number {
    const style = getComputedStyle(this.pane);
    const width = Number.parseFloat(style.getPropertyValue("--grid-width")) - NUMBERS;
    const isTall = this.pane.clientHeight > this.pane.clientWidth && style.maxHeight !== "none";
    const others = [...this.pane.children].filter((child) => child !== this.grid);
    const height = this.pane.clientHeight - others.reduce((sum, { clientHeight }) => sum + clientHeight + 14, 58);
    const most = isTall ? Math.max(14, Math.floor(height / this.layers.length)) : 44;
    return Math.max(10, Math.min(44, most, Math.floor(width / this.most)));
  }

  /** The numbers of the heads over their columns; none where it differs between layers, or has no room. */
  private numbers(): HTMLElement {
    const every = this.side >= 13 ? 1 : this.side >= 10 ? 2 : 4;
    const texts = Array.from({ length: this.most }, (_, head) => {
      const there = this.layers.flatMap(({ num_heads }, layer) =>
        head < num_heads ? [headNumber(this.layers, { layer, head })] : [],
      );
      return head % every === 0 && there.every((number) => number === there[0]) ? String(there[0]) : "";
    });
    const spans = texts.map((text) => element("span", { className: "number" }, text));
    return element("div", { className: "row", "aria-hidden": "true" }, element("p", { className: "layer" }), ...spans);
  }

  /** One row for each layer, its number and mean entropy in front. */
  private rows(): HTMLElement[] {
    return this.layers.flatMap(({ heads }, layer) => {
      const tiles = this.tiles.filter((tile) => tile.layer === layer);
      if (tiles.length === 0) return [];
      const row = this.row(tiles);
      const name = `${this.isLarge ? "Layer " : ""}${layerName(this.layers, layer)}`;
      const label = element("p", { className: "layer" }, name);
      row.prepend(label);
      if (!this.isLarge) return [row];
      const known = heads?.filter((kind) => kind !== null) ?? [];
      if (heads && known.length < heads.length) {
        label.title = NO_KINDS;
        label.append(element("span", { className: "number" }, "no kinds (NaN)"));
      } else if (heads) {
        const mean = known.reduce((sum, { entropy }) => sum + entropy, 0) / known.length;
        label.title = `Mean entropy of its heads: ${share(mean)} of that of even attention`;
        const bar = element("span", { className: "even" }, element("span", { style: `width: ${100 * mean}%` }));
        label.append(bar, element("span", { className: "number" }, `entropy ${whole(mean)}`));
      }
      return [row];
    });
  }

  /** What stands under a tile. */
  private words({ kind, ...at }: Tile) {
    const shown = this.session.store.state.sort === "entropy" ? "entropy" : "score";
    return {
      name: this.inLayers ? `H${headNumber(this.layers, at)}` : shortName(this.layers, at),
      score: kind && (shown !== "score" || kind.kind !== "mixed") ? whole(kind[shown]) : "",
      kind: kind?.kind ?? "",
    };
  }

  private row(tiles: Tile[]): HTMLElement {
    const buttons = tiles.map((tile) => {
      const words = this.isLarge ? Object.entries(this.words(tile)) : [];
      const spans = words.map(([className, text]) => element("span", { className }, text));
      const properties = { type: "button", tabIndex: -1, "aria-label": described(tile.kind, this.headName(tile)) };
      return element("button", properties, element("canvas"), ...spans);
    });
    return element("div", { className: "row" }, ...buttons);
  }

  private repaint() {
    const { look, gridCeilings, store } = this.session;
    const { scale, hidden } = store.drawn;
    const palette = (blocks: number) => paletteOf(look, scale, blocks, false, gridCeilings.value);
    for (const [button, { layer, head }] of this.arranged.value) {
      const canvas = button.querySelector("canvas") as HTMLCanvasElement;
      smallPicture(this.session, { layer, head, hidden }, palette, canvas);
      // Fewer pixels than cells: let the browser average. More: keep the cells' edges sharp.
      canvas.style.imageRendering = canvas.width > this.side * devicePixelRatio ? "auto" : "pixelated";
    }
  }

  /** The open head, and where the Tab key goes. */
  private outline() {
    const { layer, head } = this.session.store.drawn;
    const [first] = this.arranged.value.keys();
    for (const [button, tile] of this.arranged.value as Map<HTMLElement, Tile>) {
      const isOpen = tile.layer === layer && tile.head === head;
      button.setAttribute("aria-pressed", String(isOpen));
      button.tabIndex = isOpen || button === first ? 0 : -1;
      if (isOpen && !this.isLarge && this.grid.contains(document.activeElement)) button.focus();
    }
  }

  private tileAt(target: EventTarget | null): Tile | undefined {
    return this.arranged.peek().get((target as HTMLElement).closest("button") as Element);
  }

  private open(target: EventTarget | null) {
    const { store } = this.session;
    const tile = this.tileAt(target);
    if (!tile) return;
    const { layer, head } = tile;
    store.set({ layer, head, ...(this.isLarge && { view: "map" }) });
  }

  /** What there is to know of the head that is pointed at, over the tiles; beside the stage under them all. */
  private say() {
    const { drawn } = this.session.store;
    const tile = this.arranged.value && this.pointed.value;
    this.details.textContent = tile ? described(tile.kind, this.headName(tile)) : "";
    const at = tile ?? drawn;
    const { kind } = this.layers[at.layer];
    const missing = kind === "pyramid" ? ", block means only" : "";
    const fitted = drawn.scale === "fit" ? `\n${darkest(this.session.gridCeilings.value)}` : "";
    const head = `layer ${layerName(this.layers, at.layer)}, head ${headNumber(this.layers, at)}`;
    this.about.textContent = `${tile ? "Open" : "Open now:"} ${head}${missing}${fitted}`;
  }

  /** The arrows go from tile to tile; beside the stage they open it. */
  private go(down: number, right: number) {
    const { store } = this.session;
    if (!this.isLarge) return store.set({ layer: store.state.layer + down, head: store.state.head + right });
    const buttons = [...this.arranged.value.keys()];
    const to = buttons.indexOf(document.activeElement as Element) + down * this.columns + right;
    (buttons[Math.max(0, Math.min(buttons.length - 1, to))] as HTMLElement).focus();
  }

  isSettled(): boolean {
    return !this.session.isGathering;
  }

  legend(): Legend {
    const { look, store, gridCeilings, layers } = this.session;
    const { kv_len } = layers[store.drawn.layer];
    return legendOf(store.drawn.scale, kv_len, "share of attention", look.ramp, gridCeilings.value);
  }

  private headName(tile: Tile): string {
    return `layer ${layerName(this.layers, tile.layer)} head ${headNumber(this.layers, tile)}`;
  }

  table(): Table {
    const { layers } = this.session;
    const rows = this.tiles.map(({ layer, head, kind }) => [
      layers[layer].place ?? layer,
      headNumber(this.layers, { layer, head }),
      ...(kind ? [kind.kind, kind.score, kind.entropy, kind.sink] : kind === null ? [NO_KIND] : []),
    ]);
    return [["layer", "head", "kind", "score", "entropy", "sink"], ...rows];
  }
}

/** @returns the strongest first */
export function sorted(tiles: Tile[], by: State["sort"]): Tile[] {
  if (by === "place") return tiles;
  const value = ({ kind }: Tile) => kind?.[by === "kind" ? "score" : by] ?? -1;
  const name = ({ kind }: Tile) => (by === "kind" ? (kind?.kind ?? "\uffff") : "");
  return [...tiles].sort((a, b) => name(a).localeCompare(name(b)) || value(b) - value(a));
}

/** @returns a sentence for who cannot see the map */
function described(kind: Tile["kind"], name: string): string {
  if (!kind) return kind === null ? `${name}, ${NO_KIND}` : name;
  const score = kind.kind === "mixed" ? "" : `score ${share(kind.score)}, `;
  return `${name}, ${kind.kind}, ${score}entropy ${share(kind.entropy)}, sinks ${share(kind.sink)}`;
}

function whole(part: number): string {
  return `${Math.round(part * 100)}\u202f%`;
}
