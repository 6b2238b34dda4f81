/**
 * The host of a page that is a file: starts a worker that runs this page's own script, hands it a
 * layer the first time it is needed, and turns answers into promises.
 *
 * @typedef {import("./payload.js").LayerInfo} LayerInfo
 * @typedef {import("./source.js").Question} Question
 * @typedef {import("./source.js").Host} Host
 */

import { engine } from "./engine.js";
import { Damaged } from "./payload.js";
import { Waiting } from "./waiting.js";

/** @implements {Host} */
export class Client {
  /**
   * @param {LayerInfo[]} layers
   * @param {(layer: number) => number[]} sinksOf
   */
  constructor(layers, sinksOf) {
    this.layers = layers;
    this.sinksOf = sinksOf;
    /** @type {Set<number>} */ this.loaded = new Set();
    /** @type {Set<number>} layers whose numbers a page took out before it was saved */ this.taken = new Set();
    this.post = connect((answer) => this.waiting.tell(answer.id, answer));
    this.waiting = new Waiting(this.post, { kind: "drop" });
  }

  /** @param {Question} question @param {AbortSignal} signal */
  async ask(question, signal) {
    const { layer } = question;
    this.load(layer);
    if (this.taken.has(layer))
      throw new Damaged(
        `Layer ${layer} is not in this copy: a browser saved it from an open page. Open the file itself to see the whole.`,
      );
    const answer = await this.waiting.ask(question, signal);
    if (answer.damage === undefined) return answer;
    throw new Damaged(`Layer ${layer} of this file is damaged: ${answer.damage} Write the file again to see the whole.`);
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
    this.post({ id: 0, kind: "load", layer, info, raw, sinks: this.sinksOf(layer) });
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
 * @param {(answer: import("./engine.js").Answer) => void} onAnswer
 * @returns {(question: any) => void}
 */
function connect(onAnswer) {
  const source = document.getElementById("code")?.textContent ?? "";
  const here = engine(onAnswer);
  /** @type {any[]} until it is known who answers */ const early = [];
  /** @type {(question: any) => void} */ let post = (question) => void early.push(question);
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
