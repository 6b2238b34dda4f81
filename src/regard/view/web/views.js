/**
 * The views of the stage, one tab each. All share the state; the open one draws itself.
 *
 * @typedef {import("./state.js").State} State
 *
 * @typedef {object} View
 * @property {(state: State, changed: Set<string>) => void} update draws what changed; everything
 *   changed when the view is opened
 * @property {(reading: import("./reading.js").Reading) => void} [read] draws what is read off
 * @property {(down: number, right: number, extends_: boolean) => void} [move] the arrows, where they
 *   do not move the crosshair
 * @property {() => (string | number)[][]} [table] the numbers shown; the first row names the columns
 * @property {() => string} [caption] what is seen, in words, for a picture of it
 * @property {() => boolean} isSettled is all that is seen there, or known to be missing?
 * @property {() => import("./painter.js").Drawers} [drawers] what draws itself in a picture
 */

import { byId } from "./dom.js";

export class Views {
  /** @param {Partial<Record<State["view"], View>>} views those that this recording has */
  constructor(views) {
    this.views = views;
    /** @type {string} */ this.open = "";
    for (const name of Object.keys(views)) {
      const tab = document.querySelector(`button[data-set="view=${name}"]`);
      /** @type {HTMLElement} */ (tab).hidden = false;
    }
  }

  /** @param {string} name @returns {boolean} */
  has(name) {
    return name in this.views;
  }

  /** @returns {View | undefined} the open one */
  now() {
    return this.views[/** @type {State["view"]} */ (this.open)];
  }

  /** @param {State} state @param {Set<string>} changed */
  update(state, changed) {
    const opened = state.view !== this.open;
    if (opened) {
      this.open = state.view;
      document.body.dataset.view = state.view;
      for (const name of Object.keys(this.views)) byId(`view-${name}`).hidden = name !== state.view;
    }
    this.views[state.view]?.update(state, opened ? new Set(Object.keys(state)) : changed);
  }
}
