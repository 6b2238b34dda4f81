/**
 * A host for a page in a frame: whoever frames it is asked by messages. `widget.js` is the other side.
 *
 * @typedef {import("./source.js").Host} Host
 */

import { Waiting } from "./waiting.js";

/** @implements {Host} */
export class Framed {
  constructor() {
    // To anyone: the page does not know where it stands, and asks for nothing secret.
    this.waiting = new Waiting((question) => window.parent.postMessage({ regard: question }, "*"), { kind: "forget" });
    window.addEventListener("message", ({ source, data }) => {
      if (source === window.parent) this.waiting.tell(data?.id, data);
    });
  }

  /** @param {import("./source.js").Question} question @param {AbortSignal} signal */
  async ask(question, signal) {
    const { error, buffers = [], ...answer } = await this.waiting.ask(question, signal);
    if (error !== undefined) throw new Error(error);
    const [values, mask] = buffers;
    if (values) answer.values = new Float32Array(values);
    if (mask) answer.mask = new Uint8Array(mask);
    return answer;
  }
}
