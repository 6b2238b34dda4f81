/** A host for a page in a frame: whoever frames it is asked by messages. `widget.ts` is the other side. */

import type { Host } from "./source";
import { Waiting } from "./waiting";

export function framed(): Host {
  // To anyone: the page does not know where it stands, and asks for nothing secret.
  const host = new Waiting((message) => window.parent.postMessage({ regard: message }, "*"));
  window.addEventListener("message", ({ source, data }) => {
    if (source === window.parent) host.settle(data);
  });
  return host;
}
