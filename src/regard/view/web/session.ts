/**
 * What all views share: the recording, the one state, the numbers, and what is read off. Its parts
 * that change are signals: a drawing that has read one is run again when that one changes.
 */

import { batch, computed, effect, signal } from "@preact/signals-core";
import { forAxis, sinksOf, type Axis, type TwoAxes } from "./data/axes";
import { fitted } from "./data/compare";
import { Client } from "./data/client";
import { gridsOf, withPatches, type Grid } from "./data/patches";
import { CAUSES, inBlocks, Reader, type Reading } from "./data/reading";
import { ceilingOfAll, smallMap, type Maps } from "./data/small";
import { Source, type Host } from "./data/source";
import type { Latest } from "./data/waiting";
import { lookOf, type Look } from "./look";
import type { Opening } from "./protocol/questions";
import type { LayerInfo, Recording } from "./protocol/recording";
import { freshState, Store, type Cell, type State } from "./state";
import type { View } from "./view";

export class Session implements Maps {
  readonly layers: LayerInfo[] = this.recording.layers;
  readonly isLive = this.layers.some(({ kind }) => kind === "live");
  private axesOf = new Map<string, TwoAxes>();
  private readonly small = signal(this.layers.map(smallMap));
  readonly store: Store;
  readonly source: Source;
  private readonly reader: Reader;
  private readonly darkness = matchMedia("(prefers-color-scheme: dark)");
  private readonly isDark = signal(this.darkness.matches);
  private readonly looks = computed(() => (this.isDark.value, lookOf(this.store.drawn.theme)));
  private readonly read = signal<Reading | null>(null);
  private readonly shares = computed(() => this.read.value && inBlocks(this.read.value, this.layers));
  private readonly troubles = signal<ReadonlyMap<object, Error>>(new Map()); // who has no answer, and why
  private readonly stage = signal<View | undefined>(undefined);
  private readonly gathers = signal(this.isLive);
  private news = new Set<number>(); // layers whose small maps came
  private redrawing = 0;
  /** Counts how often an answer came after there had been none: what is on the stage asks again. */
  readonly again = signal(0);
  readonly gridCeilings = computed(() => ceilingOfAll(this, this.store.drawn.hidden));

  /**
   * @param host what answers for one head; null: the file itself
   * @param partsOf the parts in which a fresh page shows a text
   */
  constructor(
    readonly recording: Recording,
    host: Host | null,
    partsOf: (axes: TwoAxes) => State["parts"],
    hasView: (name: State["view"]) => boolean,
  ) {
    const fit = (state: State) => fitted({ ...state, view: hasView(state.view) ? state.view : "map" }, recording);
    const { opened, other } = recording;
    const { layer } = opened;
    const compare = other ? "beside" : "alone";
    const view = this.grids(layer).length > 0 ? "image" : "map";
    const parts = partsOf(this.axes(layer));
    this.store = new Store(freshState({ ...opened, compare, parts, view }, this.layers[layer].kv_len), fit);
    this.source = new Source(this.layers, host ?? new Client(this.layers, (layer) => sinksOf(this.axes(layer).keys)));
    this.reader = new Reader(
      this.source,
      (reading) => this.onReading(reading),
      (error) => this.damaged(error, this.reader),
      (at) => this.isOneText(at),
    );
    this.darkness.addEventListener("change", ({ matches }) => (this.isDark.value = matches));
  }

  start() {
    effect(() => {
      const { view, layer } = this.store.drawn;
      if (view && layer >= 0) this.troubles.value = new Map();
    });
    effect(() => {
      if (this.again.value >= 0) this.reader.read(this.store.drawn);
    });
  }

  /** Opens a head at a word that shows what it does. */
  open(opening: Opening) {
    this.store.set({ ...opening, heads: "one", hover: null });
  }

  get maps() {
    return this.small.value;
  }

  /** More is known of the heads of these layers: it is drawn once a frame, however many came. */
  gathered(layers: number[], isLast = false) {
    for (const layer of layers) this.news.add(layer);
    cancelAnimationFrame(this.redrawing);
    this.redrawing = requestAnimationFrame(() =>
      batch(() => {
        this.small.value = this.maps.map((map, layer) =>
          this.news.delete(layer) ? smallMap(this.layers[layer]) : map,
        );
        this.gathers.value &&= !isLast;
      }),
    );
  }

  /** Until the host has answered for every head. */
  get isGathering() {
    return this.gathers.value;
  }

  get look(): Look {
    return this.looks.value;
  }

  /** @returns those of the keys that stand for parts of pictures */
  grids(layer: number): Grid[] {
    return gridsOf(this.recording, layer);
  }

