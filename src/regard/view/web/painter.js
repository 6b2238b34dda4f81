/** What a part of the page shows, drawn again on a canvas or as SVG: boxes, borders, words, pictures. */

import { SvgContext } from "./svg.js";

/**
 * @typedef {object} Pen
 * @property {CanvasRenderingContext2D} context
 * @property {number} left of the root, in the window
 * @property {number} top
 * @property {Drawers} drawers
 *
 * @typedef {Map<Element, (context: CanvasRenderingContext2D) => void>} Drawers canvases that draw
 *   themselves anew, their words as words; the others are copied pixel by pixel
 */

const NOTHING = "rgba(0, 0, 0, 0)";
const SMALL_CAPS = 0.8; // of the height of capitals

/**
 * @param {HTMLElement} root
 * @param {CanvasRenderingContext2D} context with the root's upper left corner at 0, 0
 * @param {Drawers} [drawers]
 */
export function paint(root, context, drawers = new Map()) {
  const { left, top } = root.getBoundingClientRect();
  walk(root, { context, left, top, drawers }, root.getBoundingClientRect());
}

/** @param {Element} element @param {Pen} pen @param {DOMRect} window what scrolled parts leave to see */
function walk(element, pen, window) {
  if (!(element instanceof HTMLElement || element instanceof SVGElement)) return;
  const style = getComputedStyle(element);
  const box = element.getBoundingClientRect();
  if (style.visibility === "hidden" || style.display === "none") return;
  const clips = style.overflow !== "visible" && element instanceof HTMLElement;
  const inside = clips ? common(window, box) : window;
  if (inside.width <= 0 || inside.height <= 0) return;
  const { context, left, top } = pen;
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

/** @param {HTMLCanvasElement} canvas @param {DOMRect} box @param {Pen} pen */
function copy(canvas, box, { context, left, top, drawers }) {
  const draw = drawers.get(canvas);
  context.save();
  context.translate(box.left - left, box.top - top);
  if (draw) draw(context);
  else context.drawImage(canvas, 0, 0, box.width, box.height);
  context.restore();
}

/** The number that the style sheet puts above a word. @param {HTMLElement} element @param {Pen} pen */
function above(element, { context, left, top }) {
  const style = getComputedStyle(element, "::before");
  const [box] = element.getClientRects();
  context.font = `${style.fontWeight} ${style.fontSize} ${style.fontFamily}`;
  context.fillStyle = style.color;
  context.textAlign = "left";
  context.textBaseline = "bottom";
  context.fillText(element.dataset.share ?? "", box.left - left, box.top - top + 1);
}

/** @param {DOMRect} box @param {CSSStyleDeclaration} style @param {Pen} pen */
function boxOf(box, style, { context, left, top }) {
  const [x, y] = [box.left - left, box.top - top];
  if (style.backgroundColor !== NOTHING) {
    context.fillStyle = style.backgroundColor;
    context.fillRect(x, y, box.width, box.height);
  }
  const sides = /** @type {const} */ ([
    ["Top", x, y, box.width, 0],
    ["Bottom", x, y + box.height, box.width, 0],
    ["Left", x, y, 0, box.height],
    ["Right", x + box.width, y, 0, box.height],
  ]);
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

/** The frame around a small map. @param {DOMRect} box @param {CSSStyleDeclaration} style @param {Pen} pen */
function outlineOf(box, style, { context, left, top }) {
  const thick = Number.parseFloat(style.outlineWidth);
  if (style.outlineStyle !== "solid" || !(thick > 0)) return;
  context.strokeStyle = style.outlineColor;
  context.lineWidth = thick;
  const [x, y] = [box.left - left - thick / 2, box.top - top - thick / 2];
  context.strokeRect(x, y, box.width + thick, box.height + thick);
}

/** @param {Text} node @param {CSSStyleDeclaration} style @param {Pen} pen @param {DOMRect} window */
function words(node, style, pen, window) {
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

/**
 * @param {string} text @param {DOMRect} box @param {CSSStyleDeclaration} style @param {Pen} pen
 * @param {DOMRect} window
 */
function letters(text, box, style, { context, left, top }, window) {
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

/** @param {SVGGeometryElement} element @param {CSSStyleDeclaration} style @param {Pen} pen */
function shape(element, style, { context, left, top }) {
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

/** @param {SVGLineElement} element @param {DOMMatrix} matrix @returns {string} */
function lineOf({ x1, y1, x2, y2 }, matrix) {
  const [fromX, fromY, toX, toY] = [x1, y1, x2, y2].map((n) => n.baseVal.value);
  const [from, to] = [new DOMPoint(fromX, fromY), new DOMPoint(toX, toY)].map((at) => at.matrixTransform(matrix));
  return `M${from.x} ${from.y}L${to.x} ${to.y}`;
}

/** @param {SVGGeometryElement} element @returns {string} its path; "" for shapes that no view has */
function outline(element) {
  if (element instanceof SVGPathElement) return element.getAttribute("d") ?? "";
  if (element instanceof SVGRectElement) {
    const [x, y, width, height] = [element.x, element.y, element.width, element.height].map(
      (n) => n.baseVal.value,
    );
    return `M${x} ${y}h${width}v${height}h${-width}Z`;
  }
  return "";
}

/** @param {DOMRect} a @param {DOMRect} b @returns {DOMRect} */
function common(a, b) {
  const [left, top] = [Math.max(a.left, b.left), Math.max(a.top, b.top)];
  return new DOMRect(left, top, Math.min(a.right, b.right) - left, Math.min(a.bottom, b.bottom) - top);
}

/** @param {DOMRect} a @param {DOMRect} b @returns {boolean} */
function meets(a, b) {
  const { width, height } = common(a, b);
  return width > 0 && height > 0;
}
