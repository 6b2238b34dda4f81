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

/** On the map, in pixels from its corner. */
type Point = { x: number; y: number };

/** A zoom that keeps the token under the pointer (or the chosen one) where it is, or takes it to another point. */
export function zoomBy(map: HeadMap, factor: number, from?: Point | null, to?: Point) {
  if (!map.frame) return;
  const { store } = map.session;
  // Not the frame on the stage: several steps may come between two pictures.
  const frame = map.framed(store.state);
  const { x, y } = from ?? middle(map, frame);
  const zoom = Math.round(1000 * Math.max(1, Math.min(frame.most, store.state.zoom * factor))) / 1000;
  const next = map.framed({ zoom, row: 0, column: 0 });
  store.set({
    zoom,
    row: frame.row + y / frame.cellHeight - (to?.y ?? y) / next.cellHeight,
    column: frame.column + x / frame.cellWidth - (to?.x ?? x) / next.cellWidth,
    ...(to ? { hover: null } : {}),
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

/** One pointer points, chooses and drags; two pinch: the part between them follows them. */
export function followPointer(map: HeadMap) {
  const { canvas, holder, session } = map;
  const pointers = new Map<number, Point>();
  let [moved, pinched] = [false, false];
  canvas.addEventListener("pointerdown", (event) => {
    const point = map.pointOf(event);
    if (!point) return;
    if (pointers.size === 0) [moved, pinched] = [false, false];
    pointers.set(event.pointerId, point);
    pinched ||= pointers.size > 1;
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    const [before, now] = [pointers.get(event.pointerId), map.pointOf(event)];
    if (!before || !now) return session.hover(map.at(event));
    moved ||= Math.hypot(now.x - before.x, now.y - before.y) > 4;
    if (!moved) return;
    const [still] = [...pointers].filter(([id]) => id !== event.pointerId).map(([, point]) => point);
    pointers.set(event.pointerId, now);
    if (!still) return zoomBy(map, 1, before, now);
    const far = ({ x, y }: Point) => Math.max(20, Math.hypot(x - still.x, y - still.y));
    const between = ({ x, y }: Point) => ({ x: (x + still.x) / 2, y: (y + still.y) / 2 });
    zoomBy(map, far(now) / far(before), between(before), between(now));
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
  canvas.addEventListener("dblclick", (event) => zoomBy(map, 2, map.pointOf(event)));
  canvas.addEventListener(
    "wheel",
    (event) => {
      // Where something scrolls (a notebook, a phone), a plain wheel does that, and Ctrl or a pinch zooms.
      const { scrollHeight } = document.scrollingElement as Element;
      const isAlone = window === window.top && scrollHeight <= window.innerHeight + 1;
      if (!event.ctrlKey && !event.metaKey && !isAlone) return;
      event.preventDefault();
      zoomBy(map, 2 ** (-event.deltaY / 200), map.pointOf(event));
    },
    { passive: false },
  );
}
