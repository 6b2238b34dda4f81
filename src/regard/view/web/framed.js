/**
 * A source of numbers for a page in a frame: whoever frames it is asked by messages. `widget.js` is
 * the other side.
 *
 * @typedef {import("./client.js").Head} Head
 * @typedef {import("./client.js").Numbers} Numbers
 * @typedef {import("./payload.js").LayerInfo} LayerInfo
 *
 * @typedef {object} Reply
 * @property {number} id of the question
 * @property {string} [error] a sentence, instead of everything else
 * @property {ArrayBuffer[]} buffers
 */

import { Waiting } from "./waiting.js";

export class Framed {
  /** @param {LayerInfo[]} layers */
  constructor(layers) {
    this.layers = layers;
    /** @type {Waiting<any>} */ this.waiting = new Waiting(
      (id) => this.post({ kind: "forget", id }),
      ({ error }) => (error === undefined ? null : new Error(error)),
    );
    window.addEventListener("message", ({ source, data }) => {
      if (source === window.parent) this.waiting.tell(data?.id, data);
    });
  }

  /**
   * @param {Head} head @param {number} query @param {AbortSignal} [signal]
   * @returns {Promise<{values: Float32Array, mask: Uint8Array}>}
   */
  async row(head, query, signal) {
    const { buffers } = await this.ask({ kind: "row", ...head, query }, signal);
    return { values: new Float32Array(buffers[0]), mask: new Uint8Array(buffers[1]) };
  }

  /**
   * @param {Head} head @param {number} key @param {AbortSignal} [signal]
   * @returns {Promise<Float32Array>}
   */
  async column(head, key, signal) {
    return new Float32Array((await this.ask({ kind: "column", ...head, key }, signal)).buffers[0]);
  }

  /**
   * @param {Head} head @param {import("./blocks.js").Place & {byRow: boolean}} place
   * @param {AbortSignal} [signal]
   * @returns {Promise<Numbers>}
   */
  async tile(head, { level, row, column, byRow }, signal = new AbortController().signal) {
    const question = { kind: "tile", ...head, level, row, column, by_row: byRow };
    const { buffers, height, width, exact, sampled } = await this.ask(question, signal);
    return { values: new Float32Array(buffers[0]), height, width, exact, sampled: sampled ?? undefined };
  }

  /**
   * @param {Head} head @param {boolean} byRow @param {AbortSignal} [signal]
   * @returns {Promise<{done: number, seconds: number | null}>}
   */
  async progress(head, byRow, signal) {
    return this.ask({ kind: "progress", ...head, by_row: byRow }, signal);
  }

  /**
   * @param {Head} head @param {number} query @param {import("./row_steps.js").Part} keys
   * @returns {Promise<import("./row_steps.js").Steps>}
   */
  async steps(head, query, keys) {
    return this.ask({ kind: "steps", ...head, query, ...keys });
  }

  /**
   * @param {Head} head @param {import("./shares.js").Parts} parts @param {AbortSignal} signal
   * @returns {Promise<Float32Array>} (query parts, key parts)
   */
  async segments(head, parts, signal) {
    const { buffers } = await this.ask({ kind: "segments", ...head, ...parts }, signal);
    return new Float32Array(buffers[0]);
  }

  /**
   * @param {number} layer
   * @returns {Promise<import("./payload.js").SmallNumbers>}
   */
  async overview(layer) {
    return (await this.ask({ kind: "overview", layer }, new AbortController().signal)).overview;
  }

  /** @returns {Promise<(import("./payload.js").HeadKind | null)[]>} of every head, layer by layer */
  async heads() {
    return (await this.ask({ kind: "heads" })).heads;
  }

  /**
   * @param {{kind: string} & Record<string, unknown>} question
   * @param {AbortSignal} [signal] without one, a newer question of the same kind takes its place
   * @returns {Promise<any>} never, when a newer question took its place
   */
  ask(question, signal) {
    return this.waiting.ask(question.kind, (id) => this.post({ ...question, id }), signal);
  }

  /** @param {object} question */
  post(question) {
    // To anyone: the page does not know where it stands, and asks for nothing secret.
    window.parent.postMessage({ regard: question }, "*");
  }
}
