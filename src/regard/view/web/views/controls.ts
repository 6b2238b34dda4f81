/** The bar and the stage's head: words to press, each showing the state it changes. */

import { headNumber, layerName } from "../data/payload";
import { byId, offerNumbers } from "../dom";
import type { Page as Whole, Shared } from "../main";
import { areSeveral } from "../map/compare";
import { bringIntoView } from "../map/travel";
import { counted, grouped } from "../maths/numbers";
import type { State } from "../state";
import { find } from "../text/prose";
import { sinkNames, visible } from "../text/tokens";
import { press, writeHelp } from "./keys";
import { countRefused } from "./notes";

type Page = Shared & Pick<Whole, "map" | "panes" | "redraw" | "views">;

const HINT = "regard-hint";

export class Controls {
  private layer = byId<HTMLSelectElement>("layer");
  private head = byId<HTMLSelectElement>("head");

  constructor(readonly page: Page) {
    this.describe();
    this.hint();
    offerNumbers(this.layer, page.recording.layers.length, (at) => layerName(page.recording.layers, at));
    this.layer.addEventListener("change", () => page.store.set({ layer: Number(this.layer.value) }));
    this.head.addEventListener("change", () => page.store.set({ head: Number(this.head.value) }));
    document.addEventListener("click", (event) => this.press(event));
    this.search();
    writeHelp(byId("keys"), page);
  }

  /** What this is, at the top. */
  private describe() {
    const { layers, other } = this.page.recording;
    const refused = countRefused(this.page.recording);
    const [title, model] = [visible(this.page.recording.title), visible(this.page.recording.model)];
    document.title = `${title} · regard`;
    byId("title").textContent = title;
    const heads = Math.max(...layers.map((info) => info.num_heads));
    const { q_len, kv_len } = layers[0];
    const tokens = q_len === kv_len ? counted(q_len, "token") : `${grouped(q_len)} × ${counted(kv_len, "token")}`;
    byId("about").textContent = [
      model,
      tokens,
      `${counted(other?.first ?? layers.length, "layer")} × ${counted(heads, "head")}`,
      refused && `${counted(refused, "layer")} refused`,
    ]
      .filter(Boolean)
      .join(" · ");
  }

  /** @param event any button with data-set="name=value" or data-key="a key" */
  private press(event: MouseEvent) {
    const button = (event.target as HTMLElement).closest?.("button");
    if (!button) return;
    const [name, value] = (button.dataset.set ?? "").split("=");
    if (name) this.page.store.set({ [name]: value });
    const { key } = button.dataset;
    if (key) press(this.page, key, event);
    if (button.id === "understood") this.understand();
    const { state } = this.page.store;
    if (button.id === "several" && !areSeveral(state)) this.page.store.set({ heads: `${state.layer}.${state.head}` });
    if (button.id === "theme") this.turnTheme();
    if (button.id === "close") byId<HTMLDialogElement>("help").close();
  }

  /** The line that explains rows and columns, until it is dismissed; a browser may keep that. */
  private hint() {
    byId("hint").hidden = remembered(HINT) !== null;
  }

  private understand() {
    byId("hint").hidden = true;
    try {
      localStorage.setItem(HINT, "understood");
    } catch {
      // A frame of a notebook keeps nothing; the line comes back with the next page.
    }
    this.page.redraw();
  }

  private turnTheme() {
    this.page.store.set({ theme: isDark() ? "light" : "dark" });
  }

  private search() {
    const input = byId<HTMLInputElement>("find");
    input.form?.addEventListener("submit", (event) => {
      event.preventDefault();
      const { layer, side } = this.page.store.state;
      const { query, key } = this.page.cell();
      const axes = this.page.axes(layer);
      const looks = side === "looks";
      const at = find(looks ? axes.queries : axes.keys, input.value, looks ? query : key);
      byId("found").textContent = at === null && input.value.trim() ? "not in this text" : "";
      if (at === null) return;
      this.page.choose(looks ? { query: at, key: null } : { query: null, key: at });
      bringIntoView(this.page);
    });
    input.addEventListener("keydown", (event) => {
      if (event.key === "Escape") input.blur();
    });
    input.addEventListener("blur", () => {
      byId("found").textContent = "";
    });
  }

  show(state: State) {
    const { layers } = this.page.recording;
    const info = layers[state.layer];
    offerNumbers(this.head, info.num_heads, (head) => String(headNumber(layers, { layer: state.layer, head })));
    this.layer.value = String(state.layer);
    this.head.value = String(state.head);
    byId("layer-name").textContent = visible(info.name);
    for (const button of document.querySelectorAll("button[data-set]") as NodeListOf<HTMLElement>) {
      const [name, value] = (button.dataset.set ?? "").split("=");
      button.setAttribute("aria-pressed", String(String(state[name as "scale"]) === value));
    }
    byId("several")?.setAttribute("aria-pressed", String(areSeveral(state)));
    byId("theme").textContent = isDark() ? "Light" : "Dark";
    byId("sinks").setAttribute("aria-pressed", String(state.hidden));
    byId("sinks").textContent = `Hide ${sinkNames(this.page.axes(state.layer).keys)}`;
    byId("fold").textContent = state.folded ? "Show the text" : "Fold";
    for (const id of ["whole", "out"]) byId(id).hidden = state.zoom === 1;
    byId("closer").hidden = Math.max(info.q_len, info.kv_len) <= 8;
  }
}

function remembered(name: string): string | null {
  try {
    return localStorage.getItem(name);
  } catch {
    return null;
  }
}

function isDark(): boolean {
  return getComputedStyle(document.documentElement).colorScheme === "dark";
}
