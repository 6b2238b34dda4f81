/**
 * Tokens as people write them. Their text is untrusted: characters that could turn, hide or break
 * the text around them are drawn as visible symbols, and nothing here is ever parsed as HTML.
 */

import { sinksOf } from "../data/axes";
import type { Token } from "../protocol/recording";

const LONG = 120; // characters of one token that flow with the prose
const HIDDEN = new RegExp(
  "[\\u0000-\\u001f\\u007f-\\u009f\\u00ad\\u061c\\u115f\\u1160\\u180e\\u3164\\uffa0\\u200b\\u200e\\u200f\\u2028-\\u202e\\u2060-\\u206f" +
    "\\ufeff\\ufff9-\\ufffb\\u{e0000}-\\u{e007f}]|[\\ud800-\\udbff](?![\\udc00-\\udfff])" +
    "|(?<![\\ud800-\\udbff])[\\udc00-\\udfff]",
  "gu",
);

/** Spelling beside letters, and nothing to see alone; escaping.py has the same. */
const SPELLING = /^(?:[\u200c\u200d]|\u034f|\u2800|[\u180b-\u180d]|[\ufe00-\ufe0f])+$/u;

/** One name for a character on the page and in a terminal: escaping.py has the same. */
function symbol(character: string): string {
  const code = character.codePointAt(0) as number;
  if (character === "\n") return "↵";
  if (character === "\t") return "⇥";
  if (code < 0x20) return String.fromCharCode(0x2400 + code);
  if (code === 0x7f) return "␡";
  return `‹U+${code.toString(16).toUpperCase().padStart(4, "0")}›`;
}

/**
 * Every invisible character as a symbol; spaces stay spaces.
 * @param kept characters that are left as they are
 */
export function visible(text: string, kept: string = ""): string {
  if (SPELLING.test(text)) return [...text].map(symbol).join("");
  return text.replace(HIDDEN, (character) => (kept.includes(character) ? character : symbol(character)));
}

/** The token inside the prose: line breaks break, tabs advance, a very long one is shortened. */
export function inProse(token: Token): string {
  if (token.special) return named(token, LONG);
  const rest = token.text.length - LONG;
  if (rest <= 20) return visible(token.text, "\n\t");
  return `${visible(cut(token.text, LONG), "\n\t")}… (${rest} more characters)`;
}

/**
 * The token as a name, for axes, tables and sentences: one line, no space around it.
 * @param length at most so many characters
 */
export function named(token: Token, length: number = 28): string {
  const trimmed = token.text.trim();
  if (trimmed === "") return visible(token.text.slice(0, 8)).replace(/\s/g, "␣") || "∅"; // nothing to see
  const text = visible(trimmed.replace(/\r\n/g, "\n"));
  return text.length > length ? `${cut(text, length - 1)}…` : text;
}

const FROM_THE_RIGHT = /[\p{Script=Hebrew}\p{Script=Arabic}\p{Script=Syriac}\p{Script=Thaana}\p{Script=Nko}]/u;

/**
 * A name inside a sentence: one that is written from right to left turns nothing around it.
 * @param name without invisible characters
 */
export function isolated(name: string): string {
  return FROM_THE_RIGHT.test(name) ? `\u2068${name}\u2069` : name;
}

/** @returns never half a surrogate pair */
function cut(text: string, length: number): string {
  const last = text.charCodeAt(length - 1);
  return text.slice(0, last >= 0xd800 && last < 0xdc00 ? length - 1 : length);
}

/** Is more of the token there than its name shows? */
export function isShortened(token: Token): boolean {
  return token.text.length > LONG;
}

/** @returns the sinks by name: "[CLS], [SEP]"; at most three */
export function sinkNames(tokens: Token[]): string {
  const found = sinksOf(tokens);
  const names = [...new Set(found.map((at) => (tokens[at].special ? named(tokens[at], 16) : "the first token")))];
  return names.length > 3 ? `${names.slice(0, 2).join(", ")} …` : names.join(", ");
}
