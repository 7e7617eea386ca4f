/**
 * The kernel bench's CPU section: our WASM builds with every input type, the fast kernel, the CPU's 128-bit peaks, and the
 * CPU peers, all in one Worker and turn by turn.
 *
 * Ours is timed as a tile is computed: lines of A and of B^T in the heap as they came, both packed anew at every call,
 * the product left in the heap.
 */
import { WasmHeap } from "/static/js/engines/wasm_heap.js";
import { operands } from "./operands.js";
import { FACTORS, onnxWasm, tfjsWasm } from "./peers.js";
import { compete, roundsAt } from "./rounds.js";

/** @typedef {import("./rounds.js").Entry} Entry */

const TYPES = new Map([["f32", 0], ["bf16", 1], ["f16", 2], ["i8", 3]]);
const ROWWISE = 2e-6, NORMWISE = 2e-5;
const HEAP_BYTES_MAX = 1 << 29;

/** @typedef {import("/static/js/engines/wasm.js").Exports} Exports */

/** @param {string} path @returns {Promise<any>} the exports of a fresh instance */
export async function instance(path) {
  const response = await fetch(path);
  if (!response.ok) throw new Error(`${path} was not built: ${response.status}`);
  return (await WebAssembly.instantiateStreaming(response)).instance.exports;
}

/**
 * @typedef {object} Loaded
 * @property {Exports} exports
 * @property {WasmHeap} heap
 * @property {(bytes: Uint8Array<ArrayBuffer>) => number} load address of a copy; 0 for nothing
 */

/** @param {string} path @returns {Promise<Loaded>} */
export async function kernel(path) {
  /** @type {Exports} */
  const exports = await instance(path);
  const heap = new WasmHeap(exports.memory, exports.__heap_base.value, HEAP_BYTES_MAX);
  const load = (/** @type {Uint8Array<ArrayBuffer>} */ bytes) => {
    if (bytes.length === 0) return 0;
    const at = heap.alloc(bytes.length);
    new Uint8Array(heap.memory.buffer, at, bytes.length).set(bytes);
    return at;
  };
  return { exports, heap, load };
}

/**
 * @param {string} name @param {string} path of the module @param {number} n @param {string} dtype of A and B
 * @returns {Entry}
 */
export function ours(name, path, n, dtype) {
  const make = async () => {
    const { exports, heap, load } = await kernel(path);
    const { a, bt, aScales, btScales } = await operands(n, dtype);
    const [atA, atB, atAScales, atBScales] = [a, bt, aScales, btScales].map(load);
    const atC = heap.alloc(4 * n * n), scratch = heap.alloc(exports.gemm_scratch_bytes());
    const type = TYPES.get(dtype) ?? 0;
    const once = () =>
      exports.gemm(n, n, n, atA, n, 1, type, atAScales, atB, n, 1, type, atBScales, atC, n, 0, 0, scratch);
    return contestant(name, n, dtype, ROWWISE, once, () => heap.floats(atC, n * n).slice());
  };
  return { name, make };
}

/** The fast kernel. @param {string} name @param {string} path @param {number} n @returns {Entry} */
function fast(name, path, n) {
  const make = async () => {
    const { exports, heap, load } = await kernel(path);
    const scratchBytes = exports.gemm_fast_scratch_bytes?.(n, n, n) ?? 0;
    if (!scratchBytes) throw new Error(`the fast kernel does not apply at ${n}`);
    const { a, bt } = await operands(n, "f32");
    const [atA, atB] = [a, bt].map(load);
    const atC = heap.alloc(4 * n * n), scratch = heap.alloc(scratchBytes);
    const once = () => exports.gemm_fast?.(n, n, n, atA, n, atB, n, atC, n, scratch);
    return contestant(name, n, "f32", NORMWISE, once, () => heap.floats(atC, n * n).slice());
  };
  return { name, make };
}

/**
 * @param {string} name @param {number} n @param {string} dtype @param {number} errorMax
 * @param {() => void} once @param {() => Float32Array} result
 * @returns {import("./rounds.js").Contestant}
 */
function contestant(name, n, dtype, errorMax, once, result) {
  const run = (/** @type {number} */ calls) => {
    for (let i = 0; i < calls; i += 1) once();
  };
  const product = async () => {
    once();
    return result();
  };
  return { name, flop: 2 * n ** 3, truth: { n, dtype, factors: 1 }, errorMax, run, product };
}

const PEAK_ROUNDS = 1 << 20;

/** Chains without memory, kernels_wasm/peak.c. @param {"fused"|"separate"} kind @returns {Entry} */
export function peak(kind) {
  const name = `peak/${kind}`;
  const make = async () => {
    const exports = await instance("/build/bench/peak.wasm");
    /** @type {(rounds: number, one: number) => number} */
    const chains = exports[`peak_${kind}`];
    return {
      name,
      flop: exports[`peak_${kind}_flop`](PEAK_ROUNDS),
      run: (/** @type {number} */ calls) => {
        for (let i = 0; i < calls; i += 1) chains(PEAK_ROUNDS, 1);
      },
    };
  };
  return { name, make };
}

const RELAXED = "/static/wasm/gemm_relaxed.wasm";
const STRICT = "/static/wasm/gemm_strict.wasm";
const SCALAR = "/static/wasm/gemm_scalar.wasm";

/** @param {number} n @param {import("./page.js").Plan} plan */
function entries(n, plan) {
  const all = [peak("fused"), ours("wasm/relaxed", RELAXED, n, "f32")];
  if (plan.fast.includes(n)) all.push(fast("wasm/fast", RELAXED, n));
  all.push(tfjsWasm(n));
  if (!plan.wasm.includes(n)) return all;
  all.push(
    onnxWasm("peer/onnxruntime-web-wasm", n, FACTORS),
    onnxWasm("peer/onnxruntime-web-wasm-one-run", n, 1),
    peak("separate"),
    ours("wasm/strict", STRICT, n, "f32"),
    ours("wasm/relaxed-bf16", RELAXED, n, "bf16"),
    ours("wasm/relaxed-f16", RELAXED, n, "f16"),
    ours("wasm/relaxed-int8", RELAXED, n, "i8"),
    ours("wasm/strict-int8", STRICT, n, "i8"),
    ours("wasm/scalar", SCALAR, n, "f32"),
  );
  return all;
}

/** @param {import("./page.js").Plan} plan */
export async function run(plan) {
  const sizes = [...new Set([...plan.wasm, ...plan.fast])].sort((x, y) => x - y);
  const measured = [];
  for (const n of sizes) measured.push(await compete("wasm", n, entries(n, plan), roundsAt(n, plan)));
  return { measured };
}
