/** What the map and the steps give to the Save menu: their numbers as tables. */

import { isDifference, shown, shownName } from "../data/compare";
import { cellTable, rangesOf, type Grid } from "../map/cells";
import type { HeadMap } from "../map/map";
import type { Part } from "../map/mosaic";
import { columnsOf } from "../maths/sums";
import type { StepsAnswer } from "../protocol/questions";
import type { Token } from "../protocol/recording";
import type { Session } from "../session";
import type { Table } from "../view";

/**
 * The cells of the maps on the stage.
 * @param unit what a cell is
 */
export function mapTable(session: Session, maps: HeadMap[], unit: string): Table {
  const { drawn } = session.store;
  const units = [unit];
  if (drawn.hidden) units.push("without sinks");
  if (isDifference(shown(drawn, session.layers))) units.push("as parts of 1");
  const every = Math.max(...maps.map((map) => map.sampled()));
  if (every > 1) units.push(`a sample of 1 query in ${every}`);
  if (session.trouble) units.push(session.trouble);
  return cellTable(maps.map(gridOf), units.join(", "));
}

/** The cells on the stage. */
function gridOf(map: HeadMap): Grid {
  const { session, which } = map;
  const { q_len, kv_len } = map.info();
  const grid = { name: shownName(which, session.layers), ...session.axes(which.layer) };
  const { size, top, bottom, left, right } = map.part as Part;
  return {
    ...grid,
    rows: rangesOf(top, bottom, (at) => Math.min(q_len, at * size)),
    columns: rangesOf(left, right, (at) => Math.min(kv_len, at * size)),
    at: (row, column) => map.cellAt(top + row, left + column),
  };
}

/** The numbers of the steps, those of pictures too. */
export function stepsTable(steps: StepsAnswer, query: Token, keys: Token[]): Table {
  const columns = columnsOf(steps).filter(({ vector }) => !vector);
  const none = columns.map(() => "");
  const [vector, output] = [Array.from(steps.vector ?? []), Array.from(steps.output ?? [])];
  const rows = steps.rows.map((step) => [
    step.key,
    keys[step.key].text,
    ...columns.map(({ of }) => Number(of(step) ?? NaN)),
    ...Array.from(step.vector ?? []),
    ...Array.from(step.value ?? []),
  ]);
  const places = [...vector.map((_, d) => `vector ${d}`), ...output.map((_, d) => `value ${d}`)];
  return [
    ["key", "token", ...columns.map(({ name }) => name), ...places],
    ...rows,
    ...(vector.length > 0 ? [["query", query.text, ...none, ...vector, ...output.map(() => "")]] : []),
    ...(output.length > 0 ? [["output", "", ...none, ...vector.map(() => ""), ...output]] : []),
  ];
}
