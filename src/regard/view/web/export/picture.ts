/** What a view draws when it is saved. */

export type Pen = CanvasRenderingContext2D;

/** What a view looks like, in CSS pixels. */
export interface Picture {
  width: number;
  height: number;
  draw: (pen: Pen) => void; // from 0, 0
}

/**
 * Cut with "…" where there is no room for all of it.
 * @param width pixels
 */
export function fitted(pen: Pen, text: string, width: number): string {
  const letters = [...text];
  let fit = text;
  while (letters.length > 1 && pen.measureText(fit).width > width) {
    letters.pop();
    fit = `${letters.join("")}…`;
  }
  return fit;
}
