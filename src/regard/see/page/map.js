/** The large map of the open head: exact weights, coarse first, with a crosshair over it. */

import { Axes } from "./axes.js";
import { level, logFloor } from "./colours.js";
import { digits } from "./numbers.js";
import { picturedMap } from "./overview.js";

/**
 * @typedef {import("./axes.js").Frame} Frame
 * @typedef {import("./state.js").State} State
 * @typedef {import("./tokens.js").Token} Token
 *
 * @typedef {object} Look what the theme gives
 * @property {ReturnType<import("./colours.js").ramp>} ramp
 * @property {import("./axes.js").Ink} ink
 *
 * @typedef {object} Picture numbers of a part of the matrix
 * @property {string} name which head, part and scale
 * @property {number} height
 * @property {number} width
 * @property {Float32Array} values mean weight of each cell, filled from the top
 * @property {number} filled rows that have arrived
 * @property {HTMLCanvasElement} canvas a pixel for each cell
 * @property {number} painted rows that have their colours
 */

const NUMBERS = 40; // pixels of a cell that holds a number
const SLICE = 12; // milliseconds of painting in one frame
const REDRAWN = ["layer", "head", "hidden", "scale", "zoom", "row", "column", "theme", "folded", "size"];

export class MapView {
  /**
   * @param {HTMLElement} stage
   * @param {import("./main.js").Page} page
   */
  constructor(stage, page) {
    this.page = page;
    this.holder = /** @type {HTMLElement} */ (stage.querySelector(".map"));
    this.status = /** @type {HTMLElement} */ (stage.querySelector(".progress"));
    const [base, over] = /** @type {HTMLCanvasElement[]} */ ([...this.holder.querySelectorAll("canvas")]);
    this.base = base;
    this.over = over;
    this.context = /** @type {CanvasRenderingContext2D} */ (this.base.getContext("2d"));
    this.overContext = /** @type {CanvasRenderingContext2D} */ (this.over.getContext("2d"));
    this.axes = new Axes(this.context);
    this.overAxes = new Axes(this.overContext);
    /** @type {Frame | null} */ this.frame = null;
    /** @type {Picture | null} */ this.picture = null;
    new ResizeObserver(() => this.update(page.store.state, new Set(["size"]))).observe(this.holder);
  }

  /** @param {State} state @param {Set<string>} changed */
  update(state, changed) {
    if (!REDRAWN.some((name) => changed.has(name)) || this.holder.clientWidth === 0) return;
    this.arrange(state);
    if (this.picture && (changed.has("scale") || changed.has("theme"))) this.picture.painted = 0;
    this.ask(state);
    this.draw();
    this.paint();
  }

  /** The part of the matrix that is shown, and where. @param {State} state */
  arrange(state) {
    const { queries, keys } = this.page.axes(state.layer);
    const rows = Math.max(1, Math.round(queries.length / state.zoom));
    const columns = Math.max(1, Math.round(keys.length / state.zoom));
    const first = {
      row: Math.min(state.row, queries.length - rows),
      column: Math.min(state.column, keys.length - columns),
    };
    const size = { width: this.holder.clientWidth, height: this.holder.clientHeight };
    for (const canvas of [this.base, this.over]) {
      canvas.width = Math.round(size.width * devicePixelRatio);
      canvas.height = Math.round(size.height * devicePixelRatio);
    }
    this.context.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    this.overContext.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    this.queries = queries;
    this.keys = keys;
    this.frame = this.axes.frame(
      size,
      queries.slice(first.row, first.row + rows),
      keys.slice(first.column, first.column + columns),
      first,
    );
    this.overAxes.setLimit(this.axes.limit);
    const { left, top, cellWidth, cellHeight } = this.frame;
    this.holder.dataset.frame = [left, top, cellWidth, cellHeight].join();
  }

  /** @param {State} state asks for the numbers unless they are there */
  ask(state) {
    const frame = /** @type {Frame} */ (this.frame);
    const info = this.page.recording.layers[state.layer];
    const height = Math.min(frame.rows, Math.round(frame.rows * frame.cellHeight * devicePixelRatio));
    const width = Math.min(frame.columns, Math.round(frame.columns * frame.cellWidth * devicePixelRatio));
    const byRow = state.scale === "row";
    const name = [
      state.layer,
      state.head,
      state.hidden,
      byRow,
      frame.row,
      frame.column,
      frame.rows,
      frame.columns,
      height,
      width,
    ].join();
    if (info.kind === "map") {
      this.picture = null;
      this.holder.dataset.ready = "small map";
      return;
    }
    if (this.picture?.name === name) return;
    const picture = {
      name,
      height,
      width,
      values: new Float32Array(height * width),
      filled: 0,
      canvas: document.createElement("canvas"),
      painted: 0,
    };
    [picture.canvas.width, picture.canvas.height] = [width, height];
    this.picture = picture;
    this.holder.dataset.ready = "";
    const part = {
      layer: state.layer,
      head: state.head,
      hidden: state.hidden,
      byRow,
      cells: /** @type {[number, number]} */ ([height, width]),
      rows: /** @type {[number, number]} */ ([frame.row, frame.row + frame.rows]),
      columns: /** @type {[number, number]} */ ([frame.column, frame.column + frame.columns]),
    };
    this.page.source
      .map(part, (top, values) => this.receive(picture, top, values))
      .catch((error) => this.page.damaged(error));
  }

