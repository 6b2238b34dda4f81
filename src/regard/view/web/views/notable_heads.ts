/** The heads that stand out, and what the open one does: words for somebody who sees the page first. */

import { notableHeads } from "../data/opening";
import { byId, element } from "../dom";
import { headNumber, layerName, ownLayers, shortName } from "../protocol/recording";
import type { Session } from "../session";
import { doing, introduced } from "../text/head_words";

const SEARCHING = "Looking at every head for those that stand out; they will be listed here.";

export class NotableHeads {
  private layers = ownLayers(this.session.recording);
  private pane = byId("notable");
  private sentence = byId("introduction");
  private isLate = !this.isKnown(); // the page was there before the kinds of its heads

  constructor(private readonly session: Session) {}

  /** @returns are the kinds of the heads known? */
  private isKnown(): boolean {
    return this.layers.some(({ heads }) => heads !== null);
  }

  /** Beside a head that was opened before the kinds were known, the one that stands out most. */
  private offer(layer: number, head: number) {
    const best = notableHeads(this.layers).find((one) => this.session.openingCells(one.layer, one.head).length > 0);
    const isMoved = layer !== this.session.store.fresh.layer || head !== this.session.store.fresh.head;
    if (isMoved) this.isLate = false;
    if (isMoved || !best || (best.layer === layer && best.head === head)) return;
    const text = `Open layer ${layerName(this.layers, best.layer)}, head ${headNumber(this.layers, best)}, which stands out most: ${best.kind.kind}`;
    const onclick = () => this.session.openHead(best.layer, best.head);
    this.sentence.append(" ", element("button", { type: "button", className: "offer", onclick }, text));
  }

  /** A button for each kind of head, with the head that is it most. */
  list() {
    const found = this.session.maps && notableHeads(this.layers);
    this.pane.hidden = found.length === 0;
    const buttons = found.map(({ layer, head, kind }) => {
      const name = element("span", {}, shortName(this.layers, { layer, head }));
      const onclick = () => this.session.openHead(layer, head);
      const properties = { type: "button", "data-head": `${layer}.${head}`, title: doing(kind), onclick };
      return element("button", properties, name, ` ${kind.kind} ${Math.round(100 * kind.score)}\u202f%`);
    });
    this.pane.querySelector("ul")?.replaceChildren(...buttons.map((button) => element("li", {}, button)));
  }

  show() {
    const { layer, head, heads, compare } = this.session.store.drawn;
    const kind = this.session.maps && this.layers[layer].heads?.[head];
    const isOne = heads === "one" && compare !== "difference";
    const names = { layer: layerName(this.layers, layer), head: headNumber(this.layers, { layer, head }) };
    this.sentence.textContent = kind && isOne ? introduced({ ...names, kind }) : "";
    if (!this.isKnown()) this.sentence.textContent = this.session.isGathering ? SEARCHING : "";
    else if (isOne && this.isLate) this.offer(layer, head);
    for (const button of this.pane.querySelectorAll("button") as NodeListOf<HTMLElement>)
      button.setAttribute("aria-pressed", String(button.dataset.head === `${layer}.${head}`));
  }
}
