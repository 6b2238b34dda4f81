/** A host for a page in a frame: whoever frames it is asked by messages. `widget.ts` is the other side. */

import type { Answers, Question } from "../protocol/questions";
import type { Host } from "./source";
import { Waiting } from "./waiting";

export type Message = { id: number } & (Question | { kind: "forget" });

/** What an answer has besides numbers stands beside them; an error is one sentence. */
export type Reply = { id: number; error?: string; buffers?: ArrayBuffer[] };

export class Framed implements Host {
  private waiting = new Waiting<Message, Reply>(
    (message) => window.parent.postMessage({ regard: message }, "*"),
    (id) => ({ kind: "forget", id }),
  );

  constructor() {
    // To anyone: the page does not know where it stands, and asks for nothing secret.
    window.addEventListener("message", ({ source, data }) => {
      if (source === window.parent) this.waiting.settle(data?.id, data);
    });
  }

  async ask<Q extends Question>(question: Q, signal: AbortSignal): Promise<Answers[Q["kind"]]> {
    const { id: _, error, buffers = [], ...answer } = await this.waiting.ask((id) => ({ ...question, id }), signal);
    if (error !== undefined) throw new Error(error);
    const [values, mask] = buffers;
    const numbers = {
      ...(values && { values: new Float32Array(values) }),
      ...(mask && { mask: new Uint8Array(mask) }),
    };
    return { ...answer, ...numbers } as Answers[Q["kind"]];
  }
}
