/**
 * The numbers of the map as a table: the cells that are seen, as they are drawn, of one map or of
 * two beside each other.
 */

import type { Token } from "../protocol/recording";
import { named } from "../text/tokens";
import type { Table } from "../view";
import type { Part } from "./mosaic";

/** First and last token of a cell. */
type Range = [number, number];

export interface Grid {
  name: string; // whose weights
  queries: Token[];
  keys: Token[];
  part: Part;
  at: (down: number, right: number) => number | null; // the share of a cell; null: not there yet
}

/** @param unit what a cell is */
export function cellTable(grids: Grid[], unit: string): Table {
  const tables = grids.map(({ name, queries, keys, part: { size, top, bottom, left, right }, at }) => {
    const cells = (first: number, end: number) => Array.from({ length: end - first }, (_, i) => first + i);
    const range = (cell: number, { length }: Token[]): Range => [cell * size, Math.min(length, (cell + 1) * size) - 1];
    const columns = cells(left, right).map((column) => range(column, keys));
    const rows = cells(top, bottom).map((row) => {
      const [first, last] = range(row, queries);
      const place = first === last ? first : places([first, last]);
      return [name, place, words(queries, [first, last]), ...cells(left, right).map((column) => at(row, column) ?? "")];
    });
    return [[unit, "query", "token", ...columns.map((one) => `${places(one)} ${words(keys, one)}`)], ...rows];
  });
  // Maps of one text have one head.
  return tables.flatMap(([head, ...rows], i) =>
    i > 0 && head.join() === tables[0][0].join() ? rows : [head, ...rows],
  );
}

function places([first, last]: Range): string {
  return first === last ? String(first) : `${first}–${last}`;
}

function words(tokens: Token[], [first, last]: Range): string {
  return first === last ? named(tokens[first]) : `${named(tokens[first])} … ${named(tokens[last])}`;
}
