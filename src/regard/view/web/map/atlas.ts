/** The map view: one map, or two side by side, and what chooses their heads. */

import { headNumber, layerName } from "../data/payload";
import { byId, offerNumbers } from "../dom";
import { fitted, type Picture } from "../export/picture";
import type { Page as Whole, Shared } from "../main";
import { grouped } from "../maths/numbers";
import type { State } from "../state";
import { ceilingOf } from "./ceiling";
import { cellTable } from "./cells";
import { beside, headline, shown } from "./compare";
import { MapView } from "./map";
import { followMinimap } from "./minimap";
import { followPointer } from "./travel";
import type { Table } from "../views/views";

type Page = Shared & Pick<Whole, "ceiling" | "isCompared" | "map" | "panes" | "trouble" | "unit">;

// Pixels in a picture.
const NAME = 18; // of the line that names a map
const APART = 20; // between two maps

export class Atlas {
  private holders = [...this.section.querySelectorAll(".map")] as HTMLElement[];
  readonly first = new MapView(this.holders[0], this.page, (state) => shown(state, this.page.recording.layers));
  private second = new MapView(this.holders[1], this.page, beside);
  private titles = [...this.section.querySelectorAll(".map-title")] as HTMLElement[];
  private withLayer = byId<HTMLSelectElement>("with-layer");
  private withHead = byId<HTMLSelectElement>("with-head");

  constructor(
    private readonly section: HTMLElement,
    private readonly page: Page,
  ) {
    if (!page.panes) return;
    offerNumbers(this.withLayer, page.recording.layers.length, (at) => layerName(page.recording.layers, at));
    for (const select of [this.withLayer, this.withHead])
      select.onchange = () => page.store.set({ with: `${this.withLayer.value}.${this.withHead.value}` });
  }

  listen() {
    for (const map of [this.first, this.second]) {
      followPointer(map, this.page);
      followMinimap(map, this.page);
    }
  }

  update(state: State, changed: Set<string>) {
    if (["layer", "head", "heads", "with", "compare"].some((name) => changed.has(name))) this.name(state);
    this.first.update(state, changed);
    if (state.compare === "beside") this.second.update(state, changed);
  }

  /** Which heads are on the stage, in words. */
  private name(state: State) {
    const { layers } = this.page.recording;
    document.body.dataset.compare = state.compare;
    const isBeside = state.compare === "beside";
    (this.second.holder.parentElement as HTMLElement).hidden = !isBeside;
    const which = shown(state, layers);
    this.titles[0].textContent = headline({ ...which, hidden: false }, layers);
    this.titles[0].hidden = state.compare === "alone" && state.heads === "one";
    if (isBeside) this.titles[1].textContent = headline({ ...beside(state), hidden: false }, layers);
    if (!this.page.panes) return;
    const chosen = byId("with");
    chosen.hidden = state.compare === "alone" || this.page.recording.other !== undefined;
    if (chosen.hidden) return;
    const [layer, head] = state.with.split(".").map(Number);
    offerNumbers(this.withHead, layers[layer].num_heads, (at) => String(headNumber(layers, { layer, head: at })));
    [this.withLayer.value, this.withHead.value] = [String(layer), String(head)];
  }

  point() {
    this.first.point();
    if (this.page.store.state.compare === "beside") this.second.point();
  }

  /** @returns those on the stage */
  maps(): MapView[] {
    return this.page.store.state.compare === "beside" ? [this.first, this.second] : [this.first];
  }

  /** @returns the weight of the darkest colour on the fitted scale, one for all maps on the stage */
  ceiling(): number {
    return Math.max(...this.maps().map(({ which }) => ceilingOf(this.page, which)));
  }

  isSettled(): boolean {
    return this.maps().every((map) => map.isSettled());
  }

  caption(): string {
    const { state } = this.page.store;
    const { which, frame } = this.first;
    const words = [headline(which, this.page.recording.layers)];
    if (frame && state.zoom > 1) {
      words.push(`queries ${seen(frame.row, frame.rows)}`, `keys ${seen(frame.column, frame.columns)}`);
    }
    const every = this.sampled();
    if (every > 1) words.push(`a sample of 1 query in ${every}`);
    return words.join(", ");
  }

  /** The maps on the stage from left to right, under their names where they have some. */
  picture(): Picture {
    const maps = this.maps().map((map) => map.picture());
    const above = this.titles[0].hidden ? 0 : NAME;
    return {
      width: maps.reduce((sum, { width }) => sum + width + APART, -APART),
      height: above + Math.max(...maps.map(({ height }) => height)),
      draw: (pen) =>
        maps.forEach(({ width, draw }, i) => {
          pen.font = `12px ${getComputedStyle(document.body).fontFamily}`;
          pen.fillStyle = this.page.look.ink.grey;
          [pen.textAlign, pen.textBaseline] = ["left", "top"];
          if (above) pen.fillText(fitted(pen, this.titles[i].textContent ?? "", width), 0, 0);
          pen.save();
          pen.translate(0, above);
          draw(pen);
          pen.restore();
          pen.translate(width + APART, 0);
        }),
    };
  }

  /** @returns of how many queries one was asked; 1: the numbers are exact */
  private sampled(): number {
    return Math.max(...this.maps().map((map) => map.sampled()));
  }

  /** @returns the cells that are seen */
  table(): Table {
    const { state } = this.page.store;
    const every = this.sampled();
    const unit = [this.page.unit(state)];
    if (state.scale === "row") unit.push("each row over its highest");
    if (state.hidden) unit.push("without sinks");
    if (this.page.isCompared(state)) unit.push("as parts of 1");
    if (every > 1) unit.push(`a sample of 1 query in ${every}`);
    const trouble = this.page.trouble();
    if (trouble) unit.push(trouble);
    const grids = this.maps().map((map) => map.grid());
    return cellTable(grids, unit.join(", "));
  }
}

/** @param first a part of one, if it is not whole */
function seen(first: number, count: number): string {
  return `${grouped(Math.floor(first))} to ${grouped(Math.ceil(first + count - 1e-6) - 1)}`;
}
