/** Lines between words: queries at the left, keys at the right, a line for each weight. */

import { counted, share } from "./numbers.js";
import { named } from "./tokens.js";

/**
 * @typedef {import("./tokens.js").Token} Token
 * @typedef {"query" | "key"} Axis
 */

export const MOST_LINED = 60; // tokens; more lines than theirs show nothing
const LEAST = 0.01; // the weight from which a line is drawn
const ROW = 22; // pixels of a token
const WIDEST = 6; // pixels of the line of a weight of 1
const STROKE = 150; // level of the ramp
const SVG = "http://www.w3.org/2000/svg";

export class Lines {
  /**
   * @param {HTMLElement} holder
   * @param {{point: (axis: Axis, at: number | null) => void, choose: (axis: Axis, at: number) => void}} told
   */
  constructor(holder, told) {
    this.holder = holder;
    this.caption = document.createElement("p");
    this.caption.className = "caption";
    this.picture = document.createElement("div");
    this.picture.className = "lined";
    holder.append(this.caption, this.picture);
    /** @type {SVGLineElement[]} */ this.drawn = [];
    for (const kind of ["pointerover", "click"])
      this.picture.addEventListener(kind, ({ target }) => {
        const name = /** @type {HTMLElement} */ (target).closest("[data-line]");
        const { line, place } = /** @type {HTMLElement | null} */ (name)?.dataset ?? {};
        if (line === undefined) return kind === "click" ? undefined : told.point("query", null);
        const tell = kind === "click" ? told.choose : told.point;
        tell(/** @type {Axis} */ (line), Number(place));
      });
    this.picture.addEventListener("pointerleave", () => told.point("query", null));
  }

  /**
   * @param {Float32Array} weights (q_len, kv_len)
   * @param {{queries: Token[], keys: Token[]}} axes
   * @param {import("./flow.js").Ramp} ramp
   */
  draw(weights, { queries, keys }, ramp) {
    const height = ROW * Math.max(queries.length, keys.length);
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("viewBox", `0 0 100 ${height}`);
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("height", String(height));
    svg.setAttribute("aria-hidden", "true");
    /** @type {[number, number, number][]} */ const drawn = [];
    weights.forEach((weight, cell) => {
      if (weight >= LEAST) drawn.push([weight, Math.floor(cell / keys.length), cell % keys.length]);
    });
    // The strongest on top.
    this.drawn = drawn
      .sort(([a], [b]) => a - b)
      .map(([weight, query, key]) => line(weight, query, key, ramp.css[STROKE]));
    svg.append(...this.drawn);
    this.picture.replaceChildren(list(queries, "query"), svg, list(keys, "key"));
    const spoilt = weights.reduce((count, weight) => count + Number(Number.isNaN(weight)), 0);
    const allowed = weights.reduce((count, weight) => count + Number(weight > 0), 0);
    this.caption.textContent = `Lines: ${counted(drawn.length, "weight")} of ${share(LEAST)} and more, of ${counted(allowed, "weight")} above 0; width and strength by weight${spoilt > 0 ? `; ${counted(spoilt, "weight")} not numbers (NaN)` : ""}`;
  }

  clear() {
    this.caption.textContent = "";
    this.picture.replaceChildren();
    this.drawn = [];
  }

  /**
   * Only the lines of some tokens; all lines for null.
   * @param {Axis} axis @param {[number, number] | null} range first and last
   */
  isolate(axis, range) {
    for (const drawn of this.drawn) {
      const at = Number(drawn.dataset[axis]);
      drawn.classList.toggle("aside", range !== null && (at < range[0] || at > range[1]));
    }
  }

  /**
   * Tints the names at one side.
   * @param {Axis} axis @param {(at: number) => {css: string, onTop: string} | null} tintOf
   * @param {[number, number] | null} chosen underlined
   */
  tint(axis, tintOf, chosen) {
    for (const name of this.picture.querySelectorAll(`[data-line="${axis}"]`)) {
      const { style, dataset, classList } = /** @type {HTMLElement} */ (name);
      const at = Number(dataset.place);
      const tint = tintOf(at);
      style.backgroundColor = tint?.css ?? "";
      style.color = tint?.onTop ?? "";
      classList.toggle("chosen", chosen !== null && at >= chosen[0] && at <= chosen[1]);
    }
  }
}

/** @param {number} weight @param {number} query @param {number} key @param {string} colour */
function line(weight, query, key, colour) {
  const drawn = document.createElementNS(SVG, "line");
  drawn.setAttribute("x1", "0");
  drawn.setAttribute("y1", String((query + 0.5) * ROW));
  drawn.setAttribute("x2", "100");
  drawn.setAttribute("y2", String((key + 0.5) * ROW));
  drawn.setAttribute("stroke", colour);
  drawn.setAttribute("stroke-width", String(Math.max(0.75, WIDEST * weight)));
  drawn.setAttribute("stroke-opacity", String(Math.min(1, 0.08 + 0.92 * weight)));
  drawn.setAttribute("vector-effect", "non-scaling-stroke");
  drawn.dataset.query = String(query);
  drawn.dataset.key = String(key);
  return drawn;
}

/** @param {Token[]} tokens @param {Axis} axis @returns {HTMLElement} */
function list(tokens, axis) {
  const names = document.createElement("ol");
  names.setAttribute("aria-label", axis === "query" ? "Queries" : "Keys");
  names.append(
    ...tokens.map((token, at) => {
      const item = document.createElement("li");
      const name = document.createElement("span");
      name.dataset.line = axis;
      name.dataset.place = String(at);
      name.textContent = named(token, 24);
      if (token.special) name.className = "special";
      item.append(name);
      return item;
    }),
  );
  return names;
}
