/**
 * Who waits for which answer: a source that sends questions away and gets answers back later. Without
 * a signal, a newer question of the same kind takes the place of an older one, which is never answered.
 *
 * @template Answer
 */
export class Waiting {
  /**
   * @param {(id: number) => void} forget tells the other side that nobody waits any more
   * @param {(answer: Answer) => Error | null} troubleOf why an answer is none
   */
  constructor(forget, troubleOf) {
    this.forget = forget;
    this.troubleOf = troubleOf;
    /** @type {Map<number, (answer: Answer) => void>} */ this.waiting = new Map();
    /** @type {Map<string, number>} */ this.newest = new Map();
    this.id = 0;
  }

  /**
   * @param {string} kind @param {(id: number) => void} send @param {AbortSignal} [signal]
   * @returns {Promise<Answer>}
   */
  ask(kind, send, signal) {
    const id = ++this.id;
    if (!signal) {
      this.drop(this.newest.get(kind) ?? 0);
      this.newest.set(kind, id);
    }
    return new Promise((resolve, reject) => {
      if (signal?.aborted) return reject(signal.reason);
      const abort = () => {
        this.drop(id);
        reject(signal?.reason);
      };
      signal?.addEventListener("abort", abort, { once: true });
      this.waiting.set(id, (answer) => {
        this.waiting.delete(id);
        signal?.removeEventListener("abort", abort);
        const trouble = this.troubleOf(answer);
        if (trouble) reject(trouble);
        else resolve(answer);
      });
      send(id);
    });
  }

  /** @param {number} id @param {Answer} answer */
  tell(id, answer) {
    this.waiting.get(id)?.(answer);
  }

  /** @param {number} id a question that nobody waits for any more */
  drop(id) {
    if (this.waiting.delete(id)) this.forget(id);
  }
}
