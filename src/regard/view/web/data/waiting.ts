/** Who waits for which answer. */

/** Questions are sent away with a number, and answers come back with it. */
export class Waiting<Sent, Got> {
  private waiting = new Map<number, (answer: Got) => void>();
  private id = 0;

  /**
   * @param post sends a question to the other side
   * @param forget what is sent when nobody waits for an answer any more
   */
  constructor(
    private readonly post: (message: Sent) => void,
    private readonly forget: (id: number) => Sent,
  ) {}

  ask(question: (id: number) => Sent, signal: AbortSignal): Promise<Got> {
    const id = ++this.id;
    return new Promise((resolve, reject) => {
      if (signal.aborted) return reject(signal.reason);
      const abort = () => {
        if (this.waiting.delete(id)) this.post(this.forget(id));
        reject(signal.reason);
      };
      signal.addEventListener("abort", abort, { once: true });
      this.waiting.set(id, (answer) => {
        this.waiting.delete(id);
        signal.removeEventListener("abort", abort);
        resolve(answer);
      });
      this.post(question(id));
    });
  }

  settle(id: number, answer: Got) {
    this.waiting.get(id)?.(answer);
  }
}

/** One question at a time: a newer one takes the place of an older one, whose answer nobody gets. */
export class Latest {
  isWaiting = false;
  private controller = new AbortController();

  async ask<T>(
    question: (signal: AbortSignal) => Promise<T>,
    onAnswer: (answer: T) => void,
    onError: (error: Error) => void,
  ) {
    this.drop();
    const { signal } = this.controller;
    this.isWaiting = true;
    try {
      const answer = await question(signal);
      if (signal.aborted) return;
      this.isWaiting = false;
      onAnswer(answer);
    } catch (error) {
      if (signal.aborted) return;
      this.isWaiting = false;
      onError(error as Error);
    }
  }

  /** Nobody waits any more. */
  drop() {
    this.controller.abort();
    this.controller = new AbortController();
    this.isWaiting = false;
  }
}
