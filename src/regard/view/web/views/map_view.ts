/** The map view: one map, or two side by side, and what chooses their heads. */

import { beside, headline, isDifference, shown } from "../data/compare";
import { byId, offerNumbers } from "../dom";
import { headNumber, layerName } from "../protocol/recording";
import type { Session } from "../session";
import { cellTable } from "../map/cells";
import { legendOf } from "../map/legend";
import { HeadMap, stageCeiling } from "../map/map";
import { followPointer } from "../map/travel";
import type { Legend, Table, View } from "../view";

export class MapView implements View {
  private section = byId("view-map");
  private holders = [...this.section.querySelectorAll(".map")] as HTMLElement[];
  private titles = [...this.section.querySelectorAll(".map-title")] as HTMLElement[];
  private withLayer = byId<HTMLSelectElement>("with-layer");
  private withHead = byId<HTMLSelectElement>("with-head");
  readonly first: HeadMap;
  private second: HeadMap;
  readonly draws: (() => void)[];

  constructor(readonly session: Session) {
    const { layers, store } = session;
    this.first = new HeadMap(this.holders[0], session, shown);
    this.second = new HeadMap(this.holders[1], session, beside);
    const second = this.second.draws.map((draw) => () => this.isBeside() && draw());
    this.draws = [() => this.name(), ...this.first.draws, ...second];
    followPointer(this.first);
    followPointer(this.second);
    offerNumbers(this.withLayer, layers.length, (at) => layerName(layers, at));
    for (const select of [this.withLayer, this.withHead])
      select.onchange = () => store.set({ with: `${this.withLayer.value}.${this.withHead.value}` });
  }

  private isBeside(): boolean {
    return this.session.store.drawn.compare === "beside";
  }

  /** Which heads are on the stage, in words. */
  private name() {
    const { layers, store } = this.session;
    const { compare, heads, with: other } = store.drawn;
    document.body.dataset.compare = compare;
    this.titles[0].textContent = headline(shown(store.drawn, layers), layers);
    this.titles[0].hidden = compare === "alone" && heads === "one";
    (this.second.holder.parentElement as HTMLElement).hidden = compare !== "beside";
    if (compare === "beside") this.titles[1].textContent = headline(beside(store.drawn), layers);
    byId("with").hidden = compare === "alone" || this.session.recording.other !== undefined;
    if (byId("with").hidden) return;
    const [layer, head] = other.split(".").map(Number);
    offerNumbers(this.withHead, layers[layer].num_heads, (at) => String(headNumber(layers, { layer, head: at })));
    [this.withLayer.value, this.withHead.value] = [String(layer), String(head)];
  }

  /** @returns those on the stage */
  parts(): HeadMap[] {
    return this.isBeside() ? [this.first, this.second] : [this.first];
  }

  isSettled(): boolean {
    return this.parts().every((map) => map.isSettled());
  }

  /** @returns what a cell is */
  private unit(): string {
    const { layers, store } = this.session;
    const which = shown(store.drawn, layers);
    const size = this.first.arranged.value?.part.size ?? 1;
    const what = isDifference(which) ? "points more or less" : "share of attention";
    return `${what}${size > 1 ? ` per ${size} keys` : ""}`;
  }

  table(): Table {
    const { layers, store, trouble } = this.session;
    const maps = this.parts();
    const every = Math.max(...maps.map((map) => map.sampled()));
    const units = [
      this.unit(),
      store.drawn.hidden && "without sinks",
      isDifference(shown(store.drawn, layers)) && "as parts of 1",
      every > 1 && `a sample of 1 query in ${every}`,
      trouble,
    ];
    const grids = maps.map((map) => map.cells());
    return cellTable(grids, units.filter(Boolean).join(", "));
  }

  legend(): Legend {
    const { store, layers, look } = this.session;
    const which = shown(store.drawn, layers);
    const ramp = isDifference(which) ? look.differences : look.ramp;
    const blocks = layers[which.layer].kv_len / (this.first.arranged.value?.part.size ?? 1);
    return legendOf(store.drawn.scale, blocks, this.unit(), ramp, stageCeiling(this.session));
  }
}
