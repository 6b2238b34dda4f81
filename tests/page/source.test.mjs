import assert from "node:assert/strict";
import { test } from "node:test";
import { Source } from "../../src/regard/view/web/data/source";
import { Latest, Waiting } from "../../src/regard/view/web/data/waiting";
import { Reader } from "../../src/regard/view/web/data/reading";
import { layer } from "./recordings.mjs";

/** Weights of three heads: of query q on key k, 0.1 for each of head, q and k. */
const weight = (head, query, key) => Math.fround(0.1 * (head + query + key));
const KEYS = [0, 1, 2];

function host(asked = []) {
  return {
    async ask(question, signal) {
      asked.push(question);
      await new Promise((resolve) => setTimeout(resolve));
      signal.throwIfAborted();
      const { kind, head, query, key } = question;
      if (kind === "row")
        return {
          values: Float32Array.from(KEYS, (at) => weight(head, query, at)),
          mask: Uint8Array.of(1, Number(head > 0), 0),
        };
      if (kind === "column") return { values: Float32Array.from(KEYS, (at) => weight(head, at, key)) };
      return { values: Float32Array.of(head), height: 1, width: 1, exact: head < 2, sampled: head < 2 ? undefined : 4 };
    },
  };
}

const LAYERS = [layer({ num_heads: 3, q_len: 3, kv_len: 3 })];
const MEAN = { layer: 0, head: 0, hidden: false, terms: [0, 2].map((head) => ({ layer: 0, head, factor: 0.5 })) };
const near = (found, expected) =>
  assert.deepEqual(
    [...found].map((one) => one.toFixed(5)),
    expected.map((one) => one.toFixed(5)),
  );

test("an answer about several heads is the sum of their own", async () => {
  const source = new Source(LAYERS, host());
  const row = await source.row(MEAN, 1, new AbortController().signal);
  near(
    row.values,
    KEYS.map((key) => weight(1, 1, key)),
  );
  assert.deepEqual([...row.mask], [1, 1, 0]);
  near(
    await source.column(MEAN, 2, new AbortController().signal),
    KEYS.map((query) => weight(1, query, 2)),
  );
  near(await source.segments(MEAN, { queries: [], keys: [] }, new AbortController().signal), [1]);
});

test("a tile of several heads is exact where all of them are", async () => {
  const place = { level: 0, row: 0, column: 0 };
  const tile = await new Source(LAYERS, host()).tile(MEAN, place, new AbortController().signal);
  assert.deepEqual([tile.exact, tile.sampled, ...tile.values], [false, 4, 1]);
});

test("questions whose answers are on their way are counted, also where they end in an error", async () => {
  const source = new Source(LAYERS, host());
  const stop = new AbortController();
  const [row, column] = [source.row(MEAN, 1), source.column(MEAN, 2, stop.signal)];
  assert.equal(source.open, 4);
  stop.abort();
  await assert.rejects(column, { name: "AbortError" });
  await row;
  await new Promise((resolve) => setTimeout(resolve)); // the second of the two columns
  assert.equal(source.open, 0);
});

test("a newer question takes the place of an older, whose answer and error nobody gets", async () => {
  const latest = new Latest();
  const told = [];
  const answering = (name) => (signal) =>
    new Promise((resolve) => setTimeout(resolve)).then(() => (signal.throwIfAborted(), name));
  const ask = (question) =>
    latest.ask(
      question,
      (answer) => told.push(answer),
      ({ message }) => told.push(message),
    );
  const older = ask(answering("older"));
  await ask(answering("newer"));
  await older;
  await ask(() => Promise.reject(new Error("wrong")));
  const dropped = ask(answering("dropped"));
  latest.drop();
  await dropped;
  assert.deepEqual(told, ["newer", "wrong"]);
});

test("an answer finds who asked, and nobody waits for what was given up", async () => {
  const posted = [];
  const waiting = new Waiting((message) => posted.push(message));
  const stop = new AbortController();
  const [one, two] = [
    waiting.ask({ kind: "row" }, new AbortController().signal),
    waiting.ask({ kind: "row" }, stop.signal),
  ];
  stop.abort();
  await assert.rejects(two, { name: "AbortError" });
  waiting.settle({ id: 1, values: "an answer" });
  assert.deepEqual(await one, { values: "an answer" });
  assert.deepEqual(posted, [
    { kind: "row", id: 1 },
    { kind: "row", id: 2 },
    { kind: "forget", id: 2 },
  ]);
});

// What is read off

const STATE = { view: "map", layer: 0, head: 0, hidden: false, heads: "one", compare: "alone", hover: null };

/** All readings of a state, the last one with its column. */
async function readings(more, isOneText = true) {
  const found = [];
  const reader = new Reader(
    new Source(LAYERS, host()),
    (reading) => found.push(reading),
    assert.fail,
    () => isOneText,
  );
  const state = { ...STATE, query: 1, key: 0, ...more };
  reader.read(state);
  while (!found.at(-1)?.column) await new Promise((resolve) => setTimeout(resolve));
  return found;
}

test("the row is read first, then the column", async () => {
  const found = await readings({});
  assert.deepEqual(
    found.map(({ column }) => column === null),
    [true, false],
  );
  near(
    found[1].row,
    KEYS.map((key) => weight(0, 1, key)),
  );
  near(
    found[1].column,
    KEYS.map((query) => weight(0, query, 0)),
  );
});

test("a side that is unknown is the strongest", async () => {
  assert.equal((await readings({ key: null })).at(-1).key, 2);
  assert.equal((await readings({ query: null })).at(-1).query, 2);
});

test("what is pointed at is read instead of what is chosen", async () => {
  const last = (await readings({ hover: { query: 2, key: 1 } })).at(-1);
  assert.deepEqual([last.query, last.key], [2, 1]);
});

test("in a text that stands twice one token is read both ways", async () => {
  const last = (await readings({ view: "text", query: 2, key: 0 })).at(-1);
  assert.deepEqual([last.query, last.key], [2, 2]);
  const other = (await readings({ view: "text", query: 2, key: 0 }, false)).at(-1);
  assert.deepEqual([other.query, other.key], [2, 0]);
});
