/** The sum that made a number, in words and signs: "query·key = 0.2×1.1 + (−0.5)×0.3 + … = 12.3". */

import { digits, grouped, share } from "./numbers";
import type { Step, StepsAnswer as Steps } from "../protocol/questions";

/** A step, as a column of the table. */
export interface Column {
  name: string;
  does: string; // one sentence that says what the step is for, and the lesson that builds it
  of?: (step: Step) => number | boolean | null; // its number
  vector?: (step: Step) => ArrayLike<number>; // what it shows in place of a number
  vectors?: string; // the name of these together
  sum: (step: Step, names: { query: string; key: string }) => string; // how it came about
  total?: { text: string; sum: string; vector?: ArrayLike<number> }; // over all keys
}

const MOST_TERMS = 6;
const LISTED = 4; // numbers of a vector that are written
const WEIGHTED = "weight × value";
const READABLE = 16; // exp of a larger score is no number that anybody reads

/** A number as it stands in the table: whole ones without a point, a true minus. */
export function written(value: number | boolean | null): string {
  if (value === null) return "–";
  if (typeof value === "boolean") return value ? "yes" : "no";
  const text = Number.isInteger(value) && Math.abs(value) < 1e6 ? String(value) : digits(value);
  return text.replace(/^-/, "−");
}

/** @returns a negative one in brackets */
function factor(value: number): string {
  return value < 0 ? `(${written(value)})` : written(value);
}

/** The products of a query and a key: all of a few, of many the largest. */
function dotSum(query: ArrayLike<number>, key: ArrayLike<number>, dot: number): string {
  const places = Array.from({ length: query.length }, (_, d) => d);
  const product = (d: number) => query[d] * key[d];
  const few = places.length <= MOST_TERMS + 2;
  if (!few) places.sort((a, b) => Math.abs(product(b)) - Math.abs(product(a)) || a - b).splice(MOST_TERMS);
  const terms = places.map((d) => `${factor(query[d])}×${factor(key[d])}`).join(" + ");
  if (few) return `query·key = ${terms} = ${written(dot)}`;
  const rest = dot - places.reduce((sum, d) => sum + product(d), 0);
  return (
    `query·key = ${terms} + … = ${written(dot)}. ` +
    `These are the ${MOST_TERMS} largest of ${query.length} products; the others add ${written(rest)}.`
  );
}

/** The number to subtract from every score, so that its exponential stays readable: the largest, as it is shown. */
function shiftOf({ maximum }: Steps): number {
  if (maximum === null || Math.abs(maximum) < READABLE) return 0;
  return Math.abs(maximum) < 1000 ? Number(maximum.toPrecision(3)) : Math.round(maximum);
}

/** @returns the sum of exp(score - shift) */
function sumOfExponentials(steps: Steps): number {
  const { maximum, log_normalizer } = steps;
  if (maximum === null || log_normalizer === null) return 0;
  return Math.exp(maximum - shiftOf(steps) + log_normalizer);
}

function shifted(shift: number): string {
  if (shift === 0) return "";
  return shift < 0 ? ` + ${written(-shift)}` : ` − ${written(shift)}`;
}

