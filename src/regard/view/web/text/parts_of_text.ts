/** Words, sentences and the two texts of a pair, found among tokens. */

import { endsSentence } from "./flow";
import type { Token } from "./tokens";

const CONTINUES = /^[\p{L}\p{N}\p{M}]/u;
const CAN_CONTINUE = /[\p{L}\p{N}\p{M}]$/u;

/** Is a token the rest of the word before it? */
function continues(tokens: Token[], at: number): boolean {
  const [before, token] = [tokens[at - 1], tokens[at]];
  if (!before || !token || before.special || token.special) return false;
  return CAN_CONTINUE.test(before.text) && CONTINUES.test(token.text);
}

/** @returns first and last token of its word */
export function wordAt(tokens: Token[], at: number): [number, number] {
  let [first, last] = [at, at];
  while (continues(tokens, first)) first--;
  while (continues(tokens, last + 1)) last++;
  return [first, last];
}

/** @returns first and last token of its sentence */
export function sentenceAt(tokens: Token[], at: number): [number, number] {
  let [first, last] = [at, at];
  if (tokens[at].special) return [at, at];
  while (first > 0 && !tokens[first - 1].special && !endsSentence(tokens, first - 1)) first--;
  while (last + 1 < tokens.length && !tokens[last + 1].special && !endsSentence(tokens, last)) last++;
  return [first, last];
}

/**
 * Where the second text of a pair begins: special tokens part exactly two runs of words.
 * @returns null: no pair
 */
export function secondText(tokens: Token[]): number | null {
  const starts: number[] = [];
  tokens.forEach((token, at) => {
    if (!token.special && (at === 0 || tokens[at - 1].special)) starts.push(at);
  });
  return starts.length === 2 ? starts[1] : null;
}
