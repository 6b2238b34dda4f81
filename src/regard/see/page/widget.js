/**
 * The notebook's side of the page: it stands in a frame of its own, whose questions go to the kernel
 * and whose answers come back from there. anywidget runs this module; nothing else imports it.
 *
 * @typedef {object} Model
 * @property {(name: string) => any} get
 * @property {(content: object) => void} send
 * @property {(event: string, listener: (content: any, buffers: DataView[]) => void) => void} on
 * @property {(event: string, listener: (content: any, buffers: DataView[]) => void) => void} off
 */

/**
 * @param {{model: Model, el: HTMLElement}} place
 * @returns {() => void} takes it away again
 */
function render({ model, el }) {
  const frame = document.createElement("iframe");
  frame.title = model.get("title");
  frame.setAttribute("sandbox", model.get("sandbox"));
  frame.width = "100%";
  frame.height = model.get("height");
  frame.style.border = "0";
  frame.srcdoc = model.get("page");
  // Several cells may show one model; each answer goes to the frame that asked.
  const view = `${Date.now()} ${Math.random()}`;

  /** @param {MessageEvent} event */
  function ask({ source, data }) {
    if (source !== frame.contentWindow || !data?.regard) return;
    model.send({ ...data.regard, id: [view, data.regard.id] });
  }

  /** @param {any} content @param {DataView[]} buffers */
  function tell(content, buffers) {
    if (content?.id?.[0] !== view) return;
    const copies = buffers.map((bytes) =>
      bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.byteLength),
    );
    frame.contentWindow?.postMessage({ ...content, id: content.id[1], buffers: copies }, "*");
  }

  window.addEventListener("message", ask);
  model.on("msg:custom", tell);
  el.append(frame);
  return () => {
    window.removeEventListener("message", ask);
    model.off("msg:custom", tell);
    frame.remove();
  };
}

export default { render };
