/**
 * The one state that all views share, and its address. Every change goes through `set`. What draws
 * reads it from `drawn`, whose parts are signals: they follow once a frame, and whatever has read
 * one is drawn again when that one changes.
 */

import { batch, signal, type Signal } from "@preact/signals-core";

/** The words that a part of the state may be; on a fresh page it is the first, where nothing else is better. */
export const WORDS = {
  view: ["overview", "map", "text", "steps", "segments", "image"],
  scale: ["fit", "linear", "log"],
  side: ["looks", "looked"], // where the token looks, or who looks at it
  order: ["weight", "position"], // of the keys in the steps
  theme: ["auto", "light", "dark"],
  sort: ["place", "kind", "score", "entropy"], // of the heads in the overview
  parts: ["sentences", "words", "lines"], // of the text, in the segments
  heads: ["one", "mean"], // the open head, or the mean of its layer
  compare: ["alone", "beside", "difference"], // the open head with another
} as const;

type Words = { [Name in keyof typeof WORDS]: (typeof WORDS)[Name][number] };

export interface Cell {
  query: number | null; // null: the one that gives the key the most
  key: number | null; // null: the one the query gives the most
}

export interface State extends Words {
  layer: number;
  head: number;
  query: number | null; // chosen; null for a moment, as in a Cell
  key: number | null; // chosen
  hover: Cell | null; // pointed at; shown instead of the chosen cell while it lasts
  hidden: boolean; // sinks set aside
  steps: number; // how many keys the steps show
  zoom: number; // 1: the whole matrix
  row: number; // first query on the map; a part of one, if the map is moved by less
  column: number; // first key on the map
  with: string; // which other is compared, as layer.head
  folded: boolean; // the text is put away
}

export const FEWEST_STEPS = 32;
const SHORT = 32; // keys whose steps stand in the order of the text

/**
 * The state of a fresh page.
 * @param keys of the open layer
 */
export function freshState(
  open: Pick<State, "layer" | "head" | "query" | "key" | "compare" | "parts" | "view">,
  keys: number,
): State {
  const words = Object.fromEntries(Object.entries(WORDS).map(([name, [first]]) => [name, first])) as unknown as Words;
  const order = keys > SHORT ? "weight" : "position";
  const places = { hover: null, zoom: 1, row: 0, column: 0, steps: FEWEST_STEPS, with: "" };
  return { ...words, ...places, order, hidden: false, folded: false, ...open };
}

const HEAD = /^\d{1,4}\.\d{1,4}$/;
const ALWAYS = ["layer", "head", "query", "key"];
const COUNTS = [...ALWAYS, "steps", "zoom", "row", "column"];
const FLAGS = ["hidden", "folded"];

export class Store {
  /** What was asked for last. */
  state: State;
  /** What is drawn. */
  readonly drawn: Readonly<State>;
  private readonly parts: { [Name in keyof State]: Signal<State[Name]> };
  private isWaiting = false; // for the next frame

  /**
   * @param fresh the state of a fresh page
   * @param fitted keeps every number inside the recording
   */
  constructor(
    readonly fresh: State,
    private readonly fitted: (state: State) => State,
  ) {
    this.state = fitted(fresh);
    const parts = Object.entries(this.state).map(([name, value]) => [name, signal(value)] as const);
    this.parts = Object.fromEntries(parts) as typeof this.parts;
    const getters = parts.map(([name, part]) => [name, { get: () => part.value, enumerable: true }]);
    this.drawn = Object.defineProperties({}, Object.fromEntries(getters)) as State;
  }

  /** Is a change still to be drawn? */
  isPending(names: (keyof State)[] = Object.keys(this.state) as (keyof State)[]): boolean {
    return names.some((name) => this.parts[name].peek() !== this.state[name]);
  }

  /** A head or a query that is opened starts with few steps. */
  set(patch: Partial<State>) {
    const before = this.state;
    const next = { ...before, ...patch };
    const isOther = (["layer", "head", "query"] as const).some((name) => next[name] !== before[name]);
    if (isOther && !("steps" in patch)) next.steps = this.fresh.steps;
    this.state = this.fitted(next);
    if (this.isWaiting || !this.isPending()) return;
    this.isWaiting = true;
    requestAnimationFrame(() => this.draw());
  }

  /** Does the recording have what is asked for? */
  takes(patch: Partial<State>): boolean {
    const fitted = this.fitted({ ...this.state, ...patch });
    return Object.entries(patch).every(([name, value]) => fitted[name as keyof State] === value);
  }

  /** What was asked for becomes what is drawn. */
  draw() {
    this.isWaiting = false;
    batch(() => {
      for (const [name, part] of Object.entries(this.parts)) part.value = this.state[name as keyof State];
    });
  }

  /** @returns what must be remembered to come back here */
  address(): string {
    const parts = [];
    for (const name of [...COUNTS, ...Object.keys(WORDS), "with", ...FLAGS]) {
      const value = this.state[name as keyof State];
      const fresh = this.fresh[name as keyof State];
      const isUnusual = ALWAYS.includes(name) ? value !== null : value !== fresh;
      const text = FLAGS.includes(name) ? Number(value) : String(value);
      if (isUnusual) parts.push(`${name}=${encodeURIComponent(text)}`);
    }
    return `#${parts.join("&")}`;
  }

  /** Go where an address points; what it does not say, or says wrongly, is as on a fresh page. */
  go(address: string) {
    const patch: Record<string, unknown> = { ...this.fresh };
    const named = new URLSearchParams(address.replace(/^#/, ""));
    for (const [name, text] of named) {
      if (COUNTS.includes(name) && /^\d{1,9}(\.\d{1,3})?$/.test(text)) patch[name] = Number(text);
      const words: readonly string[] = Object.hasOwn(WORDS, name) ? WORDS[name as "scale"] : [];
      if (words.includes(text)) patch[name] = text;
      if (name === "with" && HEAD.test(text)) patch[name] = text;
      if (FLAGS.includes(name)) patch[name] = text === "1";
    }
    // The fresh cell is one of the fresh head.
    const isElsewhere = ["layer", "head", "query"].some((name) => named.has(name));
    if (named.has("layer") && !named.has("head")) patch.head = 0;
    if (isElsewhere && !named.has("key")) patch.key = null;
    this.set(patch);
  }
}
