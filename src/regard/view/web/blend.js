/**
 * Several heads as one picture: a mean, or one less another. Everything that is shown of a head is
 * a sum of weights, so each answer is the sum of the heads' own answers.
 *
 * @typedef {import("./client.js").Head} Head
 * @typedef {import("./client.js").Numbers} Numbers
 * @typedef {Pick<import("./client.js").Client, "layers" | "row" | "column" | "tile" | "progress" | "steps" | "segments">} Source
 * @typedef {{layer: number, head: number, factor: number}} Term
 * @typedef {Head & {terms?: Term[]}} Which one head, or a sum of several
 */

export class Blend {
  /** @param {Source} source answers for one head */
  constructor(source) {
    this.source = source;
    this.layers = source.layers;
  }

  /**
   * @param {Which} which @param {number} query @param {AbortSignal} [signal]
   * @returns {Promise<import("./client.js").Row>}
   */
  async row(which, query, signal) {
    if (!which.terms) return this.source.row(which, query, signal);
    const rows = await all(which, signal, (head, shared) => this.source.row(head, query, shared));
    const mask = new Uint8Array(rows[0].mask.length);
    for (const row of rows) row.mask.forEach((may, key) => (mask[key] |= may));
    const values = added(which.terms, rows.map((row) => row.values));
    return { values, mask, rest: addedRests(rows.map(({ rest }) => rest), which.terms) };
  }

  /**
   * @param {Which} which @param {number} key @param {AbortSignal} [signal]
   * @returns {Promise<Float32Array>}
   */
  async column(which, key, signal) {
    if (!which.terms) return this.source.column(which, key, signal);
    const columns = await all(which, signal, (head, shared) => this.source.column(head, key, shared));
    return added(which.terms, columns);
  }

  /**
   * @param {Which} which @param {import("./blocks.js").Place & {byRow: boolean}} place
   * @param {AbortSignal} signal
   * @returns {Promise<Numbers>}
   */
  async tile(which, place, signal) {
    if (!which.terms) return this.source.tile(which, place, signal);
    const tiles = await all(which, signal, (head, shared) => this.source.tile(head, place, shared));
    const { height, width } = tiles[0];
    const exact = tiles.every((tile) => tile.exact);
    const sampled = Math.max(...tiles.map((tile) => tile.sampled ?? 1));
    return { values: added(which.terms, tiles.map(({ values }) => values)), height, width, exact, sampled };
  }

  /**
   * @param {Which} which @param {boolean} byRow @param {AbortSignal} [signal]
   * @returns {Promise<{done: number, seconds: number | null}>}
   */
  async progress(which, byRow, signal) {
    let [done, seconds] = [0, /** @type {number | null} */ (0)];
    const heads = headsOf(which);
    for (const head of heads) {
      const one = await this.source.progress(head, byRow, signal);
      done += one.done / heads.length;
      seconds = seconds === null || one.seconds === null ? null : seconds + one.seconds;
    }
    return { done, seconds };
  }

  /** @param {Head} head @param {import("./shares.js").Parts} parts @param {AbortSignal} signal */
  segments(head, parts, signal) {
    return this.source.segments(head, parts, signal);
  }

  /** @param {Which} which @param {number} query @param {import("./row_steps.js").Part} keys */
  steps(which, query, keys) {
    return this.source.steps(which, query, keys);
  }
}

/** @param {Which} which @returns {Head[]} */
function headsOf({ hidden, terms, ...head }) {
  return (terms ?? [head]).map((term) => ({ layer: term.layer, head: term.head, hidden }));
}

/**
 * @template T
 * @param {Which} which @param {AbortSignal | undefined} signal
 * @param {(head: Head, signal: AbortSignal) => Promise<T>} ask
 * @returns {Promise<T[]>}
 */
function all(which, signal, ask) {
  const shared = signal ?? new AbortController().signal;
  return Promise.all(headsOf(which).map((head) => ask(head, shared)));
}

/**
 * What is not known of a sum of rows; undefined where all is known.
 * @param {(import("./held.js").Rest | undefined)[]} rests @param {{factor: number}[]} terms
 * @returns {import("./held.js").Rest | undefined}
 */
export function addedRests(rests, terms) {
  if (rests.every((rest) => rest === undefined)) return undefined;
  const sum = { share: 0, most: 0 };
  rests.forEach((rest, i) => {
    sum.share += terms[i].factor * (rest?.share ?? 0);
    sum.most += Math.abs(terms[i].factor) * (rest?.most ?? 0);
  });
  return sum;
}

/** @param {Term[]} terms @param {Float32Array[]} numbers @returns {Float32Array} */
function added(terms, numbers) {
  const sum = new Float64Array(numbers[0].length);
  numbers.forEach((values, i) => {
    const { factor } = terms[i];
    for (let at = 0; at < sum.length; at++) sum[at] += factor * values[at];
  });
  return Float32Array.from(sum);
}
