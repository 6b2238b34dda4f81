/** Small maps as pictures. */

import { smallShares } from "../data/small";
import type { Which } from "../data/source";
import { pixelated } from "../dom";
import { paletteOf, type Palette } from "../look";
import { pixelOf } from "../maths/colours";
import type { Head } from "../protocol/recording";
import type { Session } from "../session";

/** @returns a pixel for each cell; null: not known yet */
export function smallPicture(
  session: Session,
  which: Which,
  palette: (blocks: number) => Palette,
): HTMLCanvasElement | null {
  const { rows, columns } = session.maps[which.layer];
  const shares = smallShares(session, which);
  if (!shares) return null;
  const { ramp, at } = palette(columns);
  const pixels = Uint32Array.from(shares, (share) => pixelOf(ramp, at(share)));
  return pixelated(columns, rows, pixels);
}

/** Pictures of heads: two views show them. */
const kept = { of: "", maps: [] as unknown, pictures: new Map<string, HTMLCanvasElement | null>() };

/** The small map of one head, on the scale that all heads of a grid have; null: not known yet. */
export function headPicture(session: Session, { layer, head }: Head): HTMLCanvasElement | null {
  const { look, maps, gridCeilings, store } = session;
  const { scale, hidden } = store.drawn;
  const of = [look.name, scale, hidden, gridCeilings.value].join();
  if (kept.of !== of || kept.maps !== maps) Object.assign(kept, { of, maps, pictures: new Map() });
  const palette = (blocks: number) => paletteOf(look, scale, blocks, false, gridCeilings.value);
  const name = `${layer} ${head}`;
  if (!kept.pictures.has(name)) kept.pictures.set(name, smallPicture(session, { layer, head, hidden }, palette));
  return kept.pictures.get(name) ?? null;
}
