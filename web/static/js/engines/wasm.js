/**
 * The WASM engine: panels in the heap of one module instance, tiles computed from them by its GEMM.
 *
 * The kernel comes in three builds of one source (kernels_wasm/): relaxed SIMD fuses multiply and add where the CPU does,
 * strict SIMD gives the same bits everywhere, scalar runs where there is no SIMD. A panel is copied into the heap once and
 * used by every tile that names it. A tile's product lives there only while it is computed; what leaves is a fresh buffer
 * that can be handed over without a copy. When the heap is full the tile fails and the engine goes on with what it has.
 */
import { refuseEmpty } from "./errors.js";
import { PanelStore } from "./panel_store.js";
import { WasmHeap } from "./wasm_heap.js";

/**
 * @typedef {import("../../../types/engine.js").Engine} Engine
 * @typedef {import("../../../types/engine.js").EngineOptions} EngineOptions
 * @typedef {import("../../../types/engine.js").Operand} Operand
 * @typedef {import("../../../types/engine.js").Problem} Problem
 * @typedef {import("../../../types/engine.js").TileWork} TileWork
 * @typedef {"relaxed"|"strict"|"scalar"} Build
 */

/**
 * What the module exports: kernels_wasm/gemm.c says what the arguments mean.
 * @typedef {object} Exports
 * @property {WebAssembly.Memory} memory
 * @property {WebAssembly.Global} __heap_base first byte the module does not use itself
 * @property {() => number} gemm_scratch_bytes
 * @property {(m: number, n: number, k: number, a: number, aAcross: number, aAlong: number, aType: number, aScales: number,
 *   b: number, bAcross: number, bAlong: number, bType: number, bScales: number, c: number, cRow: number,
 *   accumulate: number, bias: number, scratch: number) => void} gemm
 * @property {(m: number, n: number, k: number) => number} [gemm_fast_scratch_bytes] 0 where gemm is as fast
 * @property {(m: number, n: number, k: number, a: number, aAcross: number, b: number, bAcross: number, c: number,
 *   cRow: number, scratch: number) => void} [gemm_fast]
 */

const ELEMENT_BYTES = 4;
const TYPES = { f32: 0, bf16: 1, f16: 2, i8: 3 };

/** @implements {Engine} */
class WasmEngine {
  depth = 1;
  note = "";
  #exports;
  #heap;
  #scratch;
  /** @type {PanelStore<number>} */
  #panels;

  /** @param {WebAssembly.Module} module @param {Build} build @param {number} bytesMax limit of the whole memory */
  constructor(module, build, bytesMax) {
    this.kernel = `wasm-${build}`;
    this.#exports = /** @type {Exports} */ (/** @type {unknown} */ (new WebAssembly.Instance(module).exports));
    this.#heap = new WasmHeap(this.#exports.memory, this.#exports.__heap_base.value, bytesMax);
    this.#scratch = this.#heap.alloc(this.#exports.gemm_scratch_bytes());
    this.#panels = new PanelStore((at) => this.#heap.free(at));
  }

