/**
 * The tiles of the map: asked for as long as they are wanted, the most wanted first, kept while
 * there is room.
 */

import { termsOf, type Source, type Which } from "../data/source";
import type { Place } from "../maths/blocks";
import type { ProgressAnswer, TileAnswer } from "../protocol/questions";

export interface Wanted {
  name: string; // of the tile
  which: Which;
  place: Place;
}

export type Tile = TileAnswer & { place: Place; stale: boolean };

const ROOM = 96 * 2 ** 20; // bytes
const AT_ONCE = 4;
const AGAIN = 200; // milliseconds between two questions for how far the exact numbers are

/** @returns whose tiles they are */
export function owner(which: Which): string {
  return [termsOf(which).map((term) => Object.values(term).join(" ")), which.hidden].join();
}

export function placeName({ level, row, column }: Place): string {
  return `${level}/${row}/${column}`;
}

export class Tiles {
  kept = new Map<string, Tile>(); // the least used first
  private running = new Map<string, AbortController>();
  wanted: Wanted[] = [];
  progress: ProgressAnswer | null = null;
  private isFollowing = false;

  /** @param onNews a tile came, or how far the exact numbers are */
  constructor(
    private readonly source: Source,
    private readonly onNews: () => void,
    private readonly onTrouble: (error: Error) => void,
  ) {}

  find(name: string): Tile | undefined {
    const tile = this.kept.get(name);
    if (!tile) return undefined;
    this.kept.delete(name);
    this.kept.set(name, tile);
    return tile;
  }

  /** What is wanted from now on, the most wanted first. */
  want(wanted: Wanted[]) {
    this.wanted = wanted;
    const names = new Set(wanted.map(({ name }) => name));
    for (const [name, controller] of this.running) {
      if (names.has(name)) continue;
      this.running.delete(name);
      controller.abort();
    }
    this.ask();
  }

  private ask() {
    for (const wish of this.wanted) {
      if (this.running.size >= AT_ONCE) return;
      const tile = this.kept.get(wish.name);
      if (!this.running.has(wish.name) && (!tile || tile.stale)) void this.fetch(wish);
    }
    if (this.running.size === 0) void this.follow();
  }

  private async fetch({ name, which, place }: Wanted) {
    const controller = new AbortController();
    this.running.set(name, controller);
    try {
      const numbers = await this.source.tile(which, place, controller.signal);
      this.running.delete(name);
      this.kept.delete(name);
      this.kept.set(name, { ...numbers, place, stale: false });
      this.makeRoom();
      this.ask();
      this.onNews();
    } catch (error) {
      if (controller.signal.aborted) return;
      this.running.delete(name);
      this.wanted = [];
      this.onTrouble(error as Error);
    }
  }

  private makeRoom() {
    let size = 0;
    for (const { values } of this.kept.values()) size += 8 * values.length; // a number and a pixel
    for (const [name, { values }] of this.kept) {
      if (size <= ROOM || this.wanted.some((wish) => wish.name === name)) return;
      this.kept.delete(name);
      size -= 8 * values.length;
    }
  }

  /** Asks how far the exact numbers of samples are, on which a live host works meanwhile, and then for these. */
  private async follow() {
    const isSample = (tile?: Tile) => tile?.exact === false && !tile.stale;
    const wish = this.wanted.find(({ name }) => isSample(this.kept.get(name)));
    if (!wish) this.progress = null;
    if (!wish || this.isFollowing) return;
    this.isFollowing = true;
    const start = performance.now();
    try {
      this.progress = await this.source.progress(wish.which);
      const rest = AGAIN - (performance.now() - start);
      // Browsers hold back the timers of hidden tabs, and the work is done while the page asks.
      if (rest > 0 && this.progress.done < 1) await new Promise((resolve) => setTimeout(resolve, rest));
    } catch (error) {
      return this.onTrouble(error as Error);
    } finally {
      this.isFollowing = false;
    }
    const samples = this.wanted.map(({ name }) => this.kept.get(name)).filter(isSample) as Tile[];
    if (this.progress.done >= 1) for (const tile of samples) tile.stale = true;
    this.ask();
    this.onNews();
  }
}
