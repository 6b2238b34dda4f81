/** What a view's elements look like, drawn on a canvas: their grounds, lines, pictures and words. */

import { fittedText } from "../dom";
import type { Pen, Picture } from "../view";

type Stroke = (pen: Pen) => void;

/** @returns all of it but what is pressed, with what is scrolled out of sight */
export function snapshot(pane: HTMLElement): Picture {
  pane.classList.add("drawn"); // what is pressed takes no room
  const origin = pane.getBoundingClientRect();
  const parts = [...pane.querySelectorAll("*")].filter((part) => !part.closest(".details, [hidden]"));
  const boxes = parts.map((part) => ({ part, box: part.getBoundingClientRect(), style: getComputedStyle(part) }));
  const shown = boxes.filter(({ box }) => box.width > 0);
  const strokes = shown.flatMap(({ part, box, style }): Stroke[] => {
    const texts = [...part.childNodes].filter((node) => node instanceof Text);
    const words = texts.map((node) => textOf(node as Text, box, style));
    if (part instanceof SVGLineElement) return [lineOf(part, style)];
    return [groundOf(box, style), ...(part instanceof HTMLCanvasElement ? [canvasOf(part, box)] : []), ...words];
  });
  pane.classList.remove("drawn");
  return {
    width: Math.max(...shown.map(({ box }) => box.right - origin.left)),
    height: Math.max(...shown.map(({ box }) => box.bottom - origin.top)),
    draw: (pen) => {
      pen.translate(-origin.left, -origin.top);
      for (const stroke of strokes) stroke(pen);
    },
  };
}

/** The ground of an element, and the line around or under it. */
function groundOf({ left, top, width, height, bottom }: DOMRect, style: CSSStyleDeclaration): Stroke {
  const { backgroundColor, outlineColor, outlineStyle, borderBottomColor } = style;
  const outline = outlineStyle === "solid" ? Number.parseFloat(style.outlineWidth) : 0;
  const under = Number.parseFloat(style.borderBottomWidth);
  return (pen) => {
    pen.fillStyle = backgroundColor;
    pen.fillRect(left, top, width, height);
    [pen.strokeStyle, pen.lineWidth] = [outlineColor, outline];
    if (outline > 0) pen.strokeRect(left - outline / 2, top - outline / 2, width + outline, height + outline);
    pen.fillStyle = borderBottomColor;
    if (under > 0) pen.fillRect(left, bottom - under, width, under);
  };
}

function canvasOf(canvas: HTMLCanvasElement, { left, top, width, height }: DOMRect): Stroke {
  return (pen) => {
    pen.imageSmoothingEnabled = canvas.width > 2 * width;
    if (canvas.width > 0) pen.drawImage(canvas, left, top, width, height);
  };
}

/** A line between words; one that is put aside is not seen. */
function lineOf(line: SVGLineElement, { opacity, strokeWidth, strokeOpacity, stroke }: CSSStyleDeclaration): Stroke {
  const place = line.getScreenCTM();
  const [from, to] = [
    [line.x1, line.y1],
    [line.x2, line.y2],
  ].map(([x, y]) => new DOMPoint(x.baseVal.value, y.baseVal.value).matrixTransform(place ?? undefined));
  return (pen) => {
    pen.save();
    [pen.globalAlpha, pen.strokeStyle] = [Number(opacity) * Number(strokeOpacity), stroke];
    pen.lineWidth = Number.parseFloat(strokeWidth);
    pen.beginPath();
    pen.moveTo(from.x, from.y);
    pen.lineTo(to.x, to.y);
    pen.stroke();
    pen.restore();
  };
}

/** The lines of a text, each where the page has it; one that its element cuts ends with "…". */
function textOf(node: Text, box: DOMRect, style: CSSStyleDeclaration): Stroke {
  const { color, fontVariantCaps, letterSpacing, fontStyle, fontWeight, fontSize, fontFamily, textOverflow } = style;
  const range = document.createRange();
  const lines: { text: string; left: number; middle: number }[] = [];
  for (const { index, 0: word } of node.data.matchAll(/\S+/g)) {
    range.setStart(node, index);
    range.setEnd(node, index + word.length);
    const { left, top, height, width } = range.getBoundingClientRect();
    const [last, middle] = [lines.at(-1), top + height / 2];
    if (width === 0) continue;
    if (last && Math.abs(last.middle - middle) < 2) last.text += ` ${word}`;
    else lines.push({ text: word, left, middle });
  }
  return (pen) => {
    // Not style.font: it is empty where digits are all of one width.
    pen.font = `${fontStyle} ${fontWeight} ${fontSize} ${fontFamily}`;
    [pen.fontVariantCaps, pen.letterSpacing] = [fontVariantCaps as CanvasFontVariantCaps, letterSpacing];
    pen.fillStyle = color;
    [pen.textAlign, pen.textBaseline] = ["left", "middle"];
    for (const { text, left, middle } of lines)
      pen.fillText(textOverflow === "ellipsis" ? fittedText(pen, text, box.right - left) : text, left, middle);
    [pen.fontVariantCaps, pen.letterSpacing] = ["normal", "0px"];
  };
}
