/**
 * The Pyodide engine, a device's last resort: Python in WebAssembly, and in it the same C kernel as a side module, by
 * ctypes; where that does not load or multiplies wrongly, pure Python (kernel "python").
 *
 * Everything comes from our own server: Pyodide as npm has it, a lock file that names one package, and that package, a
 * wheel with both builds of the kernel (kernels_wasm/pyodide). Panels are Python bytearrays and the kernel works on them
 * where they are. It needs no more of the content security policy than any WebAssembly. Left out: NumPy, threads.
 */
import { i8Parts, place, rounded, widenI8 } from "./elements.js";
import { refuseEmpty } from "./errors.js";
import { PanelStore } from "./panel_store.js";
import { PyodideHeap } from "./pyodide_heap.js";

/**
 * @typedef {import("../../../types/engine.js").Engine} Engine
 * @typedef {import("../../../types/engine.js").Operand} Operand
 * @typedef {import("../../../types/engine.js").Problem} Problem
 * @typedef {import("../../../types/engine.js").PanelForm} PanelForm
 * @typedef {import("../../../types/engine.js").TileWork} TileWork
 * @typedef {{ place: Place, form: PanelForm }} Panel
 * @typedef {import("./pyodide_heap.js").Place} Place
 * @typedef {import("./pyodide_heap.js").Bytes} Bytes
 * @typedef {import("./pyodide_heap.js").Proxy} Proxy
 */

/**
 * A kernel of kernels_wasm/pyodide/tileweave_kernel: SideModule or Plain.
 * @typedef {Proxy & {
 *   name: string, note: string,
 *   fast_scratch_bytes: (m: number, n: number, k: number) => number,
 *   tile: (batch: number, m: number, n: number, k: number, a: Lines, aEntry: number, b: Lines, bEntry: number, c: Bytes,
 *     accumulate: boolean, scratch?: Bytes) => void,
 *   multiply: (m: number, n: number, k: number, a: Lines, b: Lines, c: Bytes, cRow: number, accumulate: boolean,
 *     bias?: Bytes) => void,
 * }} Kernel
 * @typedef {Proxy} Lines
 * @typedef {{
 *   alloc: (size: number) => Bytes|undefined,
 *   Operand: (bytes: Bytes, offset: number, across: number, along: number, type: number, scales?: Bytes) => Lines,
 *   open_kernel: () => Kernel, open_plain: (reason: string) => Kernel,
 * }} Package
 * @typedef {{
 *   pyimport: (name: "tileweave_kernel") => Package, loadedPackages: object, _module: { memory: WebAssembly.Memory },
 * }} Pyodide
 */

const WHEEL = "tileweave-kernel";
const ELEMENT_BYTES = 4;
const TYPES = { f32: 0, bf16: 1, f16: 2, i8: 3 };
const SIZES = { f32: 4, bf16: 2, f16: 2, i8: 1 };

/** @implements {Engine} */
class PyodideEngine {
  depth = 1;
  #python;
  #kernel;
  #heap;
  /** @type {PanelStore<Panel>} */
  #panels;

  /** @param {Package} python @param {Kernel} kernel @param {PyodideHeap} heap */
  constructor(python, kernel, heap) {
    this.#python = python;
    this.#kernel = kernel;
    this.#heap = heap;
    this.kernel = kernel.name;
    this.note = kernel.note;
    this.#panels = new PanelStore((panel) => heap.free(panel.place));
  }

