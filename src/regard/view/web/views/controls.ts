/** The bar and the stage's head: words to press, each showing the state it changes. */

import { isOfBlocks } from "../data/compare";
import { byId, element, offerNumbers } from "../dom";
import { bringIntoView } from "../map/travel";
import { counted, grouped } from "../maths/numbers";
import { headNumber, layerName, ownLayers, type Token } from "../protocol/recording";
import { sinkNames, visible } from "../text/tokens";
import { press, type Hands } from "./keys";
import { countRefused } from "./notes";

const HINT = "regard-hint";
const IN_MEANS = "These block means contain them, so they cannot be hidden.";

export class Controls {
  private layer = byId<HTMLSelectElement>("layer");
  private head = byId<HTMLSelectElement>("head");

  private session = this.hands.session;

  constructor(private readonly hands: Hands) {
    const { recording, store } = this.session;
    const layers = ownLayers(recording);
    this.describe();
    byId("hint").hidden = Boolean(storage()?.getItem(HINT));
    offerNumbers(this.layer, layers.length, (at) => layerName(layers, at));
    this.layer.addEventListener("change", () => store.set({ layer: Number(this.layer.value) }));
    this.head.addEventListener("change", () => store.set({ head: Number(this.head.value) }));
    document.addEventListener("click", (event) => this.press(event));
    this.search();
  }

  /** What this is, at the top. */
  private describe() {
    const { recording } = this.session;
    const layers = ownLayers(recording);
    const refused = countRefused(recording);
    const [title, model] = [visible(recording.title), visible(recording.model)];
    document.title = `${title} · regard`;
    byId("title").textContent = title;
    const heads = Math.max(...layers.map((info) => info.num_heads));
    const { q_len, kv_len } = layers[0];
    const tokens = q_len === kv_len ? counted(q_len, "token") : `${grouped(q_len)} × ${counted(kv_len, "token")}`;
    const size = `${counted(layers.filter(({ part }) => !part).length, "layer")} × ${counted(heads, "head")}`;
    const numbers = [tokens, size, ...(refused ? [`${counted(refused, "layer")} refused`] : [])];
    const parts = [...(model ? [model] : []), ...numbers.map((text) => element("span", {}, text))];
    byId("about").replaceChildren(...parts.flatMap((part, i) => (i > 0 ? [" · ", part] : [part])));
  }

  /** @param event any button with data-set="name=value" or data-key="a key" */
  private press(event: MouseEvent) {
    const button = (event.target as HTMLElement).closest?.("button");
    if (!button) return;
    const [name, value] = (button.dataset.set ?? "").split("=");
    const { store } = this.session;
    if (name) store.set({ [name]: value });
    const { key } = button.dataset;
    if (key) press(this.hands, key, event);
    if (button.id === "understood") {
      byId("hint").hidden = true;
      storage()?.setItem(HINT, "understood");
    }
    if (button.className === "close") button.closest("dialog")?.close();
    if (button.id === "theme") store.set({ theme: this.session.look.name === "dark" ? "light" : "dark" });
  }

  private search() {
    const input = byId<HTMLInputElement>("find");
    // The frame of a notebook lets no form be sent, not even one that a script takes up.
    input.addEventListener("keydown", ({ key: pressed, isComposing }) => {
      if (pressed === "Escape") input.blur();
      if (pressed !== "Enter" || isComposing) return;
      const { layer, side } = this.session.store.state;
      const { query, key } = this.session.cell();
      const axes = this.session.axes(layer);
      const looks = side === "looks";
      const at = find(looks ? axes.queries : axes.keys, input.value, looks ? query : key);
      byId("found").textContent = at === null && input.value.trim() ? "not in this text" : "";
      if (at === null) return;
      this.session.choose(looks ? { query: at, key: null } : { query: null, key: at });
      bringIntoView(this.hands.map);
    });
    input.addEventListener("blur", () => {
      byId("found").textContent = "";
    });
  }

  /** What each control shows of the state. */
  show() {
    const { layers, store, look } = this.session;
    const state = store.drawn;
    const info = layers[state.layer];
    offerNumbers(this.head, info.num_heads, (head) => String(headNumber(layers, { layer: state.layer, head })));
    this.layer.value = String(state.layer);
    this.head.value = String(state.head);
    byId("layer-name").textContent = visible(info.name);
    for (const button of document.querySelectorAll("button[data-set]") as NodeListOf<HTMLButtonElement>) {
      const [name, value] = (button.dataset.set ?? "").split("=");
      button.disabled = !store.takes({ [name]: value });
      button.setAttribute("aria-pressed", String(String(state[name as "scale"]) === value));
    }
    byId("theme").textContent = look.name === "dark" ? "Light" : "Dark";
    const [sinks, isFixed] = [byId<HTMLButtonElement>("sinks"), isOfBlocks(state, layers)];
    sinks.disabled = isFixed;
    sinks.setAttribute("aria-pressed", String(state.hidden));
    sinks.textContent = isFixed ? IN_MEANS : `Hide ${sinkNames(this.session.axes(state.layer).keys)}`;
    byId("fold").textContent = state.folded ? "Show the text" : "Fold";
    document.body.classList.toggle("folded", state.folded);
    for (const id of ["whole", "out"]) byId(id).hidden = state.zoom === 1;
    byId("closer").hidden = Math.max(info.q_len, info.kv_len) <= 8;
  }
}

/** The next token, after one, at which a phrase begins; the phrase may run over several tokens. */
export function find(tokens: Token[], phrase: string, after: number): number | null {
  const wanted = phrase.trim().toLowerCase();
  if (wanted === "") return null;
  const starts = [];
  let text = "";
  for (const token of tokens) {
    starts.push(text.length);
    text += token.text.toLowerCase();
  }
  let at = text.indexOf(wanted, starts[after + 1] ?? text.length);
  if (at < 0) at = text.indexOf(wanted);
  if (at < 0) return null;
  const next = starts.findIndex((start) => start > at);
  return next < 0 ? tokens.length - 1 : next - 1;
}

/** @returns null: a frame of a notebook keeps nothing, and the line comes back with the next page */
function storage(): Storage | null {
  try {
    return localStorage;
  } catch {
    return null;
  }
}
