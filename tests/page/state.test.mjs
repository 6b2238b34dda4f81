import assert from "node:assert/strict";
import { test } from "node:test";
import { effect } from "@preact/signals-core";
import { fitted } from "../../src/regard/view/web/data/compare";
import { moving } from "../../src/regard/view/web/dom";
import { freshState, Store, WORDS as STATES } from "../../src/regard/view/web/state";
import { bindingsOf } from "../../src/regard/view/web/views/keys";
import { layer, recording, tokens, WORDS } from "./recordings.mjs";

globalThis.requestAnimationFrame = (draw) => frames.push(draw);
let frames = [];

function store(from = recording()) {
  frames = [];
  const open = { layer: 0, head: 0, query: 4, key: 3 };
  const fresh = freshState({ ...open, compare: "alone", parts: "sentences", view: "map" }, from.layers[0].kv_len);
  return new Store(fresh, (state) => fitted(state, from));
}

/** The state that an address gives, beside that of a fresh page. */
function differences(address, from) {
  const page = store(from);
  page.go(address);
  return Object.fromEntries(Object.entries(page.state).filter(([name, value]) => value !== page.fresh[name]));
}

test("an address names the cell always and the rest where it is unusual", () => {
  const page = store();
  assert.equal(page.address(), "#layer=0&head=0&query=4&key=3");
  page.set({ hidden: true, scale: "log" });
  assert.equal(page.address(), "#layer=0&head=0&query=4&key=3&scale=log&hidden=1");
});

test("every part of the state comes back from its address", () => {
  const page = store();
  page.set({ layer: 1, head: 1, query: 2, key: 5, view: "text", hidden: true, zoom: 2, row: 1.5, column: 2.25 });
  page.set({ side: "looked", sort: "kind", compare: "difference" });
  page.set({ with: "0.1", heads: "mean" });
  page.set({ folded: true, theme: "dark", parts: "lines" });
  const again = store();
  again.go(page.address());
  assert.deepEqual(again.state, page.state);
});

for (const wrong of [
  "#layer=99&head=-1&query=1e9&scale=<b>",
  "#%00=&&=&query=x",
  "#zoom=-3&row=99999&column=-1",
  "#constructor=1&__proto__=x&toString=x",
  "#parts=pattern&scale=row&heads=1.1&with=x",
])
  test(`a wrong address opens what there is: ${wrong}`, () => {
    const page = store();
    page.go(wrong);
    const { layer: at, head, query, key } = page.state;
    assert.ok([0, 1].includes(at) && head === 0 && [4, null].includes(query) && [3, null].includes(key));
    assert.deepEqual({ ...page.state, layer: 0, query: 4, key: 3 }, page.fresh);
  });

test("an address of another head or query leaves the key open", () => {
  assert.deepEqual(differences("#query=7"), { query: 7, key: null });
  assert.deepEqual(differences("#layer=1"), { layer: 1, key: null });
  assert.deepEqual(differences("#layer=1&key=2"), { layer: 1, key: 2 });
});

test("an address asks for no more keys than there are", () => {
  const long = recording([layer({ q_len: 100, kv_len: 100 })]);
  for (const [asked, given] of [
    [1, 32],
    [90, 90],
    [999999, 100],
  ]) {
    const page = store(long);
    page.go(`#steps=${asked}`);
    assert.equal(page.state.steps, given);
  }
  const longer = store(recording([layer({ q_len: 5000, kv_len: 5000 })]));
  longer.go("#steps=5000");
  assert.equal(longer.state.steps, 1000);
});

test("the part of the map stays inside the matrix", () => {
  const page = store(recording([layer({ q_len: 100, kv_len: 200 })]));
  page.set({ zoom: 4, row: 1000, column: 1000.12345 });
  assert.deepEqual([page.state.row, page.state.column], [75, 150]);
  page.set({ row: 10.12345 });
  assert.equal(page.state.row, 10.123);
});

test("more steps are asked for again at each query", () => {
  const page = store(recording([layer({ q_len: 100, kv_len: 100 })]));
  page.set({ steps: 64 });
  page.set({ key: 7 });
  assert.equal(page.state.steps, 64);
  page.set({ query: 7 });
  assert.equal(page.state.steps, 32);
});

test("what is drawn follows once a frame, and only what has read a change is drawn again", () => {
  const [page, told] = [store(), []];
  effect(() => void told.push(`head ${page.drawn.head} query ${page.drawn.query}`));
  effect(() => void told.push(`scale ${page.drawn.scale}`));
  told.length = 0;
  page.set({ head: 1 });
  page.set({ query: 5, hover: null });
  page.set({ query: 5 });
  assert.equal(frames.length, 1);
  assert.deepEqual([told, page.isPending(), page.isPending(["scale"])], [[], true, false]);
  frames[0]();
  assert.deepEqual([told, page.isPending()], [["head 1 query 5"], false]);
});

