/** What a live host tells of the heads after the page is there: small maps first, then their kinds. */

import type { Page } from "../main";
import { smallMap } from "../map/small";

/** @returns when all is told, or the host tells no more */
export async function gather(page: Page): Promise<void> {
  const { layers } = page.recording;
  const open = page.store.state.layer;
  const nearest = layers.map((_, at) => at).sort((a, b) => Math.abs(a - open) - Math.abs(b - open));
  /** @returns asks for one layer after the other */
  async function ask(): Promise<void> {
    for (let at = nearest.shift(); at !== undefined; at = nearest.shift()) {
      layers[at].overview = await page.source.overview(at);
      page.maps[at] = smallMap(layers[at]);
      page.gathered();
    }
  }
  try {
    // Two at a time: a host has more than one core.
    await Promise.all([ask(), ask()]);
    const kinds = await page.source.heads();
    for (const layer of layers) layer.heads = kinds.splice(0, layer.num_heads);
    page.gathered();
  } catch {
    // The map and the sentence say that a host is lost; without kinds the maps stand in layers.
  }
}
