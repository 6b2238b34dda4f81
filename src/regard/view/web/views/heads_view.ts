/** All heads at once: a small map of each with its kind, in layers or sorted. */

import { signal } from "@preact/signals-core";
import { byId, element, moving } from "../dom";
import { legendOf } from "../map/legend";
import { headPicture } from "../map/small_picture";
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

const ORDERS = { place: "Place", kind: "Kind", score: "Score", entropy: "Entropy" };
const NO_KIND = "no kind: not numbers (NaN)";
const LABELS = 92; // pixels left of the tiles, for the layer's number and its entropy

export class HeadsView implements View {
  private layers = ownLayers(this.session.recording);
  private order = element(
    "select",
    { onchange: () => this.session.store.set({ sort: this.order.value as State["sort"] }) },
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
  private pane = byId("view-overview");
  private size = signal(0); // changes with that of the pane
  private arranged = signal<Element[]>([]); // the buttons
  readonly draws = [() => this.arrange(), () => this.repaint(), () => this.outline()];

  constructor(private readonly session: Session) {
    this.pane.append(this.choices, this.count, this.grid, this.details);
    new ResizeObserver(() => this.size.value++).observe(this.pane);
  }

  /** @returns every head of the recording */
  private all(): Tile[] {
    return this.layers.flatMap(({ num_heads, heads }, layer) =>
      Array.from({ length: num_heads }, (_, head) => ({ layer, head, kind: heads?.[head] })),
    );
  }

  /** Which tiles, in which order, how large. */
  private arrange() {
    const { sort } = this.session.store.drawn;
    const all = this.session.maps && this.all();
    if (this.size.value < 0 || this.grid.clientWidth === 0) return;
    const known = all.some(({ kind }) => Boolean(kind));
    this.choices.hidden = !known;
    this.order.value = sort;
    this.tiles = known ? sorted(all, sort) : all;
    this.count.textContent = counted(all.length, "head");
    this.inLayers = sort === "place" || !known;
    const most = Math.max(...this.layers.map(({ num_heads }) => num_heads));
    const room = this.grid.clientWidth - (this.inLayers ? LABELS : 0) - 12;
    this.side = this.inLayers ? Math.max(26, Math.min(132, Math.floor(room / most) - 8)) : 108;
    this.columns = this.inLayers ? most : Math.max(1, Math.floor(room / (this.side + 12)));
    this.grid.style.setProperty("--side", `${this.side}px`);
    this.grid.classList.toggle("small", this.side < 64);
    this.tileOf.clear();
    this.grid.replaceChildren(...(this.inLayers ? this.rows() : [this.row(this.tiles)]));
    this.arranged.value = [...this.tileOf.keys()];
  }

  /** One row for each layer, its number and mean entropy in front. */
  private rows(): HTMLElement[] {
    return this.layers.flatMap(({ heads }, layer) => {
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
    const shown = this.session.store.state.sort === "entropy" ? "entropy" : "score";
    const at = { layer, head };
    return {
      name: this.inLayers ? `H${headNumber(this.layers, at)}` : shortName(this.layers, at),
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
      return button;
    });
    return element("div", { className: "row" }, ...buttons);
  }

  private repaint() {
    for (const button of this.arranged.value) {
      const picture = headPicture(this.session, this.tileOf.get(button) as Tile);
      if (picture) button.querySelector("canvas")?.replaceWith(picture);
    }
  }

  /** The open head, and where the Tab key goes. */
  private outline() {
    const { layer, head } = this.session.store.drawn;
    this.arranged.value.forEach((button, at) => {
      const tile = this.tileOf.get(button);
      const open = tile?.layer === layer && tile.head === head;
      button.setAttribute("aria-pressed", String(open));
      (button as HTMLElement).tabIndex = open || at === 0 ? 0 : -1;
    });
  }

  private open(target: EventTarget | null) {
    const button = (target as HTMLElement).closest("button");
    const tile = button && this.tileOf.get(button);
    if (tile) this.session.store.set({ layer: tile.layer, head: tile.head, view: "map" });
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
    return !this.session.isGathering;
  }

  legend(): Legend {
    const { look, store, gridCeilings, layers } = this.session;
    const { kv_len } = layers[store.drawn.layer];
    return legendOf(store.drawn.scale, kv_len, "share of attention", look.ramp, gridCeilings.value);
  }

  caption(): string {
    return this.count.textContent ?? "";
  }

  private nameOf(layer: number): string {
    return layerName(this.layers, layer);
  }

  private numberOf(tile: Pick<Tile, "layer" | "head">): number {
    return headNumber(this.layers, tile);
  }

  table(): Table {
    const { layers } = this.session;
    const rows = this.tiles.map(({ layer, head, kind }) => [
      layers[layer].place ?? layer,
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

/** @returns a sentence for who cannot see the map */
function described(kind: Tile["kind"], name: string): string {
  if (!kind) return kind === null ? `${name}, ${NO_KIND}` : name;
  const score = kind.kind === "mixed" ? "" : `score ${share(kind.score)}, `;
  return `${name}, ${kind.kind}, ${score}entropy ${share(kind.entropy)}, sinks ${share(kind.sink)}`;
}

function whole(part: number): string {
  return `${Math.round(part * 100)}\u202f%`;
}
