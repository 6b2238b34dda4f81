/** What heads of each kind do, in words, as docs/heads.md defines the kinds. */

import type { HeadKind, KindHere } from "../protocol/questions";

const TRIAL = "in a trial made to show it";
const MEAN = "of its attention on average";
const KINDS: Record<string, [does: string, score: string]> = {
  induction: ["each token attends to the token after its previous occurrence", TRIAL],
  "duplicate token": ["each token attends to the same token earlier", TRIAL],
  retrieval: ["it attends to the token that the model copies next, far away", TRIAL],
  "previous token": ["each token attends to the one before it", MEAN],
  "next token": ["each token attends to the one after it", MEAN],
  self: ["each token attends to itself", MEAN],
  local: ["each token attends to the 4 tokens on either side", MEAN],
  "separator sink": ["most attention rests on special tokens such as [SEP], whatever the query", MEAN],
  "first-token sink": ["most attention rests on the first token, whatever the query", MEAN],
  uniform: ["it spreads its attention almost evenly", "of the entropy of even attention"],
};

/** @returns "an induction head", "a previous-token head", "a first-token sink" */
function named(kind: string): string {
  const name = kind.endsWith("sink") ? kind : `${kind.replace(" ", "-")} head`;
  return `${/^[aeio]/.test(name) ? "an" : "a"} ${name}`;
}

/** @returns what such a head does, without its number */
export function doing({ kind }: HeadKind): string {
  return KINDS[kind]?.[0] ?? "no simple pattern takes half of its attention";
}

/** @returns one sentence that says what is seen */
export function introduced({ layer, head, kind }: { layer: string; head: number; kind: HeadKind }): string {
  const name = `Layer ${layer}, head ${head} is ${named(kind.kind)}: ${doing(kind)}`;
  const known = KINDS[kind.kind] ? ` (${percent(kind.score)} ${KINDS[kind.kind][1]})` : "";
  return `${name}${known}.${kind.here ? ` ${inThisText(kind.here)}` : ""}`;
}

/** @returns what a head does here, whose name a trial gave */
function inThisText({ kind, score }: KindHere): string {
  return KINDS[kind]
    ? `In this text it is ${named(kind)} (${percent(score)}).`
    : "In this text no simple pattern takes half of its attention.";
}

const percent = (share: number) => `${Math.round(100 * share)}\u202f%`;
