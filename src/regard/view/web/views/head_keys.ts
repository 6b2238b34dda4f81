/** The keys of a page of several heads. */

import { turn, type Binding, type Hands } from "./keys";

export const OF_SEVERAL: Binding[] = [
  { keys: ["[", "]"], does: "previous, next head", run: (hands, key) => step(hands, "head", key === "[" ? -1 : 1) },
  { keys: ["{", "}"], does: "previous, next layer", run: (hands, key) => step(hands, "layer", key === "{" ? -1 : 1) },
  {
    keys: ["m"],
    does: "the mean of all heads of the layer",
    run: ({ session: { store } }) => store.set({ heads: store.state.heads === "one" ? "mean" : "one" }),
  },
  { keys: ["c"], does: "compare with another head: beside, difference", run: (hands) => turn(hands, "compare") },
];

function step({ session: { store } }: Hands, what: "layer" | "head", by: number) {
  store.set({ [what]: store.state[what] + by });
}
