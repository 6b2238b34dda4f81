/** The tokens on the two axes of a layer, and those among them that are sinks. */

import type { Token } from "../protocol/recording";

export type Axis = "query" | "key";

/** The tokens of a layer; the same list where its queries and keys are one text. */
export interface TwoAxes {
  queries: Token[];
  keys: Token[];
}

/** The tokens of an axis; positions where no token text was recorded. */
export function forAxis(tokens: Token[] | null, length: number): Token[] {
  if (tokens && tokens.length === length) return tokens;
  return Array.from({ length }, (_, i) => ({ text: ` ${i}`, special: false }));
}

const sinks = new WeakMap<Token[], number[]>();

/** The positions that are set aside as sinks: the first token and the special ones. */
export function sinksOf(tokens: Token[]): number[] {
  let found = sinks.get(tokens);
  if (!found) sinks.set(tokens, (found = tokens.flatMap((token, i) => (i === 0 || token.special ? [i] : []))));
  return found;
}
