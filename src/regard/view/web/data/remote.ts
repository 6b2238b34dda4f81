/**
 * A host for a page that a server sent: every question is a request to that server and to no other;
 * `http_server.py` documents them.
 */

import type { Answers, Question } from "../protocol/questions";
import type { Recording } from "../protocol/recording";
import type { Host } from "./source";
import { Waiting } from "./waiting";

const GONE = "The server does not answer any more. Start regard serve again, and open the address that it prints.";

export class Remote implements Host {
  private headers: Record<string, string> = this.run === undefined ? {} : { "X-Run": String(this.run) };

  /** @param run of the model, where the text can be edited: no other run may answer */
  constructor(private readonly run?: number) {}

  async ask<Q extends Question>(question: Q, signal: AbortSignal): Promise<Answers[Q["kind"]]> {
    return (await this.answer(question, signal)) as Answers[Q["kind"]];
  }

  private async answer(question: Question, signal: AbortSignal): Promise<Answers[Question["kind"]]> {
    const { kind, ...parameters } = question;
    const text = (value: unknown) => (typeof value === "string" ? value : JSON.stringify(value));
    const texts = Object.entries(parameters).map(([name, value]) => [name, text(value)]);
    const answer = await fetched(`api/${kind}?${new URLSearchParams(texts)}`, { signal, headers: this.headers });
    if (answer.headers.get("Content-Type")?.startsWith("application/json")) return answer.json();
    const bytes = await answer.arrayBuffer();
    const header = (name: string) => Number(answer.headers.get(name) ?? 0);
    if (kind === "row") {
      const keys = bytes.byteLength / 5; // four bytes of a weight, one of the mask
      return { values: new Float32Array(bytes, 0, keys), mask: new Uint8Array(bytes, 4 * keys) };
    }
    const values = new Float32Array(bytes);
    if (kind !== "tile") return { values };
    const [height, width, exact] = [header("X-Height"), header("X-Width"), header("X-Exact") === 1];
    return { values, height, width, exact, sampled: header("X-Sampled") || undefined };
  }
}

/** What answers for the heads of a recording that is not in the file. */
export function hostOf({ run }: Recording): Host {
  // A notebook's frame has no address of its own.
  return location.protocol === "about:" ? framed() : new Remote(run);
}

/** A host for a page in a frame: whoever frames it is asked by messages. `widget.ts` is the other side. */
export function framed(): Host {
  // To anyone: the page does not know where it stands, and asks for nothing secret.
  const host = new Waiting((message) => window.parent.postMessage({ regard: message }, "*"));
  window.addEventListener("message", ({ source, data }) => {
    if (source === window.parent) host.settle(data);
  });
  return host;
}

/** Asks the page's own server. */
export async function fetched(address: string, how: RequestInit): Promise<Response> {
  const answer = await fetch(address, how).catch((error) => {
    // What fetch rejects with where there is no answer at all.
    throw error instanceof TypeError ? new Error(GONE) : error;
  });
  if (!answer.ok) throw new Error(await answer.text());
  return answer;
}
