/** A host for a page in a frame: whoever frames it is asked by messages. `widget.ts` is the other side. */

import type { Host, Question } from "./source";
import { Waiting } from "./waiting";

export class Framed implements Host {
  private waiting = new Waiting((question) => window.parent.postMessage({ regard: question }, "*"), { kind: "forget" });

  constructor() {
    // To anyone: the page does not know where it stands, and asks for nothing secret.
    window.addEventListener("message", ({ source, data }) => {
      if (source === window.parent) this.waiting.settle(data?.id, data);
    });
  }

  async ask(question: Question, signal: AbortSignal) {
    const { error, buffers = [], ...answer } = await this.waiting.ask(question, signal);
    if (error !== undefined) throw new Error(error);
    const [values, mask] = buffers;
    if (values) answer.values = new Float32Array(values);
    if (mask) answer.mask = new Uint8Array(mask);
    return answer;
  }
}