  axes(layer: number): TwoAxes {
    const { q_len, kv_len } = this.layers[layer];
    const { other } = this.recording;
    const read = other && layer >= other.first ? other : this.recording;
    const grids = this.grids(layer);
    const name = `${q_len} ${kv_len} ${read === other} ${grids.map(({ number }) => number).join()}`;
    let axes = this.axesOf.get(name);
    if (!axes) {
      const { query_tokens, key_tokens, one_text } = read;
      const isOne = q_len === kv_len && one_text;
      const texts = isOne ? query_tokens : key_tokens;
      const keys = withPatches(forAxis(texts, kv_len), grids, texts?.length === kv_len);
      axes = { queries: isOne ? keys : forAxis(query_tokens, q_len), keys };
      this.axesOf.set(name, axes);
    }
    return axes;
  }

  /** @returns are the queries of the layer its keys, too? */
  isOneText(layer: number = this.store.state.layer): boolean {
    return this.axes(layer).queries === this.axes(layer).keys;
  }

  /** @returns a token as the cell that is read: one of both axes where it looks, and who looks at it */
  cellOf(axis: Axis, at: number): Cell {
    return axis === "query" || this.isOneText() ? { query: at, key: null } : { query: null, key: at };
  }

  /** Keeps a token, in the direction of its axis. */
  chooseToken(axis: Axis, at: number) {
    if (this.isOneText()) return this.choose({ query: at });
    this.store.set({ ...this.cellOf(axis, at), side: axis === "query" ? "looks" : "looked", hover: null });
  }

  /** What is read off; null: not known yet, or not known at all. */
  get reading(): Reading | null {
    return this.shares.value;
  }

  /** The same with the weights of single tokens where `inBlocks` has the shares of blocks. */
  get perToken(): Reading | null {
    return this.read.value;
  }

  private onReading(reading: Reading) {
    // In the next frame another one is asked for; this one must not fill in the new cell.
    if (this.store.isPending([...CAUSES])) return;
    if (reading.column) this.mended(this.reader);
    this.read.value = reading;
    const { hover, query, key } = this.store.state;
    if (!hover && (query === null || key === null)) this.store.set({ query: reading.query, key: reading.key });
  }

  /**
   * @param state what is asked for, or what is drawn
   * @returns the pointed or chosen cell, as far as it is known
   */
  cell(state: Readonly<State> = this.store.state): { query: number; key: number } {
    const { query, key } = state.hover ?? state;
    return { query: query ?? this.reading?.query ?? 0, key: key ?? this.reading?.key ?? 0 };
  }

  hover(cell: Cell | null) {
    const { hover, layer } = this.store.state;
    const { q_len, kv_len } = this.layers[layer];
    // The map beside it may be of a longer text.
    if (cell && ((cell.query ?? 0) >= q_len || (cell.key ?? 0) >= kv_len)) return;
    if (cell?.query !== hover?.query || cell?.key !== hover?.key) this.store.set({ hover: cell });
  }

  /** Keeps a cell; the reading fills in a side that is still unknown. */
  choose(cell: Partial<Cell>) {
    this.store.set({ ...cell, hover: null });
  }

  /** The open view. */
  get view(): View | undefined {
    return this.stage.value;
  }

  set view(view: View | undefined) {
    this.stage.value = view;
  }

  /** Asks for what a view shows, and once more when a host answers again; until then the trouble of the view is said. */
  ask<T>(
    view: object,
    latest: Latest,
    question: (signal: AbortSignal) => Promise<T>,
    onAnswer: (answer: T) => void,
    onError: () => void = () => {},
  ) {
    if (this.again.value < 0) return;
    const answered = (answer: T) => (this.mended(view), onAnswer(answer));
    void latest.ask(question, answered, (error) => (onError(), this.damaged(error, view)));
  }

  /** @param asker who has no answer */
  damaged(error: Error, asker: object) {
    const view = this.stage.peek();
    if (asker !== this.reader && asker !== view && !view?.parts?.().includes(asker)) return;
    this.troubles.value = new Map(this.troubles.peek()).set(asker, error);
    if (asker === this.reader) this.read.value = null;
  }

  /** @param asker who has its answer; where it had none before, all others try again, too */
  mended(asker: object) {
    const troubles = new Map(this.troubles.peek());
    if (!troubles.delete(asker)) return;
    this.troubles.value = troubles;
    this.again.value++;
  }

  /** @returns why something on the stage is not whole, and what stands there instead */
  get trouble(): string {
    const parts = this.view?.parts?.() ?? [];
    const troubles = this.troubles.value;
    const onStage = [this.reader, this.view, ...parts].flatMap((asker) => (asker && troubles.get(asker)) ?? []);
    const reasons = new Set(onStage.map(({ message }) => message));
    const isMap = parts.some((part) => troubles.has(part)) && !this.isLive;
    return [...reasons, ...(isMap ? ["The small map is shown instead."] : [])].join(" ");
  }
}
