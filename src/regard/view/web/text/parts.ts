/** A text in parts: its sentences, its lines, or what a pattern finds in it. */

import type { Part } from "../views/segments";
import { endsSentence } from "./flow";
import { visible, type Token } from "./tokens";

const MOST = 48; // parts; more of them are joined, so many to each
const NAME = 64; // characters of a name

/** @returns none where nothing fits the pattern */
export function parted(
  tokens: Token[],
  { parts, pattern }: { parts: "sentences" | "lines" | "pattern"; pattern: string },
): Part[] {
  if (parts === "pattern") return matches(tokens, pattern);
  const spans: [number, number][] = [];
  let first = 0;
  tokens.forEach((token, at) => {
    const last = at === tokens.length - 1 || tokens[at + 1].special !== token.special;
    const ends = parts === "lines" ? token.text.includes("\n") : endsSentence(tokens, at);
    if (!last && !ends) return;
    if (!token.special) spans.push([first, at + 1]);
    first = at + 1;
  });
  const each = Math.ceil(spans.length / MOST);
  return Array.from({ length: Math.ceil(spans.length / each) || 0 }, (_, i) => {
    const [start] = spans[i * each];
    const [, stop] = spans[Math.min(spans.length, (i + 1) * each) - 1];
    return part(tokens, start, stop);
  });
}

function matches(tokens: Token[], pattern: string): Part[] {
  if (!pattern.trim()) return [];
  const found = expression(pattern);
  const starts: number[] = [];
  let text = "";
  for (const token of tokens) {
    starts.push(text.length);
    text += token.special ? "\n" : token.text;
  }
  const spans: Part[] = [];
  for (const { index, 0: match } of text.matchAll(found)) {
    if (!match.trim()) continue;
    const start = tokenAt(starts, index + match.length - match.trimStart().length);
    const stop = tokenAt(starts, index + match.trimEnd().length - 1) + 1;
    const before = spans.at(-1)?.span[1] ?? 0;
    if (stop > before) spans.push(part(tokens, Math.max(start, before), stop));
    if (spans.length === MOST) break;
  }
  return spans;
}

/** A pattern that is no regular expression means its own letters. */
function expression(pattern: string): RegExp {
  try {
    return new RegExp(pattern, "giu");
  } catch {
    return new RegExp(pattern.replace(/[\\^$.*+?()[\]{}|/-]/g, "\\$&"), "giu");
  }
}

/**
 * @param at a character
 * @returns its token
 */
function tokenAt(starts: number[], at: number): number {
  let [low, high] = [0, starts.length - 1];
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if (starts[middle] <= at) low = middle;
    else high = middle - 1;
  }
  return low;
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
