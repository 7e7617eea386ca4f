/**
 * One compute Worker's engine: panels in the WASM heap, tiles computed from them.
 *
 * A panel is copied into the heap once and used by every tile that names it. A tile's product lives in the heap only
 * while it is computed; what leaves is a fresh buffer that can be handed over without a copy. When the heap is full the
 * tile fails with OutOfMemory and the engine goes on with what it has.
 */
import { Kernel, OutOfMemory } from "./wasm_kernel.js";

const ELEMENT_BYTES = 4;

/** A lease names a panel that never reached this Worker. */
export class MissingPanel extends Error {}

export class TileEngine {
  /** id -> address @type {Map<string, number>} */
  #panels = new Map();
  /** Panels that found no room. @type {Set<string>} */
  #lost = new Set();

  /** @param {WebAssembly.Module} module @param {number} bytesMax what this Worker's memory may grow to */
  constructor(module, bytesMax) {
    this.kernel = new Kernel(module, bytesMax);
  }

  /** Bytes of the WASM memory, and those of them in use. */
  get memory() {
    return { bytes: this.kernel.heap.bytes, used: this.kernel.heap.usedBytes };
  }

  /** @param {string} id @param {Uint8Array<ArrayBuffer>} bytes */
  put(id, bytes) {
    if (this.#panels.has(id)) return;
    this.#lost.delete(id);
    const { heap } = this.kernel;
    try {
      const at = heap.alloc(bytes.length);
      new Uint8Array(heap.memory.buffer, at, bytes.length).set(bytes);
      this.#panels.set(id, at);
    } catch (error) {
      if (!(error instanceof OutOfMemory)) throw error;
      this.#lost.add(id);
    }
  }

  /** @param {string[]} ids */
  drop(ids) {
    for (const id of ids) {
      this.#lost.delete(id);
      const at = this.#panels.get(id);
      if (at === undefined) continue;
      this.kernel.heap.free(at);
      this.#panels.delete(id);
    }
  }

  /** Panels that found no room since the last call. */
  takeLost() {
    const lost = [...this.#lost];
    this.#lost.clear();
    return lost;
  }

  /**
   * The product of one lease, batch x m x n floats, row-major. Throws OutOfMemory, MissingPanel, or what the kernel throws.
   * @param {import("./protocol.js").Lease} lease
   * @returns {{ bytes: Uint8Array<ArrayBuffer>, seconds: number }} seconds inside the kernel
   */
  compute({ batch, m, n, k, a, b }) {
    const atA = this.#address(a), atB = this.#address(b);
    const { heap } = this.kernel;
    const size = ELEMENT_BYTES * batch * m * n;
    const atC = heap.alloc(size);
    try {
      const start = performance.now();
      for (let i = 0; i < batch; i += 1) {
        const [x, y, z] = [m * k, n * k, m * n].map((elements) => ELEMENT_BYTES * i * elements);
        this.kernel.multiply(m, n, k, atA + x, atB + y, atC + z);
      }
      const seconds = (performance.now() - start) / 1000;
      return { bytes: new Uint8Array(heap.memory.buffer.slice(atC, atC + size)), seconds };
    } finally {
      heap.free(atC);
    }
  }

  /** @param {string} id */
  #address(id) {
    const at = this.#panels.get(id);
    if (at !== undefined) return at;
    if (this.#lost.has(id)) throw new OutOfMemory(`no room for panel ${id}`);
    throw new MissingPanel(`panel ${id} is not here`);
  }
}
