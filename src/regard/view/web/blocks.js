/**
 * Blocks of tokens, aligned to 0: at level z a cell is the mean weight of 2^z x 2^z tokens, and a
 * tile is 256 x 256 cells; both are smaller at the matrix's edge.
 *
 * @typedef {object} Place which tile
 * @property {number} level
 * @property {number} row tile row: its first query is row * 256 * 2^level
 * @property {number} column
 *
 * @typedef {object} Extent what a tile covers
 * @property {number} size tokens of a block, each way
 * @property {number} first query
 * @property {number} end past the last query
 * @property {number} from first key
 * @property {number} to past the last key
 * @property {number} height cells
 * @property {number} width cells
 */

export const TILE = 256;

/**
 * @param {Place} place @param {{q_len: number, kv_len: number}} shape
 * @returns {Extent}
 */
export function extent({ level, row, column }, { q_len, kv_len }) {
  const size = 2 ** level;
  const [first, from] = [row * TILE * size, column * TILE * size];
  const [end, to] = [Math.min(q_len, first + TILE * size), Math.min(kv_len, from + TILE * size)];
  const [height, width] = [Math.ceil((end - first) / size), Math.ceil((to - from) / size)];
  return { size, first, end, from, to, height, width };
}

/**
 * Adds one query's weights to a row of cells: of each block of keys the mean, over a divisor.
 * @param {ArrayLike<number>} weights of the query
 * @param {number} from first key @param {number} to past the last key @param {number} size
 * @param {Float32Array} cells @param {number} at the row's first cell @param {number} divisor
 */
export function addRow(weights, from, to, size, cells, at, divisor) {
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
 * @param {number} cell of the tile @param {Extent} extent @returns {number}
 */
export function middle(cell, { first, end, size }) {
  const start = first + cell * size;
  return Math.floor((start + Math.min(end, start + size)) / 2);
}

/**
 * Where a cell begins, of a length divided into cells as even as can be, as regard.Pool divides it.
 * @param {number} cell @param {number} length @param {number} cells @returns {number}
 */
export function edge(cell, length, cells) {
  return Math.floor((cell * length) / cells);
}

/**
 * The cell that holds a position, of a length divided as `edge` divides it.
 * @param {number} position @param {number} length @param {number} cells @returns {number}
 */
export function blockOf(position, length, cells) {
  return Math.floor(((position + 1) * cells - 1) / length);
}
