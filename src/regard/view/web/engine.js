/**
 * Answers questions about heads in slices of a few milliseconds, so that it can be interrupted and
 * can run in a worker or, where there is none, beside the page itself.
 *
 * @typedef {import("./payload.js").LayerInfo} LayerInfo
 * @typedef {import("./softmax.js").Layer} Layer
 *
 * @typedef {object} Question
 * @property {number} id
 * @property {"load" | "drop" | "row" | "column" | "tile" | "progress" | "steps" | "segments"} kind
 * @property {number} layer
 * @property {number} head
 * @property {boolean} hidden sinks set aside
 * @property {number} query of a row or of its steps
 * @property {number} key of a column
 * @property {number} level of a tile
 * @property {number} row of a tile
 * @property {number} column of a tile
 * @property {boolean} by_row each row divided by its highest weight
 * @property {"weight" | "position"} by with "steps", as `start` and `count`; see row_steps.js
 * @property {number} start
 * @property {number} count
 * @property {import("./shares.js").Span[]} queries parts of the text, with "segments"
 * @property {import("./shares.js").Span[]} keys
 * @property {LayerInfo} info with "load"
 * @property {Record<string, Uint8Array<ArrayBuffer>>} raw numbers in base64, with "load"
 * @property {number[]} sinks with "load"
 *
 * @typedef {Partial<import("./row_steps.js").Steps> & Found} Answer
 *
 * @typedef {object} Found
 * @property {number} id
 * @property {Float32Array} [values]
 * @property {Uint8Array} [mask]
 * @property {import("./held.js").Rest} [rest] with a row of which not every weight is known
 * @property {number} [height] cells of a tile
 * @property {number} [width]
 * @property {boolean} [exact] a tile that is no sample
 * @property {number} [sampled] one query in so many was asked
 * @property {number} [done] of a pass, from 0 to 1
 * @property {number | null} [seconds] left of a pass
 * @property {string} [damage]
 */

import { addRow, extent, middle } from "./blocks.js";
import { heldAnswer } from "./held_answers.js";
import { blockSize, isStored, Pass } from "./pass.js";
import { rowSteps } from "./row_steps.js";
import { shares } from "./shares.js";
import { allowed, highestOf, isMaskKnown, readLayer, rowOf, rowWeights, weightsOf } from "./softmax.js";

const SLICE = 8; // milliseconds of work between two looks at what else was asked
const PASSES = 12; // that are kept, 16 MB each
const DIRECT = 3e9; // products: a second or three

/**
 * @param {(answer: Answer) => void} answer
 * @param {number} [direct] products of a tile that is computed at once; a larger one of blocks that
 *   a pass sums up is a sample until it is through
 * @returns {(question: Question) => Promise<void>}
 */
export function engine(answer, direct = DIRECT) {
  /** @type {Map<number, Promise<Layer>>} */ const layers = new Map();
  /** @type {Set<number>} */ const wanted = new Set();
  /** @type {Set<number>} those that a pass waits for */ const urgent = new Set();
  /** @type {Map<string, Pass>} */ const passes = new Map();
  let sliceStart = 0;
  let passing = false;

  /** @returns {Promise<void>} */
  async function turn() {
    if (performance.now() - sliceStart < SLICE) return;
    await pause();
    sliceStart = performance.now();
  }

  /** @param {Question} question @returns {Promise<boolean>} still wanted? */
  async function goesOn({ id }) {
    await turn();
    return wanted.has(id);
  }

  /** @type {Record<string, (question: Question, layer: Layer) => Promise<Omit<Answer, "id"> | null>>} */
  const answers = {
    row: async (question, layer) => rowAnswer(question, layer),
    column: (question, layer) => columnAnswer(question, layer, () => goesOn(question)),
    tile: (question, layer) => tile(question, layer),
    steps: async (question, layer) => rowSteps(layer, question, question.query, question),
    segments: (question, layer) => shares(layer, question, question, () => goesOn(question)),
    progress: async (question) => {
      return passes.get(passName(question))?.progress() ?? { done: 1, seconds: 0 };
    },
  };

  /** @param {Question} question @param {Layer} layer */
  async function tile(question, layer) {
    const part = extent(question, layer.info);
    const { height, width, size } = part;
    const pass = passes.get(passName(question)) ?? (isStored(layer, question) ? begin(question, layer) : null);
    if (pass?.has(part)) return { values: pass.tile(part), height, width, exact: true };
    const exact = size < blockSize(layer, question) || products(layer, question, part) <= direct;
    if (!exact) begin(question, layer);
    const values = await tileValues(question, layer, part, exact, () => goesOn(question));
    return values && { values, height, width, exact, ...(exact ? {} : { sampled: size }) };
  }

  /** A pass begins, or goes on before all others. @param {Question} question @param {Layer} layer */
  function begin(question, layer) {
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

  /** @returns {Pass | undefined} */
  function next() {
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
      const found = layer.held ? heldAnswer(layer, question) : await answers[kind](question, layer);
      if (found && wanted.has(id)) answer({ id, ...found });
    } catch (error) {
      answer({ id, damage: error instanceof Error ? error.message : String(error) });
    } finally {
      wanted.delete(id);
      urgent.delete(id);
    }
  };
}

/** @param {Question} question @returns {string} */
function passName({ layer, head, hidden, by_row }) {
  return `${layer} ${head} ${hidden} ${by_row}`;
}

/** @param {Question} question @param {Layer} layer */
function rowAnswer(question, layer) {
  const row = new Float64Array(layer.info.kv_len);
  rowWeights(layer, question, question.query, row);
  const [start, stop] = allowed(layer, question.head, question.query);
  const mask = new Uint8Array(layer.info.kv_len);
  for (let key = start; key < stop; key++) {
    const counts = isMaskKnown(layer.info) || row[key] !== 0;
    mask[key] = counts && !(question.hidden && layer.sinks[key]) ? 1 : 0;
  }
  return { values: Float32Array.from(row), mask };
}

/** @param {Question} question @param {Layer} layer @param {() => Promise<boolean>} goesOn */
async function columnAnswer(question, layer, goesOn) {
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
 * How much work an exact tile is.
 * @param {Layer} layer @param {Question} question @param {import("./blocks.js").Extent} part
 */
function products(layer, question, { first, end, from, to }) {
  let numbers = 0;
  for (let query = first; query < end; query++) {
    const [start, stop] = allowed(layer, question.head, query);
    numbers += Math.max(0, Math.min(stop, to) - Math.max(start, from));
  }
  return numbers * Math.max(1, layer.info.head_dim);
}

/**
 * @param {Question} question @param {Layer} layer @param {import("./blocks.js").Extent} part
 * @param {boolean} exact all queries; else the middle one of each block
 * @param {() => Promise<boolean>} goesOn
 * @returns {Promise<Float32Array | null>}
 */
async function tileValues(question, layer, part, exact, goesOn) {
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

/** @returns {Promise<void>} lets everything else that waits go first */
function pause() {
  return new Promise((resolve) => {
    const channel = new MessageChannel();
    channel.port1.onmessage = () => {
      channel.port1.close();
      resolve();
    };
    channel.port2.postMessage(null);
  });
}
