/**
 * The state inside the recording: no number or head of an address names what is not there. And what is shown when it
 * is more than one head: the mean of a layer, or two side by side, or their difference. The state keeps it as words: heads=mean, with=3.8 (layer.head), compare=beside or
 * compare=difference.
 */

import { headNumber, layerName, type Head, type LayerInfo, type Recording } from "../protocol/recording";
import { FEWEST_STEPS, type State } from "../state";
import { termsOf, type Which } from "./source";

const MOST_STEPS = 1000; // that a server sends at once

/** The parts of the state that say which heads are shown. */
export type Chosen = Pick<State, "layer" | "head" | "heads" | "with" | "compare" | "hidden">;

/** @param text as the state has a head: layer.head */
function headOf(text: string): Head {
  const [layer, head] = text.split(".").map(Number);
  return { layer, head };
}

/** A comparison with a head that is there and has the open layer's shape; with the next head where none was chosen. */
function fittedComparison(
  state: Pick<State, "layer" | "head" | "with" | "compare">,
  { layers, other }: Pick<Recording, "layers" | "other">,
): Pick<State, "with" | "compare"> {
  const open = layers[state.layer];
  const isThere = ({ layer, head }: Head) =>
    layers[layer]?.q_len === open.q_len && layers[layer].kv_len === open.kv_len && head < layers[layer].num_heads;
  const { compare } = state;
  if (compare === "alone") return { with: state.with, compare };
  if (other) {
    // The same head of the other recording, whose text may be longer or shorter.
    const layer = Math.min(layers.length - 1, state.layer + other.first);
    const at = { layer, head: Math.min(state.head, layers[layer].num_heads - 1) };
    return { with: `${at.layer}.${at.head}`, compare: isThere(at) ? compare : "beside" };
  }
  const next = { layer: state.layer, head: (state.head + 1) % open.num_heads };
  return { with: isThere(headOf(state.with)) ? state.with : `${next.layer}.${next.head}`, compare };
}

/** What the map shows. */
export function shown({ layer, head, heads, hidden, compare, with: other }: Chosen, layers: LayerInfo[]): Which {
  const count = heads === "one" ? 1 : layers[layer].num_heads;
  const terms = Array.from({ length: count }, (_, i) => ({
    layer,
    head: heads === "one" ? head : i,
    factor: 1 / count,
  }));
  if (compare === "difference") terms.push({ ...headOf(other), factor: -1 });
  return terms.length > 1 || heads !== "one" ? { layer, head, hidden, terms } : { layer, head, hidden };
}

/** What stands beside it. */
export function beside({ with: other, hidden }: Pick<State, "with" | "hidden">): Which {
  return { ...headOf(other), hidden };
}

export function isDifference({ terms }: Which): boolean {
  return terms?.some(({ factor }) => factor < 0) ?? false;
}

/** Heads in words. */
export function headsName(which: Which, layers: LayerInfo[]): string {
  const mine = termsOf(which).filter(({ factor }) => factor > 0);
  if (mine.length === 1) return headName(mine[0], layers);
  return `mean of the ${mine.length} heads of layer ${layerName(layers, which.layer)}`;
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

/** @returns every number inside the recording */
export function fitted(state: State, recording: Pick<Recording, "layers" | "other">): State {
  const { layers, other } = recording;
  const layer = within(state.layer, other?.first ?? layers.length);
  const { num_heads, q_len, kv_len } = layers[layer];
  const zoom = Math.max(1, state.zoom);
  const head = within(state.head, num_heads);
  const heads = { ...state, layer, head, ...fittedComparison({ ...state, layer, head }, recording) };
  return {
    ...heads,
    hidden: state.hidden && !isOfBlocks(heads, layers),
    zoom,
    query: state.query === null ? null : within(state.query, q_len),
    key: state.key === null ? null : within(state.key, kv_len),
    steps: Math.max(FEWEST_STEPS, Math.min(state.steps, kv_len, MOST_STEPS)),
    row: thousandths(Math.max(0, Math.min(q_len - q_len / zoom, state.row))),
    column: thousandths(Math.max(0, Math.min(kv_len - kv_len / zoom, state.column))),
  };
}

/** Is any of the heads on the stage there as block means only, with its sinks in them? */
export function isOfBlocks(state: Chosen, layers: LayerInfo[]): boolean {
  const other = state.compare === "beside" && coarsest(beside(state), layers);
  return Boolean(other || coarsest(shown(state, layers), layers));
}

/** @returns from 0 to count - 1, whole */
function within(value: number, count: number): number {
  return Math.max(0, Math.min(count - 1, Math.round(value)));
}

function thousandths(value: number): number {
  return Math.round(value * 1000) / 1000;
}
