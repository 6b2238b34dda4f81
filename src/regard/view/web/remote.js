/**
 * A source of numbers for a page that a server sent: every question is a request to that server and
 * to no other; `server.py` documents them.
 *
 * @typedef {import("./client.js").Head} Head
 * @typedef {import("./client.js").Numbers} Numbers
 * @typedef {import("./payload.js").LayerInfo} LayerInfo
 * @typedef {Record<string, number | string | boolean>} Parameters
 */

/** The server is gone, or has another recording by now: nothing can be asked until it is started again. */
export class Lost extends Error {}

const GONE = "The server does not answer any more. Start regard serve again, and open the file that it names.";
const STATUSES_OF_THE_LOST = [403, 409];

export class Remote {
  /** @param {LayerInfo[]} layers */
  constructor(layers) {
    this.layers = layers;
    /** @type {Map<string, AbortController>} */ this.newest = new Map();
  }

  /**
   * @param {Head} head @param {number} query @param {AbortSignal} [signal]
   * @returns {Promise<{values: Float32Array, mask: Uint8Array}>}
   */
  async row(head, query, signal) {
    const { kv_len } = this.layers[head.layer];
    const bytes = await (await this.ask("row", { ...which(head), query }, signal)).arrayBuffer();
    return { values: new Float32Array(bytes, 0, kv_len), mask: new Uint8Array(bytes, 4 * kv_len) };
  }

  /**
   * @param {Head} head @param {number} key @param {AbortSignal} [signal]
   * @returns {Promise<Float32Array>}
   */
  async column(head, key, signal) {
    const answer = await this.ask("column", { ...which(head), key }, signal);
    return new Float32Array(await answer.arrayBuffer());
  }

  /**
   * @param {Head} head @param {import("./blocks.js").Place & {byRow: boolean}} place
   * @param {AbortSignal} [signal] ends the work on it
   * @returns {Promise<Numbers>}
   */
  async tile(head, { level, row, column, byRow }, signal = new AbortController().signal) {
    const place = { level, row, column, by_row: byRow };
    const answer = await this.ask("tile", { ...which(head), ...place }, signal);
    const told = (/** @type {string} */ name) => Number(answer.headers.get(name) ?? 0);
    return {
      values: new Float32Array(await answer.arrayBuffer()),
      height: told("X-Height"),
      width: told("X-Width"),
      exact: told("X-Exact") === 1,
      sampled: told("X-Sampled") || undefined,
    };
  }

  /**
   * @param {Head} head @param {boolean} byRow @param {AbortSignal} [signal]
   * @returns {Promise<{done: number, seconds: number | null}>}
   */
  async progress(head, byRow, signal) {
    return (await this.ask("progress", { ...which(head), by_row: byRow }, signal)).json();
  }

  /**
   * @param {Head} head @param {number} query @param {import("./row_steps.js").Part} keys
   * @returns {Promise<import("./row_steps.js").Steps>}
   */
  async steps(head, query, { by, start, count }) {
    return (await this.ask("steps", { ...which(head), query, by, start, count })).json();
  }

  /**
   * @param {Head} head @param {import("./shares.js").Parts} parts @param {AbortSignal} [signal]
   * @returns {Promise<Float32Array>} (query parts, key parts)
   */
  async segments(head, { queries, keys }, signal) {
    const parts = { queries: JSON.stringify(queries), keys: JSON.stringify(keys) };
    const answer = await this.ask("segments", { ...which(head), ...parts }, signal);
    return new Float32Array(await answer.arrayBuffer());
  }

  /**
   * @param {number} layer
   * @returns {Promise<import("./payload.js").SmallNumbers>}
   */
  async overview(layer) {
    return (await (await this.ask("overview", { layer }, new AbortController().signal)).json()).overview;
  }

  /** @returns {Promise<(import("./payload.js").HeadKind | null)[]>} of every head, layer by layer */
  async heads() {
    return (await (await this.ask("heads", {})).json()).heads;
  }

  /**
   * @param {string} kind @param {Parameters} parameters
   * @param {AbortSignal} [signal] without one, a newer question of the same kind takes its place
   * @returns {Promise<Response>} never, when a newer question took its place
   */
  async ask(kind, parameters, signal) {
    const own = new AbortController();
    if (!signal) {
      this.newest.get(kind)?.abort();
      this.newest.set(kind, own);
    }
    const texts = Object.entries(parameters).map(([name, value]) => [
      name,
      String(typeof value === "boolean" ? Number(value) : value),
    ]);
    try {
      const answer = await fetch(`api/${kind}?${new URLSearchParams(texts)}`, { signal: signal ?? own.signal });
      if (answer.ok) return answer;
      const sentence = await answer.text();
      throw STATUSES_OF_THE_LOST.includes(answer.status) ? new Lost(sentence) : new Error(sentence);
    } catch (error) {
      if (own.signal.aborted) return new Promise(() => {});
      // What fetch rejects with where there is no answer at all.
      if (error instanceof TypeError) throw new Lost(GONE);
      throw error;
    }
  }
}

/** @param {Head} head @returns {Parameters} */
function which({ layer, head, hidden }) {
  return { layer, head, hidden };
}
