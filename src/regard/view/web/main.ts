/** The page: reads the recording, makes the views and keeps them in step. */

import { Client } from "./data/client";
import { engine } from "./data/engine";
import { coarsest, isWhole } from "./data/block_means";
import { Damaged, readRecording, type Recording } from "./data/payload";
import { Source, type Host } from "./data/source";
import { byId, element } from "./dom";
import { Atlas } from "./map/atlas";
import { INKS, type Ink } from "./map/axes";
import { ceilingOfAll } from "./map/ceiling";
import { isDifference, shown } from "./map/compare";
import { legendOf, showLegend, type Legend } from "./map/legend";
import type { Look, MapView } from "./map/map";
import { smallMap } from "./map/small";
import { differenceRamp, ramp } from "./maths/colours";
import { fitted } from "./bounds";
import { gather, liveHost, menus, moreViews, panes, type Panes } from "./full_page";
import { freshState, Store, type Cell, type State } from "./state";
import { blockSentence, errorName, meansName } from "./text/block_words";
import { parted } from "./text/parts";
import { Prose } from "./text/prose";
import { ReadingView } from "./text/sentence";
import { forAxis, sinksOf, type TwoAxes } from "./text/tokens";
import { Controls } from "./views/controls";
import { listen } from "./views/keys";
import { notes } from "./views/notes";
import { lastWord, openingCells, openingHead, smallRows } from "./views/opening";
import { changesReading, Reader, type Reading } from "./views/reading";
import { StepsView } from "./views/steps";
import { Views } from "./views/views";

const MOST_READ = 48; // queries whose weights are asked for, to open at the clearest

/** What every part of the page may use of it. */
export type Shared = Pick<
  Page,
  "axes" | "cell" | "choose" | "damaged" | "hover" | "look" | "maps" | "mended" | "recording" | "source" | "store"
>;

export class Page {
  private axesOf = new Map<string, TwoAxes>();
  readonly maps = this.recording.layers.map(smallMap);
  readonly store = new Store(
    this.freshState(),
    (state) => this.fitted(state),
    (state, changed) => this.show(state, changed),
  );
  private isLive = this.recording.layers.some(({ kind }) => kind === "live");
  readonly source = new Source(this.recording.layers, this.host());
  look = this.themed();
  reading: Reading | null = null;
  private troubles = new Map<object, Error>(); // who has no answer, and why
  isGathering = this.isLive; // until the host has answered for every head
  gridCeiling = 1;
  private remembering = 0;
  private redrawing = 0;
  readonly panes: Panes | null = panes(this);
  private atlas: Atlas = new Atlas(byId("view-map"), this);
  readonly map: MapView = this.atlas.first;
  legend!: Legend;
  private legendName = "";
  private prose = new Prose(byId("prose"), this);
  private steps = new StepsView(byId("view-steps"), this);
  readonly views = new Views({ map: this.atlas, steps: this.steps, ...moreViews(this) });
  private words = new ReadingView(this);
  private controls = new Controls(this);
  private reader = new Reader(
    this.source,
    (reading) => this.read(reading),
    (error) => this.damaged(error, this.words),
    (at) => this.axes(at).queries === this.axes(at).keys,
  );

  constructor(readonly recording: Recording) {
    menus(this);
  }

  /** What answers for one head. */
  private host(): Host {
    if (this.isLive) return liveHost(this);
    return new Client(this.recording.layers, (layer) => sinksOf(this.axes(layer).keys));
  }

  /** More is known of the heads: they are drawn once a frame, however many layers came. */
  private gathered() {
    cancelAnimationFrame(this.redrawing);
    this.redrawing = requestAnimationFrame(() => {
      const { state } = this.store;
      this.drawOverview();
      this.views.update(state, new Set(["maps"]));
      this.panes?.notable.list();
      this.explain(state);
      this.note(state);
    });
  }

  private drawOverview() {
    if (!this.panes) return;
    this.gridCeiling = ceilingOfAll(this);
    this.panes.overview.draw();
  }

  start() {
    this.atlas.listen();
    listen(this);
    // Not location.hash: remember() may have put the last state back before this event comes.
    window.addEventListener("hashchange", ({ newURL }) => this.store.go(new URL(newURL).hash));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
    window.addEventListener("resize", () => this.drawOverview());
    const isFresh = !new URLSearchParams(location.hash.slice(1)).has("query");
    this.store.go(location.hash);
    this.show(this.store.state, new Set(Object.keys(this.store.state)));
    if (isFresh) void this.clarify();
    byId("failure").textContent = "";
    document.body.classList.add("ready");
    if (this.isLive) void this.gather();
  }

