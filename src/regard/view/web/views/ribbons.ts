/** Shares as ribbons from the parts that look, left, to the parts that are looked at, right. */

import { context2d, element, svgElement } from "../dom";
import type { Look } from "../map/map";
import { level } from "../maths/colours";
import { share } from "../maths/numbers";
import { isolated } from "../text/tokens";
import type { Part } from "./segments";

const LEAST = 0.01; // thinner ribbons are not drawn
const LINE = 22; // pixels of a part's own line at least
const NODE = 5; // width of the bar of a part
const NAMES = 230; // width of the names on each side

export function ribbons({
  queries,
  keys,
  values: shares,
  look,
  ceiling,
  width,
  height,
}: {
  queries: Part[];
  keys: Part[];
  values: Float32Array;
  look: Look;
  ceiling: number;
  width: number;
  height: number;
}): SVGSVGElement {
  const values = shares.map((value) => value || 0); // NaN has no thickness; the table says it
  const names = Math.min(NAMES, width / 4);
  const most = Math.max(queries.length, keys.length);
  const tall = Math.max(most * LINE * 1.6, Math.min(height, most * 160));
  const received = keys.map((_, column) =>
    queries.reduce((sum, __, row) => sum + values[row * keys.length + column], 0),
  );
  const given = queries.map((_, row) => total(values, row, keys.length));
  // One scale for both sides: a ribbon is as thick where it ends as where it begins.
  const scale = (tall - LINE * most) / (given.reduce((sum, size) => sum + size, 0) || 1);
  const left = placed(given, tall, scale);
  const right = placed(received, tall, scale);
  const picture = svgElement("svg", { width, height: tall, viewBox: `0 0 ${width} ${tall}`, role: "group" });
  picture.setAttribute("aria-label", "Flows between the parts, 1 % and more. Arrow keys move from flow to flow.");
  const [x1, x2] = [names + NODE, width - names - NODE];
  const used = { left: left.map(({ y }) => y), right: right.map(({ y }) => y) };
  queries.forEach((query, row) => {
    keys.forEach((key, column) => {
      const value = values[row * keys.length + column];
      const thick = value * scale;
      const [y1, y2] = [used.left[row], used.right[column]];
      used.left[row] += thick;
      used.right[column] += thick;
      if (value < LEAST) return;
      const middle = (x1 + x2) / 2;
      const path = svgElement("path", {
        d: `M${x1} ${y1}C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}L${x2} ${y2 + thick}C${middle} ${y2 + thick} ${middle} ${y1 + thick} ${x1} ${y1 + thick}Z`,
        fill: look.ramp.css[Math.max(40, level(value, "fit", 0, ceiling))],
        "fill-opacity": 0.75,
        role: "img",
        tabindex: picture.childElementCount === 0 ? 0 : -1,
        "data-row": row,
        "data-column": column,
      });
      const title = svgElement("title", {});
      title.textContent = `${isolated(query.name)} → ${isolated(key.name)}: ${share(value)}`;
      path.append(title);
      picture.append(path);
    });
  });
  sided(picture, left, queries, { x: names, at: names - 8, anchor: "end" }, look);
  sided(picture, right, keys, { x: width - names - NODE, at: width - names + 8, anchor: "start" }, look);
  return picture;
}

/**
 * The bars of one side, one under the other.
 * @param scale pixels of a share of 1
 */
function placed(sizes: number[], height: number, scale: number): { y: number; height: number }[] {
  const whole = sizes.reduce((sum, size) => sum + size, 0) * scale;
  const gap = (height - whole) / sizes.length;
  let y = gap / 2;
  return sizes.map((size) => {
    const place = { y, height: size * scale };
    y += size * scale + gap;
    return place;
  });
}

function sided(
  picture: SVGSVGElement,
  places: { y: number; height: number }[],
  parts: Part[],
  { x, at, anchor }: { x: number; at: number; anchor: string },
  { ink }: Look,
) {
  const width = Number(picture.getAttribute("width"));
  const room = anchor === "end" ? at : width - at;
  places.forEach(({ y, height }, i) => {
    picture.append(svgElement("rect", { x, y, width: NODE, height: Math.max(1, height), fill: ink.grey }));
    const text = svgElement("text", {
      x: at,
      y: y + height / 2 + 4,
      "text-anchor": anchor,
      fill: ink.ink,
      "font-size": 12,
    });
    text.textContent = shortened(parts[i].name, room);
    picture.append(text);
  });
}

/**
 * @param room pixels
 * @returns what of it fits
 */
function shortened(name: string, room: number): string {
  const letters = [...name];
  let text = name;
  while (letters.length > 1 && widthOf(text) > room) {
    letters.pop();
    text = `${letters.join("")}…`;
  }
  return text;
}

/** @returns pixels */
function widthOf(text: string): number {
  const context = context2d((measured ??= element("canvas")));
  context.font = "12px system-ui, sans-serif";
  return context.measureText(text).width;
}

let measured: HTMLCanvasElement | null = null;

function total(values: Float32Array, row: number, columns: number) {
  return values.subarray(row * columns, (row + 1) * columns).reduce((sum, value) => sum + value, 0);
}
