/** Drawing on a canvas or as SVG: the calls that pictures use, and what writes them down as SVG. */

import { context2d, element } from "../dom";

/** The part of a canvas that pictures are drawn with: what can be written as SVG. */
type Calls = Exclude<keyof SvgPen & keyof CanvasRenderingContext2D, "drawImage">;
export type Pen = Pick<CanvasRenderingContext2D, Calls> & Pick<SvgPen, "drawImage">;

/** What a view looks like, in CSS pixels. */
export interface Picture {
  width: number;
  height: number;
  draw: (pen: Pen) => void; // from 0, 0
}

const ANCHORS = { left: "start", start: "start", center: "middle", right: "end", end: "end" };
/** How far the alphabetic line lies below the named one, in heights of the font. */
const BELOW = { alphabetic: 0, middle: 0.35, top: 0.8, bottom: -0.2, hanging: 0.8, ideographic: -0.2 };

/** What save() keeps and restore() brings back. */
class Style {
  fillStyle = "#000";
  strokeStyle = "#000";
  lineWidth = 1;
  globalAlpha = 1;
  font = "10px sans-serif";
  letterSpacing = "0px";
  textAlign: CanvasTextAlign = "start";
  textBaseline: CanvasTextBaseline = "alphabetic";
  imageSmoothingEnabled = true;
  imageSmoothingQuality: ImageSmoothingQuality = "low";
  dashes: number[] = [];
  groups = 0; // opened since the last save()
}

export class SvgPen extends Style {
  parts: string[] = [];
  path = "";
  saved: Style[] = [];
  clips = 0;
  ruler = context2d(element("canvas"));

  /** @returns the picture as a document of its own */
  document({ width, height, draw }: Picture): string {
    draw(this);
    const size = `width="${width}" height="${height}" viewBox="0 0 ${width} ${height}"`;
    const ends = "</g>".repeat(this.groups);
    return [`<svg xmlns="http://www.w3.org/2000/svg" ${size}>`, ...this.parts, ends, "</svg>\n"].join("\n");
  }

  save() {
    const style = new Style();
    for (const name of Object.keys(style)) Object.assign(style, { [name]: this[name as keyof Style] });
    this.saved.push(style);
    this.groups = 0;
  }

  restore() {
    this.parts.push("</g>".repeat(this.groups));
    Object.assign(this, this.saved.pop());
  }

  /** @param attribute of all that follows until restore() */
  group(attribute: string) {
    this.groups++;
    this.parts.push(`<g ${attribute}>`);
  }

  translate(x: number, y: number) {
    this.group(`transform="translate(${short(x)} ${short(y)})"`);
  }

  rotate(radians: number) {
    this.group(`transform="rotate(${short((radians * 180) / Math.PI)})"`);
  }

  clip() {
    const id = `clip-${++this.clips}`;
    this.parts.push(`<clipPath id="${id}"><path d="${this.path}"/></clipPath>`);
    this.group(`clip-path="url(#${id})"`);
  }

  setLineDash(dashes: number[]) {
    this.dashes = dashes;
  }

  beginPath() {
    this.path = "";
  }

  moveTo(x: number, y: number) {
    this.path += `M${short(x)} ${short(y)}`;
  }

  lineTo(x: number, y: number) {
    this.path += `L${short(x)} ${short(y)}`;
  }

  bezierCurveTo(...numbers: [number, number, number, number, number, number]) {
    this.path += `C${numbers.map(short).join(" ")}`;
  }

  closePath() {
    this.path += "Z";
  }

  rect(x: number, y: number, width: number, height: number) {
    this.path += `M${short(x)} ${short(y)}h${short(width)}v${short(height)}h${short(-width)}Z`;
  }

  stroke() {
    this.put(`<path d="${this.path}" ${this.stroked()}/>`);
  }

  fill() {
    this.put(`<path d="${this.path}" fill="${this.fillStyle}"/>`);
  }

  strokeRect(...box: [number, number, number, number]) {
    this.put(`<rect ${placed(box)} ${this.stroked()}/>`);
  }

  fillRect(...box: [number, number, number, number]) {
    this.put(`<rect ${placed(box)} fill="${this.fillStyle}"/>`);
  }

  /** @param most width */
  fillText(text: string, x: number, y: number, most: number = Infinity) {
    const squeezed =
      this.measureText(text).width > most ? ` textLength="${short(most)}" lengthAdjust="spacingAndGlyphs"` : "";
    const [, weight, size, family] = /^(?:(\d+) )?([\d.]+)px (.*)$/.exec(this.font) ?? ["", "", "10", "sans-serif"];
    const font = `font-size="${size}" font-family="${escaped(family)}"${weight ? ` font-weight="${weight}"` : ""}`;
    const at = `x="${short(x)}" y="${short(y + BELOW[this.textBaseline] * Number(size))}"`;
    const anchor = `text-anchor="${ANCHORS[this.textAlign]}"`;
    const spaced = this.letterSpacing === "0px" ? "" : ` letter-spacing="${this.letterSpacing}"`;
    const look = `${at} ${anchor}${spaced} fill="${this.fillStyle}" ${font} xml:space="preserve"${squeezed}`;
    this.put(`<text ${look}>${escaped(text)}</text>`);
  }

  measureText(text: string): TextMetrics {
    this.ruler.font = this.font;
    return this.ruler.measureText(text);
  }

  drawImage(canvas: HTMLCanvasElement, ...box: [number, number, number, number]) {
    const smooth = this.imageSmoothingEnabled ? "" : ' style="image-rendering:pixelated"';
    const source = `preserveAspectRatio="none" href="${canvas.toDataURL("image/png")}"`;
    this.put(`<image ${placed(box)}${smooth} ${source}/>`);
  }

  put(part: string) {
    this.parts.push(this.globalAlpha < 1 ? `<g opacity="${short(this.globalAlpha)}">${part}</g>` : part);
  }

  stroked(): string {
    const dashed = this.dashes.length > 0 ? ` stroke-dasharray="${this.dashes.join(" ")}"` : "";
    return `fill="none" stroke="${this.strokeStyle}" stroke-width="${short(this.lineWidth)}"${dashed}`;
  }
}

/**
 * Cut with "…" where there is no room for all of it.
 * @param width pixels
 */
export function fitted(pen: Pick<Pen, "measureText">, text: string, width: number): string {
  const letters = [...text];
  let fit = text;
  while (letters.length > 1 && pen.measureText(fit).width > width) {
    letters.pop();
    fit = `${letters.join("")}…`;
  }
  return fit;
}

function placed([x, y, width, height]: number[]): string {
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
