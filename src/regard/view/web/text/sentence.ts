/** The cell that is read, as a sentence. */

import type { TwoAxes } from "../data/axes";
import { sinksOf } from "../data/axes";
import { coarsest, headsName, isDifference, lessName } from "../data/compare";
import type { Reading } from "../data/reading";
import { digits, share } from "../maths/numbers";
import { rankOf, strongest } from "../maths/weights";
import type { LayerInfo, Token } from "../protocol/recording";
import { blockAt, meansName, meanSentence } from "./block_words";
import { isolated, named } from "./tokens";

const NOT_NUMBERS = "its weights are not numbers (NaN)";

/** How often each token stands in a text. */
const counts = new WeakMap<Token[], Map<string, number>>();

/** Does the same token stand elsewhere too? */
export function isRepeated(tokens: Token[], at: number): boolean {
  let count = counts.get(tokens);
  if (!count) {
    count = new Map();
    for (const { text } of tokens) count.set(text.trim(), (count.get(text.trim()) ?? 0) + 1);
    counts.set(tokens, count);
  }
  return (count.get(tokens[at].text.trim()) ?? 0) > 1;
}

/** A token in a sentence; a repeated one with its position. */
export function quoted(tokens: Token[], at: number): string {
  const name = isolated(named({ ...tokens[at], special: false }));
  return isRepeated(tokens, at) ? `“${name}” (token ${at})` : `“${name}”`;
}

/** What both sentences say of a reading: which numbers these are, whose, and what is left out of them. */
function aboutOf(reading: Reading, layers: LayerInfo[]) {
  const blocks = coarsest(reading, layers);
  const aside = reading.hidden ? ", the first and the special tokens set aside" : "";
  return { blocks, means: blocks ? ` (${meansName(blocks)})` : "", where: headsName(reading, layers), aside };
}

/** What is chosen in the text: where it looks, and who looks at it. */
export function textSentence(reading: Reading, { queries, keys }: TwoAxes, layers: LayerInfo[]): string {
  const { query, key, row, column } = reading;
  const { blocks, means, where, aside } = aboutOf(reading, layers);
  const nameOf = (tokens: Token[], at: number) =>
    blocks ? blockAt(at, blocks.block, tokens.length).name : quoted(tokens, at);
  const [from, of] = [quoted(queries, query), quoted(keys, key)];
  const to = strongest(row);
  const looks = Number.isNaN(row[to])
    ? `${from}: ${NOT_NUMBERS}${means}`
    : row[to] > 0
      ? `${from} looks most at ${nameOf(keys, to)}: ${share(row[to])}${means}`
      : `${from} looks at nothing`;
  const by = column ? strongest(column) : 0;
  const looked = !column
    ? ""
    : Number.isNaN(column[by])
      ? `; of what looks at ${of} the weights are not numbers (NaN)`
      : column[by] > 0
        ? `; ${of} is looked at most by ${nameOf(queries, by)}: ${share(column[by])}${means}`
        : `; nobody looks at ${of}`;
  return `${looks}${looked}, ${where}${aside}.`;
}

/** @param isKnown whether a weight of 0 is known to be the mask's doing */
export function sentence(reading: Reading, { queries, keys }: TwoAxes, layers: LayerInfo[], isKnown: boolean): string {
  const { hidden, query, key, row, mask } = reading;
  const [from, to] = [quoted(queries, query), quoted(keys, key)];
  const { blocks, means, where, aside } = aboutOf(reading, layers);
  if (mask[key] && Number.isNaN(row[key])) return `${from}: ${NOT_NUMBERS}${means}, ${where}${aside}.`;
  if (isDifference(reading) && mask[key] && !blocks) {
    const much = `${digits(Math.abs(row[key]) * 100)} percentage points ${row[key] < 0 ? "less" : "more"} of its attention`;
    return `${from} gives ${to} ${much} in ${where} than in ${lessName(reading, layers)}${aside}.`;
  }
  const { rank, of } = rankOf(row, mask, key);
  if (of === 0) return `${from} may attend to nothing: all its weights are 0, ${where}${aside}.`;
  if (!mask[key]) {
    const isAside = hidden && sinksOf(keys).includes(key);
    const verb = isAside ? "is read without" : isKnown ? "may not attend to" : "gives nothing to";
    return `${from} ${verb} ${to}, ${where}${aside}.`;
  }
  if (blocks) return meanSentence(reading, blocks, where);
  return `${from} gives ${share(row[key])} of its attention to ${to} (rank ${rank} of ${of}), ${where}${aside}.`;
}
