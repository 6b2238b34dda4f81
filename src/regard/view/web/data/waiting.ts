/** Who waits for which answer. */

import type { Answers, Question } from "../protocol/questions";
import type { Host } from "./source";

export type Message = { id: number } & (Question | { kind: "forget" }); // nobody waits for that answer any more

/** An answer, or one sentence that says why there is none. */
export type Reply = { id: number } & (Answers[Question["kind"]] | { error: string });

/** A host behind messages, a worker or who frames the page: each answer has the number of its question. */
export class Waiting implements Host {
  private waiting = new Map<number, (reply: Reply) => void>();
  private id = 0;

  constructor(private readonly post: (message: Message) => void) {}

  ask<Q extends Question>(question: Q, signal: AbortSignal): Promise<Answers[Q["kind"]]> {
    const id = ++this.id;
    return new Promise((resolve, reject) => {
      if (signal.aborted) return reject(signal.reason);
      const abort = () => {
        if (this.waiting.delete(id)) this.post({ id, kind: "forget" });
        reject(signal.reason);
      };
      signal.addEventListener("abort", abort, { once: true });
      this.waiting.set(id, ({ id: _, ...answer }) => {
        this.waiting.delete(id);
        signal.removeEventListener("abort", abort);
        if ("error" in answer) reject(new Error(answer.error));
        else resolve(answer as Answers[Q["kind"]]);
      });
      this.post({ ...question, id });
    });
  }

  settle(reply: Reply) {
    this.waiting.get(reply?.id)?.(reply);
  }
}

/** One question at a time: a newer one takes the place of an older one, whose answer nobody gets. */
export class Latest {
  private controller = new AbortController();

  async ask<T>(
    question: (signal: AbortSignal) => Promise<T>,
    onAnswer: (answer: T) => void,
    onError: (error: Error) => void,
  ) {
    this.drop();
    const { signal } = this.controller;
    try {
      const answer = await question(signal);
      if (!signal.aborted) onAnswer(answer);
    } catch (error) {
      if (!signal.aborted) onError(error as Error);
    }
  }

  /** Nobody waits any more. */
  drop() {
    this.controller.abort();
    this.controller = new AbortController();
  }
}
