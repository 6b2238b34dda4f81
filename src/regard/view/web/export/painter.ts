/** What a part of the page shows, drawn again on a canvas or as SVG: boxes, borders, words, pictures. */

import { SvgContext } from "./svg";

export interface Pen {
  context: CanvasRenderingContext2D;
  left: number; // of the root, in the window
  top: number;
  drawers: Drawers;
}

/** Canvases that draw themselves anew, their words as words; the others are copied pixel by pixel. */
export type Drawers = Map<Element, (context: CanvasRenderingContext2D) => void>;

const NOTHING = "rgba(0, 0, 0, 0)";
const SMALL_CAPS = 0.8; // of the height of capitals

/** @param context with the root's upper left corner at 0, 0 */
export function paint(root: HTMLElement, context: CanvasRenderingContext2D, drawers: Drawers = new Map()) {
  const { left, top } = root.getBoundingClientRect();
  walk(root, { context, left, top, drawers }, root.getBoundingClientRect());
}

/** @param window what scrolled parts leave to see */
function walk(element: Element, pen: Pen, window: DOMRect) {
  if (!(element instanceof HTMLElement || element instanceof SVGElement)) return;
  const style = getComputedStyle(element);
  const box = element.getBoundingClientRect();
  if (style.visibility === "hidden" || style.display === "none") return;
  const clips = style.overflow !== "visible" && element instanceof HTMLElement;
  const inside = clips ? common(window, box) : window;
  if (inside.width <= 0 || inside.height <= 0) return;
  const { context } = pen;
  context.save();
  context.globalAlpha *= Number(style.opacity);
  if (element instanceof SVGElement) {
    if (element instanceof SVGGeometryElement) shape(element, style, pen);
  } else if (meets(box, window)) {
    for (const part of element.getClientRects()) boxOf(part, style, pen);
    if (element.dataset.share) above(element, pen);
  }
  if (element instanceof HTMLCanvasElement && box.width > 0 && meets(box, window)) {
    context.imageSmoothingEnabled = style.imageRendering !== "pixelated";
    copy(element, box, pen);
    outlineOf(box, style, pen);
  }
  for (const child of element.childNodes) {
    if (child instanceof Element) walk(child, pen, inside);
    else if (child instanceof Text) words(child, style, pen, inside);
  }
  context.restore();
}

function copy(canvas: HTMLCanvasElement, box: DOMRect, { context, left, top, drawers }: Pen) {
  const draw = drawers.get(canvas);
  context.save();
  context.translate(box.left - left, box.top - top);
  if (draw) draw(context);
  else context.drawImage(canvas, 0, 0, box.width, box.height);
  context.restore();
}

/** The number that the style sheet puts above a word. */
function above(element: HTMLElement, { context, left, top }: Pen) {
  const style = getComputedStyle(element, "::before");
  const [box] = element.getClientRects();
  context.font = `${style.fontWeight} ${style.fontSize} ${style.fontFamily}`;
  context.fillStyle = style.color;
  context.textAlign = "left";
  context.textBaseline = "bottom";
  context.fillText(element.dataset.share ?? "", box.left - left, box.top - top + 1);
}

function boxOf(box: DOMRect, style: CSSStyleDeclaration, { context, left, top }: Pen) {
  const [x, y] = [box.left - left, box.top - top];
  if (style.backgroundColor !== NOTHING) {
    context.fillStyle = style.backgroundColor;
    context.fillRect(x, y, box.width, box.height);
  }
  const sides = [
    ["Top", x, y, box.width, 0],
    ["Bottom", x, y + box.height, box.width, 0],
    ["Left", x, y, 0, box.height],
    ["Right", x + box.width, y, 0, box.height],
  ] as const;
  for (const [side, fromX, fromY, width, height] of sides) {
    const thick = Number.parseFloat(style[`border${side}Width`]);
    const colour = style[`border${side}Color`];
    if (!(thick > 0) || style[`border${side}Style`] === "none" || colour === NOTHING) continue;
    context.fillStyle = colour;
    const inward = side === "Bottom" || side === "Right" ? -thick : 0;
    if (width > 0) context.fillRect(fromX, fromY + inward, width, thick);
    else context.fillRect(fromX + inward, fromY, thick, height);
  }
}

/** The frame around a small map. */
function outlineOf(box: DOMRect, style: CSSStyleDeclaration, { context, left, top }: Pen) {
  const thick = Number.parseFloat(style.outlineWidth);
  if (style.outlineStyle !== "solid" || !(thick > 0)) return;
  context.strokeStyle = style.outlineColor;
  context.lineWidth = thick;
  const [x, y] = [box.left - left - thick / 2, box.top - top - thick / 2];
  context.strokeRect(x, y, box.width + thick, box.height + thick);
}

