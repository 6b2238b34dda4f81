/** Shares as ribbons from the parts that look, left, to the parts that are looked at, right. */

import { context2d, element, svgElement } from "../dom";
import { fitted, SvgPen, type Pen, type Picture } from "../export/svg";
import type { Look } from "../map/map";
import { level } from "../maths/colours";
import { share } from "../maths/numbers";
import { isolated } from "../text/tokens";
import type { Part } from "./segments";

const LEAST = 0.01; // thinner ribbons are not drawn
const LINE = 22; // pixels of a part's own line at least
const NODE = 5; // width of the bar of a part
const NAMES = 230; // width of the names on each side
const OPACITY = 0.75;

interface Parts {
  queries: Part[];
  keys: Part[];
  values: Float32Array;
}

/** Ends at the y of a part on each side, as thick there as here. */
type Ribbon = { row: number; column: number; value: number; from: number; to: number; thick: number; fill: string };
type Bar = { y: number; height: number };

/** Where everything lies. */
interface Flows {
  width: number;
  height: number;
  names: number; // pixels of the names on each side
  ribbons: Ribbon[];
  left: Bar[];
  right: Bar[];
}

interface Room {
  look: Look;
  ceiling: number; // the share of the darkest colour
  width: number;
  height: number;
}

function placeFlows({ queries, keys, values: shares }: Parts, { look, ceiling, width, height }: Room): Flows {
  const values = shares.map((value) => value || 0); // NaN has no thickness; the table says it
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
  const used = { left: left.map(({ y }) => y), right: right.map(({ y }) => y) };
  const ribbons: Ribbon[] = [];
  values.forEach((value, at) => {
    const [row, column] = [Math.floor(at / keys.length), at % keys.length];
    const thick = value * scale;
    const fill = look.ramp.css[Math.max(40, level(value, "fit", 0, ceiling))];
    if (value >= LEAST) ribbons.push({ row, column, value, from: used.left[row], to: used.right[column], thick, fill });
    used.left[row] += thick;
    used.right[column] += thick;
  });
  return { width, height: tall, names: Math.min(NAMES, width / 4), ribbons, left, right };
}

/** The edge of a ribbon. */
function outline(pen: Pen, { from, to, thick }: Ribbon, { width, names }: Flows) {
  const [x1, x2] = [names + NODE, width - names - NODE];
  const middle = (x1 + x2) / 2;
  pen.beginPath();
  pen.moveTo(x1, from);
  pen.bezierCurveTo(middle, from, middle, to, x2, to);
  pen.lineTo(x2, to + thick);
  pen.bezierCurveTo(middle, to + thick, middle, from + thick, x1, from + thick);
  pen.closePath();
}

/** The ribbons on the page, each to be pointed at. */
export function ribbons(parts: Parts, room: Room): SVGSVGElement {
  const flows = placeFlows(parts, room);
  const { width, height } = flows;
  const picture = svgElement("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "group" });
  picture.setAttribute("aria-label", "Flows between the parts, 1 % and more. Arrow keys move from flow to flow.");
  const pen = new SvgPen();
  for (const ribbon of flows.ribbons) {
    outline(pen, ribbon, flows);
    const path = svgElement("path", {
      d: pen.path,
      fill: ribbon.fill,
      "fill-opacity": OPACITY,
      role: "img",
      tabindex: picture.childElementCount === 0 ? 0 : -1,
      "data-row": ribbon.row,
      "data-column": ribbon.column,
    });
    const [query, key] = [parts.queries[ribbon.row].name, parts.keys[ribbon.column].name];
    const title = svgElement("title", {});
    title.textContent = `${isolated(query)} → ${isolated(key)}: ${share(ribbon.value)}`;
    path.append(title);
    picture.append(path);
  }
  const ruler = context2d(element("canvas"));
  ruler.font = "12px system-ui, sans-serif";
  for (const { bar, name, x, at, anchor } of sides(parts, flows)) {
    const box = { x, y: bar.y, width: NODE, height: Math.max(1, bar.height), fill: room.look.ink.grey };
    const place = { x: at, y: bar.y + bar.height / 2 + 4, "text-anchor": anchor };
    const text = svgElement("text", { ...place, fill: room.look.ink.ink, "font-size": 12 });
    text.textContent = fitted(ruler, name, flows.names - 8);
    picture.append(svgElement("rect", box), text);
  }
  return picture;
}

/** The same in a picture. */
export function drawnRibbons(parts: Parts, room: Room): Picture {
  const flows = placeFlows(parts, room);
  const draw = (pen: Pen) => {
    pen.globalAlpha = OPACITY;
    for (const ribbon of flows.ribbons) {
      outline(pen, ribbon, flows);
      pen.fillStyle = ribbon.fill;
      pen.fill();
    }
    pen.globalAlpha = 1;
    pen.font = `12px ${getComputedStyle(document.body).fontFamily}`;
    pen.textBaseline = "middle";
    for (const { bar, name, x, at, anchor } of sides(parts, flows)) {
      pen.fillStyle = room.look.ink.grey;
      pen.fillRect(x, bar.y, NODE, Math.max(1, bar.height));
      pen.fillStyle = room.look.ink.ink;
      pen.textAlign = anchor;
      pen.fillText(fitted(pen, name, flows.names - 8), at, bar.y + bar.height / 2);
    }
  };
  return { width: flows.width, height: flows.height, draw };
}

/** The bar and the name of each part: of those that look on the left, of the others on the right. */
function sides({ queries, keys }: Parts, { width, names, left, right }: Flows) {
  const end = { x: names, at: names - 8, anchor: "end" as const };
  const start = { x: width - names - NODE, at: width - names + 8, anchor: "start" as const };
  return [
    ...left.map((bar, i) => ({ bar, name: queries[i].name, ...end })),
    ...right.map((bar, i) => ({ bar, name: keys[i].name, ...start })),
  ];
}

/**
 * The bars of one side, one under the other.
 * @param scale pixels of a share of 1
 */
function placed(sizes: number[], height: number, scale: number): Bar[] {
  const whole = sizes.reduce((sum, size) => sum + size, 0) * scale;
  const gap = (height - whole) / sizes.length;
  let y = gap / 2;
  return sizes.map((size) => {
    const place = { y, height: size * scale };
    y += size * scale + gap;
    return place;
  });
}

function total(values: Float32Array, row: number, columns: number) {
  return values.subarray(row * columns, (row + 1) * columns).reduce((sum, value) => sum + value, 0);
}