  /** @param {Picture} picture @param {number} top @param {Float32Array} values */
  receive(picture, top, values) {
    if (picture !== this.picture) return;
    picture.values.set(values, top * picture.width);
    picture.filled = top + values.length / picture.width;
    const part = picture.filled / picture.height;
    this.status.textContent = part < 1 ? `exact map: ${Math.floor(part * 100)} %` : "";
    this.holder.style.setProperty("--done", String(part));
    this.holder.classList.toggle("loading", part < 1);
    this.paint();
  }

  /** Colours what has arrived, a little in each frame. */
  paint() {
    const { picture } = this;
    if (!picture || picture.painted === picture.filled) return;
    const { scale, layer } = this.page.store.state;
    const floor = logFloor(this.page.recording.layers[layer].kv_len);
    const { packed } = this.page.look.ramp;
    const context = /** @type {CanvasRenderingContext2D} */ (picture.canvas.getContext("2d"));
    const start = performance.now();
    while (picture.painted < picture.filled && performance.now() - start < SLICE) {
      const rows = Math.min(16, picture.filled - picture.painted);
      const image = context.createImageData(picture.width, rows);
      const pixels = new Uint32Array(image.data.buffer);
      const first = picture.painted * picture.width;
      // By row the engine has divided each row by its highest weight already.
      for (let i = 0; i < pixels.length; i++)
        pixels[i] = packed[level(picture.values[first + i], scale, floor, 1)];
      context.putImageData(image, 0, picture.painted);
      picture.painted += rows;
    }
    this.draw();
    if (picture.painted === picture.height) this.holder.dataset.ready = picture.name;
    else if (picture.painted < picture.filled) requestAnimationFrame(() => this.paint());
  }

  draw() {
    const { state } = this.page.store;
    const frame = /** @type {Frame} */ (this.frame);
    const { ink, ramp } = this.page.look;
    const context = this.context;
    context.clearRect(0, 0, this.base.width, this.base.height);
    const [width, height] = [frame.columns * frame.cellWidth, frame.rows * frame.cellHeight];
    context.save();
    context.beginPath();
    context.rect(frame.left, frame.top, width, height);
    context.clip();
    this.drawCoarse(state);
    if (this.picture && this.picture.painted > 0) this.drawPicture(this.picture);
    context.restore();
    context.strokeStyle = ink.line;
    context.lineWidth = 1;
    context.strokeRect(frame.left - 0.5, frame.top - 0.5, width + 1, height + 1);
    if (this.picture && this.picture.painted === frame.rows && frame.cellWidth >= NUMBERS)
      this.drawNumbers(ramp);
    this.axes.draw(frame, /** @type {Token[]} */ (this.queries), /** @type {Token[]} */ (this.keys), ink);
    this.point();
  }

  /** The small map, enlarged: what is known before the exact numbers. @param {State} state */
  drawCoarse({ layer, head, scale }) {
    const frame = /** @type {Frame} */ (this.frame);
    const info = this.page.recording.layers[layer];
    const picture = picturedMap(this.page.maps[layer], head, scale, this.page.look.ramp);
    const { context } = this;
    context.imageSmoothingEnabled = false;
    const across = picture.width / info.kv_len;
    const down = picture.height / info.q_len;
    context.drawImage(
      picture,
      frame.column * across,
      frame.row * down,
      frame.columns * across,
      frame.rows * down,
      frame.left,
      frame.top,
      frame.columns * frame.cellWidth,
      frame.rows * frame.cellHeight,
    );
  }

  /** @param {Picture} picture */
  drawPicture(picture) {
    const frame = /** @type {Frame} */ (this.frame);
    const { canvas, painted } = picture;
    const height = (frame.rows * frame.cellHeight * painted) / picture.height;
    const width = frame.columns * frame.cellWidth;
    this.context.clearRect(frame.left, frame.top, width, height);
    this.context.imageSmoothingEnabled = false;
    let source = canvas;
    let from = painted;
    const enlarged = Math.ceil(Math.max(frame.cellWidth, frame.cellHeight) * devicePixelRatio);
    const whole = Number.isInteger(frame.cellWidth * devicePixelRatio) && picture.width === frame.columns;
    if (!whole && painted === picture.height && picture.width === frame.columns && enlarged <= 6) {
      // Cells of, say, 2.3 pixels: enlarge by a whole number, then let the browser average, so
      // that no row looks thicker than its neighbour.
      source = document.createElement("canvas");
      source.width = canvas.width * enlarged;
      source.height = painted * enlarged;
      from = source.height;
      const large = /** @type {CanvasRenderingContext2D} */ (source.getContext("2d"));
      large.imageSmoothingEnabled = false;
      large.drawImage(canvas, 0, 0, canvas.width, painted, 0, 0, source.width, source.height);
      this.context.imageSmoothingEnabled = true;
      this.context.imageSmoothingQuality = "high";
    }
    this.context.drawImage(source, 0, 0, source.width, from, frame.left, frame.top, width, height);
  }

