/**
 * The WASM engine: panels in the heap of one module instance, tiles computed from them by its GEMM.
 *
 * The kernel comes in three builds of one source (kernels_wasm/): relaxed SIMD fuses multiply and add where the CPU does,
 * strict SIMD gives the same bits everywhere, scalar runs where there is no SIMD. A panel is copied into the heap once and
 * used by every tile that names it. A tile's product lives there only while it is computed; what leaves is a fresh buffer
 * that can be handed over without a copy. When the heap is full the tile fails and the engine goes on with what it has.
 */
import { i8Parts, place, rounded, SCALE_BLOCK, widenI8 } from "./elements.js";
import { refuseEmpty } from "./errors.js";
import { PanelStore } from "./panel_store.js";
import { WasmHeap } from "./wasm_heap.js";

/**
 * @typedef {import("../../../types/engine.js").Engine} Engine
 * @typedef {import("../../../types/engine.js").EngineOptions} EngineOptions
 * @typedef {import("../../../types/engine.js").Operand} Operand
 * @typedef {import("../../../types/engine.js").Problem} Problem
 * @typedef {import("../../../types/engine.js").PanelForm} PanelForm
 * @typedef {import("../../../types/engine.js").TileWork} TileWork
 * @typedef {import("./elements.js").Place} Place
 * @typedef {{ at: number, form: PanelForm }} Panel where it lies in the heap
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
const SIZES = { f32: 4, bf16: 2, f16: 2, i8: 1 };

/** @implements {Engine} */
class WasmEngine {
  depth = 1;
  note = "";
  #exports;
  #heap;
  #scratch;
  /** @type {PanelStore<Panel>} */
  #panels;

  /** @param {WebAssembly.Module} module @param {Build} build @param {number} bytesMax limit of the whole memory */
  constructor(module, build, bytesMax) {
    this.kernel = `wasm-${build}`;
    this.#exports = /** @type {Exports} */ (/** @type {unknown} */ (new WebAssembly.Instance(module).exports));
    this.#heap = new WasmHeap(this.#exports.memory, this.#exports.__heap_base.value, bytesMax);
    this.#scratch = this.#heap.alloc(this.#exports.gemm_scratch_bytes());
    this.#panels = new PanelStore(({ at }) => this.#heap.free(at));
  }

  get memory() {
    return { bytes: this.#heap.bytes, used: this.#heap.usedBytes };
  }

  /** @param {string} id @param {Uint8Array<ArrayBuffer>} bytes @param {PanelForm} form */
  put(id, bytes, form) {
    this.#panels.put(id, () => ({ at: this.#load(bytes), form }));
  }

  /** @param {string[]} ids */
  drop(ids) {
    this.#panels.drop(ids);
  }

  takeLost() {
    return this.#panels.takeLost();
  }

  /** @param {TileWork} work */
  async compute(work) {
    const { batch, m, n, terms, accuracy, dtype } = work;
    terms.forEach(({ k }) => refuseEmpty({ batch, m, n, k }));
    const count = batch * m * n;
    const panels = terms.map(({ a, b }) => /** @type {const} */ ([this.#panels.get(a), this.#panels.get(b)]));
    const scratchBytes = this.#fastScratch(work, panels[0]);
    /** @type {number[]} */
    const mine = [];
    const take = (/** @type {number} */ bytes) => {
      mine.push(this.#heap.alloc(bytes));
      return mine[mine.length - 1];
    };
    try {
      const atC = take(ELEMENT_BYTES * count), fastScratch = scratchBytes ? take(scratchBytes) : 0;
      const start = performance.now();
      for (const [index, term] of terms.entries()) {
        const { k } = term, [panelA, panelB] = panels[index];
        const a = this.#operand(panelA, place(work, term, "a", panelA.form), work.aByK, k, batch * (work.aByK ? k : m), take);
        const b = this.#operand(panelB, place(work, term, "b", panelB.form), work.bByK, k, batch * (work.bByK ? k : n), take);
        for (let i = 0; i < batch; i += 1) {
          const x = a.at(i), y = b.at(i), z = atC + ELEMENT_BYTES * i * m * n;
          if (fastScratch) this.#exports.gemm_fast?.(m, n, k, x.at, a.across, y.at, b.across, z, n, fastScratch);
          else {
            this.#exports.gemm(m, n, k, x.at, a.across, a.along, a.type, x.scales, y.at, b.across, b.along, b.type, y.scales,
              z, n, index ? 1 : 0, 0, this.#scratch);
          }
        }
        while (mine.length > (fastScratch ? 2 : 1)) this.#heap.free(/** @type {number} */ (mine.pop()));
      }
      const seconds = (performance.now() - start) / 1000;
      return { bytes: rounded(this.#heap.floats(atC, count), dtype), seconds };
    } finally {
      mine.forEach((at) => this.#heap.free(at));
    }
  }

  /** Scratch of the fast kernel; 0 where it is not wanted, cannot read the operands or is no faster. @param {TileWork} work @param {readonly [Panel, Panel]} panels */
  #fastScratch({ m, n, aByK, bByK, terms, accuracy }, panels) {
    const plainly = terms.length === 1 && !aByK && !bByK && panels.every(({ form }) => form.dtype === "f32");
    return accuracy === "normwise" && plainly ? (this.#exports.gemm_fast_scratch_bytes?.(m, n, terms[0].k) ?? 0) : 0;
  }

  /**
   * An operand as the kernel reads it. The kernel's scales are for blocks along k of whole lines; an i8 operand that lies
   * otherwise is widened first, for this tile.
   * @param {Panel} panel @param {Place} place @param {boolean} byK @param {number} k @param {number} rows of the panel
   * @param {(bytes: number) => number} take
   */
  #operand({ at, form: { rows: all, columns, dtype } }, { base, across, along, entry, row, column }, byK, k, rows, take) {
    const type = TYPES[dtype], size = SIZES[dtype];
    if (dtype !== "i8") {
      return { across, along, type, at: (/** @type {number} */ i) => ({ at: at + size * (base + i * entry), scales: 0 }) };
    }
    const blocks = Math.ceil(columns / SCALE_BLOCK), scales = at + Math.ceil((all * columns) / 4) * 4;
    if (!byK && column === 0 && Math.ceil(k / SCALE_BLOCK) === blocks) {
      const lines = entry / columns;
      const first = (/** @type {number} */ i) => scales + ELEMENT_BYTES * (row + i * lines) * blocks;
      return { across, along, type, at: (/** @type {number} */ i) => ({ at: at + base + i * entry, scales: first(i) }) };
    }
    const wideAt = take(ELEMENT_BYTES * rows * columns); // before views of the memory are made: it may grow
    const bytes = new Uint8Array(this.#heap.memory.buffer, at, scales - at + ELEMENT_BYTES * all * blocks);
    const parts = i8Parts(bytes, { rows: all, columns, dtype });
    this.#heap.floats(wideAt, rows * columns).set(widenI8(parts.elements, parts.scales, columns, row, rows));
    const from = wideAt + ELEMENT_BYTES * (base - row * columns);
    return { across, along, type: TYPES.f32, at: (/** @type {number} */ i) => ({ at: from + ELEMENT_BYTES * i * entry, scales: 0 }) };
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
