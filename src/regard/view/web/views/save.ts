/** The Save menu: what the open view shows on paper, or its numbers as CSV. */

import { byId, element } from "../dom";
import { headNumber, layerName } from "../protocol/recording";
import type { Session } from "../session";
import type { State } from "../state";

const GIVEN_UP = "Nothing was saved: another view, layer or head was opened meanwhile.";
const NO_NUMBERS = "Nothing was saved: there are no numbers here.";

export class SaveMenu {
  private menu = byId<HTMLDetailsElement>("save");
  private status = byId("saving");
  private waiting = 0; // saves that wait

  constructor(private readonly session: Session) {
    this.menu.addEventListener("click", (event) => {
      const kind = (event.target as HTMLElement).dataset.save;
      if (kind) void this.save(kind as "csv" | "print");
    });
    this.menu.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.close();
    });
    // The frame of a notebook may not print.
    if (location.protocol === "about:") this.menu.querySelector("[data-save=print]")?.remove();
    document.addEventListener("click", ({ target }) => {
      if (this.menu.contains(target as Node)) return;
      this.menu.open = false;
      this.say("");
    });
  }

  private close() {
    this.menu.open = false;
    this.menu.querySelector("summary")?.focus();
  }

  private async save(kind: "csv" | "print") {
    this.close();
    if (!(await this.settled())) return this.say(GIVEN_UP);
    if (kind === "print") return print();
    const numbers = this.csv();
    if (!numbers) return this.say(NO_NUMBERS);
    const href = URL.createObjectURL(new Blob([numbers], { type: "text/csv" }));
    const link = element("a", { href, download: `${this.name()}.csv` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
  }

  /**
   * Waits, and says so, until all that is seen is there.
   * @returns false: by then something else is seen
   */
  private async settled(): Promise<boolean> {
    const { store, source, view } = this.session;
    const place = placeOf(store.state);
    this.say("");
    this.waiting++;
    const isMoving = () => store.isPending() || source.open > 0 || view?.isSettled?.() === false;
    while (placeOf(store.state) === place && isMoving()) {
      this.say("Saving …");
      await new Promise(requestAnimationFrame);
    }
    this.waiting--;
    this.say("");
    return placeOf(store.state) === place;
  }

  /** @param text in place of "Saving …" where nothing waits any more */
  private say(text: string) {
    const said = this.waiting > 0 ? "Saving …" : text;
    if (this.status.textContent !== said) this.status.textContent = said;
  }

  /** @returns with a mark by which spreadsheets know UTF-8; "": there are no numbers */
  private csv(): string {
    const table = this.session.view?.table?.() ?? [];
    if (table.length === 0) return "";
    return `\ufeff${table.map((cells) => cells.map(field).join(",")).join("\r\n")}\r\n`;
  }

  /** @returns letters, digits and dashes only, whatever the title says */
  private name(): string {
    const { store, layers } = this.session;
    const { view, layer, head } = store.state;
    const title = this.session.recording.title
      .normalize("NFKD")
      .replace(/[^A-Za-z0-9]+/g, "-")
      .replace(/^-+|-+$/g, "")
      .slice(0, 40);
    const which = `-layer-${layerName(layers, layer)}-head-${headNumber(layers, { layer, head })}`;
    return `${title || "attention"}-${view}${view === "overview" ? "" : which}`;
  }
}

/** @returns what a save is of */
function placeOf({ view, layer, head }: State): string {
  return [view, layer, head].join();
}

/** A cell of a CSV file. A text that a spreadsheet would take for a formula gets a quote in front. */
function field(value: string | number): string {
  if (typeof value === "number") return String(value);
  const text = /^[=+\-@\t\r]/.test(value) ? `'${value}` : value;
  return `"${text.replaceAll('"', '""')}"`;
}