  get memory() {
    return { bytes: this.#heap.bytes, used: this.#heap.usedBytes };
  }

  /** int8 is kept as float32: its kernel would gain little here. @param {string} id @param {Uint8Array<ArrayBuffer>} bytes @param {PanelForm} form */
  put(id, bytes, form) {
    if (form.dtype !== "i8") return this.#panels.put(id, () => ({ place: this.#heap.load(bytes), form }));
    const { elements, scales } = i8Parts(bytes, form);
    const wide = new Uint8Array(widenI8(elements, scales, form.columns, 0, form.rows).buffer);
    this.#panels.put(id, () => ({ place: this.#heap.load(wide), form: { ...form, dtype: "f32" } }));
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
    const { batch, m, n, aByK, bByK, terms, dtype, accuracy } = work;
    terms.forEach(({ k }) => refuseEmpty({ batch, m, n, k }));
    const panels = terms.map(({ a, b }) => [this.#panels.get(a), this.#panels.get(b)]);
    const plainly = terms.length === 1 && !aByK && !bByK && panels[0].every(({ form }) => form.dtype === "f32");
    const scratchBytes = accuracy === "normwise" && plainly ? this.#kernel.fast_scratch_bytes(m, n, terms[0].k) : 0;
    const mine = [this.#heap.alloc(ELEMENT_BYTES * batch * m * n)];
    /** @type {Lines[]} */
    const lines = [];
    try {
      if (scratchBytes) mine.push(this.#heap.alloc(scratchBytes));
      const start = performance.now();
      for (const [index, term] of terms.entries()) {
        const [a, b] = panels[index].map(({ place: at, form }, number) => {
          const { base, across, along, entry } = place(work, term, number ? "b" : "a", form), size = SIZES[form.dtype];
          lines.push(this.#python.Operand(at.bytes, size * base, across, along, TYPES[form.dtype]));
          return { lines: lines[lines.length - 1], entry: size * entry };
        });
        this.#kernel.tile(batch, m, n, term.k, a.lines, a.entry, b.lines, b.entry, mine[0].bytes, index > 0, mine[1]?.bytes);
      }
      const seconds = (performance.now() - start) / 1000;
      const bytes = this.#heap.read(mine[0]);
      return { bytes: dtype === "f32" ? bytes : rounded(new Float32Array(bytes.buffer), dtype), seconds };
    } finally {
      lines.forEach((proxy) => proxy.destroy());
      mine.forEach((place) => this.#heap.free(place));
    }
  }

  /** @param {Problem} problem */
  async multiply({ m, n, k, a, b, cRow, c, bias, accuracy }) {
    refuseEmpty({ m, n, k });
    /** @type {Place[]} */
    const mine = [];
    /** @type {Lines[]} */
    const lines = [];
    const load = (/** @type {Uint8Array<ArrayBuffer>} */ bytes) => {
      mine.push(this.#heap.load(bytes));
      return mine[mine.length - 1];
    };
    const floats = (/** @type {Float32Array<ArrayBuffer>} */ values) =>
      load(new Uint8Array(values.buffer, values.byteOffset, values.byteLength));
    const operand = (/** @type {Operand} */ { dtype, across, along, scales }, /** @type {Place} */ place) => {
      lines.push(this.#python.Operand(place.bytes, 0, across, along, TYPES[dtype], scales && floats(scales).bytes));
      return lines[lines.length - 1];
    };
    try {
      const placeA = load(a.bytes), placeB = load(b.bytes);
      const placeC = floats(c ?? new Float32Array((m - 1) * cRow + n));
      const fast = accuracy === "normwise" && !c && !bias && asPanel(a, k) && asPanel(b, k) && cRow === n;
      const scratchBytes = fast ? this.#kernel.fast_scratch_bytes(m, n, k) : 0;
      if (scratchBytes) {
        mine.push(this.#heap.alloc(scratchBytes));
        this.#kernel.tile(1, m, n, k, operand(a, placeA), 0, operand(b, placeB), 0, placeC.bytes, false, mine[mine.length - 1].bytes);
      } else {
        const added = bias && floats(bias).bytes;
        this.#kernel.multiply(m, n, k, operand(a, placeA), operand(b, placeB), placeC.bytes, cRow, c !== undefined, added);
      }
      return new Float32Array(this.#heap.read(placeC).buffer);
    } finally {
      lines.forEach((proxy) => proxy.destroy());
      mine.forEach((place) => this.#heap.free(place));
    }
  }

  /** Pyodide and its memory go with the last reference to them. */
  close() {
    this.#panels.dropAll();
  }
}

/** Whether it lies as the wire carries it, which is all that the fast kernel is asked here. @param {Operand} operand @param {number} k */
function asPanel({ dtype, across, along }, k) {
  return dtype === "f32" && along === 1 && across === k;
}

/** @param {(python: Package) => Kernel} pick @returns {import("../../../types/engine.js").Open} */
function opener(pick) {
  return async ({ base, bytesMax }) => {
    const pyodide = await start(new URL("vendor/pyodide/", base).href).catch((error) => {
      throw new Error(`this server has no Pyodide, or the browser cannot run it: ${error}`);
    });
    const python = pyodide.pyimport("tileweave_kernel");
    // Pyodide gives its memory no public name; the version is pinned, and a test grows to the limit.
    const heap = new PyodideHeap(pyodide._module.memory, python.alloc, bytesMax);
    return new PyodideEngine(python, pick(python), heap);
  };
}

/** Pyodide with our package in it. @param {string} home the folder of all its files @returns {Promise<Pyodide>} */
async function start(home) {
  await compiles(`${home}pyodide.asm.wasm`);
  /** @type {{ loadPyodide: (options: object) => Promise<Pyodide> }} */
  const { loadPyodide } = await import(`${home}pyodide.mjs`);
  // Every address is given, so that Pyodide has no reason to ask any other server.
  const addresses = { indexURL: home, packageBaseUrl: home, lockFileURL: `${home}pyodide-lock.json` };
  const pyodide = await loadPyodide({ ...addresses, packages: [WHEEL] });
  if (!(WHEEL in pyodide.loadedPackages)) throw new Error("the wheel with the kernel could not be loaded");
  return pyodide;
}

/** Pyodide waits for ever where its module does not come or does not compile: that is tried first. @param {string} address */
async function compiles(address) {
  const response = await fetch(address);
  if (!response.ok) throw new Error(`${address}: ${response.status} ${response.statusText}`);
  await WebAssembly.compileStreaming(response);
}

/** The side module, else pure Python. */
export const open = opener((python) => python.open_kernel());
/** Pure Python, even where the side module would run: only asked for by name. */
export const openPython = opener((python) => python.open_plain("asked for"));
