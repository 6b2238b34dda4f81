/** The questions of the page and their answers, as protocol.py writes them. */

/** A number for each key; of the mask, 1 where the query may attend to the key. */
export type RowAnswer = { values: Float32Array; mask: Uint8Array };
/** The weights of one query, and which keys it may attend to. */
export type RowQuestion = { kind: "row"; layer: number; head: number; hidden: boolean; query: number };
/** Numbers whose shape the question says: a column, or shares (query parts, key parts). */
export type Values = { values: Float32Array };
/** The weights that all queries give to one key. */
export type ColumnQuestion = { kind: "column"; layer: number; head: number; hidden: boolean; key: number };
/** The cells (height, width); sampled: one query in so many was asked, if they are not exact. */
export type TileAnswer = {
  values: Float32Array;
  height: number;
  width: number;
  exact: boolean;
  sampled?: number | null;
};
/** A part of the matrix: 256 x 256 cells, each the mean of 2^level x 2^level weights. */
export type TileQuestion = {
  kind: "tile";
  layer: number;
  head: number;
  hidden: boolean;
  level: number;
  row: number;
  column: number;
};
/** The part of the pass that is done, from 0 to 1, and the seconds that are left, if known. */
export type ProgressAnswer = { done: number; seconds: number | null };
/** The state of the pass over a long head, which its exact tiles wait for. */
export type ProgressQuestion = { kind: "progress"; layer: number; head: number; hidden: boolean };
/** One key of a query; a step that does nothing is null for every key. */
export type Step = {
  key: number;
  vector: ArrayLike<number> | null;
  dot: number | null;
  scaled: number | null;
  biased: number | null;
  modified: number | null;
  capped: number | null;
  allowed: boolean;
  score: number | null;
  weight: number;
  value: ArrayLike<number> | null;
};
/** A query step by step, as ``A.steps(query)`` has it. */
export type StepsAnswer = {
  vector: ArrayLike<number> | null;
  scale: number;
  masked: boolean;
  maximum: number | null;
  log_normalizer: number | null;
  sink: number | null;
  keys: number;
  allowed: number;
  total: number;
  rows: Step[];
  output: ArrayLike<number> | null;
};
/** The steps of one query to its weights, for some of its keys: strongest first, or in order. */
export type StepsQuestion = {
  kind: "steps";
  layer: number;
  head: number;
  hidden: boolean;
  query: number;
  by: "weight" | "position";
  start: number;
  count: number;
};
/** The shares of key parts in query parts; a part is its first token, and one past its last. */
export type SegmentsQuestion = {
  kind: "segments";
  layer: number;
  head: number;
  hidden: boolean;
  queries: [number, number][];
  keys: [number, number][];
};
/** The small maps of a layer: a byte for each block, in base64; sampled as in a tile. */
export type SmallNumbers = { rows: number; columns: number; maximum: number; levels: string; sampled?: number | null };
/** The small maps of a layer, of a live host. */
export type OverviewQuestion = { kind: "overview"; layer: number };
/** The kind of a head in this text, where a trial gave its name. */
export type KindHere = { kind: string; score: number };
/** The kind of one head, as docs/heads.md has it; its entropy as a share of the largest. */
export type HeadKind = { kind: string; score: number; entropy: number; sink: number; here?: KindHere | null };
/** A head, and a cell that shows what it does; without a key none does. */
export type Opening = { layer: number; head: number; query: number; key: number | null };
/** The kind of each head, layer by layer, or null for NaN; a head of each kind, and the first. */
export type HeadsAnswer = { heads: (HeadKind | null)[]; notable: Opening[]; opened: Opening };
/** The kinds of all heads, of a live host. */
export type HeadsQuestion = { kind: "heads" };
/** The answer to a question of each kind. */
export type Answers = {
  row: RowAnswer;
  column: Values;
  tile: TileAnswer;
  progress: ProgressAnswer;
  steps: StepsAnswer;
  segments: Values;
  overview: SmallNumbers;
  heads: HeadsAnswer;
};

export type Question =
  | RowQuestion
  | ColumnQuestion
  | TileQuestion
  | ProgressQuestion
  | StepsQuestion
  | SegmentsQuestion
  | OverviewQuestion
  | HeadsQuestion;
