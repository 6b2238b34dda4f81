/** Cells that somebody keeps, as the state has them. */

import type { Head, LayerInfo } from "../protocol/recording";

/** A cell that somebody keeps, with a note. */
export type Pin = Head & { query: number; key: number; note: string };

export const MOST_PINS = 12;
export const LONGEST = 120; // characters of a note

/**
 * @param text of the address, which may be anything
 * @returns those of cells that are there
 */
export function pinsOf(text: string, layers: LayerInfo[]): Pin[] {
  let listed = [];
  try {
    listed = JSON.parse(text || "[]");
  } catch {
    return [];
  }
  if (!Array.isArray(listed)) return [];
  return listed.slice(0, MOST_PINS).flatMap((each) => {
    const [layer, head, query, key, note] = Array.isArray(each) ? each : [];
    const info = layers[layer];
    const isThere = (at: unknown, count: number) => Number.isInteger(at) && Number(at) >= 0 && Number(at) < count;
    if (!info || ![isThere(head, info.num_heads), isThere(query, info.q_len), isThere(key, info.kv_len)].every(Boolean))
      return [];
    return [{ layer, head, query, key, note: String(note ?? "").slice(0, LONGEST) }];
  });
}

/** @returns as the state keeps them */
export function written(pins: Pin[]): string {
  if (pins.length === 0) return "";
  return JSON.stringify(pins.map(({ layer, head, query, key, note }) => [layer, head, query, key, note]));
}

/** @returns are they the same cell? */
export function isSame(one: Omit<Pin, "note">, other: Omit<Pin, "note">): boolean {
  return ["layer", "head", "query", "key"].every((name) => one[name as "key"] === other[name as "key"]);
}
