/**
 * All that the page asks of the numbers, of one head or of several: a mean, or one less another.
 * Everything that is shown of a head is a sum of weights, so an answer about several heads is the
 * sum of the heads' own answers. A host answers for one head: this file, a server, or a notebook.
 */

import type { Place } from "../maths/blocks";
import type { Part } from "../maths/row_steps";
import type { Answers, Question, SegmentsQuestion } from "../protocol/questions";
import type { Head, LayerInfo } from "../protocol/recording";

export type Term = Head & { factor: number };

/** One head, or a sum of several; hidden: sinks are set aside. */
export type Which = Head & { hidden: boolean; terms?: Term[] };

/** @returns what is added up */
export function termsOf({ layer, head, terms }: Head & Pick<Which, "terms">): Term[] {
  return terms ?? [{ layer, head, factor: 1 }];
}

export interface Host {
  ask: <Q extends Question>(question: Q, signal: AbortSignal) => Promise<Answers[Q["kind"]]>;
}

export type Parts = Pick<SegmentsQuestion, "queries" | "keys">;

const NEVER = new AbortController().signal; // of questions that nobody gives up

export class Source {
  open = 0; // questions of what is seen, whose answers are on their way

  constructor(
    readonly layers: LayerInfo[],
    private readonly host: Host,
  ) {}

  private async ask<Q extends Question>(question: Q, signal: AbortSignal): Promise<Answers[Q["kind"]]> {
    this.open++;
    return this.host.ask(question, signal).finally(() => this.open--);
  }

  /** The answers of every head. */
  private each<Q extends Question>(which: Which, more: Omit<Q, "layer" | "head" | "hidden">, signal: AbortSignal) {
    const { hidden } = which;
    const questions = termsOf(which).map(({ layer, head }) => ({ layer, head, hidden, ...more }) as unknown as Q);
    return Promise.all(questions.map((question) => this.ask(question, signal)));
  }

  /** The weights of one query, and which keys it may attend to. */
  async row(which: Which, query: number, signal: AbortSignal = NEVER) {
    const rows = await this.each<Question & { kind: "row" }>(which, { kind: "row", query }, signal);
    const mask = new Uint8Array(rows[0].mask.length);
    for (const row of rows) row.mask.forEach((may, key) => (mask[key] |= may));
    return { values: added(which, rows), mask };
  }

  /** What every query gives to one key. */
  async column(which: Which, key: number, signal: AbortSignal = NEVER): Promise<Float32Array> {
    const columns = await this.each<Question & { kind: "column" }>(which, { kind: "column", key }, signal);
    return added(which, columns);
  }

  /**
   * A tile of the matrix; many may be asked at once.
   * @param signal ends the work on it
   */
  async tile(which: Which, { level, row, column }: Place, signal: AbortSignal = NEVER) {
    const place = { kind: "tile", level, row, column } as const;
    const tiles = await this.each<Question & { kind: "tile" }>(which, place, signal);
    const exact = tiles.every((tile) => tile.exact);
    const sampled = exact ? tiles[0].sampled : Math.max(...tiles.map((tile) => tile.sampled ?? 1));
    return { ...tiles[0], values: added(which, tiles), exact, sampled };
  }

  /** How far the exact numbers of large heads are; a live host goes on with them meanwhile. */
  async progress(which: Which) {
    const all = [];
    for (const { layer, head } of termsOf(which))
      all.push(await this.host.ask({ kind: "progress", layer, head, hidden: which.hidden }, NEVER));
    const done = all.reduce((sum, one) => sum + one.done / all.length, 0);
    const isKnown = all.every(({ seconds }) => seconds !== null);
    return { done, seconds: isKnown ? all.reduce((sum, one) => sum + Number(one.seconds), 0) : null };
  }

  /** How one query comes to its weights, for some of its keys. */
  steps({ layer, head, hidden }: Which, query: number, keys: Part, signal: AbortSignal = NEVER) {
    return this.ask({ kind: "steps", layer, head, hidden, query, ...keys }, signal);
  }

  /**
   * What parts of the text give to each other.
   * @returns (query parts, key parts)
   */
  async segments(which: Which, parts: Parts, signal: AbortSignal = NEVER): Promise<Float32Array> {
    const { hidden } = which;
    const shares = [];
    // One after the other: each may wait for a pass over its head.
    for (const { layer, head } of termsOf(which))
      shares.push(await this.ask({ kind: "segments", layer, head, hidden, ...parts }, signal));
    return added(which, shares);
  }

  /** Of a live host. */
  overview(layer: number) {
    return this.host.ask({ kind: "overview", layer }, NEVER);
  }

  /** Of a live host. */
  heads() {
    return this.host.ask({ kind: "heads" }, NEVER);
  }
}

function added(which: Which, answers: { values: Float32Array }[]): Float32Array {
  const sum = new Float64Array(answers[0].values.length);
  termsOf(which).forEach(({ factor }, i) => {
    const { values } = answers[i];
    for (let at = 0; at < sum.length; at++) sum[at] += factor * values[at];
  });
  return Float32Array.from(sum);
}
