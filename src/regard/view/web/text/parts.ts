/** A text in parts: its sentences, its words or its lines; and the two texts of a pair. */

import type { Token } from "../protocol/recording";
import { visible } from "./tokens";

/** First token, and the one past the last. */
type Span = [number, number];

export interface Part {
  name: string; // its first words
  span: Span;
}

const MOST = 48; // parts; more of them are joined, the same number to each
const NAME = 64; // characters of a name
const BEGINS_IN_WORD = /^[\p{L}\p{N}\p{M}]/u;
const ENDS_IN_WORD = /[\p{L}\p{N}\p{M}]$/u;
const LETTER = /[\p{L}\p{N}]/u;
const SENTENCE_END = /[.!?\u2026]["'\u201d\u2019)\]]*\s*$/;
const ENDS = {
  sentences: endsSentence,
  words: (tokens: Token[], at: number) => !continues(tokens, at + 1),
  lines: (tokens: Token[], at: number) => tokens[at].text.includes("\n"),
};

type Way = keyof typeof ENDS;

/** Does a sentence end with this token? */
export function endsSentence(tokens: Token[], at: number): boolean {
  const { text, special } = tokens[at];
  const next = tokens[at + 1];
  return special || !next || SENTENCE_END.test(text) || breaksBetween(text, next.text);
}

export function breaksBetween(text: string, next: string): boolean {
  return /\n\s*$/.test(text) || /^\s*\n/.test(next);
}

/** Special tokens are in none, and punctuation is no word. */
function spansOf(tokens: Token[], by: Way): Span[] {
  const spans: Span[] = [];
  let first = 0;
  tokens.forEach((token, at) => {
    const next = tokens[at + 1];
    if (next?.patch && token.patch) return; // the patches of a picture are one part
    const isLast = !next || next.special !== token.special || next.patch !== token.patch;
    if (!isLast && !ENDS[by](tokens, at)) return;
    const counts = by !== "words" || tokens.slice(first, at + 1).some(({ text }) => LETTER.test(text));
    if (!token.special && counts) spans.push([first, at + 1]);
    first = at + 1;
  });
  return spans;
}

/** @returns how many sentences, words or lines one part joins */
export function joinedIn(tokens: Token[], by: Way): number {
  return Math.ceil(spansOf(tokens, by).length / MOST);
}

export function parted(tokens: Token[], by: Way): Part[] {
  const spans = spansOf(tokens, by);
  const each = joinedIn(tokens, by);
  return Array.from({ length: Math.ceil(spans.length / each) || 0 }, (_, i) => {
    const [start] = spans[i * each];
    const [, stop] = spans[Math.min(spans.length, (i + 1) * each) - 1];
    return part(tokens, start, stop);
  });
}

/** Is a token the rest of the word before it? */
function continues(tokens: Token[], at: number): boolean {
  const [before, token] = [tokens[at - 1], tokens[at]];
  return ENDS_IN_WORD.test(before.text) && BEGINS_IN_WORD.test(token.text);
}

function part(tokens: Token[], start: number, stop: number): Part {
  const text = visible(
    tokens
      .slice(start, Math.min(stop, start + NAME))
      .map((token) => (token.special ? " " : token.text))
      .join("")
      .trim()
      .replace(/\s+/g, " "),
  );
  const letters = [...text];
  const name = letters.length > NAME ? `${letters.slice(0, NAME - 1).join("")}…` : text;
  return { name: name || `token ${start}`, span: [start, stop] };
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