/** The steps of this query, those that do nothing left out. */
export function columnsOf(steps: Steps): Column[] {
  const { vector, scale, rows, output, maximum, masked } = steps;
  const has = (name: keyof Step) => rows.some((step) => step[name] !== null);
  const before = ({ dot, scaled, biased, modified }: Step) => written(modified ?? biased ?? scaled ?? dot);
  const times = `× ${scaleText(scale, vector)}`;
  const [shift, total] = [shiftOf(steps), sumOfExponentials(steps)];
  const exp = ({ score }: Step) => (score === null ? 0 : Math.exp(score - shift));
  const exponential = `exp(score${shifted(shift)})`;
  const of = `over ${steps.keys === 1 ? "its one key" : `all ${grouped(steps.keys)} keys`}`;
  const sink = steps.sink === null ? "" : `, with exp(${written(steps.sink)}) of the sink, which is no key`;
  const added = output ? `output = the sum of ${WEIGHTED} ${of} = ${listed(output)}` : "";
  const columns: (Column | false | null)[] = [
    vector &&
      has("dot") && {
        name: "query × key",
        does: "Each number of the query times the same one of the key: which numbers make the two fit (lesson 2).",
        vector: ({ vector: key }) => Array.from(key ?? [], (number, d) => vector[d] * number),
        vectors: "Products",
        sum: ({ vector: key, dot }) => (key ? dotSum(vector, key, Number(dot)) : ""),
      },
    has("dot") && {
      name: "query·key",
      does: "The sum of these products: how well the query fits the key (lesson 2).",
      of: ({ dot }) => dot,
      sum: ({ vector: key, dot }) => (vector && key ? dotSum(vector, key, Number(dot)) : ""),
    },
    has("scaled") && {
      name: times,
      does: "Scaled, so that scores do not grow with the length of the vectors (lesson 3).",
      of: ({ scaled }) => scaled,
      sum: ({ dot, scaled }) => `scaled = ${factor(Number(dot))} ${times} = ${written(scaled)}`,
    },
    has("biased") && {
      name: "+ bias",
      does: "Plus a number for the pair of positions, such as their distance.",
      of: ({ biased }) => biased,
      sum: ({ dot, scaled, biased }) => {
        const from = scaled ?? Number(dot);
        return `biased = ${written(from)} + ${factor(Number(biased) - from)} = ${written(biased)}`;
      },
    },
    has("modified") && {
      name: "modified",
      does: "What the model makes of the score by a function of its own.",
      of: ({ modified }) => modified,
      sum: (step) =>
        `modified: the score_mod makes ${written(step.modified)} of ${before({ ...step, modified: null })}`,
    },
    has("capped") && {
      name: "capped",
      does: "Kept between two limits by tanh.",
      of: ({ capped }) => capped,
      sum: (step) => `capped: the softcap makes ${written(step.capped)} of ${before(step)}`,
    },
    masked && {
      name: "mask",
      does: "Keys that the query may not attend to, such as later ones, get the score −∞ (lesson 3).",
      of: ({ allowed }) => allowed,
      sum: ({ allowed }, { query, key }) =>
        `mask: ${query} ${allowed ? "may" : "may not"} attend to ${key}${allowed ? "" : ", so the score becomes −∞"}`,
    },
    maximum !== null && {
      name: exponential,
      does: "The exponential: positive, and the larger the score the more of it (lesson 3).",
      of: exp,
      sum: (step) =>
        step.score === null ? "exp(−∞) = 0" : `exp(${written(step.score)}${shifted(shift)}) = ${written(exp(step))}`,
      total: { text: written(total), sum: `The sum of ${exponential} ${of}${sink} = ${written(total)}` },
    },
    {
      name: "weight",
      does: "Divided by the sum of the row, so that all weights add up to 100 % (lesson 3).",
      of: ({ weight }) => weight,
      sum: (step) => {
        const quotient = `${written(exp(step))} / ${written(total)}, the sum over all keys = `;
        return `weight = ${maximum === null ? "" : quotient}${share(step.weight)}`;
      },
      total: { text: share(steps.total), sum: `The weights add up to ${share(steps.total)} ${of}.` },
    },
    output && {
      name: "value",
      does: "What the key hands over when it is attended to (lesson 4).",
      vector: ({ value }) => value ?? [],
      vectors: "Values",
      sum: ({ value }) => `value = ${listed(value ?? [])}`,
      total: { text: "output", sum: added },
    },
    output && {
      name: WEIGHTED,
      does: "The value by its weight; the sum over all keys is the output of the head (lesson 4).",
      vector: weightedValue,
      vectors: "Their shares and the output",
      sum: (step) =>
        `${WEIGHTED} = ${share(step.weight)} × ${listed(step.value ?? [])} = ${listed(weightedValue(step))}`,
      total: { text: "", sum: added, vector: output },
    },
  ];
  return columns.filter((column): column is Column => Boolean(column));
}

function weightedValue({ value, weight }: Step): number[] {
  return Array.from(value ?? [], (number) => weight * number);
}

/** @returns its first numbers */
function listed(vector: ArrayLike<number>): string {
  const first = Array.from({ length: Math.min(LISTED, vector.length) }, (_, d) => written(vector[d]));
  return `(${[...first, ...(vector.length > LISTED ? ["…"] : [])].join(", ")})`;
}

/** The scale as people know it. */
function scaleText(scale: number, vector: ArrayLike<number> | null): string {
  const usual = vector && Math.abs(scale * Math.sqrt(vector.length) - 1) < 1e-6;
  if (usual && Number.isInteger(Math.sqrt(vector.length))) return `1/${Math.sqrt(vector.length)}`;
  return usual ? `1/√${vector.length}` : written(scale);
}