  /** Asks a live host for what the page needs of every head. */
  private async gather() {
    const { layers } = this.recording;
    await gather(this.source, this.store.state.layer, {
      onMap: (at, overview) => {
        layers[at].overview = overview;
        this.maps[at] = smallMap(layers[at]);
        this.gathered();
      },
      onKinds: (kinds) => {
        for (const layer of layers) layer.heads = kinds.splice(0, layer.num_heads);
        this.gathered();
      },
    });
    requestAnimationFrame(() => {
      this.isGathering = false; // after the last drawing
      this.panes?.notable.show(this.store.state);
    });
  }

  /** @returns the head that stands out most, at a word that shows what it does */
  private freshState(): State {
    const { layers, opened, other } = this.recording;
    const head = openingHead(layers, opened, (one) => this.openingCells(one.layer, one.head).length > 0);
    const layer = Math.max(0, Math.min(layers.length - 1, head.layer));
    const axes = this.axes(layer);
    const cell = this.openingCell(layer, head.head);
    const compare = other ? "beside" : "alone";
    // One sentence has no other parts than its words.
    const parts = parted(axes.keys, "sentences").length > 1 ? "sentences" : "words";
    return freshState({ layer, head: head.head, ...cell, compare, parts }, layers[layer].kv_len);
  }

  /** @returns words that show what a head does, as far as its small map says; none: the text does not show it */
  openingCells(layer: number, head: number) {
    const axes = this.axes(layer);
    return openingCells(this.recording.layers[layer].heads?.[head], axes, smallRows(this.maps[layer], axes, head));
  }

  private openingCell(layer: number, head: number): Cell {
    return this.openingCells(layer, head)[0] ?? { query: lastWord(this.axes(layer).queries), key: null };
  }

  /** @returns every number inside the recording, and a view that there is */
  private fitted(state: State): State {
    // The store asks before there are views.
    const view = !this.views || this.views.has(state.view) ? state.view : "map";
    return fitted({ ...state, view }, this.recording);
  }

  axes(layer: number): TwoAxes {
    const { layers, other } = this.recording;
    const { q_len, kv_len } = layers[layer];
    const read = other && layer >= other.first ? other : this.recording;
    const name = `${q_len} ${kv_len} ${read === other}`;
    let axes = this.axesOf.get(name);
    if (!axes) {
      const queries = forAxis(read.query_tokens, q_len);
      const one = q_len === kv_len && read.one_text;
      axes = { queries, keys: one ? queries : forAxis(read.key_tokens, kv_len) };
      this.axesOf.set(name, axes);
    }
    return axes;
  }

  /** @returns is a cell still being read? */
  get isReading(): boolean {
    return this.reader.isReading;
  }

  /** Says something in place of the cell that is read. */
  say(text: string) {
    this.words.say(text);
  }

  /** @returns the pointed or chosen cell, as far as it is known */
  cell(): { query: number; key: number } {
    const { query, key } = this.store.state.hover ?? this.store.state;
    return { query: query ?? this.reading?.query ?? 0, key: key ?? this.reading?.key ?? 0 };
  }

  hover(cell: Cell | null) {
    const { hover, layer } = this.store.state;
    const { q_len, kv_len } = this.recording.layers[layer];
    // The map beside it may be of a longer text.
    if (cell && ((cell.query ?? 0) >= q_len || (cell.key ?? 0) >= kv_len)) return;
    if (cell?.query === hover?.query && cell?.key === hover?.key) return;
    this.store.set({ hover: cell });
  }

  /** Keeps a cell; the reading fills in a side that is still unknown. */
  choose(cell: Cell) {
    this.store.set({ ...cell, hover: null });
  }

  /** Opens a head at a word that shows what it does. */
  openHead(layer: number, head: number) {
    this.store.set({ layer, head, heads: "one", ...this.openingCell(layer, head), hover: null });
    void this.clarify();
  }

