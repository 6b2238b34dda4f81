/** The text beside the map; the tokens that give or take attention are tinted. */

import type { Axis, TwoAxes } from "../data/axes";
import type { Reading } from "../data/reading";
import { byId, element } from "../dom";
import { share } from "../maths/numbers";
import { strongest } from "../maths/weights";
import type { Token } from "../protocol/recording";
import type { Session } from "../session";
import type { Cell } from "../state";
import { Flow } from "../text/flow";

export const QUERIES = "Queries: the text that looks";
export const KEYS = "Keys: the text that is looked at";

export class Prose {
  private pane = byId("prose");
  private caption = byId("tint");
  private flows: Record<Axis, Flow> | null = null;

  constructor(private readonly session: Session) {}

  draw() {
    const { drawn } = this.session.store;
    const axes = this.session.axes(drawn.layer);
    if (this.flows?.key.tokens !== axes.keys) this.write(axes);
    const { reading } = this.session;
    if (reading?.layer === drawn.layer) this.read(reading);
  }

  /** Writes the text, once or twice. */
  private write({ queries, keys }: TwoAxes) {
    this.pane.replaceChildren();
    const isOne = queries === keys;
    const text = (tokens: Token[], axis: Axis) => {
      const name = axis === "query" ? QUERIES : KEYS;
      const cell = (at: number): Cell => {
        const asQuery = isOne ? this.session.store.state.side === "looks" : axis === "query";
        return asQuery ? { query: at, key: null } : { query: null, key: at };
      };
      if (!isOne) this.pane.append(element("h3", {}, name));
      return new Flow(this.pane, tokens, isOne ? "The text" : name, {
        point: (at) => this.session.hover(at === null ? null : cell(at)),
        choose: (at) => this.session.choose(cell(at)),
      });
    };
    const query = text(queries, "query");
    this.flows = { query, key: isOne ? query : text(keys, "key") };
  }

  private read(reading: Reading) {
    const { scale, side, hover } = this.session.store.drawn;
    const looks = side === "looks";
    const weights = looks ? reading.row : reading.column;
    if (!weights || !this.flows) return;
    // A tint points at words; on a log scale nearly every word would have one.
    const relative = scale !== "linear";
    const highest = relative ? weights[strongest(weights)] : 1;
    this.caption.textContent = tintText(weights, highest, relative);
    const { query, key } = this.flows;
    const [tinted, other] = looks ? [key, query] : [query, key];
    if (other !== tinted) other.clear();
    tinted.tint(weights, highest, this.session.look.ramp);
    const [chosen, at] = looks ? [reading.query, reading.key] : [reading.key, reading.query];
    other.mark("chosen", chosen);
    tinted.mark("other", at === chosen && other === tinted ? null : at);
    if (!hover) other.reveal(chosen, other === tinted ? at : chosen);
  }
}

/**
 * What the tint of a text says.
 * @param highest the weight of its full tint
 * @param isStrongest is it the strongest weight?
 */
export function tintText(weights: Float32Array, highest: number, isStrongest: boolean): string {
  if (Number.isNaN(highest)) return "Not numbers (NaN)";
  const grey = weights.some(Number.isNaN) ? "; grey: not numbers (NaN)" : "";
  return `Full tint: ${share(highest)}${isStrongest ? ", the strongest" : ""}${grey}`;
}
