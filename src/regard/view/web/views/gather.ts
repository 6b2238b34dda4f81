/** The small maps and the kinds of all heads, from a live host that finds them after the page is there. */

import type { HeadKind, SmallNumbers } from "../data/payload";
import type { Source } from "../data/source";

export interface Listener {
  onMap: (layer: number, overview: SmallNumbers) => void;
  onKinds: (kinds: (HeadKind | null)[]) => void; // of every head, layer by layer
}

/**
 * @param open the layer whose small maps come first
 * @returns when all is there, or the host answers no more
 */
export async function gather(source: Source, open: number, { onMap, onKinds }: Listener): Promise<void> {
  const nearest = source.layers.map((_, at) => at).sort((a, b) => Math.abs(a - open) - Math.abs(b - open));
  /** Asks for one layer after the other. */
  async function ask(): Promise<void> {
    for (let at = nearest.shift(); at !== undefined; at = nearest.shift()) onMap(at, await source.overview(at));
  }
  try {
    // Two at a time: a host has more than one core.
    await Promise.all([ask(), ask()]);
    onKinds(await source.heads());
  } catch {
    // The map and the sentence say that a host is lost; without kinds the maps stand in layers.
  }
}
