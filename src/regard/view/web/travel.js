/**
 * Moving over the map: pointing, choosing, dragging, zooming with the wheel.
 *
 * @typedef {import("./axes.js").Frame} Frame
 */

/**
 * A zoom that keeps the token under the pointer (or the chosen one) where it is.
 * @param {import("./main.js").Page} page
 * @param {number} factor
 * @param {{x: number, y: number}} [point] on the map, from its corner
 * @param {import("./map.js").MapView} [map] on which the point lies
 */
export function zoomBy(page, factor, point, map = page.map) {
  if (!map.frame) return;
  // Not the frame on the stage: several steps may come between two pictures.
  const frame = map.framed(page.store.state);
  const { x, y } = point ?? middle(page, frame);
  const zoom = Math.max(1, Math.min(frame.most, page.store.state.zoom * factor));
  const at = { query: frame.row + y / frame.cellHeight, key: frame.column + x / frame.cellWidth };
  const next = map.framed({ zoom: Math.round(zoom * 1000) / 1000, row: 0, column: 0 });
  page.store.set({
    zoom: Math.round(zoom * 1000) / 1000,
    row: at.query - y / next.cellHeight,
    column: at.key - x / next.cellWidth,
  });
}

/**
 * The chosen cell where it is on the map, else the map's middle.
 * @param {import("./main.js").Page} page @param {Frame} frame
 */
function middle(page, frame) {
  const { query, key } = page.cell();
  const x = (key + 0.5 - frame.column) * frame.cellWidth;
  const y = (query + 0.5 - frame.row) * frame.cellHeight;
  return {
    x: x >= 0 && x <= frame.width ? x : frame.width / 2,
    y: y >= 0 && y <= frame.height ? y : frame.height / 2,
  };
}

/**
 * Moves the shown part so that the chosen cell is on it.
 * @param {import("./main.js").Page} page
 */
export function bringIntoView(page) {
  if (!page.map.frame || page.store.state.zoom === 1) return;
  const frame = page.map.framed(page.store.state);
  const { query, key } = page.cell();
  page.store.set({
    row: seen(frame.row, query, frame.rows),
    column: seen(frame.column, key, frame.columns),
  });
}

/** @param {number} first @param {number} at @param {number} shown */
function seen(first, at, shown) {
  if (at < first) return at;
  return at + 1 > first + shown ? at + 1 - shown : first;
}

/**
 * @param {import("./map.js").MapView} map
 * @param {import("./main.js").Page} page
 */
export function followPointer(map, page) {
  const { over, holder } = map;
  /** @type {{x: number, y: number, row: number, column: number} | null} */ let drag = null;
  let moved = false;
  const onMap = /** @param {MouseEvent} event */ ({ offsetX, offsetY }) =>
    map.frame ? { x: offsetX - map.frame.left, y: offsetY - map.frame.top } : undefined;
  over.addEventListener("pointerdown", (event) => {
    if (!map.frame) return;
    const { row, column } = map.frame;
    drag = { x: event.clientX, y: event.clientY, row, column };
    moved = false;
    over.setPointerCapture(event.pointerId);
  });
  over.addEventListener("pointermove", (event) => {
    if (!drag || !map.frame) return page.hover(map.at(event));
    const [dx, dy] = [event.clientX - drag.x, event.clientY - drag.y];
    moved ||= Math.hypot(dx, dy) > 4;
    if (!moved) return;
    const { cellWidth, cellHeight } = map.frame;
    page.store.set({ row: drag.row - dy / cellHeight, column: drag.column - dx / cellWidth, hover: null });
  });
  over.addEventListener("pointerup", (event) => {
    drag = null;
    const cell = map.at(event);
    if (!moved && cell) page.store.set({ ...cell, hover: null });
    holder.focus({ preventScroll: true });
  });
  over.addEventListener("pointercancel", () => {
    drag = null;
  });
  over.addEventListener("pointerleave", () => page.hover(null));
  over.addEventListener("dblclick", (event) => zoomBy(page, 2, onMap(event), map));
  over.addEventListener(
    "wheel",
    (event) => {
      // A plain wheel scrolls what the page stands in (a notebook); with Ctrl, or pinching, it zooms.
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      zoomBy(page, 2 ** (-event.deltaY / 200), onMap(event), map);
    },
    { passive: false },
  );
}
