/** What the map and the steps give to the Save menu: pictures, numbers and words for them. */

import { headline, isDifference, shown, shownName } from "../data/compare";
import { fittedText } from "../dom";
import { Axes, type Frame } from "../map/axes";
import { cellTable, rangesOf, type Grid } from "../map/cells";
import type { HeadMap } from "../map/map";
import type { Part } from "../map/mosaic";
import { grouped } from "../maths/numbers";
import { columnsOf } from "../maths/sums";
import type { StepsAnswer } from "../protocol/questions";
import type { Token } from "../protocol/recording";
import type { Session } from "../session";
import type { Picture, Table, View } from "../view";

// Pixels in a picture.
const NAME = 18; // of the line that names a map
const APART = 20; // between two maps

/** The maps on the stage, as their view has them. */
interface Stage {
  session: Session;
  titles: HTMLElement[];
  parts: () => HeadMap[];
  unit: () => string; // what a cell is
}

export function mapSaving(stage: Stage): Pick<View, "picture" | "table" | "caption"> {
  const { session } = stage;
  const sample = () => {
    const every = Math.max(...stage.parts().map((map) => map.sampled()));
    return every > 1 ? [`a sample of 1 query in ${every}`] : [];
  };
  return {
    caption: () => {
      const [{ which, frame }] = stage.parts();
      const isPart = frame && session.store.drawn.zoom > 1;
      const part = isPart
        ? [`queries ${seen(frame.row, frame.rows)}`, `keys ${seen(frame.column, frame.columns)}`]
        : [];
      return [headline(which, session.layers), ...part, ...sample()].join(", ");
    },
    table: () => {
      const { drawn } = session.store;
      const unit = [stage.unit()];
      if (drawn.hidden) unit.push("without sinks");
      if (isDifference(shown(drawn, session.layers))) unit.push("as parts of 1");
      unit.push(...sample(), ...(session.trouble ? [session.trouble] : []));
      return cellTable(stage.parts().map(gridOf), unit.join(", "));
    },
    picture: () => pictureOf(stage),
  };
}

/** The maps on the stage from left to right, under their names where they have some. */
function pictureOf(stage: Stage): Picture {
  const { session, titles } = stage;
  const above = titles[0].hidden ? 0 : NAME;
  const { look } = session;
  const maps = stage.parts().map((map) => {
    const { top, height } = map.frame as Frame;
    return { map, width: map.holder.clientWidth, height: top + height + 2 };
  });
  return {
    width: maps.reduce((sum, { width }) => sum + width + APART, -APART),
    height: above + Math.max(...maps.map(({ height }) => height)),
    draw: (pen) =>
      maps.forEach(({ map, width }, i) => {
        pen.font = `12px ${look.family}`;
        pen.fillStyle = look.ink.grey;
        [pen.textAlign, pen.textBaseline] = ["left", "top"];
        if (above) pen.fillText(fittedText(pen, titles[i].textContent ?? "", width), 0, 0);
        pen.save();
        pen.translate(0, above);
        const axes = new Axes(pen);
        axes.setLimit(map.axes.limit);
        map.drawMap(pen, axes);
        map.drawCross(pen, axes);
        pen.restore();
        pen.translate(width + APART, 0);
      }),
  };
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

/** @param first a part of one, if it is not whole */
function seen(first: number, count: number): string {
  return `${grouped(Math.floor(first))} to ${grouped(Math.ceil(first + count - 1e-6) - 1)}`;
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
