/** What page_file.py puts into the page: a recording, its tokens and its layers. */

import type { HeadKind, Opening, SmallNumbers } from "./questions";

export interface Token {
  text: string; // exactly as in the source, leading space included
  special: boolean; // [CLS], <s>, padding …
  patch?: true; // it stands for a part of a picture
}

/** A picture that the model saw. */
export interface PictureInfo {
  name: string;
  width: number; // pixels of the original
  height: number;
  type: string | null;
  data: string | null; // a smaller copy, in base64; null: not in this page
}

/** Tokens that stand for the parts of a picture. */
export interface GridInfo {
  picture: number;
  rows: number;
  columns: number;
  box: [number, number, number, number]; // x0, y0, x1, y1 in pixels of the picture; may lie outside of it
  /** the keys, row by row, in runs: the first of each, and the one past its last */
  tokens: [number, number][];
  layers?: number[]; // of its recording; absent: all of them
  overlapping?: true; // a token has seen more than its box
}

export interface LayerInfo {
  name: string;
  place?: number; // the index of the layer in the model
  part?: number | null; // of a layer whose windows or tiles of a picture are layers of their own
  head_numbers?: number[] | null; // the index in the model of each head; null: all heads were recorded
  of?: string; // the title of its recording, where the page has two
  num_heads: number;
  q_len: number;
  kv_len: number;
  /**
   * what is in this file besides the small map; pyramid: block means, see block_means.ts; live: nothing, the page's
   * host is asked
   */
  kind: "query-key" | "weights" | "pyramid" | "live";
  num_kv_heads: number;
  head_dim: number;
  scale: number;
  query_unit: number; // the stored query is over this power of two, which scale makes up for
  key_unit: number;
  dtype: "float32" | "float16";
  deviation: number; // largest difference of a weight that dtype brings
  spacing?: number; // one row in so many was measured for it
  span_heads: number; // 0: no mask; 1: one mask for all heads; num_heads: one each
  /** tokens of a block of a pyramid, each way; 64 where a layer with query and key holds means of blocks too */
  block: number;
  maximum: number; // of its means
  octaves: number; // below it that its 255 levels span
  value_heads: number; // 0: there are no values
  value_dim: number;
  value_unit: number; // the stored value is over this power of two
  overview: SmallNumbers | null; // null: not known yet, or not here
  /** null: not known, or not yet; of a layer with weights that are not numbers no head has a kind */
  heads: (HeadKind | null)[] | null;
}

/** An attention that ran and was not recorded; see Recording.refused. */
export interface Refusal {
  module: string;
  line: string | null; // file:line
  reason: string; // with a remedy
}

/**
 * A second recording: its layers stand after those of the first, and each is seen beside the same one of that. The
 * pictures of its grids are those of the first recording.
 */
export interface Other extends Pick<
  Recording,
  "title" | "query_tokens" | "key_tokens" | "one_text" | "refused" | "grids"
> {
  first: number; // its first layer
}

export interface Recording {
  version: number;
  title: string;
  model: string;
  batch: number; // entries in the recording; the page shows the first
  query_tokens: Token[] | null;
  key_tokens: Token[] | null;
  one_text: boolean; // the keys are the queries' own tokens
  opened: Opening; // where a fresh page opens
  notable: Opening[]; // of each kind the head that is it most
  layers: LayerInfo[];
  refused: Refusal[];
  other?: Other;
  text?: string; // that the model read, where a server can run it on another one
  run?: number; // of the model
  pictures?: PictureInfo[]; // absent, as the grids: the model saw none
  grids?: GridInfo[];
}

export type Head = { layer: number; head: number };

/** @returns the number of a layer in the model; of a window or a tile with that: "3.1" */
export function layerName(layers: LayerInfo[], layer: number): string {
  const { place = layer, part = null } = layers[layer];
  return part === null ? String(place) : `${place}.${part}`;
}

/** @returns the number of a head in the model */
export function headNumber(layers: LayerInfo[], { layer, head }: Head): number {
  return layers[layer].head_numbers?.[head] ?? head;
}

/** @returns the layers that can be opened */
export function ownLayers({ layers, other }: Recording): LayerInfo[] {
  return layers.slice(0, other?.first);
}

/** @returns "L18H6" */
export function shortName(layers: LayerInfo[], at: Head): string {
  return `L${layerName(layers, at.layer)}H${headNumber(layers, at)}`;
}

/** Is every weight of the layer known? */
export function isWhole({ kind }: LayerInfo): boolean {
  return kind !== "pyramid";
}
