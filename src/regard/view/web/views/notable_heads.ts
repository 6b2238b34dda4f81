/** The heads that stand out, and what the open one does: words for somebody who sees the page first. */

import { byId, element } from "../dom";
import type { HeadKind, KindHere } from "../protocol/questions";
import { headNumber, layerName, ownLayers, shortName } from "../protocol/recording";
import type { Session } from "../session";

const SEARCHING = "Looking at every head for those that stand out; they will be listed here.";

// In words, as docs/heads.md defines the kinds.
const TRIAL = "in a trial made to show it";
const MEAN = "of its attention on average";
const KINDS: Record<string, [does: string, score: string]> = {
  induction: ["each token attends to the token after its previous occurrence", TRIAL],
  "duplicate token": ["each token attends to the same token earlier", TRIAL],
  retrieval: ["it attends to the token that the model copies next, far away", TRIAL],
  "previous token": ["each token attends to the one before it", MEAN],
  "next token": ["each token attends to the one after it", MEAN],
  self: ["each token attends to itself", MEAN],
  local: ["each token attends to the 4 tokens on either side", MEAN],
  "separator sink": ["most attention rests on special tokens such as [SEP], whatever the query", MEAN],
  "first-token sink": ["most attention rests on the first token, whatever the query", MEAN],
  uniform: ["it spreads its attention almost evenly", "of the entropy of even attention"],
};

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

  /** Beside a head that was opened before the kinds were known, the one that a page opens. */
  private offer(layer: number, head: number) {
    const { opened: best } = this.session.recording;
    const isMoved = layer !== this.session.store.fresh.layer || head !== this.session.store.fresh.head;
    if (isMoved) this.isLate = false;
    const kind = this.layers[best.layer].heads?.[best.head];
    if (isMoved || !kind || (best.layer === layer && best.head === head)) return;
    const text = `Open layer ${layerName(this.layers, best.layer)}, head ${headNumber(this.layers, best)}, which says most about the words: ${kind.kind}`;
    const onclick = () => this.session.open(best);
    this.sentence.append(" ", element("button", { type: "button", className: "offer", onclick }, text));
  }

  /** A button for each kind of head, with the head that is it most. */
  list() {
    const { notable } = this.session.maps && this.session.recording;
    this.pane.hidden = notable.length === 0;
    const buttons = notable.flatMap((one) => {
      const { layer, head } = one;
      const kind = this.layers[layer].heads?.[head];
      if (!kind) return [];
      const name = element("span", {}, shortName(this.layers, { layer, head }));
      const onclick = () => this.session.open(one);
      const properties = { type: "button", "data-head": `${layer}.${head}`, title: doing(kind), onclick };
      const where = kind.here ? " in a trial" : "";
      return element("button", properties, name, ` ${kind.kind} ${Math.round(100 * kind.score)}\u202f%${where}`);
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

/** @returns "an induction head", "a previous-token head", "a first-token sink" */
function named(kind: string): string {
  const name = kind.endsWith("sink") ? kind : `${kind.replace(" ", "-")} head`;
  return `${/^[aeio]/.test(name) ? "an" : "a"} ${name}`;
}

/** @returns what such a head does, without its number */
function doing({ kind }: HeadKind): string {
  return KINDS[kind]?.[0] ?? "no simple pattern takes half of its attention";
}

/** @returns one sentence that says what is seen */
export function introduced({ layer, head, kind }: { layer: string; head: number; kind: HeadKind }): string {
  const name = `Layer ${layer}, head ${head} is ${named(kind.kind)}: ${doing(kind)}`;
  const known = KINDS[kind.kind] ? ` (${percent(kind.score)} ${KINDS[kind.kind][1]})` : "";
  return `${name}${known}.${kind.here ? ` ${inThisText(kind.here)}` : ""}`;
}

/** @returns what a head does here, whose name a trial gave */
function inThisText({ kind, score }: KindHere): string {
  return KINDS[kind]
    ? `In this text it is ${named(kind)} (${percent(score)}).`
    : "In this text no simple pattern takes half of its attention.";
}

const percent = (share: number) => `${Math.round(100 * share)}\u202f%`;
