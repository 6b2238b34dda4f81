/**
 * Moving over the map: pointing, choosing, dragging, zooming with the wheel, two fingers or a double click.
 *
 * It is not d3-zoom: that keeps one scale and one offset in pixels, while a place here is a row, a
 * column and a zoom in the page's address, with cells of whole device pixels that differ in height
 * and width. Translating between the two would take more code than the gestures, and add 45 kB to
 * every page.
 */

import type { Frame } from "./axes";
import type { HeadMap } from "./map";

/**
 * A zoom that keeps the token under the pointer (or the chosen one) where it is.
 * @param point on the map, from its corner
 */
export function zoomBy(map: HeadMap, factor: number, point?: { x: number; y: number }) {
  if (!map.frame) return;
  const { store } = map.session;
  // Not the frame on the stage: several steps may come between two pictures.
  const frame = map.framed(store.state);
  const { x, y } = point ?? middle(map, frame);
  const zoom = Math.max(1, Math.min(frame.most, store.state.zoom * factor));
  const at = { query: frame.row + y / frame.cellHeight, key: frame.column + x / frame.cellWidth };
  const next = map.framed({ zoom: Math.round(zoom * 1000) / 1000, row: 0, column: 0 });
  store.set({
    zoom: Math.round(zoom * 1000) / 1000,
    row: at.query - y / next.cellHeight,
    column: at.key - x / next.cellWidth,
  });
}

/** The chosen cell where it is on the map, else the map's middle. */
function middle({ session }: HeadMap, frame: Frame) {
  const { query, key } = session.cell();
  const x = (key + 0.5 - frame.column) * frame.cellWidth;
  const y = (query + 0.5 - frame.row) * frame.cellHeight;
  return { x: x >= 0 && x <= frame.width ? x : frame.width / 2, y: y >= 0 && y <= frame.height ? y : frame.height / 2 };
}

/** Moves the shown part so that the chosen cell is on it. */
export function bringIntoView(map: HeadMap) {
  const { session } = map;
  const { store } = session;
  if (!map.frame || store.state.zoom === 1) return;
  const frame = map.framed(store.state);
  const { query, key } = session.cell();
  store.set({ row: seen(frame.row, query, frame.rows), column: seen(frame.column, key, frame.columns) });
}

function seen(first: number, at: number, shown: number) {
  if (at < first) return at;
  return at + 1 > first + shown ? at + 1 - shown : first;
}

/** Nothing around the map scrolls, so a plain wheel may zoom. */
function isAlone(): boolean {
  const { scrollHeight } = document.scrollingElement as Element;
  return window === window.top && scrollHeight <= window.innerHeight + 1;
}

/** One pointer points, chooses and drags; two pinch. */
export function followPointer(map: HeadMap) {
  const { canvas, holder, session } = map;
  const pointers = new Map<number, { x: number; y: number }>();
  let [moved, pinched] = [false, false];
  const onMap = ({ offsetX, offsetY }: MouseEvent) =>
    map.frame ? { x: offsetX - map.frame.left, y: offsetY - map.frame.top } : undefined;
  canvas.addEventListener("pointerdown", (event) => {
    if (!map.frame) return;
    if (pointers.size === 0) [moved, pinched] = [false, false];
    pointers.set(event.pointerId, { x: event.clientX, y: event.clientY });
    pinched ||= pointers.size > 1;
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    const before = pointers.get(event.pointerId);
    if (!before || !map.frame) return session.hover(map.at(event));
    const now = { x: event.clientX, y: event.clientY };
    moved ||= Math.hypot(now.x - before.x, now.y - before.y) > 4;
    if (!moved) return;
    const [other] = [...pointers].filter(([id]) => id !== event.pointerId).map(([, point]) => point);
    pointers.set(event.pointerId, now);
    if (other) pinch(map, other, before, now);
    else drag(map, now.x - before.x, now.y - before.y);
  });
  canvas.addEventListener("pointerup", (event) => {
    const cell = map.at(event);
    if (pointers.delete(event.pointerId) && !moved && !pinched && cell) session.choose(cell);
    holder.focus({ preventScroll: true });
  });
  canvas.addEventListener("pointercancel", (event) => pointers.delete(event.pointerId));
  // Two fingers belong to the map; one scrolls what the page stands in while the whole map is seen.
  canvas.addEventListener("touchstart", (event) => event.touches.length > 1 && event.preventDefault(), {
    passive: false,
  });
  canvas.addEventListener("pointerleave", () => session.hover(null));
  canvas.addEventListener("dblclick", (event) => zoomBy(map, 2, onMap(event)));
  canvas.addEventListener(
    "wheel",
    (event) => {
      // Where something scrolls (a notebook, a phone), a plain wheel does that, and Ctrl or a pinch zooms.
      if (!event.ctrlKey && !event.metaKey && !isAlone()) return;
      event.preventDefault();
      zoomBy(map, 2 ** (-event.deltaY / 200), onMap(event));
    },
    { passive: false },
  );
}

/** @param x pixels */
function drag(map: HeadMap, x: number, y: number) {
  const frame = map.framed(map.session.store.state);
  map.session.store.set({
    row: frame.row - y / frame.cellHeight,
    column: frame.column - x / frame.cellWidth,
    hover: null,
  });
}

/** The part between two fingers follows them. */
function pinch(
  map: HeadMap,
  still: { x: number; y: number },
  before: { x: number; y: number },
  now: { x: number; y: number },
) {
  const far = ({ x, y }: { x: number; y: number }) => Math.max(20, Math.hypot(x - still.x, y - still.y));
  const { left, top } = map.canvas.getBoundingClientRect();
  const frame = map.frame as Frame;
  const point = { x: (before.x + still.x) / 2 - left - frame.left, y: (before.y + still.y) / 2 - top - frame.top };
  zoomBy(map, far(now) / far(before), point);
  drag(map, (now.x - before.x) / 2, (now.y - before.y) / 2);
}
