/**
 * Blocks of tokens, aligned to 0: at level z a cell is the mean weight of 2^z x 2^z tokens, and a
 * tile is 256 x 256 cells; both are smaller at the matrix's edge.
 */

/** Which tile. */
export interface Place {
  level: number;
  row: number; // tile row: its first query is row * 256 * 2^level
  column: number;
}

/** What a tile covers. */
export interface Extent {
  size: number; // tokens of a block, each way
  first: number; // query
  end: number; // past the last query
  from: number; // first key
  to: number; // past the last key
  height: number; // cells
  width: number; // cells
}

export const TILE = 256;

export function extent({ level, row, column }: Place, { q_len, kv_len }: { q_len: number; kv_len: number }): Extent {
  const size = 2 ** level;
  const [first, from] = [row * TILE * size, column * TILE * size];
  const [end, to] = [Math.min(q_len, first + TILE * size), Math.min(kv_len, from + TILE * size)];
  const [height, width] = [Math.ceil((end - first) / size), Math.ceil((to - from) / size)];
  return { size, first, end, from, to, height, width };
}

/**
 * Adds one query's weights to a row of cells: of each block of keys the mean, over a divisor.
 * @param weights of the query
 * @param from first key
 * @param to past the last key
 * @param at the row's first cell
 */
export function addRow(
  weights: ArrayLike<number>,
  from: number,
  to: number,
  size: number,
  cells: Float32Array,
  at: number,
  divisor: number,
) {
  for (let cell = at, key = from; key < to; cell++) {
    const end = Math.min(to, key + size);
    const count = (end - key) * divisor;
    let sum = 0;
    for (; key < end; key++) sum += weights[key];
    cells[cell] += sum / count;
  }
}

/**
 * The query that stands for its block in a sample: the middle one.
 * @param cell of the tile
 */
export function middle(cell: number, { first, end, size }: Extent): number {
  const start = first + cell * size;
  return Math.floor((start + Math.min(end, start + size)) / 2);
}

/** Where a cell begins, of a length divided into cells as even as can be, as regard.Pool divides it. */
export function edge(cell: number, length: number, cells: number): number {
  return Math.floor((cell * length) / cells);
}

/** The cell that holds a position, of a length divided as `edge` divides it. */
export function blockOf(position: number, length: number, cells: number): number {
  return Math.floor(((position + 1) * cells - 1) / length);
}