  /** Shares in percent inside cells that are large enough. @param {Look["ramp"]} ramp */
  drawNumbers(ramp) {
    const { scale, layer } = this.page.store.state;
    if (scale === "row") return;
    const frame = /** @type {Frame} */ (this.frame);
    const picture = /** @type {Picture} */ (this.picture);
    const floor = logFloor(this.page.recording.layers[layer].kv_len);
    const { context } = this;
    context.font = `${frame.cellWidth < 50 ? 11 : 12}px ${getComputedStyle(document.body).getPropertyValue("--mono")}`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    picture.values.forEach((weight, i) => {
      const [row, column] = [Math.floor(i / picture.width), i % picture.width];
      context.fillStyle = weight === 0 ? this.page.look.ink.line : ramp.onTop[level(weight, scale, floor, 1)];
      const text = weight > 0 && weight < 0.00001 ? "<0.001" : digits(weight * 100);
      const y = frame.top + (row + 0.5) * frame.cellHeight;
      context.fillText(text, frame.left + (column + 0.5) * frame.cellWidth, y, frame.cellWidth - 4);
    });
  }

  /** The crosshair over the pointed or chosen cell, its two tokens named. */
  point() {
    const frame = this.frame;
    if (!frame) return;
    const { ink } = this.page.look;
    const context = this.overContext;
    context.clearRect(0, 0, this.over.width, this.over.height);
    const { query, key } = this.page.cell();
    const [x, y] = [
      frame.left + (key - frame.column) * frame.cellWidth,
      frame.top + (query - frame.row) * frame.cellHeight,
    ];
    const onMap = {
      row: query >= frame.row && query < frame.row + frame.rows,
      column: key >= frame.column && key < frame.column + frame.columns,
    };
    const { cellWidth, cellHeight } = frame;
    context.strokeStyle = ink.accent;
    context.lineWidth = 1;
    context.beginPath();
    if (onMap.row) {
      for (const edge of cellHeight < 6 ? [y + cellHeight / 2] : [y, y + cellHeight]) {
        lineTo(
          context,
          frame.left - 4,
          edge,
          onMap.column ? x : frame.left + frame.columns * cellWidth,
          edge,
        );
      }
    }
    if (onMap.column) {
      for (const edge of cellWidth < 6 ? [x + cellWidth / 2] : [x, x + cellWidth]) {
        lineTo(context, edge, frame.top - 4, edge, onMap.row ? y : frame.top + frame.rows * cellHeight);
      }
    }
    context.stroke();
    if (onMap.row && onMap.column) {
      const grown = Math.max(0, 7 - Math.min(cellWidth, cellHeight)) / 2;
      context.lineWidth = 2;
      context.strokeRect(x - grown, y - grown, cellWidth + 2 * grown, cellHeight + 2 * grown);
    }
    this.nameCell(frame, onMap.row ? query : null, onMap.column ? key : null);
  }

  /** @param {Frame} frame @param {number | null} query @param {number | null} key */
  nameCell(frame, query, key) {
    const { ink } = this.page.look;
    const queries = /** @type {Token[]} */ (this.queries);
    const keys = /** @type {Token[]} */ (this.keys);
    if (query !== null) {
      this.overAxes.coverQueries(frame, query, ink);
      this.overAxes.queryLabel(frame, queries[query], query, frame.cellHeight < 16, ink, true);
    }
    if (key !== null) {
      this.overAxes.coverKeys(frame, key, ink);
      this.overAxes.keyLabel(frame, keys[key], key, frame.cellWidth < 16, ink, true);
    }
  }

  /** @param {{offsetX: number, offsetY: number}} event @returns {{query: number, key: number} | null} */
  at({ offsetX, offsetY }) {
    const frame = this.frame;
    if (!frame) return null;
    const row = Math.floor((offsetY - frame.top) / frame.cellHeight);
    const column = Math.floor((offsetX - frame.left) / frame.cellWidth);
    const inside = row >= 0 && row < frame.rows && column >= 0 && column < frame.columns;
    return inside ? { query: frame.row + row, key: frame.column + column } : null;
  }
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {number} fromX @param {number} fromY @param {number} toX @param {number} toY
 */
function lineTo(context, fromX, fromY, toX, toY) {
  context.moveTo(fromX, fromY);
  context.lineTo(toX, toY);
}
