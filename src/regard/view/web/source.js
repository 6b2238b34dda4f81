/**
 * All that the page asks of the numbers, of one head or of several: a mean, or one less another.
 * Everything that is shown of a head is a sum of weights, so an answer about several heads is the
 * sum of the heads' own answers. A host answers for one head: this file, a server, or a notebook.
 *
 * @typedef {import("./payload.js").LayerInfo} LayerInfo
 * @typedef {{layer: number, head: number, hidden: boolean}} Head hidden: sinks are set aside
 * @typedef {{layer: number, head: number, factor: number}} Term
 * @typedef {Head & {terms?: Term[]}} Which one head, or a sum of several
 *
 * @typedef {{kind: string} & Record<string, any>} Question as page_questions.py names its parameters
 *
 * @typedef {object} Host
 * @property {(question: Question, signal: AbortSignal) => Promise<any>} ask
 *
 * @typedef {object} Row
 * @property {Float32Array} values one weight for each key; 0 where it is not known
 * @property {Uint8Array} mask
 * @property {import("./held.js").Rest} [rest] of the keys whose weights are not known
 *
 * @typedef {object} Numbers of a tile
 * @property {Float32Array} values (height, width)
 * @property {number} height
 * @property {number} width
 * @property {boolean} exact
 * @property {number} [sampled] if not exact: one query in so many was asked
 */

export class Source {
  /** @param {LayerInfo[]} layers @param {Host} host */
  constructor(layers, host) {
    this.layers = layers;
    this.host = host;
    /** @type {Map<string, AbortController>} */ this.newest = new Map();
  }

  /**
   * @param {Question} question
   * @param {AbortSignal} [signal] without one, a newer question of the same kind takes its place
   * @returns {Promise<any>} never, when a newer question took its place
   */
  async ask(question, signal) {
    if (signal) return this.host.ask(question, signal);
    const own = new AbortController();
    this.newest.get(question.kind)?.abort();
    this.newest.set(question.kind, own);
    try {
      return await this.host.ask(question, own.signal);
    } catch (error) {
      if (own.signal.aborted) return new Promise(() => {});
      throw error;
    }
  }

  /**
   * The answers of every head.
   * @param {string} kind @param {Which} which @param {object} parameters @param {AbortSignal} [signal]
   * @returns {Promise<any[]>}
   */
  each(kind, which, parameters, signal) {
    const { terms, ...head } = which;
    if (!terms) return Promise.all([this.ask({ kind, ...head, ...parameters }, signal)]);
    const shared = signal ?? new AbortController().signal;
    return Promise.all(
      terms.map(({ layer, head }) =>
        this.ask({ kind, layer, head, hidden: which.hidden, ...parameters }, shared),
      ),
    );
  }

  /**
   * The weights of one query, and which keys it may attend to.
   * @param {Which} which @param {number} query @param {AbortSignal} [signal] @returns {Promise<Row>}
   */
  async row(which, query, signal) {
    const rows = await this.each("row", which, { query }, signal);
    if (!which.terms) return rows[0];
    const mask = new Uint8Array(rows[0].mask.length);
    for (const row of rows) row.mask.forEach((/** @type {number} */ may, /** @type {number} */ key) => (mask[key] |= may));
    return { values: added(which.terms, rows), mask, rest: addedRests(rows.map(({ rest }) => rest), which.terms) };
  }

  /**
   * What every query gives to one key.
   * @param {Which} which @param {number} key @param {AbortSignal} [signal] @returns {Promise<Float32Array>}
   */
  async column(which, key, signal) {
    const columns = await this.each("column", which, { key }, signal);
    return which.terms ? added(which.terms, columns) : columns[0].values;
  }

  /**
   * A tile of the matrix; many may be asked at once.
   * @param {Which} which @param {import("./blocks.js").Place & {byRow: boolean}} place
   * @param {AbortSignal} signal ends the work on it
   * @returns {Promise<Numbers>}
   */
  async tile(which, { level, row, column, byRow }, signal) {
    const tiles = await this.each("tile", which, { level, row, column, by_row: byRow }, signal);
    if (!which.terms) return tiles[0];
    const exact = tiles.every((tile) => tile.exact);
    const sampled = Math.max(...tiles.map((tile) => tile.sampled ?? 1));
    return { ...tiles[0], values: added(which.terms, tiles), exact, sampled };
  }

  /**
   * How far the exact numbers of large heads are.
   * @param {Which} which @param {boolean} byRow @param {AbortSignal} signal
   * @returns {Promise<{done: number, seconds: number | null}>}
   */
  async progress(which, byRow, signal) {
    const all = await this.each("progress", which, { by_row: byRow }, signal);
    const done = all.reduce((sum, one) => sum + one.done / all.length, 0);
    const isKnown = all.every(({ seconds }) => seconds !== null);
    return { done, seconds: isKnown ? all.reduce((sum, one) => sum + one.seconds, 0) : null };
  }

  /**
   * How one query comes to its weights, for some of its keys.
   * @param {Head} head @param {number} query @param {import("./row_steps.js").Part} keys
   * @returns {Promise<import("./row_steps.js").Steps>}
   */
  steps(head, query, keys) {
    return this.ask({ kind: "steps", ...head, query, ...keys });
  }

  /**
   * What parts of the text give to each other.
   * @param {Head} head @param {import("./shares.js").Parts} parts @param {AbortSignal} signal
   * @returns {Promise<Float32Array>} (query parts, key parts)
   */
  async segments(head, parts, signal) {
    return (await this.ask({ kind: "segments", ...head, ...parts }, signal)).values;
  }

  /** Of a live host. @param {number} layer @returns {Promise<import("./payload.js").SmallNumbers>} */
  async overview(layer) {
    return (await this.ask({ kind: "overview", layer }, new AbortController().signal)).overview;
  }

  /** Of a live host. @returns {Promise<(import("./payload.js").HeadKind | null)[]>} of every head, layer by layer */
  async heads() {
    return (await this.ask({ kind: "heads" })).heads;
  }
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

/** @param {Term[]} terms @param {{values: Float32Array}[]} answers @returns {Float32Array} */
function added(terms, answers) {
  const sum = new Float64Array(answers[0].values.length);
  answers.forEach(({ values }, i) => {
    const { factor } = terms[i];
    for (let at = 0; at < sum.length; at++) sum[at] += factor * values[at];
  });
  return Float32Array.from(sum);
}