for (const wrong of ["with=9.9", "with=x", "heads=0.1_1.1", "heads=<b>", "with=0.1_0.2"])
  test(`heads that are not there are left out: ${wrong}`, () => {
    assert.deepEqual(differences(`#compare=difference&${wrong}`), { compare: "difference", with: "0.1" });
  });

test("heads of layers of another shape are no comparison", () => {
  const two = recording([layer(), layer({ q_len: 5 })]);
  assert.deepEqual(differences("#compare=beside&with=1.1", two), { compare: "beside", with: "0.1" });
});

test("of two recordings the same head is compared, and without a difference where their lengths differ", () => {
  const same = recording([layer(), layer(), layer(), layer()], { other: { first: 2 } });
  assert.deepEqual(differences("#layer=3&key=3&compare=difference&with=0.0", same), {
    layer: 1,
    compare: "difference",
    with: "3.0",
  });
  const longer = recording([layer(), layer({ q_len: 12, kv_len: 12 })], { other: { first: 1 } });
  assert.deepEqual(differences("#compare=difference", longer), { compare: "beside", with: "1.0" });
});

test("sinks that are inside block means are not set aside", () => {
  const large = recording([layer({ kind: "pyramid", block: 2 }), layer()]);
  assert.deepEqual(differences("#hidden=1", large), {});
  assert.deepEqual(differences("#layer=1&key=3&hidden=1", large), { layer: 1, hidden: true });
});

// The keyboard

function page() {
  const kept = store();
  const session = {
    store: kept,
    layers: recording().layers,
    axes: () => ({ queries: tokens(WORDS), keys: tokens(WORDS) }),
    cell: () => ({ query: kept.state.query, key: kept.state.key }),
    choose: (cell) => kept.set({ ...cell, hover: null }),
  };
  return { session, map: { session, frame: null }, views: STATES.view };
}

function pressed(key, shiftKey = false) {
  const one = page();
  bindingsOf(one)
    .find(({ keys }) => keys.includes(key))
    .run(one, key, { shiftKey });
  const { state, fresh } = one.session.store;
  return Object.fromEntries(Object.entries(state).filter(([name, value]) => value !== fresh[name]));
}

const PRESSED = {
  ArrowDown: { query: 5 },
  ArrowUp: { query: 3 },
  ArrowRight: { key: 4 },
  ArrowLeft: { key: 2 },
  "]": { head: 1 },
  "}": { layer: 1 },
  "[": {},
  "{": {},
  l: { scale: "linear" },
  s: { hidden: true },
  d: { side: "looked" },
  t: { folded: true },
  m: { heads: "mean" },
  c: { compare: "beside", with: "0.1" },
  1: { view: "overview" },
  3: { view: "text" },
  4: { view: "steps" },
  5: { view: "segments" },
};
for (const [key, expected] of Object.entries(PRESSED))
  test(`the key ${key} changes its part of the state`, () => assert.deepEqual(pressed(key), expected));

test("Shift and an arrow go ten cells, to the end of the text", () => {
  assert.deepEqual(pressed("ArrowDown", true), { query: 8 });
  assert.deepEqual(pressed("ArrowLeft", true), { key: 0 });
});

test("a key that is a sink goes with the sinks", () => {
  const one = page();
  const { store } = one.session;
  store.set({ key: 0 });
  bindingsOf(one)
    .find(({ keys }) => keys.includes("s"))
    .run(one, "s", {});
  assert.deepEqual([store.state.hidden, store.state.key], [true, null]);
});

test("keys that move inside a part of the page move there alone, and only without Control", () => {
  const moves = [];
  const listener = moving((...step) => moves.push(step));
  const press = (key, more = {}) => {
    let prevented = false;
    listener({ key, preventDefault: () => (prevented = true), ...more });
    return prevented;
  };
  assert.deepEqual(
    ["ArrowDown", "ArrowLeft", "l"].map((key) => press(key)),
    [true, true, false],
  );
  assert.equal(press("ArrowUp", { ctrlKey: true }), false);
  assert.deepEqual(moves, [
    [1, 0],
    [0, -1],
  ]);
});

test("no key does two things", () => {
  const keys = bindingsOf(page()).flatMap((binding) => binding.keys);
  assert.equal(new Set(keys).size, keys.length);
});

test("a page without pictures has no key for them", () => {
  const views = STATES.view.filter((name) => name !== "image");
  const keys = bindingsOf({ views }).flatMap((binding) => binding.keys);
  assert.deepEqual(
    keys.filter((key) => key >= "1" && key <= "9"),
    views.map((_, index) => `${index + 1}`),
  );
  assert.ok(keys.includes("?"));
});
