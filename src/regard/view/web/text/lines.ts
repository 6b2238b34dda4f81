/** Lines between words: queries at the left, keys at the right, a line for each weight. */

import { element, inside, svgElement } from "../dom";
import { level, tintOf, type Ramp } from "../maths/colours";
import { counted, share } from "../maths/numbers";
import { strongest } from "../maths/weights";
import type { Axis, TwoAxes } from "../data/axes";
import type { Token } from "../protocol/recording";
import { named } from "./tokens";

export const MOST_LINED = 60; // tokens; more lines than theirs show nothing
const LEAST = 0.01; // the weight from which a line is drawn
const [LEAST_ROW, LARGEST_ROW] = [22, 100]; // pixels of a token
const PARTS = { phone: 0.3, other: 0.45 }; // of the height of the screen that the lines of few tokens take at least
const ABOVE = 460; // pixels over and under them, where the screen is no phone
const WIDEST = 6; // pixels of the line of a weight of 1

export class Lines {
  private caption = inside(this.holder, ".caption");
  private picture = inside(this.holder, ".lined");
  private drawn: SVGLineElement[] = [];

  constructor(
    private readonly holder: HTMLElement,
    listener: { point: (axis: Axis, at: number | null) => void; choose: (axis: Axis, at: number) => void },
  ) {
    for (const kind of ["pointerover", "click"])
      this.picture.addEventListener(kind, ({ target }) => {
        const name = (target as HTMLElement).closest("[data-line]");
        const { line, place } = (name as HTMLElement | null)?.dataset ?? {};
        if (line === undefined) return kind === "click" ? undefined : listener.point("query", null);
        const report = kind === "click" ? listener.choose : listener.point;
        report(line as Axis, Number(place));
      });
    this.picture.addEventListener("pointerleave", () => listener.point("query", null));
  }

  /** @param weights (q_len, kv_len) */
  draw(weights: Float32Array, colour: string, { queries, keys }: TwoAxes) {
    const count = Math.max(queries.length, keys.length);
    const { innerHeight: screen } = window;
    const isPhone = matchMedia("(max-width: 699px)").matches;
    const room = isPhone ? screen * PARTS.phone : Math.max(screen * PARTS.other, screen - ABOVE);
    const side = Math.max(LEAST_ROW, Math.min(LARGEST_ROW, Math.floor(room / count)));
    const height = side * count;
    this.picture.style.setProperty("--row", `${side}px`);
    const box = { viewBox: `0 0 100 ${height}`, preserveAspectRatio: "none", height };
    const svg = svgElement("svg", { ...box, "aria-hidden": "true" });
    const cells = [...weights.keys()].filter((cell) => weights[cell] >= LEAST);
    // The strongest on top.
    this.drawn = cells
      .sort((one, other) => weights[one] - weights[other])
      .map((cell) => line(weights[cell], Math.floor(cell / keys.length), cell % keys.length, colour, side));
    svg.append(...this.drawn);
    this.picture.replaceChildren(list(queries, "query"), svg, list(keys, "key"));
    const number = (counts: (weight: number) => boolean) => weights.filter(counts).length;
    const [spoilt, allowed] = [number(Number.isNaN), number((weight) => weight > 0)];
    this.caption.textContent = `Lines: ${counted(cells.length, "weight")} of ${share(LEAST)} and more, of ${counted(allowed, "weight")} above 0; width and strength by weight${spoilt > 0 ? `; ${counted(spoilt, "weight")} not numbers (NaN)` : ""}`;
  }

  clear() {
    this.caption.textContent = "";
    this.picture.replaceChildren();
    this.drawn = [];
  }

  /** Only the lines of one token; all lines for null. */
  isolate(axis: Axis, at: number | null) {
    for (const drawn of this.drawn) drawn.classList.toggle("aside", at !== null && Number(drawn.dataset[axis]) !== at);
  }

  /**
   * Tints the names at one side.
   * @param weights null: no tint
   * @param chosen underlined
   */
  tint(axis: Axis, weights: Float32Array | null, ramp: Ramp, chosen: number | null) {
    const highest = weights ? weights[strongest(weights)] : 0;
    for (const name of this.picture.querySelectorAll(`[data-line="${axis}"]`)) {
      const { style, dataset, classList } = name as HTMLElement;
      const at = Number(dataset.place);
      const tint = weights ? level(weights[at], "fit", 0, highest) : 0;
      const colours = tint === 0 ? { css: "", onTop: "" } : tintOf(ramp, tint);
      [style.backgroundColor, style.color] = [colours.css, colours.onTop];
      classList.toggle("chosen", at === chosen);
    }
  }
}

function line(weight: number, query: number, key: number, colour: string, side: number) {
  return svgElement("line", {
    x1: 0,
    y1: (query + 0.5) * side,
    x2: 100,
    y2: (key + 0.5) * side,
    stroke: colour,
    "stroke-width": Math.max(0.75, WIDEST * weight),
    "stroke-opacity": Math.min(1, 0.08 + 0.92 * weight),
    "vector-effect": "non-scaling-stroke",
    "data-query": query,
    "data-key": key,
  });
}

function list(tokens: Token[], axis: Axis): HTMLElement {
  const names = tokens.map((token, at) => {
    const properties = { "data-line": axis, "data-place": at, className: token.special ? "special" : "" };
    return element("li", {}, element("span", properties, named(token, 24)));
  });
  return element("ol", { "aria-label": axis === "query" ? "Queries" : "Keys" }, ...names);
}
