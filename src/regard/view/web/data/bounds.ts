/** The state inside the recording: no number or head of an address names what is not there. */

import type { LayerInfo, Recording } from "../protocol/recording";
import { FEWEST_STEPS, type State } from "../state";
import { beside, coarsest, fittedComparison, shown, type Chosen } from "./compare";

const MOST_STEPS = 1000; // that a server sends at once

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
