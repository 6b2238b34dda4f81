/**
 * What is read off at the pointed or chosen cell: the whole row of its query and the whole column
 * of its key. One reading at a time; a newer one replaces an older that is still being computed.
 */

import { strongest } from "../maths/weights";
import type { LayerInfo } from "../protocol/recording";
import type { State } from "../state";
import { coarsest, shown } from "./compare";
import type { Source, Which } from "./source";
import { Latest } from "./waiting";

export interface Reading extends Which {
  query: number;
  key: number;
  row: Float32Array; // weights of the query, one for each key
  mask: Uint8Array; // which keys the query may attend to
  /** weights of the key, one from each query; null: on its way */
  column: Float32Array | null;
}

/** The parts of the state that a reading depends on. */
export const CAUSES = ["view", "layer", "head", "heads", "compare", "with", "hidden", "query", "key", "hover"] as const;
type Cause = Pick<State, (typeof CAUSES)[number]>;

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

  read(drawn: Cause) {
    const state = Object.fromEntries(CAUSES.map((name) => [name, drawn[name]])) as Cause;
    void this.latest.ask((signal) => this.ask(state, signal), this.onReading, this.onDamage);
  }

  /** The row is there at once; the column may take longer and comes in a second reading. */
  private async ask(state: Cause, signal: AbortSignal): Promise<Reading> {
    const which = shown({ ...state, ...ONLY[state.view] }, this.source.layers);
    let { query, key } = state.hover ?? state;
    // Where a token looks and who looks at it: one token, both ways.
    if ((state.view === "text" || state.view === "image") && this.isOneText(state.layer)) key = query ??= key;
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

/**
 * Where only block means are known, what is read is the share that each block of keys gets: one
 * number in the sentence, the tables and the text.
 */
export function inBlocks(reading: Reading, layers: LayerInfo[]): Reading {
  const info = coarsest(reading, layers);
  if (!info) return reading;
  const keysAt = (key: number) => Math.min(info.block, info.kv_len - key + (key % info.block));
  // A mean is rounded to a byte: what nearly all attention goes to could get more than there is.
  const shares = (means: Float32Array, at: (place: number) => number) =>
    means.map((mean, place) => Math.min(1, mean * keysAt(at(place))));
  const column = reading.column && shares(reading.column, () => reading.key);
  return { ...reading, row: shares(reading.row, (key) => key), column };
}
