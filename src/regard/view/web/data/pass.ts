/**
 * One pass over all rows of a head that is too large to answer at once: it finds the mean weights of
 * blocks, from which every coarser tile is added up. It goes on while nothing else is asked. Of a
 * long head as it is, the file holds what the pass would find.
 */

import { addRow, type Extent } from "../maths/blocks";
import { allowed, levelsOf, weightsOf, type Layer, type Which } from "../maths/softmax";

const MOST = 2048; // blocks a side that are kept: at most 16 MB

/** @returns is it in the file? */
export function isStored({ blocks, levels }: Layer, { hidden }: Which): boolean {
  return (blocks !== undefined && !hidden) || levels !== undefined;
}

/** @returns tokens of a block, each way */
export function blockSize(layer: Layer, which: Which): number {
  const { q_len, kv_len, block } = layer.info;
  if (isStored(layer, which)) return block;
  return 2 ** Math.max(0, Math.ceil(Math.log2(Math.max(q_len, kv_len) / MOST)));
}

export class Pass {
  private row = new Float64Array(this.layer.info.kv_len);
  private size = blockSize(this.layer, this.which); // tokens of a block
  private columns = Math.ceil(this.layer.info.kv_len / this.size);
  private blocks = Math.ceil(this.layer.info.q_len / this.size) * this.columns;
  private means: Float32Array; // of blocks; of one that is not through, what its rows bring to it
  done = 0; // rows
  private spent = 0; // milliseconds
  private numbers = 0; // weights computed, and in all
  private all = 0;

  constructor(
    readonly layer: Layer,
    private readonly which: Which,
  ) {
    const { q_len } = layer.info;
    this.means = isStored(layer, which) ? this.stored() : new Float32Array(this.blocks);
    for (let query = 0; query < q_len; query++) this.all += this.cost(query);
    if (isStored(layer, which)) [this.done, this.numbers] = [q_len, this.all];
  }

  /** What the file holds of this head: all is done. */
  private stored() {
    const { head } = this.which;
    const { means, blocks } = this.layer;
    if (blocks) return blocks.subarray(head * this.blocks).subarray(0, this.blocks);
    return Float32Array.from(levelsOf(this.layer, head, 0).subarray(0, this.blocks), (level) => means[level]);
  }

  private cost(query: number) {
    const [start, stop] = allowed(this.layer, this.which.head, query);
    return Math.max(1, stop - start);
  }

  progress(): { done: number; seconds: number | null } {
    const part = this.numbers / this.all;
    return { done: part, seconds: part > 0 ? ((this.spent / part) * (1 - part)) / 1000 : null };
  }

  /** One more row. */
  step() {
    const start = performance.now();
    const { layer, which, row, done, size } = this;
    weightsOf(layer, which, done, 0, row.length, row);
    const block = Math.floor(done / size);
    const rows = Math.min(layer.info.q_len, (block + 1) * size) - block * size;
    addRow(row, 0, row.length, size, this.means, block * this.columns, rows);
    this.numbers += this.cost(done);
    this.done += 1;
    this.spent += performance.now() - start;
  }

  /** @returns are all its blocks through? */
  has({ size, end }: Extent): boolean {
    return size >= this.size && this.done >= end;
  }

  /** The cells are whole blocks, added up. */
  tile({ first, end, from, to, height, width, size: cell }: Extent): Float32Array {
    const { size, columns, means } = this;
    const values = new Float32Array(height * width);
    for (let query = first; query < end; query += size) {
      const row = Math.floor((query - first) / cell);
      const queries = Math.min(end, first + (row + 1) * cell) - (first + row * cell);
      for (let key = from; key < to; key += size) {
        const column = Math.floor((key - from) / cell);
        const keys = Math.min(to, from + (column + 1) * cell) - (from + column * cell);
        // A block at the edge has fewer rows and keys.
        const part = (Math.min(end, query + size) - query) * (Math.min(to, key + size) - key);
        values[row * width + column] += (means[(query / size) * columns + key / size] * part) / (queries * keys);
      }
    }
    return values;
  }
}