function words(node: Text, style: CSSStyleDeclaration, pen: Pen, window: DOMRect) {
  const range = document.createRange();
  for (const { index, 0: word } of node.data.matchAll(/\S+/g)) {
    range.setStart(node, index);
    range.setEnd(node, index + word.length);
    const boxes = range.getClientRects();
    if (boxes.length <= 1) {
      if (boxes.length === 1) letters(word, boxes[0], style, pen, window);
      continue;
    }
    // A word broken over lines: letter by letter.
    let at = index;
    for (const letter of word) {
      range.setStart(node, at);
      range.setEnd(node, (at += letter.length));
      letters(letter, range.getBoundingClientRect(), style, pen, window);
    }
  }
}

function letters(text: string, box: DOMRect, style: CSSStyleDeclaration, { context, left, top }: Pen, window: DOMRect) {
  if (!meets(box, window)) return;
  const isSmall = style.fontVariantCaps !== "normal";
  const caps = isSmall ? text.toUpperCase() : text;
  const size = Number.parseFloat(style.fontSize) * (isSmall ? SMALL_CAPS : 1);
  context.font = `${style.fontWeight} ${size}px ${style.fontFamily}`;
  context.fillStyle = style.color;
  context.textAlign = "left";
  context.textBaseline = "alphabetic";
  const { fontBoundingBoxAscent: above, fontBoundingBoxDescent: below } = context.measureText(caps);
  context.fillText(caps, box.left - left, box.top - top + (box.height + above - below) / 2, box.width + 1);
}

function shape(element: SVGGeometryElement, style: CSSStyleDeclaration, { context, left, top }: Pen) {
  const screen = element.getScreenCTM();
  if (!screen) return;
  const matrix = new DOMMatrix().translate(-left, -top).multiply(screen);
  // A line is drawn where it ends up: it is as thick as it says, however far it is stretched.
  const isLine = element instanceof SVGLineElement;
  const path = isLine ? lineOf(element, matrix) : outline(element);
  const placed = isLine ? new DOMMatrix() : matrix;
  if (!path) return;
  const [fill, stroke] = [style.fill, style.stroke];
  if (context instanceof SvgContext) {
    const { a, b, c, d, e, f } = context.transform.multiply(placed);
    const look = `fill="${fill}" fill-opacity="${style.fillOpacity}" stroke="${stroke}" stroke-opacity="${style.strokeOpacity}" stroke-width="${Number.parseFloat(style.strokeWidth)}"`;
    context.put(`<path d="${path}" ${look} transform="matrix(${[a, b, c, d, e, f].join(" ")})"/>`);
    return;
  }
  const drawn = new Path2D();
  drawn.addPath(new Path2D(path), placed);
  const alpha = context.globalAlpha;
  if (fill !== "none") {
    context.globalAlpha = alpha * Number(style.fillOpacity);
    context.fillStyle = fill;
    context.fill(drawn);
  }
  if (stroke !== "none") {
    context.globalAlpha = alpha * Number(style.strokeOpacity);
    context.strokeStyle = stroke;
    context.lineWidth = Number.parseFloat(style.strokeWidth);
    context.stroke(drawn);
  }
  context.globalAlpha = alpha;
}

function lineOf({ x1, y1, x2, y2 }: SVGLineElement, matrix: DOMMatrix): string {
  const [fromX, fromY, toX, toY] = [x1, y1, x2, y2].map((n) => n.baseVal.value);
  const [from, to] = [new DOMPoint(fromX, fromY), new DOMPoint(toX, toY)].map((at) => at.matrixTransform(matrix));
  return `M${from.x} ${from.y}L${to.x} ${to.y}`;
}

/** @returns its path; "" for shapes that no view has */
function outline(element: SVGGeometryElement): string {
  if (element instanceof SVGPathElement) return element.getAttribute("d") ?? "";
  if (element instanceof SVGRectElement) {
    const [x, y, width, height] = [element.x, element.y, element.width, element.height].map((n) => n.baseVal.value);
    return `M${x} ${y}h${width}v${height}h${-width}Z`;
  }
  return "";
}

function common(a: DOMRect, b: DOMRect): DOMRect {
  const [left, top] = [Math.max(a.left, b.left), Math.max(a.top, b.top)];
  return new DOMRect(left, top, Math.min(a.right, b.right) - left, Math.min(a.bottom, b.bottom) - top);
}

function meets(a: DOMRect, b: DOMRect): boolean {
  const { width, height } = common(a, b);
  return width > 0 && height > 0;
}
