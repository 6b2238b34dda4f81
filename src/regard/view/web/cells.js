/**
 * The numbers of the map as a table: the cells that are seen, as they are drawn, of one map or of
 * two beside each other.
 *
 * @typedef {import("./tokens.js").Token} Token
 * @typedef {[number, number]} Range first and last token of a cell
 *
 * @typedef {object} Grid
 * @property {string} name whose weights
 * @property {Token[]} queries
 * @property {Token[]} keys
 * @property {Range[]} rows the queries of each
 * @property {Range[]} columns the keys of each
 * @property {(row: number, column: number) => number | null} at a share; null: not there yet
 */

import { named } from "./tokens.js";

/**
 * @param {Grid[]} grids @param {string} unit what a cell is
 * @returns {(string | number)[][]}
 */
export function cellTable(grids, unit) {
  const heads = grids.map(({ keys, columns }) => [unit, "query", "token", ...columns.map((range) => `${places(range)} ${words(keys, range)}`)]);
  return grids.flatMap(({ name, queries, rows, columns, at }, i) => [
    // Maps of one text have one head.
    ...(i > 0 && heads[i].join("\n") === heads[i - 1].join("\n") ? [] : [heads[i]]),
    ...rows.map((range, row) => [
      name,
      range[0] === range[1] ? range[0] : places(range),
      words(queries, range),
      ...columns.map((_, column) => at(row, column) ?? ""),
    ]),
  ]);
}

/** @param {number} first @param {number} end @param {(at: number) => number} start of a cell @returns {Range[]} */
export function rangesOf(first, end, start) {
  return Array.from({ length: end - first }, (_, i) => /** @type {Range} */ ([start(first + i), start(first + i + 1) - 1]));
}

/** @param {Range} range @returns {string} */
function places([first, last]) {
  return first === last ? String(first) : `${first}–${last}`;
}

/** @param {Token[]} tokens @param {Range} range @returns {string} */
function words(tokens, [first, last]) {
  return first === last ? named(tokens[first]) : `${named(tokens[first])} … ${named(tokens[last])}`;
}
