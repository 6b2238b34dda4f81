/**
 * What is shown when it is more than one head: the mean of some heads, or two side by side, or their
 * difference. The state keeps it as words: heads=mean or heads=0.1_3.7 (layer.head), with=3.8,
 * compare=beside or compare=difference.
 */

import { headNumber, layerName, type Head, type LayerInfo, type Recording } from "../protocol/recording";
import type { State } from "../state";
import type { Which } from "./source";

/** The parts of the state that say which heads are shown. */
export type Chosen = Pick<State, "layer" | "head" | "heads" | "with" | "compare" | "hidden">;

function pairs(text: string): Head[] {
  return text.split("_").map((pair) => {
    const [layer, head] = pair.split(".").map(Number);
    return { layer, head };
  });
}

function word({ layer, head }: Head): string {
  return `${layer}.${head}`;
}

/**
 * Only heads that are there and have the open layer's shape; a comparison with the next head where
 * none was chosen.
 */
export function fittedHeads(
  state: Pick<State, "layer" | "head" | "heads" | "with" | "compare">,
  { layers, other }: Pick<Recording, "layers" | "other">,
): Pick<State, "heads" | "with" | "compare"> {
  const open = layers[state.layer];
  const isThere = ({ layer, head }: Head) =>
    layers[layer]?.q_len === open.q_len && layers[layer].kv_len === open.kv_len && head < layers[layer].num_heads;
  let { heads } = state;
  if (heads !== "one" && heads !== "mean") heads = pairs(heads).filter(isThere).map(word).join("_") || "one";
  const { compare } = state;
  if (compare === "alone") return { heads, with: state.with, compare };
  if (other) {
    // The same head of the other recording, whose text may be longer or shorter.
    const layer = Math.min(layers.length - 1, state.layer + other.first);
    const at = { layer, head: Math.min(state.head, layers[layer].num_heads - 1) };
    return { heads, with: word(at), compare: isThere(at) ? compare : "beside" };
  }
  const next = { layer: state.layer, head: (state.head + 1) % open.num_heads };
  const isFit = state.with !== "" && isThere(pairs(state.with)[0]);
  return { heads, with: isFit ? state.with : word(next), compare };
}

/** @returns the heads of the mean, or the one */
export function chosenHeads(
  { layer, head, heads }: Pick<State, "layer" | "head" | "heads">,
  layers: LayerInfo[],
): Head[] {
  if (heads === "one") return [{ layer, head }];
  if (heads !== "mean") return pairs(heads);
  return Array.from({ length: layers[layer].num_heads }, (_, i) => ({ layer, head: i }));
}

/** What the map shows. */
export function shown(state: Chosen, layers: LayerInfo[]): Which {
  const { layer, head, hidden } = state;
  const mine = chosenHeads(state, layers);
  const terms = mine.map((at) => ({ ...at, factor: 1 / mine.length }));
  if (state.compare === "difference") terms.push({ ...pairs(state.with)[0], factor: -1 });
  return terms.length > 1 || state.heads !== "one" ? { layer, head, hidden, terms } : { layer, head, hidden };
}

/** @returns are heads chosen one by one? */
export function areSeveral({ heads }: Pick<State, "heads">): boolean {
  return heads !== "one" && heads !== "mean";
}

/** The chosen heads with one more, or without it if it was one of them. */
export function withHead(state: Pick<State, "layer" | "head" | "heads">, head: Head): string {
  const words = { one: [word(state)], mean: [] }[state.heads] ?? state.heads.split("_");
  const rest = words.filter((one) => one !== word(head));
  return (rest.length < words.length ? rest : [...rest, word(head)]).join("_") || "one";
}

/** What stands beside it. */
export function beside({ with: other, hidden }: Pick<State, "with" | "hidden">): Which {
  return { ...pairs(other)[0], hidden };
}

export function isDifference({ terms }: Which): boolean {
  return terms?.some(({ factor }) => factor < 0) ?? false;
}

/** Heads in words. */
export function headsName({ layer, head, terms }: Which, layers: LayerInfo[]): string {
  const mine = terms?.filter(({ factor }) => factor > 0) ?? [{ layer, head }];
  if (mine.length === 1) return headName(mine[0], layers);
  const whole = mine.length === layers[layer].num_heads && mine.every((term) => term.layer === layer);
  return `mean of ${whole ? "the " : ""}${mine.length} heads${whole ? ` of layer ${layerName(layers, layer)}` : ""}`;
}

/** @returns what is on the stage, in words */
export function shownName(which: Which, layers: LayerInfo[]): string {
  const name = headsName(which, layers);
  return isDifference(which) ? `${name} less ${lessName(which, layers)}` : name;
}

/** @returns the same, over a map */
export function headline(which: Which, layers: LayerInfo[]): string {
  const name = shownName(which, layers);
  return `${name[0].toUpperCase()}${name.slice(1)}`;
}

function headName(one: Head, layers: LayerInfo[]): string {
  const { of } = layers[one.layer];
  return `layer ${layerName(layers, one.layer)} head ${headNumber(layers, one)}${of === undefined ? "" : ` (${of})`}`;
}

/**
 * @param which of a difference
 * @returns what is taken away
 */
export function lessName({ terms }: Which, layers: LayerInfo[]): string {
  const less = terms?.find(({ factor }) => factor < 0);
  return less ? headName(less, layers) : "";
}

/** Of what is shown, the layer whose block means are the largest; null where every weight is known. */
export function coarsest({ layer, terms }: Pick<Which, "layer" | "terms">, layers: LayerInfo[]): LayerInfo | null {
  const infos = (terms ?? [{ layer }]).map((term) => layers[term.layer]);
  return infos.filter(({ kind }) => kind === "pyramid").sort((one, other) => other.block - one.block)[0] ?? null;
}
