/**
 * Drawing as SVG: takes the calls that the views make on a canvas and writes them down, text as
 * text. It has the part of CanvasRenderingContext2D that the views use, and no more.
 *
 * @typedef {{x: number, y: number, width: number, height: number}} Box
 */

import { context2d, element } from "./dom.js";

const ANCHORS = { left: "start", start: "start", center: "middle", right: "end", end: "end" };
/** How far the alphabetic line lies below the named one, in heights of the font. */
const BELOW = { alphabetic: 0, middle: 0.35, top: 0.8, bottom: -0.2, hanging: 0.8, ideographic: -0.2 };
/** What save keeps and restore brings back. */
const STYLE = /** @type {const} */ ([
  "fillStyle",
  "strokeStyle",
  "lineWidth",
  "globalAlpha",
  "font",
  "textAlign",
  "textBaseline",
  "letterSpacing",
  "dashes",
  "imageSmoothingEnabled",
  "imageSmoothingQuality",
  "transform",
  "clipped",
]);

export class SvgContext {
  /** @param {number} width CSS pixels @param {number} height @param {string} ground behind it all */
  constructor(width, height, ground) {
    this.size = { width, height };
    this.ground = ground;
    this.ruler = context2d(element("canvas"));
    /** @type {string[]} */ this.parts = [];
    /** @type {string[]} */ this.path = [];
    /** @type {Record<string, unknown>[]} */ this.saved = [];
    this.clips = 0;
    this.clipped = "";
    this.transform = new DOMMatrix();
    this.fillStyle = this.strokeStyle = "#000";
    this.lineWidth = this.globalAlpha = 1;
    this.font = "10px sans-serif";
    this.letterSpacing = "0px";
    /** @type {number[]} */ this.dashes = [];
    /** @type {CanvasTextAlign} */ this.textAlign = "start";
    /** @type {CanvasTextBaseline} */ this.textBaseline = "alphabetic";
    this.imageSmoothingEnabled = true;
    this.imageSmoothingQuality = "low";
  }

  /** For who draws on a canvas. @returns {CanvasRenderingContext2D} */
  asCanvas() {
    return /** @type {CanvasRenderingContext2D} */ (/** @type {unknown} */ (this));
  }

  /** @returns {string} the picture as a document of its own */
  text() {
    const { width, height } = this.size;
    return [
      `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" viewBox="0 0 ${width} ${height}">`,
      `<rect width="100%" height="100%" fill="${this.ground}"/>`,
      ...this.parts,
      "</svg>\n",
    ].join("\n");
  }

  save() {
    this.saved.push(Object.fromEntries(STYLE.map((name) => [name, this[name]])));
  }

  restore() {
    Object.assign(this, this.saved.pop());
  }

  /** @param {number} x @param {number} y */
  translate(x, y) {
    this.transform = this.transform.translate(x, y);
  }

  /** @param {number} radians */
  rotate(radians) {
    this.transform = this.transform.rotate((radians * 180) / Math.PI);
  }

  /** @param {number} x @param {number} y */
  scale(x, y) {
    this.transform = this.transform.scale(x, y);
  }

  /** @param {number[]} dashes */
  setLineDash(dashes) {
    this.dashes = dashes;
  }

  beginPath() {
    this.path = [];
  }

  /** @param {number} x @param {number} y */
  moveTo(x, y) {
    this.path.push(`M${short(x)} ${short(y)}`);
  }

  /** @param {number} x @param {number} y */
  lineTo(x, y) {
    this.path.push(`L${short(x)} ${short(y)}`);
  }

  /** @param {number} x @param {number} y @param {number} width @param {number} height */
  rect(x, y, width, height) {
    this.path.push(`M${short(x)} ${short(y)}h${short(width)}v${short(height)}h${short(-width)}Z`);
  }

  clip() {
    const outer = this.clipped;
    const id = `clip-${++this.clips}`;
    this.parts.push(
      `<clipPath id="${id}"${outer}><path d="${this.path.join("")}"${this.placed()}/></clipPath>`,
    );
    this.clipped = ` clip-path="url(#${id})"`;
  }

  stroke() {
    this.put(`<path d="${this.path.join("")}" fill="none"${this.stroked()}${this.placed()}/>`);
  }

  fill() {
    this.put(`<path d="${this.path.join("")}" fill="${this.fillStyle}"${this.placed()}/>`);
  }

  /** @param {number} x @param {number} y @param {number} width @param {number} height */
  strokeRect(x, y, width, height) {
    this.put(`<rect ${box({ x, y, width, height })} fill="none"${this.stroked()}${this.placed()}/>`);
  }

  /** @param {number} x @param {number} y @param {number} width @param {number} height */
  fillRect(x, y, width, height) {
    this.put(`<rect ${box({ x, y, width, height })} fill="${this.fillStyle}"${this.placed()}/>`);
  }

