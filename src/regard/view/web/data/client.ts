/**
 * The host of a page that is a file: starts a worker that runs this page's own script, hands it a
 * layer the first time it is needed, and turns answers into promises.
 */

import { engine, type Answer } from "./engine";
import { Damaged, layerName, type LayerInfo } from "./payload";
import type { Host, Question } from "./source";
import { Waiting } from "./waiting";

export class Client implements Host {
  private loaded = new Set<number>();
  private taken = new Set<number>(); // layers whose numbers a page took out before it was saved
  private post: (question: any) => void;
  private waiting: Waiting;

  constructor(
    private readonly layers: LayerInfo[],
    private readonly sinksOf: (layer: number) => number[],
  ) {
    this.post = connect((answer) => this.waiting.settle(answer.id, answer));
    this.waiting = new Waiting(this.post, { kind: "drop" });
  }

  async ask(question: Question, signal: AbortSignal) {
    const { layer } = question;
    const name = layerName(this.layers, layer);
    this.load(layer);
    if (this.taken.has(layer))
      throw new Damaged(
        `Layer ${name} is not in this copy: a browser saved it from an open page. Open the file itself to see the whole.`,
      );
    const answer = await this.waiting.ask(question, signal);
    if (answer.damage === undefined) return answer;
    throw new Damaged(`Layer ${name} of this file is damaged: ${answer.damage} Write the file again to see the whole.`);
  }

  /** Hands over a layer the first time it is needed. */
  private load(layer: number) {
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
 * @returns ASCII
 */
function taken(element: Element): Uint8Array<ArrayBuffer> {
  // A long text has many nodes; together they would be one more copy.
  const nodes = [...element.childNodes] as Text[];
  const bytes = new Uint8Array(nodes.reduce((length, { data }) => length + data.length, 0));
  const letters = new TextEncoder();
  let at = 0;
  for (const { data } of nodes) at += letters.encodeInto(data, bytes.subarray(at)).written;
  element.replaceChildren();
  return bytes;
}

/** A worker; where the page's host forbids it, the same engine beside the page: it works in slices. */
function connect(onAnswer: (answer: Answer) => void): (question: any) => void {
  const source = document.getElementById("code")?.textContent ?? "";
  const here = engine(onAnswer);
  const early: any[] = []; // until it is known who answers
  let post = (question: any): void => void early.push(question);
  const postTo = (one: typeof post) => {
    post = one;
    early.splice(0).forEach(one);
  };
  try {
    const worker = new Worker(URL.createObjectURL(new Blob([source], { type: "text/javascript" })));
    worker.onmessage = () => {
      worker.onmessage = (event) => onAnswer(event.data);
      postTo((question) => {
        // Handed over, not copied.
        const numbers = Object.values<Uint8Array<ArrayBuffer>>(question.raw ?? {}).map(({ buffer }) => buffer);
        worker.postMessage(question, numbers);
      });
    };
    worker.onerror = () => postTo(here);
  } catch {
    postTo(here);
  }
  return (question) => post(question);
}
