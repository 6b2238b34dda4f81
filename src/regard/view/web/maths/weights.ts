/** What stands out among the weights of a row or a column. */

/** @returns the lowest index of the largest; where none is above 0, of a NaN */
export function strongest(weights: Float32Array): number {
  let best = 0;
  for (let i = 1; i < weights.length; i++) if (weights[i] > weights[best] || Number.isNaN(weights[best])) best = i;
  const unknown = weights[best] > 0 ? -1 : weights.findIndex(Number.isNaN);
  return unknown < 0 ? best : unknown;
}

/** The rank of one weight among the allowed ones, ties to the lowest index, as topk has it. */
export function rankOf(weights: Float32Array, mask: Uint8Array, at: number): { rank: number; of: number } {
  let rank = 1;
  let of = 0;
  for (let i = 0; i < weights.length; i++) {
    of += mask[i];
    if (weights[i] > weights[at] || (weights[i] === weights[at] && i < at && mask[i])) rank++;
  }
  return { rank, of };
}

/** The positions of the largest weights above 0, in falling order. */
export function top(weights: Float32Array, count: number): number[] {
  const best: number[] = [];
  for (let i = 0; i < weights.length; i++) {
    if (!(weights[i] > 0)) continue;
    if (best.length === count && weights[i] <= weights[best[count - 1]]) continue;
    let at = best.length;
    while (at > 0 && weights[best[at - 1]] < weights[i]) at--;
    best.splice(at, 0, i);
    if (best.length > count) best.pop();
  }
  return best;
}
