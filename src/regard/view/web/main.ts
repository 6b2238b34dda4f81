/** The script of the page, and of its worker. */

import { engine } from "./data/engine";
import { Damaged, readRecording } from "./data/unpack";
import { byId } from "./dom";
import { openPage } from "./page";

function start() {
  try {
    // A copy that a browser saved of an open page has what stood in its views.
    for (const view of document.querySelectorAll(".view:not(#view-map)")) view.replaceChildren();
    openPage(readRecording(document.getElementById("recording")?.textContent));
  } catch (error) {
    const reason = error instanceof Error ? error.message : String(error);
    byId("failure").textContent =
      error instanceof Damaged
        ? `This file is damaged: ${reason} Write it again with regard to see its attention.`
        : `The page went wrong: ${reason}`;
    document.body.classList.add("failed");
  }
}

// The page and its worker run the same script.
if (typeof document === "undefined") {
  const ask = engine((answer) => postMessage(answer));
  onmessage = (event) => void ask(event.data);
  postMessage("here"); // Without this word the page works beside itself.
} else {
  start();
}
