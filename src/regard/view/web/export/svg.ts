/**
 * Drawing as SVG: takes the calls that the views make on a canvas and writes them down, text as
 * text. It has the part of CanvasRenderingContext2D that the views use, and no more.
 */

import { context2d, element } from "../dom";

export type Box = { x: number; y: number; width: number; height: number };

const ANCHORS = { left: "start", start: "start", center: "middle", right: "end", end: "end" };
/** How far the alphabetic line lies below the named one, in heights of the font. */
const BELOW = { alphabetic: 0, middle: 0.35, top: 0.8, bottom: -0.2, hanging: 0.8, ideographic: -0.2 };
/** What save keeps and restore brings back. */
const STYLE = [
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
] as const;

export class SvgContext {
  size: { width: number; height: number };
  ruler = context2d(element("canvas"));
  parts: string[] = [];
  path: string[] = [];
  saved: Record<string, unknown>[] = [];
  clips = 0;
  clipped = "";
  transform = new DOMMatrix();
  fillStyle: string;
  strokeStyle: string;
  lineWidth: number;
  globalAlpha: number;
  font = "10px sans-serif";
  letterSpacing = "0px";
  dashes: number[] = [];
  textAlign: CanvasTextAlign = "start";
  textBaseline: CanvasTextBaseline = "alphabetic";
  imageSmoothingEnabled = true;
  imageSmoothingQuality = "low";

  /**
   * @param width CSS pixels
   * @param ground behind it all
   */
  constructor(
    width: number,
    height: number,
    readonly ground: string,
  ) {
    this.size = { width, height };
    this.fillStyle = this.strokeStyle = "#000";
    this.lineWidth = this.globalAlpha = 1;
  }

  /** For who draws on a canvas. */
  asCanvas(): CanvasRenderingContext2D {
    return this as unknown as CanvasRenderingContext2D;
  }

  /** @returns the picture as a document of its own */
  text(): string {
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

  translate(x: number, y: number) {
    this.transform = this.transform.translate(x, y);
  }

  rotate(radians: number) {
    this.transform = this.transform.rotate((radians * 180) / Math.PI);
  }

  scale(x: number, y: number) {
    this.transform = this.transform.scale(x, y);
  }

  setLineDash(dashes: number[]) {
    this.dashes = dashes;
  }

  beginPath() {
    this.path = [];
  }

  moveTo(x: number, y: number) {
    this.path.push(`M${short(x)} ${short(y)}`);
  }

  lineTo(x: number, y: number) {
    this.path.push(`L${short(x)} ${short(y)}`);
  }

  rect(x: number, y: number, width: number, height: number) {
    this.path.push(`M${short(x)} ${short(y)}h${short(width)}v${short(height)}h${short(-width)}Z`);
  }

  clip() {
    const outer = this.clipped;
    const id = `clip-${++this.clips}`;
    this.parts.push(`<clipPath id="${id}"${outer}><path d="${this.path.join("")}"${this.placed()}/></clipPath>`);
    this.clipped = ` clip-path="url(#${id})"`;
  }

  stroke() {
    this.put(`<path d="${this.path.join("")}" fill="none"${this.stroked()}${this.placed()}/>`);
  }

  fill() {
    this.put(`<path d="${this.path.join("")}" fill="${this.fillStyle}"${this.placed()}/>`);
  }

  strokeRect(x: number, y: number, width: number, height: number) {
    this.put(`<rect ${box({ x, y, width, height })} fill="none"${this.stroked()}${this.placed()}/>`);
  }

  fillRect(x: number, y: number, width: number, height: number) {
    this.put(`<rect ${box({ x, y, width, height })} fill="${this.fillStyle}"${this.placed()}/>`);
  }

  /** Nothing is behind but the ground. */
  clearRect(x: number, y: number, width: number, height: number) {
    const covers = x <= 0 && y <= 0 && width >= this.size.width && height >= this.size.height;
    if (covers) this.parts = [];
    else this.put(`<rect ${box({ x, y, width, height })} fill="${this.ground}"${this.placed()}/>`);
  }

  /** @param most width */
  fillText(text: string, x: number, y: number, most: number = Infinity) {
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

  measureText(text: string): TextMetrics {
    this.ruler.font = this.font;
    return this.ruler.measureText(text);
  }

  /**
   * A part of a canvas, as a picture of its own.
   * @param numbers x, y, width, height of the part where there are eight; then of the place
   */
  drawImage(canvas: HTMLCanvasElement, ...numbers: number[]) {
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

  /** @param element its own transform would move the clip along */
  put(element: string) {
    const faint = this.globalAlpha < 1 ? ` opacity="${short(this.globalAlpha)}"` : "";
    this.parts.push(this.clipped || faint ? `<g${this.clipped}${faint}>${element}</g>` : element);
  }

  placed(): string {
    const { a, b, c, d, e, f } = this.transform;
    return this.transform.isIdentity ? "" : ` transform="matrix(${[a, b, c, d, e, f].map(short).join(" ")})"`;
  }

  stroked(): string {
    const dashed = this.dashes.length > 0 ? ` stroke-dasharray="${this.dashes.join(" ")}"` : "";
    return ` stroke="${this.strokeStyle}" stroke-width="${short(this.lineWidth)}"${dashed}`;
  }
}

function box({ x, y, width, height }: Box): string {
  return `x="${short(x)}" y="${short(y)}" width="${short(width)}" height="${short(height)}"`;
}

/** @returns three decimals at most */
function short(value: number): string {
  return String(Math.round(value * 1000) / 1000);
}

/** Text as XML may hold it: tokens are hostile. */
function escaped(text: string): string {
  return text
    .replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\ufffe\uffff\ud800-\udfff]/gu, "\ufffd")
    .replace(/[&<>"']/g, (character) => `&#${character.charCodeAt(0)};`);
}
