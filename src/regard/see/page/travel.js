/** Moving over the map: pointing, choosing, dragging, zooming with the wheel. */

/**
 * A zoom that keeps the token under the pointer (or the chosen one) where it is.
 * @param {import("./main.js").Page} page
 * @param {number} factor
 * @param {{query: number, key: number}} [around]
 */
export function zoomBy(page, factor, around = page.cell()) {
  const { zoom, row, column, layer } = page.store.state;
  const { q_len, kv_len } = page.recording.layers[layer];
  const most = Math.max(1, Math.max(q_len, kv_len) / 8);
  const next = Math.min(most, Math.max(1, zoom * factor));
  page.store.set({
    zoom: Math.round(next * 100) / 100,
    row: kept(row, around.query, q_len, zoom, next),
    column: kept(column, around.key, kv_len, zoom, next),
  });
}

/**
 * The first position shown after a zoom.
 * @param {number} first @param {number} at @param {number} length @param {number} zoom @param {number} next
 */
function kept(first, at, length, zoom, next) {
  const shown = Math.max(1, Math.round(length / zoom));
  const will = Math.max(1, Math.round(length / next));
  const inside = at >= first && at < first + shown;
  const part = inside ? (at + 0.5 - first) / shown : 0.5;
  return Math.max(0, Math.min(length - will, Math.round(at + 0.5 - part * will)));
}

/**
 * Moves the shown part so that the chosen cell is on it.
 * @param {import("./main.js").Page} page
 */
export function bringIntoView(page) {
  const { zoom, row, column, layer } = page.store.state;
  if (zoom === 1) return;
  const { query, key } = page.cell();
  const { q_len, kv_len } = page.recording.layers[layer];
  page.store.set({ row: seen(row, query, q_len, zoom), column: seen(column, key, kv_len, zoom) });
}

/** @param {number} first @param {number} at @param {number} length @param {number} zoom */
function seen(first, at, length, zoom) {
  const shown = Math.max(1, Math.round(length / zoom));
  if (at < first) return at;
  return at >= first + shown ? at - shown + 1 : first;
}

/**
 * @param {import("./map.js").MapView} map
 * @param {import("./main.js").Page} page
 */
export function followPointer(map, page) {
  const { over, holder } = map;
  /** @type {{x: number, y: number, row: number, column: number} | null} */ let drag = null;
  let moved = false;
  over.addEventListener("pointerdown", (event) => {
    const { row, column } = page.store.state;
    drag = { x: event.clientX, y: event.clientY, row, column };
    moved = false;
    over.setPointerCapture(event.pointerId);
  });
  over.addEventListener("pointermove", (event) => {
    if (drag && map.frame && page.store.state.zoom > 1) {
      const [dx, dy] = [event.clientX - drag.x, event.clientY - drag.y];
      moved ||= Math.hypot(dx, dy) > 4;
      const { cellWidth, cellHeight } = map.frame;
      if (moved)
        page.store.set({
          row: drag.row - Math.round(dy / cellHeight),
          column: drag.column - Math.round(dx / cellWidth),
          hover: null,
        });
      if (moved) return;
    }
    page.hover(map.at(event));
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
  over.addEventListener("dblclick", (event) => zoomBy(page, 2, map.at(event) ?? undefined));
  over.addEventListener(
    "wheel",
    (event) => {
      // A plain wheel scrolls what the page stands in (a notebook); with Ctrl, or pinching, it zooms.
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      zoomBy(page, 2 ** (-event.deltaY / 200), map.at(event) ?? undefined);
    },
    { passive: false },
  );
}
