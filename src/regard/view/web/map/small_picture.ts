/** Small maps as pictures. */

import { smallShares } from "../data/small";
import type { Which } from "../data/source";
import { pixelated } from "../dom";
import type { Palette } from "../look";
import { pixelOf } from "../maths/colours";
import type { Session } from "../session";

/** @returns a pixel for each cell; null: not known yet */
export function smallPicture(
  session: Session,
  which: Which,
  palette: (blocks: number) => Palette,
  canvas?: HTMLCanvasElement,
): HTMLCanvasElement | null {
  const { rows, columns } = session.maps[which.layer];
  const shares = smallShares(session, which);
  if (!shares) return null;
  const { ramp, at } = palette(columns);
  const pixels = Uint32Array.from(shares, (share) => pixelOf(ramp, at(share)));
  return pixelated(columns, rows, pixels, canvas);
}
