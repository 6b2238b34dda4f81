/** The heads that stand out, and what the open one does: words for somebody who sees the page first. */

import { doing, introduced, standingOut } from "./opening.js";

/** @typedef {import("./state.js").State} State */

export class Standing {
  /** @param {import("./main.js").Page} page */
  constructor(page) {
    this.page = page;
    this.pane = /** @type {HTMLElement} */ (document.getElementById("standing"));
    this.sentence = /** @type {HTMLElement} */ (document.getElementById("introduction"));
    this.list();
  }

  /** A button for each kind of head, with the head that is it most. */
  list() {
    const found = standingOut(this.page.recording.layers);
    this.pane.hidden = found.length === 0;
    const list = /** @type {HTMLElement} */ (this.pane.querySelector("ul"));
    list.replaceChildren(
      ...found.map(({ layer, head, kind }) => {
        const button = document.createElement("button");
        button.type = "button";
        button.dataset.head = `${layer}.${head}`;
        button.title = doing(kind);
        const name = document.createElement("span");
        name.textContent = `L${layer}H${head}`;
        button.append(name, ` ${kind.kind} ${Math.round(100 * kind.score)}\u202f%`);
        button.addEventListener("click", () => this.page.openHead(layer, head));
        const item = document.createElement("li");
        item.append(button);
        return item;
      }),
    );
    this.show(this.page.store.state);
  }

  /** @param {State} state */
  show({ layer, head, heads, compare }) {
    const kind = this.page.recording.layers[layer].heads?.[head];
    const isOne = heads === "one" && compare !== "difference";
    this.sentence.textContent = kind && isOne ? introduced({ layer, head, kind }) : "";
    for (const button of /** @type {NodeListOf<HTMLElement>} */ (this.pane.querySelectorAll("button")))
      button.setAttribute("aria-pressed", String(button.dataset.head === `${layer}.${head}`));
  }
}
