/**
 * The notebook's side of the page: it stands in a frame of its own, whose questions go to the kernel
 * and whose answers come back from there. anywidget runs this module; nothing else imports it.
 */

import { element } from "../dom";
import type { Message, Reply } from "./waiting";

/** What the kernel sends: the id of a question has the view that asked in front. */
type Content = { id: [view: string, id: number] };
type Listener = (content: Content | null, buffers: DataView<ArrayBuffer>[]) => void;

export interface Model {
  get: (name: string) => string;
  send: (content: object) => void; // throws where the kernel has ended
  on: (event: string, listener: Listener) => void;
  off: (event: string, listener: Listener) => void;
}

const GONE = "The kernel of this notebook does not answer any more. Run the cell again.";
const SILENT =
  "The kernel of this notebook does not answer yet: it is busy with another cell, or it has ended. If it has ended, run this cell again.";
const PATIENCE = 10_000; // milliseconds
const OFTEN = 2_000;
const NOTE =
  "position:absolute;inset:0 0 auto;margin:0;padding:8px 14px;font:14px system-ui,sans-serif;background:Canvas;color:CanvasText";

/** @returns takes it away again */
function render({ model, el }: { model: Model; el: HTMLElement }): () => void {
  const [title, sandbox, height, srcdoc] = ["title", "sandbox", "height", "page"].map((name) => model.get(name));
  const frame = element("iframe", { title, sandbox, width: "100%", height, style: "border: 0", srcdoc });
  const note = element("p", { role: "status", style: NOTE, hidden: true });
  const box = element("div", { style: "position: relative" }, frame, note);
  // Several cells may show one model; each answer goes to the frame that asked.
  const view = `${Date.now()} ${Math.random()}`;
  const waiting = new Set<number>();
  let heard = 0; // when the kernel answered last, or was not waited for

  function ask({ source, data }: MessageEvent) {
    if (source !== frame.contentWindow || !data?.regard) return;
    const { kind, id } = data.regard;
    if (waiting.size === 0) heard = Date.now();
    if (kind === "forget") waiting.delete(id);
    else waiting.add(id);
    send(data.regard);
  }

  function send(question: Message | { id: number; kind: "listens" }) {
    try {
      model.send({ ...question, id: [view, question.id] });
    } catch {
      for (const id of waiting) answer({ id, error: GONE });
    }
  }

  function receive(content: Content | null, buffers: DataView<ArrayBuffer>[]) {
    if (content?.id?.[0] !== view) return;
    heard = Date.now();
    look();
    const copies = buffers.map((bytes) => bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.byteLength));
    const [values, mask] = copies;
    const numbers = values && { values: new Float32Array(values), ...(mask && { mask: new Uint8Array(mask) }) };
    answer({ ...content, ...numbers, id: content.id[1] } as Reply);
  }

  function answer(content: Reply) {
    waiting.delete(content.id);
    frame.contentWindow?.postMessage(content, "*");
  }

  function look() {
    const text = waiting.size > 0 && Date.now() - heard > PATIENCE ? SILENT : "";
    note.hidden = !text;
    if (note.textContent !== text) note.textContent = text;
  }

  const looking = setInterval(() => {
    // An answer may take as long as it takes; that the kernel listens, it says at once.
    if (waiting.size > 0) send({ kind: "listens", id: 0 });
    look();
  }, OFTEN);
  window.addEventListener("message", ask);
  model.on("msg:custom", receive);
  el.append(box);
  return () => {
    clearInterval(looking);
    for (const id of waiting) send({ kind: "forget", id });
    window.removeEventListener("message", ask);
    model.off("msg:custom", receive);
    box.remove();
  };
}

export default { render };
