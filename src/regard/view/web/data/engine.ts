/**
 * Answers questions about heads in slices of a few milliseconds, so that it can be interrupted and
 * can run in a worker or, where there is none, beside the page itself.
 */

import { addRow, extent, middle, type Extent } from "../maths/blocks";
import { rowSteps, type Steps } from "../maths/row_steps";
import {
  allowed,
  highestOf,
  maskOf,
  readLayer,
  rowOf,
  rowWeights,
  weightsOf,
  type Layer,
  type Which,
} from "../maths/softmax";
import { blockAnswer } from "./block_answers";
import { blockSize, isStored, Pass } from "./pass";
import type { LayerInfo } from "./payload";

/** First token, and the one past the last. */
export type Span = [number, number];

/** Of a text. */
export type Parts = { queries: Span[]; keys: Span[] };

export interface Question extends Parts {
  id: number;
  kind: "load" | "drop" | "row" | "column" | "tile" | "progress" | "steps" | "segments";
  layer: number;
  head: number;
  hidden: boolean; // sinks set aside
  query: number; // of a row or of its steps
  key: number; // of a column
  level: number; // of a tile
  row: number; // of a tile
  column: number; // of a tile
  by_row: boolean; // each row divided by its highest weight
  by: "weight" | "position"; // with "steps", as `start` and `count`; see row_steps.ts
  start: number;
  count: number;
  info: LayerInfo; // with "load"
  raw: Record<string, Uint8Array<ArrayBuffer>>; // numbers in base64, with "load"
  sinks: number[]; // with "load"
}

export type Answer = Partial<Steps> & Found;

export interface Found {
  id: number;
  values?: Float32Array;
  mask?: Uint8Array;
  height?: number; // cells of a tile
  width?: number;
  exact?: boolean; // a tile that is no sample
  sampled?: number; // one query in so many was asked
  done?: number; // of a pass, from 0 to 1
  seconds?: number | null; // left of a pass
  damage?: string;
}

const SLICE = 8; // milliseconds of work between two looks at what else was asked
const PASSES = 12; // that are kept, 16 MB each
const DIRECT = 3e9; // products: a second or three

/**
 * @param direct products of a tile that is computed at once; a larger one of blocks that
 * a pass sums up is a sample until it is through
 */
export function engine(answer: (answer: Answer) => void, direct = DIRECT): (question: Question) => Promise<void> {
  const layers = new Map<number, Promise<Layer>>();
  const wanted = new Set<number>();
  const urgent = new Set<number>(); // those that a pass waits for
  const passes = new Map<string, Pass>();
  let sliceStart = 0;
  let passing = false;

  async function turn(): Promise<void> {
    if (performance.now() - sliceStart < SLICE) return;
    await pause();
    sliceStart = performance.now();
  }

  /** @returns still wanted? */
  async function goesOn({ id }: Question): Promise<boolean> {
    await turn();
    return wanted.has(id);
  }

  const answers: Record<string, (question: Question, layer: Layer) => Promise<Omit<Answer, "id"> | null>> = {
    row: async (question, layer) => rowAnswer(question, layer),
    column: (question, layer) => columnAnswer(question, layer, () => goesOn(question)),
    tile: (question, layer) => tile(question, layer),
    steps: async (question, layer) => rowSteps(layer, question, question.query, question),
    segments: (question, layer) => shares(layer, question, question, () => goesOn(question)),
    progress: async (question) => {
      return passes.get(passName(question))?.progress() ?? { done: 1, seconds: 0 };
    },
  };

  async function tile(question: Question, layer: Layer) {
    const part = extent(question, layer.info);
    const { height, width, size } = part;
    const pass = passes.get(passName(question)) ?? (isStored(layer, question) ? begin(question, layer) : null);
    if (pass?.has(part)) return { values: pass.tile(part), height, width, exact: true };
    const exact = size < blockSize(layer, question) || products(layer, question, part) <= direct;
    if (!exact) begin(question, layer);
    const values = await tileValues(question, layer, part, exact, () => goesOn(question));
    return values && { values, height, width, exact, ...(exact ? {} : { sampled: size }) };
  }

  /** A pass begins, or goes on before all others. */
  function begin(question: Question, layer: Layer) {
    const name = passName(question);
    const pass = passes.get(name) ?? new Pass(layer, question);
    passes.delete(name);
    passes.set(name, pass);
    for (const oldest of [...passes.keys()].slice(0, -PASSES)) passes.delete(oldest);
    if (!passing) void runPasses();
    return pass;
  }

  /** Goes on with the newest pass that is not through, while nothing else is asked. */
  async function runPasses() {
    passing = true;
    for (let pass = next(); pass; pass = next()) {
      pass.step();
      await turn();
      while (urgent.size > 0) await pause();
    }
    passing = false;
  }

  function next(): Pass | undefined {
    return [...passes.values()].findLast((pass) => pass.done < pass.layer.info.q_len);
  }

  return async (question) => {
    const { id, kind } = question;
    if (kind === "drop") return void wanted.delete(id);
    wanted.add(id);
    if (kind !== "segments") urgent.add(id);
    try {
      if (kind === "load") layers.set(question.layer, readLayer(question.info, question.raw, question.sinks));
      const layer = await layers.get(question.layer);
      if (!layer || kind === "load" || !wanted.has(id)) return;
      const found = layer.levels ? blockAnswer(layer, question) : await answers[kind](question, layer);
      if (found && wanted.has(id)) answer({ id, ...found });
    } catch (error) {
      answer({ id, damage: error instanceof Error ? error.message : String(error) });
    } finally {
      wanted.delete(id);
      urgent.delete(id);
    }
  };
}

