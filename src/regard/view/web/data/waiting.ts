/** Who waits for which answer: questions are sent away with a number, and answers come back with it. */

export class Waiting {
  waiting = new Map<number, (answer: any) => void>();
  id = 0;

  /**
   * @param post sends a question to the other side
   * @param forget says to the other side, with a number, that nobody waits any more
   */
  constructor(
    readonly post: (message: any) => void,
    readonly forget: object,
  ) {}

  ask(question: object, signal: AbortSignal): Promise<any> {
    const id = ++this.id;
    return new Promise((resolve, reject) => {
      if (signal.aborted) return reject(signal.reason);
      const abort = () => {
        if (this.waiting.delete(id)) this.post({ ...this.forget, id });
        reject(signal.reason);
      };
      signal.addEventListener("abort", abort, { once: true });
      this.waiting.set(id, (answer) => {
        this.waiting.delete(id);
        signal.removeEventListener("abort", abort);
        resolve(answer);
      });
      this.post({ ...question, id });
    });
  }

  settle(id: number, answer: any) {
    this.waiting.get(id)?.(answer);
  }
}
