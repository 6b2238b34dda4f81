/** Who waits for which answer: questions are sent away with a number, and answers come back with it. */

export class Waiting {
  /**
   * @param {(message: any) => void} post sends a question to the other side
   * @param {object} forget what tells the other side, with a number, that nobody waits any more
   */
  constructor(post, forget) {
    this.post = post;
    this.forget = forget;
    /** @type {Map<number, (answer: any) => void>} */ this.waiting = new Map();
    this.id = 0;
  }

  /** @param {object} question @param {AbortSignal} signal @returns {Promise<any>} */
  ask(question, signal) {
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

  /** @param {number} id @param {any} answer */
  tell(id, answer) {
    this.waiting.get(id)?.(answer);
  }
}
