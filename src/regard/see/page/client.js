/**
 * The page's side of the engine: starts a worker that runs this page's own script, hands it a
 * layer the first time it is needed, and turns answers into promises.
 *
 * @typedef {import("./engine.js").Question} Question
 * @typedef {import("./engine.js").Answer & {mask?: Uint8Array}} Answer
 * @typedef {import("./payload.js").LayerInfo} LayerInfo
 * @typedef {Pick<Question, "layer" | "head" | "hidden">} Head
 */

import { engine } from "./engine.js";
import { Damaged } from "./payload.js";

export class Client {
  /**
   * @param {LayerInfo[]} layers
   * @param {(info: LayerInfo) => number[]} sinksOf
   */
  constructor(layers, sinksOf) {
    this.layers = layers;
    this.sinksOf = sinksOf;
    /** @type {Map<number, (answer: Answer) => void>} */ this.waiting = new Map();
    /** @type {Map<string, number>} */ this.newest = new Map();
    /** @type {Set<number>} */ this.loaded = new Set();
    this.id = 0;
    this.post = connect((answer) => this.waiting.get(answer.id)?.(answer));
  }

  /**
   * The weights of one query, and which keys it may attend to.
   * @param {Head} head @param {number} query
   * @returns {Promise<{values: Float32Array, mask: Uint8Array}>}
   */
  async row(head, query) {
    const { values, mask } = await this.ask({ kind: "row", ...head, at: query });
    return { values: /** @type {Float32Array} */ (values), mask: /** @type {Uint8Array} */ (mask) };
  }

  /**
   * What every query gives to one key.
   * @param {Head} head @param {number} key @returns {Promise<Float32Array>}
   */
  async column(head, key) {
    return /** @type {Float32Array} */ ((await this.ask({ kind: "column", ...head, at: key })).values);
  }

  /**
   * How one query comes to its weights, shown on its strongest keys.
   * @param {Head} head @param {number} query @param {number} most
   * @returns {Promise<import("./row_steps.js").Steps>}
   */
  async steps(head, query, most) {
    const { steps } = await this.ask({ kind: "steps", ...head, at: query, most });
    return /** @type {import("./row_steps.js").Steps} */ (steps);
  }

  /**
   * A part of the matrix as a picture, in strips from the top; a newer map ends an older one.
   * @param {Head & Pick<Question, "rows" | "columns" | "cells" | "byRow">} part
   * @param {(top: number, values: Float32Array) => void} onStrip
   * @returns {Promise<void>}
   */
  async map(part, onStrip) {
    await this.ask({ kind: "map", ...part }, ({ top, values }) => {
      if (values) onStrip(top ?? 0, values);
    });
  }

  /**
   * @param {Partial<Question>} question
   * @param {(answer: Answer) => void} [onAnswer]
   * @returns {Promise<Answer>} the last answer; never, when a newer question of its kind came
   */
  ask(question, onAnswer) {
    const layer = /** @type {number} */ (question.layer);
    if (!this.loaded.has(layer)) {
      this.loaded.add(layer);
      const info = this.layers[layer];
      const text = document.getElementById(`layer-${layer}`)?.textContent ?? "";
      this.post(
        /** @type {Question} */ ({
          id: ++this.id,
          kind: "load",
          layer,
          info,
          text,
          sinks: this.sinksOf(info),
        }),
      );
    }
    const id = ++this.id;
    const kind = /** @type {string} */ (question.kind);
    this.waiting.delete(this.newest.get(kind) ?? 0);
    this.newest.set(kind, id);
    return new Promise((resolve, reject) => {
      this.waiting.set(id, (answer) => {
        onAnswer?.(answer);
        if (answer.damage === undefined && !answer.done) return;
        this.waiting.delete(id);
        if (answer.damage === undefined) resolve(answer);
        else reject(new Damaged(answer.damage));
      });
      this.post(/** @type {Question} */ ({ ...question, id }));
    });
  }
}

/**
 * A worker; where the page's host forbids it, the same engine beside the page: it works in slices.
 * @param {(answer: Answer) => void} onAnswer
 * @returns {(question: Question) => void}
 */
function connect(onAnswer) {
  const source = document.getElementById("code")?.textContent ?? "";
  const here = engine(onAnswer);
  /** @type {Question[]} */ let unanswered = [];
  try {
    const worker = new Worker(URL.createObjectURL(new Blob([source], { type: "text/javascript" })));
    let works = true;
    worker.onmessage = (event) => {
      unanswered = [];
      onAnswer(event.data);
    };
    worker.onerror = () => {
      works = false;
      for (const question of unanswered.splice(0)) void here(question);
    };
    return (question) => {
      if (!works) return void here(question);
      unanswered.push(question);
      worker.postMessage(question);
    };
  } catch {
    return (question) => void here(question);
  }
}
