/**
 * Times tf.matMul of two n x n float32 matrices on the WASM backend (one thread, SIMD) and posts GFLOP/s.
 * Waits for the result's bytes, since tfjs may return before the work is done.
 */

/** @type {any} */
const tf = /** @type {any} */ (globalThis).tf;

/** @param {number} n @param {number} runs @returns {Promise<number[]>} seconds of each run */
async function timeMatmul(n, runs) {
  const values = new Float32Array(n * n);
  for (let i = 0; i < values.length; i++) values[i] = ((i * 7919) % 1009) / 1009 - 0.5;
  const a = tf.tensor2d(values, [n, n]);
  const b = tf.tensor2d(values, [n, n]);
  const seconds = [];
  for (let run = 0; run <= runs; run++) {
    const start = performance.now();
    const c = tf.matMul(a, b);
    await c.data();
    // The first run warms up.
    if (run > 0) seconds.push((performance.now() - start) / 1000);
    c.dispose();
  }
  return seconds;
}

const query = new URLSearchParams(location.search);
const n = Number(query.get("n"));
tf.wasm.setWasmPaths("/tfjs/");
await tf.setBackend("wasm");
await tf.ready();
const seconds = await timeMatmul(n, Number(query.get("runs")));
await fetch("/figure", { method: "POST", body: JSON.stringify({ n, backend: tf.getBackend(), seconds }) });
const next = query.get("next");
if (next) location.href = next;
