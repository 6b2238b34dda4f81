/** The layers x heads grid of small maps: always there, the way to move. */

import { headNumber, layerName } from "../data/payload";
import { context2d, element, sharpened } from "../dom";
import type { Page as Whole, Shared } from "../main";
import { moving } from "../views/keys";
import { areSeveral, chosenHeads, withHead } from "./compare";
import { darkest } from "./legend";
import { headPicture } from "./small";

type Page = Shared & Pick<Whole, "gridCeiling">;

export class Overview {
  private layers = this.page.recording.layers;
  private heads = Math.max(...this.layers.map((info) => info.num_heads));
  private canvas = this.pane.querySelector("canvas") as HTMLCanvasElement;
  private caption = this.pane.querySelector(".caption") as HTMLElement;
  private left = 24;
  private top = 18;
  private step = 0;
  private gap = 0;
  private pointed: { layer: number; head: number } | null = null;
  private picture: HTMLCanvasElement | null = null;

  constructor(
    private readonly pane: HTMLElement,
    private readonly page: Page,
  ) {
    const { store } = page;
    this.canvas.addEventListener("pointermove", (event) => this.point(this.at(event)));
    this.canvas.addEventListener("pointerleave", () => this.point(null));
    this.canvas.addEventListener("click", (event) => {
      const tile = this.at(event);
      if (tile) store.set(event.shiftKey || areSeveral(store.state) ? { heads: withHead(store.state, tile) } : tile);
    });
    const step = (down: number, right: number) =>
      store.set({ layer: store.state.layer + down, head: store.state.head + right });
    this.canvas.addEventListener("keydown", moving(step));
  }

  /** Tiles as large as the pane allows, from 10 to 44 pixels: what stands under them is seen too. */
  private measure() {
    const style = getComputedStyle(this.pane);
    const width = Number.parseFloat(style.getPropertyValue("--grid-width"));
    const isBeside = this.pane.clientHeight > this.pane.clientWidth && style.maxHeight !== "none";
    const under = Array.from(this.pane.children, (child) => (child === this.canvas ? 0 : child.clientHeight + 14));
    const height = this.pane.clientHeight - this.top - under.reduce((sum, each) => sum + each, 40);
    const most = isBeside ? Math.max(14, Math.floor(height / this.layers.length)) : 44;
    this.step = Math.max(10, Math.min(44, most, Math.floor((width - this.left) / this.heads)));
    this.gap = this.step >= 18 ? 4 : 2;
  }

  private at(event: MouseEvent) {
    const head = Math.floor((event.offsetX - this.left) / this.step);
    const layer = Math.floor((event.offsetY - this.top) / this.step);
    return this.layers[layer] && head >= 0 && head < this.layers[layer].num_heads ? { layer, head } : null;
  }

  private point(tile: { layer: number; head: number } | null) {
    if (tile?.layer === this.pointed?.layer && tile?.head === this.pointed?.head) return;
    this.pointed = tile;
    this.canvas.classList.toggle("can-open", tile !== null);
    this.name();
    this.outline();
  }

  /** Says which head is pointed at or open. */
  name() {
    const { layer, head } = this.pointed ?? this.page.store.state;
    const { kind } = this.layers[layer];
    const missing = kind === "map" ? ", small map only" : kind === "pyramid" ? ", block means only" : "";
    const fitted = this.page.store.state.scale === "fit" ? ` · ${darkest(this.page.gridCeiling)}` : "";
    const adds = areSeveral(this.page.store.state) ? "Press a map to add its head or take it away. " : "";
    this.caption.textContent = `${adds}${this.pointed ? "Open" : "Open now:"} layer ${layerName(this.layers, layer)}, head ${headNumber(this.layers, { layer, head })}${missing}${fitted}`;
    this.canvas.setAttribute("aria-label", `Small maps of every head. ${this.caption.textContent}. Arrow keys move.`);
  }

  draw() {
    this.measure();
    const width = this.left + this.heads * this.step + 2;
    const height = this.top + this.layers.length * this.step + 2;
    this.picture = element("canvas");
    const context = sharpened(this.picture, width, height);
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    this.labels(context);
    context.imageSmoothingQuality = "high";
    this.layers.forEach((info, layer) => {
      for (let head = 0; head < info.num_heads; head++) this.tile(context, layer, head);
    });
    this.name();
    this.outline();
  }

  private labels(context: CanvasRenderingContext2D) {
    context.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    context.fillStyle = this.page.look.ink.faint;
    context.textBaseline = "middle";
    const every = this.step >= 18 ? 1 : this.step >= 13 ? 2 : 4;
    context.textAlign = "center";
    for (let head = 0; head < this.heads; head += every) {
      context.fillText(this.column(head), this.left + (head + 0.5) * this.step - this.gap / 2, 8);
    }
    context.textAlign = "right";
    for (let layer = 0; layer < this.layers.length; layer += this.step >= 13 ? 1 : 2) {
      const middle = this.top + (layer + 0.5) * this.step - this.gap / 2;
      context.fillText(layerName(this.layers, layer), this.left - 7, middle);
    }
  }

  /** @returns the number of the heads in a column; "" where it differs between layers */
  private column(head: number): string {
    const numbers = this.layers.flatMap(({ num_heads }, layer) =>
      head < num_heads ? [headNumber(this.layers, { layer, head })] : [],
    );
    return numbers.every((number) => number === numbers[0]) ? String(numbers[0]) : "";
  }

  private tile(context: CanvasRenderingContext2D, layer: number, head: number) {
    const picture = headPicture(this.page, layer, head);
    const side = this.step - this.gap;
    const { width, height } = picture;
    // Fewer pixels than cells: let the browser average. More: keep the cells' edges sharp.
    context.imageSmoothingEnabled = width > side * devicePixelRatio;
    const x = this.left + head * this.step;
    const y = this.top + layer * this.step;
    context.drawImage(picture, 0, 0, width, height, x, y, side, side);
    if (this.gap < 4) return; // so small, frames would be all one sees
    context.strokeStyle = this.page.look.ink.line;
    context.lineWidth = 1;
    context.strokeRect(x - 0.5, y - 0.5, side + 1, side + 1);
  }

  /** The open heads and the one pointed at, over the finished picture. */
  outline() {
    if (!this.picture) return;
    const ratio = devicePixelRatio;
    this.canvas.width = this.picture.width;
    this.canvas.height = this.picture.height;
    const context = context2d(this.canvas);
    context.drawImage(this.picture, 0, 0);
    context.scale(ratio, ratio);
    context.strokeStyle = this.page.look.ink.accent;
    const side = this.step - this.gap;
    const { state } = this.page.store;
    const open = areSeveral(state) ? chosenHeads(state, this.layers) : [state];
    for (const tile of [this.pointed, ...open]) {
      if (!tile) continue;
      const width = tile === this.pointed ? 1 : 2;
      context.lineWidth = width;
      const [x, y] = [this.left + tile.head * this.step, this.top + tile.layer * this.step];
      context.strokeRect(x - width / 2, y - width / 2, side + width, side + width);
    }
  }
}
