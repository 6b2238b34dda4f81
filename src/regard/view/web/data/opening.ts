/** Where a fresh page opens: the head that stands out most, at a word that shows what the head does. */

import { strongest } from "../maths/weights";
import type { HeadKind } from "../protocol/questions";
import type { LayerInfo, Token } from "../protocol/recording";
import { sinksOf, type TwoAxes } from "./axes";
import type { SmallMap } from "./small";

export type NotableHead = { layer: number; head: number; kind: HeadKind };

const LETTERS = /\p{L}/gu;
const CONTENT = 4; // letters of a word that is probably no article or preposition
const UNKNOWN = 0.5; // the share of a cell whose weight is not known yet
const SEEN = 0.1; // the share from which a cell shows a pattern
const MOST_WORDS = 4000; // that are weighed to find the clearest one

/** Every kind but mixed, the first one there is opens the page: the key that such a head attends to, where one says it. */
const KINDS: Record<string, ((tokens: Token[], query: number) => number) | null> = {
  induction: (tokens, query) => earlier(tokens, query) + 1,
  "duplicate token": (tokens, query) => earlier(tokens, query),
  retrieval: (tokens, query) => (query + 1 < tokens.length ? earlier(tokens, query + 1) : -1),
  "previous token": (_, query) => query - 1,
  "next token": (_, query) => query + 1,
  self: (_, query) => query,
  local: null,
  "separator sink": null,
  "first-token sink": () => 0,
  uniform: null,
};

/** The last earlier place of each token of a text; -2 without one, so that the place after it is none either. */
const earliers = new WeakMap<Token[], Int32Array>();

function earlier(tokens: Token[], query: number) {
  let places = earliers.get(tokens);
  if (!places) {
    const last = new Map<string, number>();
    places = Int32Array.from(tokens, ({ text }, at) => {
      const before = last.get(text.trim()) ?? -2;
      last.set(text.trim(), at);
      return before;
    });
    earliers.set(tokens, places);
  }
  return places[query];
}

/** @returns for each kind the head that is it most */
export function notableHeads(layers: LayerInfo[]): NotableHead[] {
  const best = new Map<string, NotableHead>();
  layers.forEach(({ heads }, layer) =>
    heads?.forEach((kind, head) => {
      if (kind && !(kind.score <= (best.get(kind.kind)?.kind.score ?? 0))) best.set(kind.kind, { layer, head, kind });
    }),
  );
  return Object.keys(KINDS).flatMap((name) => best.get(name) ?? []);
}

/**
 * @param asked layer and head, as far as the file names them
 * @param fits does the text show what a head does?
 * @returns of layers whose numbers are here, the head that stands out most and whose text shows it
 */
export function openingHead(
  layers: LayerInfo[],
  [layer, head]: (number | null)[],
  fits: (one: NotableHead) => boolean = () => true,
): { layer: number; head: number } {
  const whole = layers.map(({ kind }, at) => (layer === null ? kind !== "map" : at === layer));
  const known = layers.map((info, at) => (whole[at] ? info : { ...info, heads: null }));
  const notable = head === null ? notableHeads(known) : [];
  const best = notable.find(fits) ?? notable[0];
  return { layer: layer ?? best?.layer ?? Math.max(0, whole.indexOf(true)), head: head ?? best?.head ?? 0 };
}

/** @returns the exact weights of a query; null: not known */
export type RowOf = (query: number) => Float32Array | null;

/** @returns the rows of a head whose small map has a cell for each weight */
export function smallRows(map: SmallMap, { queries, keys }: TwoAxes, head: number): RowOf {
  if (map.rows !== queries.length || map.columns !== keys.length) return () => null;
  return (query) => map.shares.subarray((head * map.rows + query) * map.columns).subarray(0, map.columns);
}

/**
 * @param among the queries that are weighed
 * @returns content words that show what the head does, the clearest first, each with the key that it
 *   attends to where its kind or its row says which
 */
export function openingCells(
  kind: HeadKind | null | undefined,
  { queries, keys }: TwoAxes,
  rowOf: RowOf,
  among = [...queries.keys()].filter((at) => at % Math.ceil(queries.length / MOST_WORDS) === 0),
): { query: number; key: number | null }[] {
  const known = kind && KINDS[kind.kind];
  const isSink = kind?.kind.endsWith("sink");
  const sinks = new Set(sinksOf(keys));
  const keyOf = (query: number, row: Float32Array | null): number | null => {
    if (known) return queries === keys ? known(keys, query) : null;
    const best = row ? strongest(row.map((share, key) => (sinks.has(key) && !isSink ? 0 : share))) : -1;
    return row && row[best] > 0 ? best : null;
  };
  const found = among.map((query) => {
    const row = rowOf(query);
    const key = keyOf(query, row);
    if (key !== null && !(key in keys)) return { query, key, worth: 0 };
    const share = row && key !== null ? row[key] : UNKNOWN;
    const keyWorth = key === null || isSink ? 1 : sinks.has(key) ? 0 : weightOf(keys[key]);
    return { query, key, worth: known && share < SEEN ? 0 : share * weightOf(queries[query]) * keyWorth };
  });
  const fitting = found.filter(({ worth }) => worth > 0).sort((a, b) => b.worth - a.worth);
  return fitting.map(({ query, key }) => ({ query, key }));
}

/** How much a token says: a content word more than an article; a full stop, a special token, a patch not at all. */
function weightOf({ text, special, patch }: Token) {
  const letters = special || patch ? 0 : (text.match(LETTERS)?.length ?? 0);
  return Math.min(1, letters / CONTENT);
}

/** @returns the last one with letters, or else the last that is not special; of patches the first token, their class */
export function lastWord(tokens: Token[]): number {
  const last = tokens.findLastIndex((token) => weightOf(token) > 0);
  return last < 0
    ? Math.max(
        0,
        tokens.findLastIndex(({ special, patch }) => !special && !patch),
      )
    : last;
}