  /** Nothing is behind but the ground. @param {number} x @param {number} y @param {number} width @param {number} height */
  clearRect(x, y, width, height) {
    const covers = x <= 0 && y <= 0 && width >= this.size.width && height >= this.size.height;
    if (covers) this.parts = [];
    else this.put(`<rect ${box({ x, y, width, height })} fill="${this.ground}"${this.placed()}/>`);
  }

  /** @param {string} text @param {number} x @param {number} y @param {number} [most] width */
  fillText(text, x, y, most = Infinity) {
    const wide = this.measureText(text).width;
    const squeezed = wide > most ? ` textLength="${short(most)}" lengthAdjust="spacingAndGlyphs"` : "";
    const size = Number.parseFloat(/(\d+(\.\d+)?)px/.exec(this.font)?.[1] ?? "10");
    const [, weight, family] = /^(?:(\d+|bold) )?\S*px(?:\/\S+)? (.*)$/.exec(this.font) ?? [];
    const font = `font-size="${size}" font-family="${escaped(family ?? "sans-serif")}"${weight ? ` font-weight="${weight}"` : ""}`;
    const at = `x="${short(x)}" y="${short(y + BELOW[this.textBaseline] * size)}" text-anchor="${ANCHORS[this.textAlign]}"`;
    const spaced = Number.parseFloat(this.letterSpacing) ? ` letter-spacing="${this.letterSpacing}"` : "";
    const look = `${at} fill="${this.fillStyle}" ${font}${spaced} xml:space="preserve"${squeezed}`;
    this.put(`<text ${look}${this.placed()}>${escaped(text)}</text>`);
  }

  /** @param {string} text @returns {TextMetrics} */
  measureText(text) {
    this.ruler.font = this.font;
    return this.ruler.measureText(text);
  }

  /**
   * A part of a canvas, as a picture of its own.
   * @param {HTMLCanvasElement} canvas
   * @param {number[]} numbers x, y, width, height of the part where there are eight; then of the place
   */
  drawImage(canvas, ...numbers) {
    const whole = [0, 0, canvas.width, canvas.height];
    const [fromX, fromY, fromWidth, fromHeight] = numbers.length === 8 ? numbers : whole;
    const [x, y, width = canvas.width, height = canvas.height] = numbers.slice(-4);
    // Whole pixels: what sticks out of the place is cut off by the part's own view box.
    const left = Math.floor(fromX);
    const top = Math.floor(fromY);
    const part = element("canvas", {
      width: Math.max(1, Math.ceil(fromX + fromWidth) - left),
      height: Math.max(1, Math.ceil(fromY + fromHeight) - top),
    });
    context2d(part).drawImage(canvas, -left, -top);
    const smooth = this.imageSmoothingEnabled ? "" : ' style="image-rendering:pixelated"';
    const seen = `${short(fromX - left)} ${short(fromY - top)} ${short(fromWidth)} ${short(fromHeight)}`;
    const image = `<image width="${part.width}" height="${part.height}"${smooth} href="${part.toDataURL("image/png")}"/>`;
    const place = `<svg ${box({ x, y, width, height })} viewBox="${seen}" preserveAspectRatio="none">`;
    this.put(`<g${this.placed()}>${place}${image}</svg></g>`);
  }

  /** @param {string} element its own transform would move the clip along */
  put(element) {
    const faint = this.globalAlpha < 1 ? ` opacity="${short(this.globalAlpha)}"` : "";
    this.parts.push(this.clipped || faint ? `<g${this.clipped}${faint}>${element}</g>` : element);
  }

  /** @returns {string} */
  placed() {
    const { a, b, c, d, e, f } = this.transform;
    return this.transform.isIdentity ? "" : ` transform="matrix(${[a, b, c, d, e, f].map(short).join(" ")})"`;
  }

  /** @returns {string} */
  stroked() {
    const dashed = this.dashes.length > 0 ? ` stroke-dasharray="${this.dashes.join(" ")}"` : "";
    return ` stroke="${this.strokeStyle}" stroke-width="${short(this.lineWidth)}"${dashed}`;
  }
}

/** @param {Box} box @returns {string} */
function box({ x, y, width, height }) {
  return `x="${short(x)}" y="${short(y)}" width="${short(width)}" height="${short(height)}"`;
}

/** @param {number} value @returns {string} three decimals at most */
function short(value) {
  return String(Math.round(value * 1000) / 1000);
}

/** Text as XML may hold it: tokens are hostile. @param {string} text @returns {string} */
function escaped(text) {
  return text
    .replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\ufffe\uffff\ud800-\udfff]/gu, "\ufffd")
    .replace(/[&<>"']/g, (character) => `&#${character.charCodeAt(0)};`);
}
