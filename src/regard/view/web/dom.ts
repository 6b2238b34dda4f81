/** Elements: found by their id, or made; and canvases. */

/** @returns one that index.html has */
export function byId<T extends HTMLElement = HTMLElement>(id: string): T {
  return document.getElementById(id) as T;
}

/** @returns a part of it */
export function inside<T extends HTMLElement = HTMLElement>(whole: HTMLElement, selector: string): T {
  return whole.querySelector(selector) as T;
}

/** @param properties or attributes, where there is no such property; "onclick" and the like are listeners */
export function element<Tag extends keyof HTMLElementTagNameMap>(
  tag: Tag,
  properties: Record<string, unknown> = {},
  ...children: (Node | string)[]
): HTMLElementTagNameMap[Tag] {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (typeof value === "function") made.addEventListener(name.slice(2), value as EventListener);
    else if (name in made) Object.assign(made, { [name]: value });
    else made.setAttribute(name, String(value));
  }
  made.append(...children);
  return made;
}

/** Rows and columns of a step. */
export const ARROWS: Record<string, [number, number]> = {
  ArrowUp: [-1, 0],
  ArrowDown: [1, 0],
  ArrowLeft: [0, -1],
  ArrowRight: [0, 1],
};

/**
 * A listener for keys that move inside a part of the page, and there alone.
 * @param moves rows and columns of each key
 */
export function moving(move: (down: number, right: number) => void, moves = ARROWS) {
  return (event: KeyboardEvent) => {
    const step = moves[event.key];
    if (!step || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault(); // the page's own keys leave it alone then
    move(...step);
  };
}

/** A table whose rows have data-row and cells data-column: Tab reaches one of them, and the arrows go on from there. */
export class Cells {
  active = [0, 0]; // row and column of the cell that the arrows are on

  /** @param point a cell is pointed at or reached; null: none */
  constructor(
    private readonly table: HTMLElement,
    private readonly point: (place: number[] | null) => void,
    moves = ARROWS,
  ) {
    table.addEventListener("pointerover", (event) => point(placeOf(event)));
    table.addEventListener("focusin", (event) => this.activate(placeOf(event) ?? this.active));
    const go = (down: number, right: number) =>
      this.at(this.nearest(this.active[0] + down, this.active[1] + right))?.focus();
    table.addEventListener("keydown", moving(go, moves));
  }

  at([row, column]: number[]): HTMLElement | null {
    return this.table.querySelector(`[data-row="${row}"] [data-column="${column}"]`);
  }

  private nearest(row: number, column: number): number[] {
    const rows = this.table.querySelectorAll("[data-row]").length;
    const columns = this.table.querySelectorAll('[data-row="0"] [data-column]').length;
    return [Math.max(0, Math.min(rows - 1, row)), Math.max(0, Math.min(columns - 1, column))];
  }

  /** From a cell, or the nearest that is there, the arrows go on. */
  activate([row, column]: number[]) {
    this.at(this.active)?.setAttribute("tabindex", "-1");
    this.active = this.nearest(row, column);
    this.at(this.active)?.setAttribute("tabindex", "0");
    this.point(this.active);
  }
}

/** @returns row and column of the cell that an event is about */
export function placeOf({ target }: Event): number[] | null {
  const cell = (target as HTMLElement).closest<HTMLElement>("[data-column]");
  const row = cell?.closest<HTMLElement>("[data-row]");
  return cell && row ? [Number(row.dataset.row), Number(cell.dataset.column)] : null;
}

/** Gives a list so many numbers to choose from, from 0. */
export function offerNumbers(select: HTMLSelectElement, count: number, name: (at: number) => string = String) {
  const names = Array.from({ length: count }, (_, i) => name(i));
  const offered = Array.from(select.options, ({ text }) => text);
  if (offered.join() !== names.join()) select.replaceChildren(...names.map((text, i) => new Option(text, String(i))));
}

export function svgElement<Name extends keyof SVGElementTagNameMap>(
  name: Name,
  attributes: Record<string, string | number>,
  ...children: (Node | string)[]
): SVGElementTagNameMap[Name] {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, String(value));
  made.append(...children);
  return made;
}

/**
 * Says that the scroller of a view has more columns than fit: its scroll bar may be invisible until it is used.
 * @returns what looks again
 */
export function moreColumns(view: HTMLElement): () => void {
  const [line, scroller] = [inside(view, ".overflow"), inside(view, ".scroller")];
  const look = () => {
    line.hidden = scroller.scrollWidth - scroller.clientWidth - scroller.scrollLeft < 2;
  };
  scroller.addEventListener("scroll", look);
  return look;
}

/**
 * Cut with "…" where there is no room for all of it.
 * @param width pixels
 */
export function fittedText(pen: CanvasRenderingContext2D, text: string, width: number): string {
  const letters = [...text];
  let fit = text;
  while (letters.length > 1 && pen.measureText(fit).width > width) {
    letters.pop();
    fit = `${letters.join("")}…`;
  }
  return fit;
}

export function context2d(canvas: HTMLCanvasElement): CanvasRenderingContext2D {
  return canvas.getContext("2d") as CanvasRenderingContext2D;
}

/** Gives a canvas so many pixels; it stays as it is where it has them, since a change empties it. */
export function resize(canvas: HTMLCanvasElement, width: number, height: number) {
  if (canvas.width !== width || canvas.height !== height) [canvas.width, canvas.height] = [width, height];
}

/**
 * @param pixels row by row
 * @param canvas that shows them
 * @returns with one pixel for each
 */
export function pixelated(
  width: number,
  height: number,
  pixels: ArrayLike<number>,
  canvas: HTMLCanvasElement = element("canvas"),
): HTMLCanvasElement {
  [canvas.width, canvas.height] = [width, height];
  const image = new ImageData(width, height);
  new Uint32Array(image.data.buffer).set(pixels);
  context2d(canvas).putImageData(image, 0, 0);
  return canvas;
}
