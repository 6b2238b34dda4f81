/**
 * Answers questions about heads in slices of a few milliseconds, so that it can be interrupted and
 * can run in a worker or, where there is none, beside the page itself.
 */

import { addRow, extent, middle, type Extent } from "../maths/blocks";
import { rowSteps } from "../maths/row_steps";
import { allowed, maskOf, rowWeights, weightsOf, type Layer, type Which } from "../maths/softmax";
import type { Question, TileAnswer } from "../protocol/questions";
import type { LayerInfo } from "../protocol/recording";
import { blockSize, isStored, Pass } from "./pass";
import { readLayer } from "./unpack";
import type { Message as Asked, Reply } from "./waiting";

type Load = { kind: "load"; layer: number; info: LayerInfo; raw: Record<string, Uint8Array>; sinks: number[] };

type Of<Kind extends Question["kind"]> = Question & { kind: Kind };
type Visitor = (first: number, end: number, visit: (query: number) => void) => Promise<boolean>;

export type Message = Asked | ({ id: number } & Load);

const SLICE = 8; // milliseconds of work between two looks at what else was asked
const PASSES = 12; // that are kept, 16 MB each
const DIRECT = 3e9; // products: a second or three

/**
 * @param direct products of a tile that is computed at once; a larger one of blocks that
 * a pass sums up is a sample until it is through
 */
export function engine(answer: (reply: Reply) => void, direct = DIRECT): (message: Message) => Promise<void> {
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

  /** @returns visits rows; false once nobody waits */
  function visitor({ id }: { id: number }): Visitor {
    return async (first, end, visit) => {
      for (let query = first; query < end; query++) {
        visit(query);
        await turn();
        if (!wanted.has(id)) return false;
      }
      return true;
    };
  }

  /** @returns null: nobody waits */
  async function answerTo(question: { id: number } & Question, layer: Layer) {
    const rows = visitor(question);
    if (layer.levels && (question.kind === "steps" || question.kind === "segments"))
      throw new Error("not every weight of this layer is in this file.");
    switch (question.kind) {
      case "row":
        return rowAnswer(question, layer);
      case "column":
        return columnAnswer(question, layer, rows);
      case "tile":
        return tile(question, layer);
      case "steps":
        return rowSteps(layer, question, question.query, question);
      case "segments":
        return shares(layer, question, question, rows);
      case "progress":
        return passes.get(passName(question))?.progress() ?? { done: 1, seconds: 0 };
      default:
        throw new Error("a file knows this from the start.");
    }
  }

  async function tile(question: { id: number } & Of<"tile">, layer: Layer): Promise<TileAnswer | null> {
    const part = extent(question, layer.info);
    const { height, width, size } = part;
    const pass = passes.get(passName(question)) ?? (isStored(layer, question) ? begin(question, layer) : null);
    if (pass?.has(part)) return { values: pass.tile(part), height, width, exact: true };
    const exact = size < blockSize(layer, question) || products(layer, question, part) <= direct;
    if (!exact) begin(question, layer);
    const values = await tileValues(question, layer, part, exact, visitor(question));
    return values && { values, height, width, exact, ...(exact ? {} : { sampled: size }) };
  }

  /** A pass begins, or goes on before all others. */
  function begin(question: OfHead, layer: Layer) {
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

  return async (message) => {
    const { id } = message;
    if (message.kind === "forget") return void wanted.delete(id);
    if (message.kind === "load") {
      const reading = readLayer(message.info, message.raw, message.sinks);
      reading.catch(() => {}); // whoever asks about the layer is told
      return void layers.set(message.layer, reading);
    }
    wanted.add(id);
    if (message.kind !== "segments") urgent.add(id);
    try {
      const layer = "layer" in message && (await layers.get(message.layer));
      if (!layer || !wanted.has(id)) return;
      const found = await answerTo(message, layer);
      if (found && wanted.has(id)) answer({ id, ...found });
    } catch (error) {
      answer({ id, error: error instanceof Error ? error.message : String(error) });
    } finally {
      wanted.delete(id);
      urgent.delete(id);
    }
  };
}

type OfHead = { layer: number } & Which;

function passName({ layer, head, hidden }: OfHead): string {
  return `${layer} ${head} ${hidden}`;
}

function rowAnswer(question: Of<"row">, layer: Layer) {
  const row = new Float64Array(layer.info.kv_len);
  rowWeights(layer, question, question.query, row);
  return { values: Float32Array.from(row), mask: maskOf(layer, question, question.query, row) };
}

async function columnAnswer(question: Of<"column">, layer: Layer, rows: Visitor) {
  const { q_len, kv_len } = layer.info;
  const row = new Float64Array(kv_len);
  const values = new Float32Array(q_len);
  const isThere = await rows(0, q_len, (query) => {
    weightsOf(layer, question, query, question.key, question.key + 1, row);
    values[query] = row[question.key];
  });
  return isThere ? { values } : null;
}

/**
 * What parts of the text give to each other, in one head, as `seen.segments` of the library: for a
 * part of the queries the mean of its rows, added up over each part of the keys.
 * @returns (query parts, key parts); null: nobody waits
 */
async function shares(layer: Layer, which: Which, { queries, keys }: Of<"segments">, rows: Visitor) {
  const row = new Float64Array(layer.info.kv_len);
  const values = new Float32Array(queries.length * keys.length);
  for (const [place, [first, end]] of queries.entries()) {
    const sums = new Float64Array(keys.length);
    let counted = 0;
    const isThere = await rows(first, end, (query) => {
      rowWeights(layer, which, query, row);
      keys.forEach(([from, to], part) => {
        for (let key = from; key < to; key++) sums[part] += row[key];
      });
      // Without sinks, a query that attends to nothing else says nothing.
      if (!which.hidden || row.some((weight) => weight > 0)) counted++;
    });
    if (!isThere) return null;
    sums.forEach((sum, part) => (values[place * keys.length + part] = sum / Math.max(1, counted)));
  }
  return { values };
}

/** How much work an exact tile is. */
function products(layer: Layer, question: Which, { first, end, from, to }: Extent) {
  let numbers = 0;
  for (let query = first; query < end; query++) {
    const [start, stop] = allowed(layer, question.head, query);
    numbers += Math.max(0, Math.min(stop, to) - Math.max(start, from));
  }
  return numbers * Math.max(1, layer.info.head_dim);
}

/** @param exact all queries; else the middle one of each block */
async function tileValues(question: Which, layer: Layer, part: Extent, exact: boolean, rows: Visitor) {
  const { size, first, end, from, to, height, width } = part;
  const row = new Float64Array(layer.info.kv_len);
  const values = new Float32Array(height * width);
  for (let cell = 0; cell < height; cell++) {
    const start = exact ? first + cell * size : middle(cell, part);
    const stop = exact ? Math.min(end, start + size) : start + 1;
    const isThere = await rows(start, stop, (query) => {
      weightsOf(layer, question, query, from, to, row);
      addRow(row, from, to, size, values, cell * width, stop - start);
    });
    if (!isThere) return null;
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