  /** Goes on from an opened cell to the clearest of some, once their weights are known, unless somebody moved. */
  private async clarify() {
    const { layer, head, query, key } = this.store.state;
    const info = this.recording.layers[layer];
    const axes = this.axes(layer);
    if (!info.heads?.[head] || !isWhole(info) || smallRows(this.maps[layer], axes, head)(0)) return;
    const among = this.openingCells(layer, head).map((cell) => cell.query);
    among.splice(MOST_READ);
    try {
      const rows = await Promise.all(among.map((at) => this.source.row({ layer, head, hidden: false }, at)));
      const [cell] = openingCells(info.heads[head], axes, (at) => rows[among.indexOf(at)].values, among);
      const now = this.store.state;
      const isStill = now.layer === layer && now.head === head && now.query === query && (key ?? now.key) === now.key;
      if (cell && isStill) this.store.set(cell);
    } catch {
      // What is damaged or lost, the map and the sentence say.
    }
  }

  private show(state: State, changed: Set<string>) {
    if (changed.has("theme")) this.look = this.themed();
    if (changed.has("folded")) document.body.classList.toggle("folded", state.folded);
    if (changed.has("layer") || changed.has("view")) this.troubles.clear();
    this.warn();
    if (changed.has("layer")) this.open(state);
    if (["layer", "scale", "theme"].some((name) => changed.has(name))) {
      this.drawOverview();
    }
    if (["layer", "head", "heads", "compare"].some((name) => changed.has(name))) this.panes?.notable.show(state);
    if (["layer", "head", "heads"].some((name) => changed.has(name))) {
      this.panes?.overview.name();
      this.panes?.overview.outline();
    }
    this.controls.show(state);
    this.views.update(state, changed);
    this.panes?.pins.update(changed);
    this.explain(state);
    this.reader.update(state, changed);
    if (this.recording.layers[state.layer].kind === "map") this.readBlock(state);
    else if (this.reading && ["scale", "side", "theme"].some((name) => changed.has(name)))
      this.prose.read(this.reading);
    this.atlas.point();
    if (!state.hover && state.query !== null && state.key !== null) this.remember();
  }

  /** Puts the state into the address, not oftener than a browser allows. */
  private remember() {
    // A notebook's frame has no address of its own.
    if (location.protocol === "about:") return;
    clearTimeout(this.remembering);
    this.remembering = setTimeout(() => history.replaceState(null, "", this.store.address()), 150);
  }

  /** Opens the page again, somewhere else. */
  reload(address: string) {
    clearTimeout(this.remembering);
    history.replaceState(null, "", address);
    location.reload();
  }

  /** @param state another layer */
  private open({ layer }: State) {
    this.prose.write(this.axes(layer));
    this.note({ layer });
  }

  /** What must be said beside the numbers of a layer. */
  private note({ layer }: Pick<State, "layer">) {
    byId("notes").replaceChildren(...notes(this.recording, layer).map((text) => element("li", {}, text)));
  }

  /** @returns what a cell is */
  unit(state: State): string {
    if (state.view === "segments")
      return `share of the attention of a part${state.per === "token" ? ", for each token" : ""}`;
    const { kind } = this.recording.layers[state.layer];
    if (kind === "map") return "share between blocks of tokens";
    const size = this.blockSize(state);
    const compared = this.isCompared(state);
    let unit = compared ? "points more or less of a query’s attention" : "share of a query’s attention";
    if (size > 1) unit = `${compared ? "points more or less" : "share"} for each ${size} keys`;
    const means = coarsest(shown(state, this.recording.layers), this.recording.layers);
    if (state.view === "map" && means)
      unit += size < means.block ? `: ${meansName(means)}, not finer in this file` : `, ${errorName(means)}`;
    return unit;
  }

  /** @returns tokens of a cell on the stage, each way */
  private blockSize({ view }: State): number {
    return view === "map" ? (this.map.part?.size ?? 1) : 1;
  }

  /** @returns is one head less another on the stage? */
  isCompared(state: State): boolean {
    return state.view === "map" && isDifference(shown(state, this.recording.layers));
  }

  /** The legend of what is on the stage. */
  explain(state: State) {
    const { kv_len } = this.recording.layers[state.layer];
    const unit = this.unit(state);
    const scale = state.view === "segments" ? "fit" : state.scale;
    const ceiling = this.ceiling(state);
    const name = [unit, scale, kv_len, this.look.name, ceiling].join();
    if (name === this.legendName) return;
    this.legendName = name;
    const ramp = this.isCompared(state) ? this.look.differences : this.look.ramp;
    this.legend = legendOf(scale, kv_len / this.blockSize(state), unit, ramp, ceiling);
    showLegend(byId("legend"), this.legend);
  }

