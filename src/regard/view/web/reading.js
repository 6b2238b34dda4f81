/**
 * What is read off at the pointed or chosen cell: the whole row of its query and the whole column
 * of its key. One reading at a time; a newer one replaces an older that is still being computed.
 *
 * @typedef {import("./state.js").State} State
 *
 * @typedef {object} Reading
 * @property {number} layer
 * @property {number} head
 * @property {boolean} hidden
 * @property {import("./source.js").Term[]} [terms] several heads: a mean or a difference
 * @property {number} query
 * @property {number} key
 * @property {number | null} queryTo the last of several queries, of which the row is the mean
 * @property {number | null} keyTo the last of several keys, of which the column is the sum
 * @property {Float32Array} row weights of the query, one for each key
 * @property {Uint8Array} mask which keys the query may attend to
 * @property {import("./held.js").Rest} [rest] of the keys whose weights this file does not hold
 * @property {Float32Array | null} column weights of the key, one from each query;
 *   null: on its way
 */

import { addedRests } from "./source.js";
import { shown } from "./compare.js";

/** What changes a reading. */
const CAUSES = ["view", "layer", "head", "heads", "compare", "with", "hidden", "query", "key", "queryTo", "keyTo", "hover"];
const ONE = { queryTo: null, keyTo: null };
/** Views that compare no heads, and those that show one alone. @type {Partial<Record<State["view"], Partial<State>>>} */
const ONLY = { text: { compare: "alone" }, steps: { compare: "alone", heads: "one" } };

export class Reader {
  /**
   * @param {import("./source.js").Source} source
   * @param {(reading: Reading) => void} onReading
   * @param {(error: Error) => void} onDamage
   * @param {(layer: number) => boolean} isOneText are the keys of a layer the queries' own tokens?
   */
  constructor(source, onReading, onDamage, isOneText) {
    this.source = source;
    this.onReading = onReading;
    this.onDamage = onDamage;
    this.isOneText = isOneText;
    this.latest = new AbortController();
    this.isReading = false;
  }

  /** @param {State} state @param {Set<string>} changed */
  update(state, changed) {
    if (!CAUSES.some((name) => changed.has(name))) return;
    this.latest.abort();
    const { signal } = (this.latest = new AbortController());
    this.isReading = this.source.layers[state.layer].kind !== "map";
    if (!this.isReading) return;
    this.read(state, signal, (reading) => signal.aborted || this.onReading(reading))
      .catch((error) => {
        if (!signal.aborted) this.onDamage(error);
      })
      .finally(() => {
        if (!signal.aborted) this.isReading = false;
      });
  }

  /**
   * The row is there at once; the column may take longer and comes in a second reading.
   * @param {State} state @param {AbortSignal} signal
   * @param {(reading: Reading) => void} onReading
   */
  async read(state, signal, onReading) {
    const isText = state.view === "text";
    const which = shown({ ...state, ...ONLY[state.view] }, this.source.layers);
    // Several tokens are chosen in the text, and read there.
    let { queryTo, keyTo } = state.hover || !isText ? ONE : state;
    let { query, key } = state.hover ?? state;
    if (isText && this.isOneText(state.layer)) {
      // Where a token looks and who looks at it: one token, both ways.
      query ??= key;
      [key, keyTo] = [query, queryTo];
    }
    let column = null;
    if (query === null) {
      key ??= 0;
      column = await this.columns(which, key, keyTo ?? key, signal);
      query = strongest(column);
    }
    const { row, mask, rest } = await this.rows(which, query, queryTo ?? query, signal);
    key ??= strongest(row);
    const reading = { ...which, query, key, queryTo, keyTo, row, mask, rest };
    if (!column) {
      onReading({ ...reading, column: null });
      column = await this.columns(which, key, keyTo ?? key, signal);
    }
    onReading({ ...reading, column });
  }

  /**
   * The mean of some rows, and the keys that any of them may attend to.
   * @param {import("./source.js").Head} which @param {number} first @param {number} last
   * @param {AbortSignal} signal @returns {Promise<Pick<Reading, "row" | "mask" | "rest">>}
   */
  async rows(which, first, last, signal) {
    const { values: row, mask, rest } = await this.source.row(which, first, signal);
    const count = last - first + 1;
    const rests = [rest];
    for (let query = first + 1; query <= last && !signal.aborted; query++) {
      const next = await this.source.row(which, query, signal);
      for (let key = 0; key < row.length; key++) {
        row[key] += next.values[key];
        mask[key] |= next.mask[key];
      }
      rests.push(next.rest);
    }
    const mean = count > 1 ? row.map((weight) => weight / count) : row;
    return { row: mean, mask, rest: addedRests(rests, rests.map(() => ({ factor: 1 / count }))) };
  }

  /**
   * What each query gives to some keys together.
   * @param {import("./source.js").Head} which @param {number} first @param {number} last
   * @param {AbortSignal} signal @returns {Promise<Float32Array>}
   */
  async columns(which, first, last, signal) {
    const column = await this.source.column(which, first, signal);
    for (let key = first + 1; key <= last && !signal.aborted; key++) {
      const next = await this.source.column(which, key, signal);
      for (let query = 0; query < column.length; query++) column[query] += next[query];
    }
    return column;
  }
}

/** @param {Float32Array} weights @returns {number} the lowest index of the largest; where none is above 0, of a NaN */
export function strongest(weights) {
  let best = 0;
  for (let i = 1; i < weights.length; i++) if (weights[i] > weights[best] || Number.isNaN(weights[best])) best = i;
  const unknown = weights[best] > 0 ? -1 : weights.findIndex(Number.isNaN);
  return unknown < 0 ? best : unknown;
}

/**
 * The rank of one weight among the allowed ones, ties to the lowest index, as topk has it.
 * @param {Float32Array} weights @param {Uint8Array} mask @param {number} at
 * @returns {{rank: number, of: number}}
 */
export function rankOf(weights, mask, at) {
  let rank = 1;
  let of = 0;
  for (let i = 0; i < weights.length; i++) {
    of += mask[i];
    if (weights[i] > weights[at] || (weights[i] === weights[at] && i < at && mask[i])) rank++;
  }
  return { rank, of };
}

/**
 * The positions of the largest weights above 0, in falling order.
 * @param {Float32Array} weights @param {number} count
 * @returns {number[]}
 */
export function top(weights, count) {
  /** @type {number[]} */ const best = [];
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
