/** The layers x heads grid of small maps: always there, the way to move. */

import { signal } from "@preact/signals-core";
import { areSeveral, chosenHeads, withHead } from "../data/compare";
import { byId, context2d, element, moving, sharpened } from "../dom";
import { darkest } from "../map/legend";
import { headPicture } from "../map/small_picture";
import { headNumber, layerName, ownLayers, type Head } from "../protocol/recording";
import type { Session } from "../session";

export class Overview {
  private layers = ownLayers(this.session.recording);
  private heads = Math.max(...this.layers.map((info) => info.num_heads));
  private pane = byId("overview");
  private canvas = this.pane.querySelector("canvas") as HTMLCanvasElement;
  private caption = this.pane.querySelector(".caption") as HTMLElement;
  private left = 24;
  private top = 18;
  private step = 0;
  private gap = 0;
  private pointed = signal<Head | null>(null);
  private size = signal(0); // changes with that of the window
  private picture = signal<HTMLCanvasElement | null>(null);

  constructor(private readonly session: Session) {
    const { store } = session;
    window.addEventListener("resize", () => this.size.value++);
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

  private point(tile: Head | null) {
    const pointed = this.pointed.value;
    if (tile?.layer !== pointed?.layer || tile?.head !== pointed?.head) this.pointed.value = tile;
  }

  /** Says which head is pointed at or open. */
  name() {
    const { drawn } = this.session.store;
    const at = this.pointed.value ?? drawn;
    const { kind } = this.layers[at.layer];
    const missing = kind === "map" ? ", small map only" : kind === "pyramid" ? ", block means only" : "";
    const fitted = drawn.scale === "fit" ? ` · ${darkest(this.session.gridCeilings.value)}` : "";
    const adds = areSeveral(drawn) ? "Press a map to add its head or take it away. " : "";
    const verb = this.pointed.value ? "Open" : "Open now:";
    const head = headNumber(this.layers, at);
    this.caption.textContent = `${adds}${verb} layer ${layerName(this.layers, at.layer)}, head ${head}${missing}${fitted}`;
    this.canvas.classList.toggle("can-open", this.pointed.value !== null);
    this.canvas.setAttribute("aria-label", `Small maps of every head. ${this.caption.textContent}. Arrow keys move.`);
  }

  draw() {
    if (this.size.value >= 0) this.measure();
    const width = this.left + this.heads * this.step + 2;
    const height = this.top + this.layers.length * this.step + 2;
    const picture = element("canvas");
    const context = sharpened(picture, width, height);
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    this.labels(context);
    context.imageSmoothingQuality = "high";
    this.layers.forEach((info, layer) => {
      for (let head = 0; head < info.num_heads; head++) this.tile(context, layer, head);
    });
    this.picture.value = picture;
  }

  private labels(context: CanvasRenderingContext2D) {
    context.font = `11px ${this.session.look.family}`;
    context.fillStyle = this.session.look.ink.faint;
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
    const picture = headPicture(this.session, { layer, head });
    if (!picture) return;
    const side = this.step - this.gap;
    const { width, height } = picture;
    // Fewer pixels than cells: let the browser average. More: keep the cells' edges sharp.
    context.imageSmoothingEnabled = width > side * devicePixelRatio;
    const x = this.left + head * this.step;
    const y = this.top + layer * this.step;
    context.drawImage(picture, 0, 0, width, height, x, y, side, side);
    if (this.gap < 4) return; // so small, frames would be all one sees
    context.strokeStyle = this.session.look.ink.line;
    context.lineWidth = 1;
    context.strokeRect(x - 0.5, y - 0.5, side + 1, side + 1);
  }

  /** The open heads and the one pointed at, over the finished picture. */
  outline() {
    const picture = this.picture.value;
    if (!picture) return;
    [this.canvas.width, this.canvas.height] = [picture.width, picture.height];
    const context = context2d(this.canvas);
    context.drawImage(picture, 0, 0);
    context.scale(devicePixelRatio, devicePixelRatio);
    context.strokeStyle = this.session.look.ink.accent;
    const side = this.step - this.gap;
    const { layer, head, heads } = this.session.store.drawn;
    const open =
      heads === "one" || heads === "mean" ? [{ layer, head }] : chosenHeads({ layer, head, heads }, this.layers);
    for (const tile of [this.pointed.value, ...open]) {
      if (!tile) continue;
      const width = tile === this.pointed.value ? 1 : 2;
      context.lineWidth = width;
      const [x, y] = [this.left + tile.head * this.step, this.top + tile.layer * this.step];
      context.strokeRect(x - width / 2, y - width / 2, side + width, side + width);
    }
  }
}
