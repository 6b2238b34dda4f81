/** The diagonal and the lines of distance 1, 10, 100 ... tokens, with quiet labels. */

import type { Pen } from "../export/svg";
import type { Frame, Ink } from "./axes";

export interface Diagonal {
  offset: number; // the key at which query 0 stands
  isBackOnly: boolean; // may queries look back only?
}

const APART = 20; // pixels between two lines
const NAMED = 0.62; // where along the first line its name stands,
const EARLIER = 0.11; // and how much earlier the next one's, so that names do not touch

/**
 * @param context clipped to the map
 * @param diagonal null: queries and keys are no two ends of one distance
 */
export function drawDistances(context: Pen, frame: Frame, diagonal: Diagonal | null, ink: Ink) {
  if (!diagonal) return;
  const sides = diagonal.isBackOnly ? [-1] : [-1, 1];
  let last = -Infinity;
  let named = NAMED;
  for (let distance = 0; distance < frame.row + frame.rows + frame.columns + frame.column;) {
    const apart = distance * frame.cellWidth;
    if (distance === 0 || apart - last >= APART) {
      for (const side of distance === 0 ? [1] : sides)
        drawLine(context, frame, diagonal.offset + side * distance, { text: nameOf(side * distance), named }, ink);
      last = apart;
      named = Math.max(EARLIER, named - EARLIER);
    }
    distance = distance === 0 ? 1 : distance * 10;
  }
}

function nameOf(distance: number): string {
  if (distance === 0) return "itself";
  return `${Math.abs(distance).toLocaleString("en")} ${distance < 0 ? "back" : "ahead"}`;
}

/**
 * The line through the cells of query i and key i + offset.
 * @param name and where along the line it stands, from 0 to 1
 */
function drawLine(
  context: Pen,
  frame: Frame,
  offset: number,
  { text, named }: { text: string; named: number },
  ink: Ink,
) {
  // Where the line enters and leaves the map, as queries.
  const start = Math.max(frame.row, frame.column - offset);
  const end = Math.min(frame.row + frame.rows, frame.column + frame.columns - offset);
  if (end - start <= 0) return;
  const x = (query: number) => frame.left + (query + offset - frame.column) * frame.cellWidth;
  const y = (query: number) => frame.top + (query - frame.row) * frame.cellHeight;
  context.strokeStyle = ink.accent;
  context.lineWidth = 1;
  context.globalAlpha = 0.55;
  context.setLineDash([1, 3]);
  context.beginPath();
  context.moveTo(x(start), y(start));
  context.lineTo(x(end), y(end));
  context.stroke();
  context.setLineDash([]);
  context.globalAlpha = 1;
  if (y(end) - y(start) < 60) return;
  const at = start + (end - start) * named;
  context.save();
  context.translate(x(at), y(at));
  context.rotate(Math.atan2(frame.cellHeight, frame.cellWidth));
  context.font = `11px ${getComputedStyle(document.body).fontFamily}`;
  context.textAlign = "center";
  context.textBaseline = "middle";
  const { width } = context.measureText(text);
  context.globalAlpha = 0.85;
  context.fillStyle = ink.ground;
  context.fillRect(-width / 2 - 4, -7, width + 8, 14);
  context.globalAlpha = 1;
  context.fillStyle = ink.grey;
  context.fillText(text, 0, 0);
  context.restore();
}
