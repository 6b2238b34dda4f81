/**
 * The page's side of the engine: starts a worker that runs this page's own script, hands it a
 * layer the first time it is needed, and turns answers into promises.
 *
 * @typedef {import("./engine.js").Question} Question
 * @typedef {import("./engine.js").Answer} Answer
 * @typedef {import("./blocks.js").Place} Place
 * @typedef {import("./payload.js").LayerInfo} LayerInfo
 * @typedef {Pick<Question, "layer" | "head" | "hidden">} Head
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

import { engine } from "./engine.js";
import { Damaged } from "./payload.js";
import { Waiting } from "./waiting.js";

export class Client {
  /**
   * @param {LayerInfo[]} layers
   * @param {(info: LayerInfo) => number[]} sinksOf
   */
  constructor(layers, sinksOf) {
    this.layers = layers;
    this.sinksOf = sinksOf;
    /** @type {Waiting<Answer>} */ this.waiting = new Waiting(
      (id) => this.post(/** @type {Question} */ ({ kind: "drop", id })),
      ({ layer, damage }) =>
        damage === undefined
          ? null
          : new Damaged(`Layer ${layer} of this file is damaged: ${damage} Write the file again to see the whole.`),
    );
    /** @type {Set<number>} */ this.loaded = new Set();
    /** @type {Set<number>} layers whose numbers a page took out before it was saved */ this.taken = new Set();
    this.post = connect((answer) => this.waiting.tell(answer.id, answer));
  }

  /**
   * The weights of one query, and which keys it may attend to.
   * @param {Head} head @param {number} query @param {AbortSignal} [signal]
   * @returns {Promise<Row>}
   */
  async row(head, query, signal) {
    return /** @type {Row} */ (await this.ask({ kind: "row", ...head, at: query }, signal));
  }

  /**
   * What every query gives to one key.
   * @param {Head} head @param {number} key @param {AbortSignal} [signal]
   * @returns {Promise<Float32Array>}
   */
  async column(head, key, signal) {
    const { values } = await this.ask({ kind: "column", ...head, at: key }, signal);
    return /** @type {Float32Array} */ (values);
  }

  /**
   * How one query comes to its weights, for some of its keys.
   * @param {Head} head @param {number} query @param {import("./row_steps.js").Part} keys
   * @returns {Promise<import("./row_steps.js").Steps>}
   */
  async steps(head, query, keys) {
    const { steps } = await this.ask({ kind: "steps", ...head, at: query, keys });
    return /** @type {import("./row_steps.js").Steps} */ (steps);
  }

  /**
   * What parts of the text give to each other.
   * @param {Head} head @param {import("./shares.js").Parts} parts @param {AbortSignal} signal
   * @returns {Promise<Float32Array>} (query parts, key parts)
   */
  async segments(head, parts, signal) {
    const { values } = await this.ask({ kind: "segments", ...head, parts }, signal);
    return /** @type {Float32Array} */ (values);
  }

  /**
   * A tile of the matrix; many may be asked at once.
   * @param {Head} head @param {Place & {byRow: boolean}} place
   * @param {AbortSignal} [signal] ends the work on it
   * @returns {Promise<Numbers>}
   */
  async tile(head, { level, row, column, byRow }, signal = new AbortController().signal) {
    const place = { level, row, column };
    return /** @type {Numbers} */ (await this.ask({ kind: "tile", ...head, place, byRow }, signal));
  }

  /**
   * How far the exact numbers of a large head are.
   * @param {Head} head @param {boolean} byRow @param {AbortSignal} [signal]
   * @returns {Promise<{done: number, seconds: number | null}>}
   */
  async progress(head, byRow, signal) {
    const { part, seconds } = await this.ask({ kind: "progress", ...head, byRow }, signal);
    return { done: part ?? 1, seconds: seconds ?? null };
  }

  /**
   * @param {Partial<Question>} question
   * @param {AbortSignal} [signal] without one, a newer question of the same kind takes its place
   * @returns {Promise<Answer>} never, when a newer question took its place
   */
  ask(question, signal) {
    this.load(/** @type {number} */ (question.layer));
    if (this.taken.has(/** @type {number} */ (question.layer)))
      return Promise.reject(
        new Damaged(
          `Layer ${question.layer} is not in this copy: a browser saved it from an open page. Open the file itself to see the whole.`,
        ),
      );
    const kind = /** @type {string} */ (question.kind);
    return this.waiting.ask(kind, (id) => this.post(/** @type {Question} */ ({ ...question, id })), signal);
  }

  /** Hands over a layer the first time it is needed. @param {number} layer */
  load(layer) {
    if (this.loaded.has(layer)) return;
    this.loaded.add(layer);
    const info = this.layers[layer];
    const start = `layer-${layer}-`;
    const blocks = [...document.querySelectorAll(`script[id^="${start}"]`)];
    if (blocks.some((block) => !block.hasChildNodes())) return void this.taken.add(layer);
    const raw = Object.fromEntries(blocks.map((block) => [block.id.slice(start.length), taken(block)]));
    this.post(/** @type {Question} */ ({ id: 0, kind: "load", layer, info, raw, sinks: this.sinksOf(info) }));
  }
}

/**
 * The text of an element, which then has none: a layer is too large to be there twice.
 * @param {Element} element @returns {Uint8Array<ArrayBuffer>} ASCII
 */
function taken(element) {
  // A long text has many nodes; together they would be one more copy.
  const nodes = /** @type {Text[]} */ ([...element.childNodes]);
  const bytes = new Uint8Array(nodes.reduce((length, { data }) => length + data.length, 0));
  const letters = new TextEncoder();
  let at = 0;
  for (const { data } of nodes) at += letters.encodeInto(data, bytes.subarray(at)).written;
  element.replaceChildren();
  return bytes;
}

/**
 * A worker; where the page's host forbids it, the same engine beside the page: it works in slices.
 * @param {(answer: Answer) => void} onAnswer
 * @returns {(question: Question) => void}
 */
function connect(onAnswer) {
  const source = document.getElementById("code")?.textContent ?? "";
  const here = engine(onAnswer);
  /** @type {Question[]} until it is known who answers */ const early = [];
  /** @type {(question: Question) => void} */ let post = (question) => void early.push(question);
  const postTo = /** @param {typeof post} one */ (one) => {
    post = one;
    early.splice(0).forEach(one);
  };
  try {
    const worker = new Worker(URL.createObjectURL(new Blob([source], { type: "text/javascript" })));
    worker.onmessage = () => {
      worker.onmessage = (event) => onAnswer(event.data);
      postTo((question) => {
        // Handed over, not copied.
        const numbers = Object.values(question.raw ?? {}).map(({ buffer }) => buffer);
        worker.postMessage(question, numbers);
      });
    };
    worker.onerror = () => postTo(here);
  } catch {
    postTo(here);
  }
  return (question) => post(question);
}