function passName({ layer, head, hidden, by_row }: Question): string {
  return `${layer} ${head} ${hidden} ${by_row}`;
}

function rowAnswer(question: Question, layer: Layer) {
  const row = new Float64Array(layer.info.kv_len);
  rowWeights(layer, question, question.query, row);
  return { values: Float32Array.from(row), mask: maskOf(layer, question, question.query, row) };
}

async function columnAnswer(question: Question, layer: Layer, goesOn: () => Promise<boolean>) {
  const { q_len, kv_len } = layer.info;
  const row = new Float64Array(kv_len);
  const values = new Float32Array(q_len);
  for (let query = 0; query < q_len; query++) {
    weightsOf(layer, question, query, question.key, question.key + 1, row);
    values[query] = row[question.key];
    if (query % 16 === 0 && !(await goesOn())) return null;
  }
  return { values };
}

/**
 * What parts of the text give to each other, in one head, as `seen.segments` of the library: for a
 * part of the queries the mean of its rows, added up over each part of the keys.
 * @returns (query parts, key parts); null: nobody waits
 */
async function shares(
  layer: Layer,
  which: Which,
  { queries, keys }: Parts,
  goesOn: () => Promise<boolean>,
): Promise<{ values: Float32Array } | null> {
  const row = new Float64Array(layer.info.kv_len);
  const values = new Float32Array(queries.length * keys.length);
  for (const [place, [first, end]] of queries.entries()) {
    const sums = new Float64Array(keys.length);
    let counted = 0;
    for (let query = first; query < end; query++) {
      rowWeights(layer, which, query, row);
      let whole = 0;
      keys.forEach(([from, to], part) => {
        let sum = 0;
        for (let key = from; key < to; key++) sum += row[key];
        sums[part] += sum;
        whole += sum;
      });
      // Without sinks, a query that attends to nothing else says nothing.
      if (!which.hidden || whole > 0 || row.some((weight) => weight > 0)) counted++;
      if (!(await goesOn())) return null;
    }
    sums.forEach((sum, part) => (values[place * keys.length + part] = sum / Math.max(1, counted)));
  }
  return { values };
}

/** How much work an exact tile is. */
function products(layer: Layer, question: Question, { first, end, from, to }: Extent) {
  let numbers = 0;
  for (let query = first; query < end; query++) {
    const [start, stop] = allowed(layer, question.head, query);
    numbers += Math.max(0, Math.min(stop, to) - Math.max(start, from));
  }
  return numbers * Math.max(1, layer.info.head_dim);
}

/** @param exact all queries; else the middle one of each block */
async function tileValues(
  question: Question,
  layer: Layer,
  part: Extent,
  exact: boolean,
  goesOn: () => Promise<boolean>,
): Promise<Float32Array | null> {
  const { size, first, end, from, to, height, width } = part;
  const row = new Float64Array(layer.info.kv_len);
  const values = new Float32Array(height * width);
  for (let cell = 0; cell < height; cell++) {
    const start = exact ? first + cell * size : middle(cell, part);
    const stop = exact ? Math.min(end, start + size) : start + 1;
    for (let query = start; query < stop; query++) {
      weightsOf(layer, question, query, from, to, row);
      const highest = question.by_row ? highestOf(rowOf(layer, question, query)) || 1 : 1;
      addRow(row, from, to, size, values, cell * width, highest * (stop - start));
      if (!(await goesOn())) return null;
    }
  }
  return values;
}

/** @returns lets everything else that waits go first */
function pause(): Promise<void> {
  return new Promise((resolve) => {
    const channel = new MessageChannel();
    channel.port1.onmessage = () => {
      channel.port1.close();
      resolve();
    };
    channel.port2.postMessage(null);
  });
}
