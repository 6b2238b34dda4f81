/**
 * What is read off at the pointed or chosen cell: the whole row of its query and the whole column
 * of its key. One reading at a time; a newer one replaces an older that is still being computed.
 */

import type { Source, Term } from "../data/source";
import { Latest } from "../data/waiting";
import { shown } from "../map/compare";
import type { State } from "../state";

export interface Reading {
  layer: number;
  head: number;
  hidden: boolean;
  terms?: Term[]; // several heads: a mean or a difference
  query: number;
  key: number;
  row: Float32Array; // weights of the query, one for each key
  mask: Uint8Array; // which keys the query may attend to
  /** weights of the key, one from each query; null: on its way */
  column: Float32Array | null;
}

/** What changes a reading. */
const CAUSES = "view layer head heads compare with hidden query key hover".split(" ");
/** Views that compare no heads, and those that show one alone. */
const ONLY: Partial<Record<State["view"], Partial<State>>> = {
  text: { compare: "alone" },
  steps: { compare: "alone", heads: "one" },
};

export class Reader {
  private latest = new Latest();

  /** @param isOneText are the keys of a layer the queries' own tokens? */
  constructor(
    private readonly source: Source,
    private readonly onReading: (reading: Reading) => void,
    private readonly onDamage: (error: Error) => void,
    private readonly isOneText: (layer: number) => boolean,
  ) {}

  get isReading(): boolean {
    return this.latest.isWaiting;
  }

  update(state: State, changed: Set<string>) {
    if (!changesReading(changed)) return;
    if (this.source.layers[state.layer].kind === "map") return this.latest.drop();
    void this.latest.ask((signal) => this.read(state, signal), this.onReading, this.onDamage);
  }

  /** The row is there at once; the column may take longer and comes in a second reading. */
  private async read(state: State, signal: AbortSignal): Promise<Reading> {
    const which = shown({ ...state, ...ONLY[state.view] }, this.source.layers);
    let { query, key } = state.hover ?? state;
    // Where a token looks and who looks at it: one token, both ways.
    if (state.view === "text" && this.isOneText(state.layer)) key = query ??= key;
    let column = null;
    if (query === null) {
      key ??= 0;
      column = await this.source.column(which, key, signal);
      query = strongest(column);
    }
    const { values: row, mask } = await this.source.row(which, query, signal);
    key ??= strongest(row);
    const reading = { ...which, query, key, row, mask };
    if (!column) {
      this.onReading({ ...reading, column: null });
      column = await this.source.column(which, key, signal);
    }
    return { ...reading, column };
  }
}

/** @param changed parts of the state */
export function changesReading(changed: Set<string>): boolean {
  return CAUSES.some((name) => changed.has(name));
}

/** @returns the lowest index of the largest; where none is above 0, of a NaN */
export function strongest(weights: Float32Array): number {
  let best = 0;
  for (let i = 1; i < weights.length; i++) if (weights[i] > weights[best] || Number.isNaN(weights[best])) best = i;
  const unknown = weights[best] > 0 ? -1 : weights.findIndex(Number.isNaN);
  return unknown < 0 ? best : unknown;
}

/** The rank of one weight among the allowed ones, ties to the lowest index, as topk has it. */
export function rankOf(weights: Float32Array, mask: Uint8Array, at: number): { rank: number; of: number } {
  let rank = 1;
  let of = 0;
  for (let i = 0; i < weights.length; i++) {
    of += mask[i];
    if (weights[i] > weights[at] || (weights[i] === weights[at] && i < at && mask[i])) rank++;
  }
  return { rank, of };
}

/** The positions of the largest weights above 0, in falling order. */
export function top(weights: Float32Array, count: number): number[] {
  const best: number[] = [];
  for (let i = 0; i < weights.length; i++) {
    if (!(weights[i] > 0)) continue;
    if (best.length === count && weights[i] <= weights[best[count - 1]]) continue;
    let at = best.length;
    while (at > 0 && weights[best[at - 1]] < weights[i]) at--;
    best.splice(at, 0, i);
    if (best.length > count) best.pop();
  }
  return best;
}
