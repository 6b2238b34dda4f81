/**
 * The numbers of the map as a table: the cells that are seen, as they are drawn, of one map or of
 * two beside each other.
 */

import type { Token } from "../protocol/recording";
import { named } from "../text/tokens";
import type { Table } from "../view";

/** First and last token of a cell. */
export type Range = [number, number];

export interface Grid {
  name: string; // whose weights
  queries: Token[];
  keys: Token[];
  rows: Range[]; // the queries of each
  columns: Range[]; // the keys of each
  at: (row: number, column: number) => number | null; // a share; null: not there yet
}

/** @param unit what a cell is */
export function cellTable(grids: Grid[], unit: string): Table {
  const heads = grids.map(({ keys, columns }) => [
    unit,
    "query",
    "token",
    ...columns.map((range) => `${places(range)} ${words(keys, range)}`),
  ]);
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

/** @param start of a cell */
export function rangesOf(first: number, end: number, start: (at: number) => number): Range[] {
  return Array.from({ length: end - first }, (_, i) => [start(first + i), start(first + i + 1) - 1] as Range);
}

function places([first, last]: Range): string {
  return first === last ? String(first) : `${first}–${last}`;
}

function words(tokens: Token[], [first, last]: Range): string {
  return first === last ? named(tokens[first]) : `${named(tokens[first])} … ${named(tokens[last])}`;
}
