/**
 * Measures the WASM kernel against tfjs-backend-wasm's matMul in the browser that opens this page, and posts the figures.
 *
 * The two take turns, round by round, so that a change of the CPU's clock hits both; each figure is the median round.
 * tfjs keeps its packed B between calls on the same tensor, ours packs both operands every time: the comparison leans
 * its way. Started by `kernels_wasm/measure.py`; not shipped to volunteers.
 */
import { Kernel } from "/static/js/wasm_kernel.js";

const SHAPES = [[256, 256, 256], [512, 512, 512], [1024, 1024, 1024], [256, 256, 2048], [128, 2048, 512]];
const ROUNDS = 31;
const ROUND_MS = 25;

/** @param {() => void} run @returns {number} seconds per call over one round */
function round(run) {
  const start = performance.now();
  let calls = 0;
  do {
    run();
    calls += 1;
  } while (performance.now() - start < ROUND_MS);
  return (performance.now() - start) / 1000 / calls;
}

/** @param {number[]} values */
const median = (values) => values.sort((a, b) => a - b)[values.length >> 1];

/** @param {number} count */
function randoms(count) {
  return Float32Array.from({ length: count }, () => Math.random() - 0.5);
}

/**
 * @param {WebAssembly.Module} module @param {number} m @param {number} n @param {number} k
 * @param {Float32Array} a @param {Float32Array} bt
 */
function prepare(module, m, n, k, a, bt) {
  const kernel = new Kernel(module, 1 << 28);
  const [atA, atB, atC] = [m * k, n * k, m * n].map((count) => kernel.heap.alloc(4 * count));
  kernel.heap.floats(atA, m * k).set(a);
  kernel.heap.floats(atB, n * k).set(bt);
  const run = () => kernel.multiply(m, n, k, atA, atB, atC);
  run();
  return { run, last: () => kernel.heap.floats(atC, m * n)[m * n - 1] };
}

async function measure() {
  const tf = /** @type {any} */ (globalThis).tf;
  tf.wasm.setWasmPaths("/node_modules/@tensorflow/tfjs-backend-wasm/dist/");
  tf.wasm.setThreadsCount(1);
  await tf.setBackend("wasm");
  await tf.ready();
  const module = await WebAssembly.compileStreaming(fetch("/static/wasm/gemm_simd128.wasm"));
  const rows = [];
  for (const [m, n, k] of SHAPES) {
    const a = randoms(m * k), bt = randoms(n * k);
    const ours = prepare(module, m, n, k, a, bt);
    const ta = tf.tensor2d(a, [m, k]), tb = tf.transpose(tf.tensor2d(bt, [n, k]));
    const theirs = () => tf.matMul(ta, tb).dispose();
    const difference = Math.abs(ours.last() - tf.matMul(ta, tb).dataSync()[m * n - 1]);
    if (!(difference < 1e-3)) throw new Error(`products differ by ${difference} at ${m}x${n}x${k}`);
    const seconds = { ours: /** @type {number[]} */ ([]), tfjs: /** @type {number[]} */ ([]) };
    round(ours.run);
    round(theirs);
    for (let i = 0; i < ROUNDS; i += 1) {
      seconds.ours.push(round(ours.run));
      seconds.tfjs.push(round(theirs));
    }
    const gflops = (/** @type {number[]} */ list) => (2 * m * n * k) / median(list) / 1e9;
    rows.push({ m, n, k, tileweave_gflops: gflops(seconds.ours), tfjs_gflops: gflops(seconds.tfjs) });
    ta.dispose();
    tb.dispose();
  }
  return rows;
}

const body = await measure().then((rows) => ({ agent: navigator.userAgent, rows }), (error) => ({ error: String(error) }));
const out = document.getElementById("out");
if (out) out.textContent = JSON.stringify(body, null, 2);
await fetch("/figures", { method: "POST", body: JSON.stringify(body) });
