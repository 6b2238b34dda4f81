/**
 * Answers questions about one head at a time, in slices of a few milliseconds, so that it can be
 * interrupted and can run in a worker or, where there is none, beside the page itself.
 *
 * @typedef {import("./payload.js").LayerInfo} LayerInfo
 *
 * @typedef {object} Question
 * @property {number} id
 * @property {"load" | "row" | "column" | "map" | "steps"} kind
 * @property {number} layer
 * @property {number} head
 * @property {boolean} hidden sinks set aside
 * @property {number} at the query of a row or of its steps, the key of a column
 * @property {number} most keys of a row's steps
 * @property {[number, number]} rows of a map
 * @property {[number, number]} columns of a map
 * @property {[number, number]} cells of a map: at most so many down and across
 * @property {boolean} byRow each row divided by its highest weight
 * @property {LayerInfo} info with "load"
 * @property {string} text with "load"
 * @property {number[]} sinks with "load"
 *
 * @typedef {object} Answer
 * @property {number} id
 * @property {Float32Array} [values]
 * @property {import("./row_steps.js").Steps} [steps]
 * @property {number} [top] the first row of a strip of a map
 * @property {boolean} [done]
 * @property {string} [damage]
 */

import { rowSteps } from "./row_steps.js";
import { allowed, isMaskKnown, partOfRow, readLayer, rowWeights, rowsOf } from "./softmax.js";

const SLICE = 8; // milliseconds of work between two looks at what else was asked
const STRIP = 60; // milliseconds between two strips of a map

/**
 * @param {(answer: Answer) => void} answer
 * @returns {(question: Question) => Promise<void>}
 */
export function engine(answer) {
  /** @type {Map<number, Promise<import("./softmax.js").Layer>>} */ const layers = new Map();
  /** @type {Map<string, number>} */ const newest = new Map();
  let sliceStart = 0;

  /** @param {Question} question @returns {Promise<boolean>} still wanted? */
  async function goesOn(question) {
    if (performance.now() - sliceStart < SLICE) return true;
    await pause();
    sliceStart = performance.now();
    return newest.get(question.kind) === question.id;
  }

  /** @param {Question} question @param {import("./softmax.js").Layer} layer */
  async function column(question, layer) {
    const { q_len, kv_len } = layer.info;
    const row = new Float64Array(kv_len);
    const values = new Float32Array(q_len);
    for (let query = 0; query < q_len; query++) {
      partOfRow(layer, question, query, question.at, question.at + 1, row);
      values[query] = row[question.at];
      if (query % 16 === 0 && !(await goesOn(question))) return;
    }
    answer({ id: question.id, values, done: true });
  }

  /** @param {Question} question @param {import("./softmax.js").Layer} layer */
  async function map(question, layer) {
    const [first, end] = question.rows;
    const [from, to] = question.columns;
    const height = Math.min(question.cells[0], end - first);
    const width = Math.min(question.cells[1], to - from);
    const row = new Float64Array(layer.info.kv_len);
    let strip = new Float32Array(height * width);
    let top = 0;
    let posted = performance.now();
    for (let cell = 0; cell < height; cell++) {
      const queries = [first + edge(cell, end - first, height), first + edge(cell + 1, end - first, height)];
      for (let query = queries[0]; query < queries[1]; query++) {
        partOfRow(layer, question, query, from, to, row);
        const divisor = question.byRow ? rowsOf(layer, question).highest[query] || 1 : 1;
        pool(row, from, to, width, strip, (cell - top) * width, divisor * (queries[1] - queries[0]));
        if (!(await goesOn(question))) return;
      }
      const last = cell + 1 === height;
      if (last || performance.now() - posted > STRIP) {
        answer({ id: question.id, values: strip.slice(0, (cell + 1 - top) * width), top, done: last });
        strip = new Float32Array((height - cell - 1) * width);
        top = cell + 1;
        posted = performance.now();
      }
    }
  }

  return async (question) => {
    newest.set(question.kind, question.id);
    try {
      if (question.kind === "load") {
        layers.set(question.layer, readLayer(question.info, question.text, question.sinks));
      }
      const layer = await layers.get(question.layer);
      if (!layer || newest.get(question.kind) !== question.id) return;
      if (question.kind === "row") answer({ id: question.id, ...rowAnswer(question, layer), done: true });
      if (question.kind === "column") await column(question, layer);
      if (question.kind === "map") await map(question, layer);
      if (question.kind === "steps") {
        const steps = rowSteps(layer, question.head, question.at, question.most);
        answer({ id: question.id, steps, done: true });
      }
    } catch (error) {
      answer({ id: question.id, damage: error instanceof Error ? error.message : String(error) });
    }
  };
}

/** @param {Question} question @param {import("./softmax.js").Layer} layer */
function rowAnswer(question, layer) {
  const row = new Float64Array(layer.info.kv_len);
  rowWeights(layer, question, question.at, row);
  const [start, stop] = allowed(layer, question.head, question.at);
  const mask = new Uint8Array(layer.info.kv_len);
  for (let key = start; key < stop; key++) {
    const counts = isMaskKnown(layer.info) || row[key] !== 0;
    mask[key] = counts && !(question.hidden && layer.sinks[key]) ? 1 : 0;
  }
  return { values: Float32Array.from(row), mask };
}

/**
 * The mean of each cell, added up: cell i of n holds positions floor(i * length / n) up to
 * floor((i + 1) * length / n), as regard.Pool divides them.
 * @param {Float64Array} row @param {number} from @param {number} to @param {number} width
 * @param {Float32Array} out @param {number} at @param {number} divisor
 */
function pool(row, from, to, width, out, at, divisor) {
  if (width === to - from) {
    for (let cell = 0; cell < width; cell++) out[at + cell] += row[from + cell] / divisor;
    return;
  }
  for (let cell = 0, key = from; cell < width; cell++) {
    const end = from + edge(cell + 1, to - from, width);
    const count = end - key;
    let sum = 0;
    for (; key < end; key++) sum += row[key];
    out[at + cell] += sum / (count * divisor);
  }
}

/** @param {number} cell @param {number} length @param {number} cells @returns {number} */
export function edge(cell, length, cells) {
  return Math.floor((cell * length) / cells);
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
