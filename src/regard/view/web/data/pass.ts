/**
 * One pass over all rows of a head that is too large to answer at once: it sums the weights of
 * blocks, from which every coarser tile is added up. It goes on while nothing else is asked. Of a
 * long head as it is, the file holds what the pass would find.
 */

import { addRow, type Extent } from "../maths/blocks";
import { allowed, levelsOf, weightsOf, type Layer, type Which } from "../maths/softmax";

const MOST = 2048; // blocks a side that are kept: at most 16 MB

/** @returns is it in the file? */
export function isStored({ sums, levels }: Layer, { hidden }: Which): boolean {
  return (sums !== undefined && !hidden) || levels !== undefined;
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
  private sums: Float32Array;
  done = 0; // rows
  private spent = 0; // milliseconds
  private numbers = 0; // weights computed, and in all
  private all = 0;

  constructor(
    readonly layer: Layer,
    private readonly which: Which,
  ) {
    const { q_len } = layer.info;
    this.sums = isStored(layer, which) ? this.stored() : new Float32Array(this.blocks);
    for (let query = 0; query < q_len; query++) this.all += this.cost(query);
    if (isStored(layer, which)) [this.done, this.numbers] = [q_len, this.all];
  }

  /** What the file holds of this head: all is done. */
  private stored() {
    const { head } = this.which;
    const { info, means, sums } = this.layer;
    if (sums) return sums.subarray(head * this.blocks).subarray(0, this.blocks);
    const levels = levelsOf(this.layer, head, 0).subarray(0, this.blocks);
    return Float32Array.from(levels, (level, at) => {
      const first = Math.floor(at / this.columns) * this.size;
      return means[level] * (Math.min(info.q_len, first + this.size) - first);
    });
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
    const { layer, which, row, done } = this;
    weightsOf(layer, which, done, 0, row.length, row);
    const at = Math.floor(done / this.size) * this.columns;
    addRow(row, 0, row.length, this.size, this.sums, at, 1);
    this.numbers += this.cost(done);
    this.done += 1;
    this.spent += performance.now() - start;
  }

  /** @returns are all its blocks summed? */
  has({ size, end }: Extent): boolean {
    return size >= this.size && this.done >= end;
  }

  /** The cells are whole blocks, added up. */
  tile({ first, end, from, to, height, width, size: cell }: Extent): Float32Array {
    const { size, columns, sums } = this;
    const values = new Float32Array(height * width);
    for (let query = first; query < end; query += size) {
      const row = Math.floor((query - first) / cell);
      const queries = Math.min(end, first + (row + 1) * cell) - (first + row * cell);
      for (let key = from; key < to; key += size) {
        const column = Math.floor((key - from) / cell);
        const keys = Math.min(to, from + (column + 1) * cell) - (from + column * cell);
        // A sum over rows of means over keys; a block at the edge has fewer keys.
        const sum = sums[(query / size) * columns + key / size] * (Math.min(to, key + size) - key);
        values[row * width + column] += sum / (queries * keys);
      }
    }
    return values;
  }
}