  /** @returns the weight of the darkest colour on the fitted scale */
  ceiling({ view }: State): number {
    if (view === "overview") return this.gridCeiling;
    return this.views.views[view]?.ceiling?.() ?? this.atlas.ceiling();
  }

  private read(reading: Reading) {
    // In the next frame another one is asked for; this one must not fill in the new cell.
    if (changesReading(this.store.changed)) return;
    this.reading = reading;
    // What answers again, answers the view as well.
    if (reading.column && this.mended(this.words)) this.views.update(this.store.state, new Set(["size"]));
    const { hover, query, key } = this.store.state;
    if (!hover && (query === null || key === null)) this.store.set({ query: reading.query, key: reading.key });
    const view = this.views.now();
    this.words.read(reading, view?.sentence?.(reading));
    view?.read?.(reading);
    this.prose.read(reading);
    this.atlas.point();
    document.body.dataset.read = [
      reading.layer,
      reading.head,
      reading.query,
      reading.key,
      Number(reading.hidden),
    ].join();
  }

  /** @param state of a layer that has only its small map */
  private readBlock(state: State) {
    const text = blockSentence(this.maps[state.layer], this.recording.layers[state.layer], state, this.cell());
    this.forget(text);
  }

  /** @param text what is said instead of a reading */
  private forget(text?: string) {
    this.reading = null;
    this.prose.clear();
    this.words.clear(text);
  }

  /** @param asker who has no answer */
  damaged(error: Error, asker: object) {
    if (!this.onStage().includes(asker)) return;
    this.troubles.set(asker, error);
    this.warn();
    if (asker === this.words) this.forget();
  }

  /**
   * @param asker who has its answer
   * @returns had it none before?
   */
  mended(asker: object): boolean {
    const was = this.troubles.delete(asker);
    this.warn();
    return was;
  }

  /** What is not whole on the stage, as long as it is not. */
  private warn() {
    const onStage = this.onStage();
    for (const asker of this.troubles.keys()) if (!onStage.includes(asker)) this.troubles.delete(asker);
    byId("damage").hidden = this.troubles.size === 0;
    byId("damage").textContent = this.trouble();
  }

  /** @returns who asks for what is seen */
  private onStage(): object[] {
    const view = this.views.now();
    return [this.words, ...(view ? [view] : []), ...(view === this.atlas ? this.atlas.maps() : [])];
  }

  /** @returns why something on the stage is not whole, and what stands there instead */
  trouble(): string {
    const reasons = new Set([...this.troubles.values()].map(({ message }) => message));
    const isMap = this.atlas.maps().some((map) => this.troubles.has(map));
    return [...reasons, ...(isMap && !this.isLive ? ["The small map is shown instead."] : [])].join(" ");
  }

  redraw() {
    this.show(this.store.state, new Set(["theme"]));
  }

  /** The theme's colours, as the style sheet has them. */
  private themed(): Look {
    const root = document.documentElement;
    const { theme } = this.store.state;
    root.dataset.theme = theme;
    const dark = theme === "dark" || (theme === "auto" && matchMedia("(prefers-color-scheme: dark)").matches);
    const style = getComputedStyle(root);
    const ink = Object.fromEntries(INKS.map((name) => [name, style.getPropertyValue(`--${name}`).trim()])) as Ink;
    const name = dark ? "dark" : "light";
    return { name, ramp: ramp(name, ink.ground), differences: differenceRamp(name, ink.ground), ink };
  }
}

function start() {
  try {
    // A copy that a browser saved of an open page has what stood in its views.
    for (const view of document.querySelectorAll(".view:not(#view-map)")) view.replaceChildren();
    new Page(readRecording(document.getElementById("recording")?.textContent)).start();
  } catch (error) {
    const reason = error instanceof Error ? error.message : String(error);
    byId("failure").textContent =
      error instanceof Damaged
        ? `This file is damaged: ${reason} Write it again with regard to see its attention.`
        : `The page went wrong: ${reason}`;
    document.body.classList.add("failed");
  }
}

// The page and its worker run the same script.
if (typeof document === "undefined") {
  const ask = engine((answer) => postMessage(answer));
  onmessage = (event) => void ask(event.data);
  postMessage("here"); // Without this word the page works beside itself.
} else {
  start();
}
