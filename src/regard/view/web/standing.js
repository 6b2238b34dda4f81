/** The heads that stand out, and what the open one does: words for somebody who sees the page first. */

import { byId, element } from "./dom.js";
import { doing, introduced, standingOut } from "./opening.js";

/** @typedef {import("./state.js").State} State */

const SEARCHING = "Looking at every head for those that stand out; they will be listed here.";

export class Standing {
  /** @param {import("./main.js").Page} page */
  constructor(page) {
    this.page = page;
    this.pane = byId("standing");
    this.sentence = byId("introduction");
    /** The page was there before its host told of the heads. */
    this.isLate = !this.isKnown();
    this.list();
  }

  /** @returns {boolean} are the kinds of the heads known? */
  isKnown() {
    return this.page.recording.layers.some(({ heads }) => heads !== null);
  }

  /**
   * Beside a head that was opened before the kinds were known, the one that stands out most.
   * @param {number} layer @param {number} head
   */
  offer(layer, head) {
    const [best] = standingOut(this.page.recording.layers);
    const isMoved = layer !== this.page.store.fresh.layer || head !== this.page.store.fresh.head;
    if (isMoved) this.isLate = false;
    if (isMoved || !best || (best.layer === layer && best.head === head)) return;
    const text = `Open layer ${best.layer}, head ${best.head}, which stands out most: ${best.kind.kind}`;
    const button = element("button", { type: "button", className: "offer" }, text);
    button.addEventListener("click", () => this.page.openHead(best.layer, best.head));
    this.sentence.append(" ", button);
  }

  /** A button for each kind of head, with the head that is it most. */
  list() {
    const found = standingOut(this.page.recording.layers);
    this.pane.hidden = found.length === 0;
    const list = /** @type {HTMLElement} */ (this.pane.querySelector("ul"));
    list.replaceChildren(
      ...found.map(({ layer, head, kind }) => {
        const name = element("span", {}, `L${layer}H${head}`);
        const properties = { type: "button", "data-head": `${layer}.${head}`, title: doing(kind) };
        const button = element("button", properties, name, ` ${kind.kind} ${Math.round(100 * kind.score)}\u202f%`);
        button.addEventListener("click", () => this.page.openHead(layer, head));
        return element("li", {}, button);
      }),
    );
    this.show(this.page.store.state);
  }

  /** @param {State} state */
  show({ layer, head, heads, compare }) {
    const kind = this.page.recording.layers[layer].heads?.[head];
    const isOne = heads === "one" && compare !== "difference";
    this.sentence.textContent = kind && isOne ? introduced({ layer, head, kind }) : "";
    if (!this.isKnown()) this.sentence.textContent = this.page.isGathering ? SEARCHING : "";
    else if (isOne && this.isLate) this.offer(layer, head);
    for (const button of /** @type {NodeListOf<HTMLElement>} */ (this.pane.querySelectorAll("button")))
      button.setAttribute("aria-pressed", String(button.dataset.head === `${layer}.${head}`));
  }
}
