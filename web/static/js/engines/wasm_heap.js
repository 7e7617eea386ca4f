/**
 * The memory of a kernel that allocates nothing: a first-fit list of free runs over a WASM memory.
 *
 * The kernels take byte addresses, so the heap is kept here, on the JavaScript side. It grows on demand up to a limit. A
 * memory never shrinks, so freed runs are merged and used again; what a volunteer lends is bounded by the limit, not by
 * how long the tab lives.
 */
import { OutOfMemory } from "./errors.js";

const PAGE_BYTES = 65536;
const ALIGN = 16;
const GROW_BYTES_MIN = 1 << 20;

/** Addresses are bytes, 16-byte aligned. */
export class WasmHeap {
  /** @type {{ at: number, size: number }[]} free runs, by address, never adjacent */
  #free = [];
  /** @type {Map<number, number>} address -> size */
  #used = new Map();
  #end;

  /**
   * @param {WebAssembly.Memory} memory
   * @param {number} base first byte that is ours
   * @param {number} bytesMax what the memory may grow to, everything included
   */
  constructor(memory, base, bytesMax) {
    this.memory = memory;
    this.bytesMax = bytesMax;
    this.#end = roundUp(base);
  }

  /** Bytes of the whole memory now. */
  get bytes() {
    return this.memory.buffer.byteLength;
  }

  /** Bytes handed out and not freed. */
  get usedBytes() {
    let sum = 0;
    for (const size of this.#used.values()) sum += size;
    return sum;
  }

  /** @param {number} bytes @returns {number} address; throws OutOfMemory */
  alloc(bytes) {
    const size = roundUp(Math.max(bytes, 1));
    const index = this.#free.findIndex((run) => run.size >= size);
    if (index >= 0) {
      const run = this.#free[index];
      const at = run.at;
      if (run.size === size) this.#free.splice(index, 1);
      else this.#free[index] = { at: at + size, size: run.size - size };
      this.#used.set(at, size);
      return at;
    }
    const last = this.#free.at(-1);
    const at = last && last.at + last.size === this.#end ? last.at : this.#end;
    this.#reach(at + size);
    if (at !== this.#end) this.#free.pop();
    this.#end = at + size;
    this.#used.set(at, size);
    return at;
  }

  /** @param {number} at an address from alloc(), not freed yet */
  free(at) {
    const size = this.#used.get(at);
    if (size === undefined) throw new Error(`free(${at}): no such allocation`);
    this.#used.delete(at);
    let index = this.#free.findIndex((run) => run.at > at);
    if (index < 0) index = this.#free.length;
    const run = { at, size };
    const next = this.#free[index];
    if (next && run.at + run.size === next.at) {
      run.size += next.size;
      this.#free.splice(index, 1);
    }
    const previous = this.#free[index - 1];
    if (previous && previous.at + previous.size === run.at) previous.size += run.size;
    else this.#free.splice(index, 0, run);
  }

  /**
   * A view of the memory. Growing detaches views, so take one, use it, forget it.
   * @param {number} at @param {number} count elements
   */
  floats(at, count) {
    return new Float32Array(this.memory.buffer, at, count);
  }

  /** @param {number} end make the memory at least this long */
  #reach(end) {
    const missing = end - this.bytes;
    if (missing <= 0) return;
    if (end > this.bytesMax) throw new OutOfMemory(`needs ${end} bytes, may use ${this.bytesMax}`);
    const wanted = Math.min(Math.max(missing, GROW_BYTES_MIN), this.bytesMax - this.bytes);
    try {
      this.memory.grow(Math.ceil(Math.max(wanted, missing) / PAGE_BYTES));
    } catch (error) {
      throw new OutOfMemory(`the browser gives no more than ${this.bytes} bytes: ${error}`);
    }
  }
}

/** @param {number} bytes */
function roundUp(bytes) {
  return Math.ceil(bytes / ALIGN) * ALIGN;
}
