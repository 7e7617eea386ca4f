/**
 * The peers on the CPU: tfjs-backend-wasm and onnxruntime-web's wasm provider, one thread each, float32 matrices.
 *
 * What a timing includes. tfjs: tf.matMul of two tensors in its heap, the result's allocation and disposal; it keeps the
 * packed B between calls, ours packs both operands every time. onnxruntime-web copies inputs and output between
 * JavaScript and its heap at each run and offers no way around it: as `onnxruntime-web-wasm` one run is a chain of FACTORS
 * products (A B B B B), so that the kernel counts and not the copies; as `onnxruntime-web-wasm-one-run` it is one product,
 * what a caller gets. Ours: operands and result in the heap, as for tfjs.
 */
import { chainModel } from "./onnx.js";
import { rowMajor } from "./operands.js";

/** @typedef {import("./rounds.js").Entry} Entry */

export const FACTORS = 4;
// Any order of a float32 sum keeps to it up to n = 2048; f16, bf16 or tf32 inside would not.
export const ROUNDING = 1e-5;
const TENSORFLOW = "/node_modules/@tensorflow";
const ONNX = "/node_modules/onnxruntime-web/dist/";

/** tfjs with a backend, loaded once a Worker. @param {"wasm"|"webgpu"} backend @returns {Promise<any>} */
async function tensorflow(backend) {
  await import(`${TENSORFLOW}/tfjs-core/dist/tf-core.min.js`);
  await import(`${TENSORFLOW}/tfjs-backend-${backend}/dist/tf-backend-${backend}.min.js`);
  const tf = /** @type {any} */ (globalThis).tf;
  if (backend === "wasm") {
    tf.wasm.setWasmPaths(`${TENSORFLOW}/tfjs-backend-wasm/dist/`);
    tf.wasm.setThreadsCount(1);
  }
  if (!(await tf.setBackend(backend))) throw new Error(`tfjs has no ${backend} backend here`);
  await tf.ready();
  return tf;
}

/** onnxruntime-web, one thread. @param {string} bundle "wasm" or "webgpu" @returns {Promise<any>} */
export async function onnxruntime(bundle) {
  const ort = await import(`${ONNX}ort.${bundle}.min.mjs`);
  ort.env.wasm.wasmPaths = new URL(ONNX, location.href).href;
  ort.env.wasm.numThreads = 1;
  ort.env.logLevel = "error";
  return ort;
}

/**
 * tfjs on either backend.
 * @param {"wasm"|"webgpu"} backend @param {number} n
 * @param {(tf: any) => Promise<void>} [finish] waits for what was queued; nothing is on the CPU
 * @returns {Entry}
 */
export function tfjs(backend, n, finish = async () => {}) {
  const name = `peer/tfjs-${backend}`;
  const make = async () => {
    const tf = await tensorflow(backend);
    const { a, b } = await rowMajor(n);
    const x = tf.tensor2d(a, [n, n]), y = tf.tensor2d(b, [n, n]);
    return {
      name,
      flop: 2 * n ** 3,
      truth: { n, dtype: "f32", factors: 1 },
      errorMax: ROUNDING,
      run: async (/** @type {number} */ calls) => {
        for (let i = 0; i < calls; i += 1) tf.matMul(x, y).dispose();
        await finish(tf);
      },
      product: async () => {
        const c = tf.matMul(x, y);
        const values = await c.data();
        c.dispose();
        return values;
      },
      close: () => tf.dispose([x, y]),
    };
  };
  return { name, make };
}

/** @param {number} n */
export const tfjsWasm = (n) => tfjs("wasm", n);

/** @param {string} name @param {number} n @param {number} factors products in one run @returns {Entry} */
export function onnxWasm(name, n, factors) {
  const make = async () => {
    const ort = await onnxruntime("wasm");
    const session = await ort.InferenceSession.create(chainModel(n, factors), { executionProviders: ["wasm"] });
    const { a, b } = await rowMajor(n);
    const feeds = { a: new ort.Tensor("float32", a, [n, n]), b: new ort.Tensor("float32", b, [n, n]) };
    return {
      name,
      flop: factors * 2 * n ** 3,
      truth: { n, dtype: "f32", factors },
      errorMax: ROUNDING * factors,
      run: async (/** @type {number} */ calls) => {
        for (let i = 0; i < calls; i += 1) await session.run(feeds);
      },
      product: async () => (await session.run(feeds)).y.data,
      close: () => session.release(),
    };
  };
  return { name, make };
}
