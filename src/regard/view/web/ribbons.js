/** Shares as ribbons from the parts that look, left, to the parts that are looked at, right. */

import { level } from "./colours.js";
import { context2d, element, svgElement } from "./dom.js";
import { share } from "./numbers.js";
import { isolated } from "./tokens.js";

const LEAST = 0.01; // thinner ribbons are not drawn
const LINE = 22; // pixels of a part's own line at least
const NODE = 5; // width of the bar of a part
const NAMES = 230; // width of the names on each side

/**
 * @param {object} flows
 * @param {import("./segments.js").Part[]} flows.queries
 * @param {import("./segments.js").Part[]} flows.keys
 * @param {Float32Array} flows.values (query parts, key parts)
 * @param {import("./map.js").Look} flows.look
 * @param {number} flows.ceiling the share of the darkest colour
 * @param {number} flows.width
 * @param {number} flows.height at least
 * @returns {SVGSVGElement}
 */
export function ribbons({ queries, keys, values: shares, look, ceiling, width, height }) {
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
 * @param {number[]} sizes @param {number} height @param {number} scale pixels of a share of 1
 * @returns {{y: number, height: number}[]}
 */
function placed(sizes, height, scale) {
  const whole = sizes.reduce((sum, size) => sum + size, 0) * scale;
  const gap = (height - whole) / sizes.length;
  let y = gap / 2;
  return sizes.map((size) => {
    const place = { y, height: size * scale };
    y += size * scale + gap;
    return place;
  });
}

/**
 * @param {SVGSVGElement} picture
 * @param {{y: number, height: number}[]} places
 * @param {import("./segments.js").Part[]} parts
 * @param {{x: number, at: number, anchor: string}} side
 * @param {import("./map.js").Look} look
 */
function sided(picture, places, parts, { x, at, anchor }, { ink }) {
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

/** @param {string} name @param {number} room pixels @returns {string} what of it fits */
function shortened(name, room) {
  const letters = [...name];
  let text = name;
  while (letters.length > 1 && widthOf(text) > room) {
    letters.pop();
    text = `${letters.join("")}…`;
  }
  return text;
}

/** @param {string} text @returns {number} pixels */
function widthOf(text) {
  const context = context2d((measured ??= element("canvas")));
  context.font = "12px system-ui, sans-serif";
  return context.measureText(text).width;
}

/** @type {HTMLCanvasElement | null} */
let measured = null;

/** @param {Float32Array} values @param {number} row @param {number} columns */
function total(values, row, columns) {
  return values.subarray(row * columns, (row + 1) * columns).reduce((sum, value) => sum + value, 0);
}
