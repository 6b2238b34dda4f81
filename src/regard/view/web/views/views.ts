/** The views of the stage, one tab each. All share the state; the open one draws itself. */

import { byId } from "../dom";
import type { Picture } from "../export/picture";
import type { State } from "../state";
import type { Reading } from "./reading";

/** The first row names the columns. */
export type Table = (string | number)[][];

export interface View {
  /** draws what changed; everything changed when the view is opened */
  update: (state: State, changed: Set<string>) => void;
  read?: (reading: Reading) => void; // draws what is read off
  /** the arrows, where they do not move the crosshair */
  move?: (down: number, right: number) => void;
  table?: () => Table; // the numbers shown
  caption?: () => string; // what is seen, in words, for a picture of it
  sentence?: (reading: Reading) => string; // what is read, where a cell alone does not say it
  ceiling?: () => number; // the weight of the darkest colour on the fitted scale
  isSettled: () => boolean; // is all that is seen there, or known to be missing?
  picture?: () => Picture | null; // null: there is nothing to draw; a view of words has none, it is printed
}

export class Views {
  private open: string = "";

  /** @param views those that this recording has */
  constructor(readonly views: Partial<Record<State["view"], View>>) {
    for (const name of Object.keys(views)) {
      const tab = document.querySelector(`button[data-set="view=${name}"]`);
      (tab as HTMLElement).hidden = false;
    }
  }

  has(name: string): boolean {
    return name in this.views;
  }

  /** @returns the open one */
  now(): View | undefined {
    return this.views[this.open as State["view"]];
  }

  update(state: State, changed: Set<string>) {
    const opened = state.view !== this.open;
    if (opened) {
      this.open = state.view;
      document.body.dataset.view = state.view;
      for (const name of Object.keys(this.views)) byId(`view-${name}`).hidden = name !== state.view;
    }
    this.views[state.view]?.update(state, opened ? new Set(Object.keys(state)) : changed);
  }
}
