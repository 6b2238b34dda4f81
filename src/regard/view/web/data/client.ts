/**
 * The host of a page that is a file: starts a worker that runs this page's own script, hands it a
 * layer the first time it is needed, and turns answers into promises.
 */

import type { Answers, Question } from "../protocol/questions";
import { layerName, type LayerInfo } from "../protocol/recording";
import { engine, type Message } from "./engine";
import type { Host } from "./source";
import { Damaged } from "./unpack";
import { Waiting, type Reply } from "./waiting";

export class Client implements Host {
  private isWhole = new Map<number, boolean>(); // false: a page took the numbers of the layer out before it was saved
  private post = connect((reply) => this.waiting.settle(reply));
  private waiting = new Waiting(this.post);

  constructor(
    private readonly layers: LayerInfo[],
    private readonly sinksOf: (layer: number) => number[],
  ) {}

  async ask<Q extends Question>(question: Q, signal: AbortSignal): Promise<Answers[Q["kind"]]> {
    if (!("layer" in question)) throw new Error("a file knows all heads from the start.");
    const { layer } = question;
    const name = layerName(this.layers, layer);
    this.load(layer);
    if (!this.isWhole.get(layer))
      throw new Damaged(
        `Layer ${name} is not in this copy: a browser saved it from an open page. Open the file itself to see the whole.`,
      );
    return this.waiting.ask(question, signal).catch((error) => {
      if (signal.aborted) throw error;
      const said = `Layer ${name} of this file is damaged: ${error.message} Write the file again to see the whole.`;
      throw new Damaged(said);
    });
  }

  /** Hands over a layer the first time it is needed. */
  private load(layer: number) {
    if (this.isWhole.has(layer)) return;
    const info = this.layers[layer];
    const start = `layer-${layer}-`;
    const blocks = [...document.querySelectorAll(`script[id^="${start}"]`)];
    const isWhole = blocks.every((block) => block.hasChildNodes());
    this.isWhole.set(layer, isWhole);
    if (!isWhole) return;
    const raw = Object.fromEntries(blocks.map((block) => [block.id.slice(start.length), taken(block)]));
    this.post({ id: 0, kind: "load", layer, info, raw, sinks: this.sinksOf(layer) });
  }
}

/**
 * The text of an element, which then has none: a layer is too large to be there twice.
 * @returns ASCII
 */
function taken(element: Element): Uint8Array {
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
function connect(onAnswer: (reply: Reply) => void): (message: Message) => void {
  const source = document.getElementById("code")?.textContent ?? "";
  const here = engine(onAnswer);
  const early: Message[] = []; // until it is known who answers
  let post = (message: Message): void => void early.push(message);
  const postTo = (one: typeof post) => {
    post = one;
    early.splice(0).forEach(one);
  };
  try {
    const worker = new Worker(URL.createObjectURL(new Blob([source], { type: "text/javascript" })));
    worker.onmessage = () => {
      worker.onmessage = (event) => onAnswer(event.data);
      postTo((message) => {
        // Handed over, not copied.
        const numbers = message.kind === "load" ? Object.values(message.raw).map(({ buffer }) => buffer) : [];
        worker.postMessage(message, numbers as ArrayBuffer[]);
      });
    };
    worker.onerror = () => postTo(here);
  } catch {
    postTo(here);
  }
  return (message) => post(message);
}
