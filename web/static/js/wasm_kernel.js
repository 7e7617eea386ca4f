/**
 * The WASM kernel and the memory it works in.
 *
 * `gemm_simd128.wasm` allocates nothing: it takes byte addresses. So the heap is kept here, on the JavaScript side: a
 * first-fit list of free runs over the module's memory, which grows on demand up to a limit. A memory never shrinks, so
 * freed runs are merged and used again; what a volunteer lends is bounded by the limit, not by how long the tab lives.
 *
 * Left out: everything about panels and tiles (tile_engine.js).
 */

const PAGE_BYTES = 65536;
const ALIGN = 16;
const GROW_BYTES_MIN = 1 << 20;

/**
 * What the module exports.
 * @typedef {object} KernelExports
 * @property {WebAssembly.Memory} memory
 * @property {WebAssembly.Global} __heap_base first byte the module does not use itself
 * @property {() => number} gemm_scratch_bytes
 * @property {(m: number, n: number, k: number, a: number, aRow: number, aCol: number, b: number, bRow: number,
 *   bCol: number, c: number, cRow: number, accumulate: number, scratch: number) => void} gemm
 */

/** The device cannot lend as much memory as a tile needs; the tile fails with code "memory", the device goes on. */
export class OutOfMemory extends Error {}

/** First-fit allocator over one WASM memory. Addresses are bytes, 16-byte aligned. */
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

/** One instance of the kernel, its heap and its scratch. */
export class Kernel {
  #exports;
  #scratch;

  /** @param {WebAssembly.Module} module @param {number} bytesMax limit of the whole memory */
  constructor(module, bytesMax) {
    this.#exports = /** @type {KernelExports} */ (/** @type {unknown} */ (new WebAssembly.Instance(module).exports));
    this.heap = new WasmHeap(this.#exports.memory, this.#exports.__heap_base.value, bytesMax);
    this.#scratch = this.heap.alloc(this.#exports.gemm_scratch_bytes());
  }

  /**
   * C[m,n] = A[m,k] B[k,n] with A and B^T stored as rows of k, C as rows of n; addresses in bytes.
   * @param {number} m @param {number} n @param {number} k @param {number} a @param {number} bt @param {number} c
   */
  multiply(m, n, k, a, bt, c) {
    this.#exports.gemm(m, n, k, a, k, 1, bt, 1, k, c, n, 0, this.#scratch);
  }
}
