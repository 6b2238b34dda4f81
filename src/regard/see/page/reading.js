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
 * @property {number} query
 * @property {number} key
 * @property {Float32Array} row weights of the query, one for each key
 * @property {Uint8Array} mask which keys the query may attend to
 * @property {Float32Array | null} column weights of the key, one from each query; null: on its way
 */

/** What changes a reading. */
const CAUSES = ["layer", "head", "hidden", "query", "key", "hover"];

export class Reader {
  /**
   * @param {import("./client.js").Client} source
   * @param {(reading: Reading) => void} onReading
   * @param {(error: Error) => void} onDamage
   */
  constructor(source, onReading, onDamage) {
    this.source = source;
    this.onReading = onReading;
    this.onDamage = onDamage;
    this.latest = 0;
  }

  /** @param {State} state @param {Set<string>} changed */
  update(state, changed) {
    if (!CAUSES.some((name) => changed.has(name))) return;
    const turn = ++this.latest;
    if (this.source.layers[state.layer].kind === "map") return;
    this.read(state, (reading) => turn === this.latest && this.onReading(reading)).catch((error) => {
      if (turn === this.latest) this.onDamage(error);
    });
  }

  /**
   * The row is there at once; the column may take longer and comes in a second reading.
   * @param {State} state
   * @param {(reading: Reading) => void} onReading
   */
  async read(state, onReading) {
    const { layer, head, hidden } = state;
    const which = { layer, head, hidden };
    let { query, key } = state.hover ?? state;
    let column = null;
    if (query === null) {
      key ??= 0;
      column = await this.source.column(which, key);
      query = strongest(column);
    }
    const { values: row, mask } = await this.source.row(which, query);
    key ??= strongest(row);
    if (!column) {
      onReading({ ...which, query, key, row, mask, column: null });
      column = await this.source.column(which, key);
    }
    onReading({ ...which, query, key, row, mask, column });
  }
}

/** @param {Float32Array} weights @returns {number} the lowest index of the largest weight */
export function strongest(weights) {
  let best = 0;
  for (let i = 1; i < weights.length; i++) if (weights[i] > weights[best]) best = i;
  return best;
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
