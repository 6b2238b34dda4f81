/** The text beside the map; the tokens that give or take attention are tinted. */

import { byId, element } from "../dom";
import type { Shared as Page } from "../main";
import { share } from "../maths/numbers";
import type { Cell } from "../state";
import { strongest, type Reading } from "../views/reading";
import { Flow } from "./flow";
import { meansAside } from "./block_words";
import type { Token, TwoAxes } from "./tokens";

export class Prose {
  private caption = byId("tint");
  private queries: Flow | null = null;
  private keys: Flow | null = null;
  private shown: Token[] | null = null;

  constructor(
    private readonly pane: HTMLElement,
    private readonly page: Page,
  ) {
    pane.addEventListener("pointermove", (event) => page.hover(this.cellAt(event)));
    pane.addEventListener("pointerleave", () => page.hover(null));
    pane.addEventListener("click", (event) => {
      const cell = this.cellAt(event);
      if (cell) page.choose(cell);
    });
  }

  /** @param axes writes the text, once or twice */
  write({ queries, keys }: TwoAxes) {
    if (this.shown === keys) return;
    this.shown = keys;
    this.pane.replaceChildren();
    if (queries === keys) {
      this.queries = this.keys = new Flow(this.pane, keys, "The text");
      return;
    }
    this.queries = this.text(queries, "Queries: the text that looks");
    this.keys = this.text(keys, "Keys: the text that is looked at");
  }

  private text(tokens: Token[], name: string): Flow {
    this.pane.append(element("h3", {}, name));
    return new Flow(this.pane, tokens, name);
  }

  private cellAt(event: Event): Cell | null {
    const query = this.queries?.at(event) ?? null;
    const key = this.keys?.at(event) ?? null;
    if (query === null && key === null) return null;
    const asQuery = query !== null && (key === null || this.page.store.state.side === "looks");
    return asQuery ? { query, key: null } : { query: null, key };
  }

  read(reading: Reading) {
    const { queries, keys } = this;
    const { scale, side, hover } = this.page.store.state;
    const looks = side === "looks";
    const weights = looks ? reading.row : reading.column;
    if (!weights || !queries || !keys) return;
    const aside = meansAside(reading, this.page.recording.layers);
    // A tint points at words; on a log scale nearly every word would have one.
    const relative = scale !== "linear";
    const highest = relative ? weights[strongest(weights)] : 1;
    this.caption.textContent = tintText(weights, highest, relative, aside);
    const [tinted, other] = looks ? [keys, queries] : [queries, keys];
    if (other !== tinted) other.clear();
    tinted.tint(weights, highest, this.page.look.ramp);
    const [chosen, at] = looks ? [reading.query, reading.key] : [reading.key, reading.query];
    other.mark("chosen", chosen);
    tinted.mark("other", at === chosen && other === tinted ? null : at);
    if (!hover) other.reveal(chosen);
  }

  clear() {
    this.queries?.clear();
    this.keys?.clear();
    this.caption.textContent = "";
  }
}

/**
 * What the tint of a text says.
 * @param highest the weight of its full tint
 * @param isStrongest is it the strongest weight?
 * @param aside what the weights are
 */
export function tintText(weights: Float32Array, highest: number, isStrongest: boolean, aside: string): string {
  if (Number.isNaN(highest)) return "Not numbers (NaN)";
  const grey = weights.some(Number.isNaN) ? "; grey: not numbers (NaN)" : "";
  return `Full tint: ${share(highest)}${isStrongest ? ", the strongest" : ""}${aside}${grey}`;
}

/** The next token, after one, at which a phrase begins; the phrase may run over several tokens. */
export function find(tokens: Token[], phrase: string, after: number): number | null {
  const wanted = phrase.trim().toLowerCase();
  if (wanted === "") return null;
  const starts = [];
  let text = "";
  for (const token of tokens) {
    starts.push(text.length);
    text += token.text.toLowerCase();
  }
  let at = text.indexOf(wanted, starts[after + 1] ?? text.length);
  if (at < 0) at = text.indexOf(wanted);
  if (at < 0) return null;
  const next = starts.findIndex((start) => start > at);
  return next < 0 ? tokens.length - 1 : next - 1;
}