  get memory() {
    return { bytes: this.#heap.bytes, used: this.#heap.usedBytes };
  }

  /** @param {string} id @param {Uint8Array<ArrayBuffer>} bytes */
  put(id, bytes) {
    this.#panels.put(id, () => this.#load(bytes));
  }

  /** @param {string[]} ids */
  drop(ids) {
    this.#panels.drop(ids);
  }

  takeLost() {
    return this.#panels.takeLost();
  }

  /** @param {TileWork} work */
  async compute({ batch, m, n, k, a, b, accuracy }) {
    refuseEmpty({ batch, m, n, k });
    const atA = this.#panels.get(a), atB = this.#panels.get(b);
    const size = ELEMENT_BYTES * batch * m * n;
    const scratchBytes = accuracy === "normwise" ? (this.#exports.gemm_fast_scratch_bytes?.(m, n, k) ?? 0) : 0;
    const mine = [this.#heap.alloc(size)];
    try {
      const atC = mine[0];
      if (scratchBytes) mine.push(this.#heap.alloc(scratchBytes));
      const start = performance.now();
      for (let i = 0; i < batch; i += 1) {
        const [x, y, z] = [atA + 4 * i * m * k, atB + 4 * i * n * k, atC + 4 * i * m * n];
        if (scratchBytes) this.#exports.gemm_fast?.(m, n, k, x, k, y, k, z, n, mine[1]);
        else this.#exports.gemm(m, n, k, x, k, 1, 0, 0, y, k, 1, 0, 0, z, n, 0, 0, this.#scratch);
      }
      const seconds = (performance.now() - start) / 1000;
      return { bytes: new Uint8Array(this.#heap.memory.buffer.slice(atC, atC + size)), seconds };
    } finally {
      mine.forEach((at) => this.#heap.free(at));
    }
  }

  /** @param {Problem} problem */
  async multiply({ m, n, k, a, b, cRow, c, bias, accuracy }) {
    refuseEmpty({ m, n, k });
    /** @type {number[]} */
    const mine = [];
    const load = (/** @type {Uint8Array<ArrayBuffer>} */ bytes) => {
      mine.push(this.#load(bytes));
      return mine[mine.length - 1];
    };
    const floats = (/** @type {Float32Array<ArrayBuffer>|undefined} */ values) =>
      values ? load(new Uint8Array(values.buffer, values.byteOffset, values.byteLength)) : 0;
    try {
      const count = c?.length ?? (m - 1) * cRow + n;
      const atA = load(a.bytes), atB = load(b.bytes), atC = floats(c ?? new Float32Array(count));
      const fast = accuracy === "normwise" && !c && !bias && plain(a) && plain(b);
      const scratchBytes = fast ? (this.#exports.gemm_fast_scratch_bytes?.(m, n, k) ?? 0) : 0;
      if (scratchBytes) {
        mine.push(this.#heap.alloc(scratchBytes));
        this.#exports.gemm_fast?.(m, n, k, atA, a.across, atB, b.across, atC, cRow, mine[mine.length - 1]);
      } else {
        const operand = (/** @type {Operand} */ { across, along, dtype, scales }) =>
          /** @type {const} */ ([across, along, TYPES[dtype], floats(scales)]);
        this.#exports.gemm(m, n, k, atA, ...operand(a), atB, ...operand(b), atC, cRow, c ? 1 : 0, floats(bias), this.#scratch);
      }
      return this.#heap.floats(atC, count).slice();
    } finally {
      mine.forEach((at) => this.#heap.free(at));
    }
  }

  /** The instance and its memory go with the last reference to them. */
  close() {
    this.#panels.dropAll();
  }

  /** @param {Uint8Array<ArrayBuffer>} bytes @returns {number} address of a copy in the heap; throws OutOfMemory */
  #load(bytes) {
    const at = this.#heap.alloc(bytes.length);
    new Uint8Array(this.#heap.memory.buffer, at, bytes.length).set(bytes);
    return at;
  }
}

/** Whether the fast kernel reads it. @param {Operand} operand */
function plain({ dtype, along }) {
  return dtype === "f32" && along === 1;
}

/** @param {Build} build @returns {import("../../../types/engine.js").Open} */
function opener(build) {
  return async ({ base, bytesMax }) => {
    const response = await fetch(new URL(`wasm/gemm_${build}.wasm`, base));
    if (!response.ok) throw new Error(`the kernel could not be loaded: ${response.status} ${response.statusText}`);
    const bytes = await response.arrayBuffer();
    if (!WebAssembly.validate(bytes)) throw new Error(`this browser has no ${NEEDS[build]}`);
    return new WasmEngine(await WebAssembly.compile(bytes), build, bytesMax);
  };
}

const NEEDS = { relaxed: "relaxed WebAssembly SIMD", strict: "WebAssembly SIMD", scalar: "WebAssembly" };

export const openRelaxed = opener("relaxed");
export const openStrict = opener("strict");
export const openScalar = opener("scalar");
