/** Where a fresh page opens: the head that stands out most, at a word that shows what the head does. */

import type { HeadKind, LayerInfo } from "../data/payload";
import type { SmallMap } from "../map/small";
import { sinksOf, type Token, type TwoAxes } from "../text/tokens";

interface Kind {
  does: string;
  score?: string; // what the number is, if not MEAN
  key?: (tokens: Token[], query: number) => number; // the key that such a head attends to
}

export type NotableHead = { layer: number; head: number; kind: HeadKind };

const TRIAL = "in a trial made to show it";
const MEAN = "of its attention on average";
const LETTERS = /\p{L}/gu;
const CONTENT = 4; // letters of a word that is probably no article or preposition
const MOST_WORDS = 4000; // that are weighed to find the clearest one

/** Every kind but mixed, as docs/heads.md defines them; the first one there is opens the page. */
const KINDS: Record<string, Kind> = {
  induction: {
    does: "each token attends to the token after its previous occurrence",
    score: TRIAL,
    key: (tokens, query) => earlier(tokens, query) + 1,
  },
  "duplicate token": { does: "each token attends to the same token earlier", score: TRIAL, key: earlier },
  retrieval: { does: "it attends to the token that the model copies next, far away", score: TRIAL },
  "previous token": { does: "each token attends to the one before it", key: (_, query) => query - 1 },
  "next token": { does: "each token attends to the one after it", key: (_, query) => query + 1 },
  self: { does: "each token attends to itself", key: (_, query) => query },
  local: { does: "each token attends to the 4 tokens on either side" },
  "separator sink": { does: "most attention rests on special tokens such as [SEP], whatever the query" },
  "first-token sink": { does: "most attention rests on the first token, whatever the query", key: () => 0 },
  uniform: { does: "it spreads its attention almost evenly", score: "of the entropy of even attention" },
};

/** @returns "an induction head", "a previous-token head", "a first-token sink" */
function named(kind: string): string {
  const name = kind.endsWith("sink") ? kind : `${kind.replace(" ", "-")} head`;
  return `${/^[aeio]/.test(name) ? "an" : "a"} ${name}`;
}

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

/** @returns what such a head does, without its number */
export function doing({ kind }: HeadKind): string {
  return KINDS[kind]?.does ?? "no simple pattern takes half of its attention";
}

/** @returns one sentence that says what is seen */
export function introduced({ layer, head, kind }: NotableHead): string {
  const known = KINDS[kind.kind];
  const name = `Layer ${layer}, head ${head} is ${named(kind.kind)}: ${doing(kind)}`;
  return known ? `${name} (${Math.round(100 * kind.score)}\u202f% ${known.score ?? MEAN}).` : `${name}.`;
}

/**
 * @param asked layer and head, as far as the file names them
 * @returns of layers whose numbers are here, the head that stands out most
 */
export function openingHead(layers: LayerInfo[], [layer, head]: (number | null)[]): { layer: number; head: number } {
  const whole = layers.map(({ kind }, at) => (layer === null ? kind !== "map" : at === layer));
  const known = layers.map((info, at) => (whole[at] ? info : { ...info, heads: null }));
  const best = head === null ? notableHeads(known)[0] : undefined;
  return { layer: layer ?? best?.layer ?? Math.max(0, whole.indexOf(true)), head: head ?? best?.head ?? 0 };
}

/** A word that shows what the head does, and the key that it attends to where its kind says which. */
export function openingCell(
  kind: HeadKind | null | undefined,
  { queries, keys }: TwoAxes,
  map: SmallMap,
  head: number,
): { query: number; key: number | null } {
  const isOneText = queries === keys;
  const isExact = map.rows === queries.length && map.columns === keys.length;
  const sinks = new Set(sinksOf(keys));
  const restsOnFirst = kind?.kind === "first-token sink";
  const keyOf = (query: number): number | null => {
    const known = kind && KINDS[kind.kind]?.key;
    if (known) return isOneText ? known(keys, query) : null;
    if (!isExact) return null;
    const at = (head * map.rows + query) * map.columns;
    const row = map.shares.subarray(at, at + map.columns);
    let best = -1;
    row.forEach((share, key) => {
      if (!sinks.has(key) && share > (best < 0 ? 0 : row[best])) best = key;
    });
    return best < 0 ? null : best;
  };
  let found = { query: lastWord(queries), key: null as number | null, worth: 0 };
  const every = Math.ceil(queries.length / MOST_WORDS);
  for (let query = 0; query < queries.length; query += every) {
    const key = keyOf(query);
    if (key !== null && !(key in keys)) continue;
    const share = isExact && key !== null ? map.shares[(head * map.rows + query) * map.columns + key] : 0.5;
    const keyWorth = key === null || restsOnFirst ? 1 : sinks.has(key) ? 0 : weightOf(keys[key]);
    const worth = share * weightOf(queries[query]) * keyWorth;
    if (worth > found.worth) found = { query, key, worth };
  }
  return { query: found.query, key: found.key };
}

/** How much a token says: a content word more than an article, a full stop or a special token not at all. */
function weightOf({ text, special }: Token) {
  const letters = special ? 0 : (text.match(LETTERS)?.length ?? 0);
  return letters === 0 ? 0 : 0.5 + 0.5 * Math.min(1, letters / CONTENT);
}

/** @returns the last one that is not special */
function lastWord(tokens: Token[]): number {
  const last = tokens.findLastIndex(({ special }) => !special);
  return last < 0 ? tokens.length - 1 : last;
}
