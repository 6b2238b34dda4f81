/** The text of a page whose server has the model: edited, and read by the model once more. */

import { fetched } from "../data/remote";
import { byId } from "../dom";
import type { Session } from "../session";

const ADDRESS = "api/text";
const LOOK_AGAIN = 400; // milliseconds
/** What another text makes meaningless: places in it. */
const PLACES = ["query", "key", "row", "column", "zoom"];

export class Edit {
  private dialog = byId<HTMLDialogElement>("edit");
  private text = this.dialog.querySelector("textarea") as HTMLTextAreaElement;
  private button = byId<HTMLButtonElement>("run");

  constructor(
    private readonly session: Session,
    private readonly reload: (address: string) => void,
  ) {
    const { text } = session.recording;
    if (typeof text !== "string") return;
    this.text.value = text;
    const open = byId("edit-text");
    open.hidden = false;
    open.addEventListener("click", () => this.dialog.showModal());
    this.button.addEventListener("click", () => void this.run());
    this.text.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) void this.run();
    });
  }

  /** The model reads the text; the page then shows the new recording at the same layer and head. */
  private async run() {
    if (this.button.disabled) return;
    this.button.disabled = this.text.readOnly = true;
    this.say("The model runs …");
    const looking = setInterval(() => void this.look(), LOOK_AGAIN);
    try {
      await fetched(ADDRESS, {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify({ text: this.text.value }),
      });
      this.say("The model has read the text.");
      const parts = this.session.store.address().slice(1).split("&");
      const kept = parts.filter((part) => !PLACES.includes(part.split("=")[0]));
      this.reload(`#${kept.join("&")}`);
    } catch (error) {
      this.button.disabled = this.text.readOnly = false;
      this.say(error instanceof Error ? error.message : String(error));
    } finally {
      clearInterval(looking);
    }
  }

  /** How far the model is. */
  private async look() {
    try {
      const { running, done, layers } = await (await fetched(ADDRESS, {})).json();
      if (running && done && this.button.disabled)
        this.say(`The model runs: layer ${done}${layers ? ` of ${layers}` : ""} …`);
    } catch {
      // The run itself says that the server is lost.
    }
  }

  private say(sentence: string) {
    byId("edit-status").textContent = sentence;
  }
}
