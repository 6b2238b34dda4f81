/** The whole matrix in a corner, with the part that is shown outlined; a click or a drag moves it. */

import { sharpened } from "../dom";
import type { Shared as Page } from "../main";
import type { Frame, Ink } from "./axes";
import type { MapView } from "./map";

export type Shape = { q_len: number; kv_len: number };

const SIDE = 116; // most pixels of its longer side
const PART = 1 / 4; // of the map, at most
const LEAST = 24;

function sidesOf({ q_len, kv_len }: Shape, frame: Frame): { width: number; height: number } {
  const longer = Math.min(SIDE, PART * frame.width, PART * frame.height) / Math.max(q_len, kv_len);
  const side = (length: number) => Math.max(LEAST, Math.round(longer * length));
  return { width: side(kv_len), height: side(q_len) };
}

/** @param small map of the whole */
export function drawMinimap(
  canvas: HTMLCanvasElement,
  small: HTMLCanvasElement | null,
  frame: Frame,
  shape: Shape,
  ink: Ink,
) {
  const isWhole = frame.rows >= shape.q_len - 1e-6 && frame.columns >= shape.kv_len - 1e-6;
  canvas.hidden = isWhole;
  if (isWhole) return;
  const { width, height } = sidesOf(shape, frame);
  const context = sharpened(canvas, width, height);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  canvas.style.left = `${frame.left + frame.width - width - 10}px`;
  canvas.style.top = `${frame.top + 10}px`;
  context.fillStyle = ink.ground;
  context.fillRect(0, 0, width, height);
  context.imageSmoothingEnabled = false;
  if (small) context.drawImage(small, 0, 0, width, height);
  context.strokeStyle = ink.faint;
  context.lineWidth = 1;
  context.strokeRect(0.5, 0.5, width - 1, height - 1);
  const [across, down] = [width / shape.kv_len, height / shape.q_len];
  const part = { width: Math.max(5, frame.columns * across), height: Math.max(5, frame.rows * down) };
  const x = (frame.column + frame.columns / 2) * across - part.width / 2;
  const y = (frame.row + frame.rows / 2) * down - part.height / 2;
  context.strokeStyle = ink.accent;
  context.lineWidth = 2;
  context.strokeRect(
    Math.max(1, Math.min(width - part.width - 1, x)),
    Math.max(1, Math.min(height - part.height - 1, y)),
    Math.min(width - 2, part.width),
    Math.min(height - 2, part.height),
  );
}

export function followMinimap(map: MapView, page: Page) {
  const { mini } = map;
  let isDown = false;
  const go = ({ offsetX, offsetY }: PointerEvent) => {
    const frame = map.frame as Frame;
    const shape = map.info();
    const { width, height } = sidesOf(shape, frame);
    page.store.set({
      row: (offsetY / height) * shape.q_len - frame.rows / 2,
      column: (offsetX / width) * shape.kv_len - frame.columns / 2,
      hover: null,
    });
  };
  mini.addEventListener("pointerdown", (event) => {
    isDown = true;
    mini.setPointerCapture(event.pointerId);
    go(event);
  });
  mini.addEventListener("pointermove", (event) => {
    if (isDown) go(event);
  });
  for (const end of ["pointerup", "pointercancel"] as const) mini.addEventListener(end, () => (isDown = false));
}
