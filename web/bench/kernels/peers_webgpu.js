/**
 * The peers on WebGPU: tfjs-backend-webgpu, onnxruntime-web's webgpu provider and jax-js, float32 matrices.
 *
 * What a timing includes, for each of them and for ours alike: operands already on the device, some products queued one
 * after another, the wait until the last is finished, results left on the device. Each has its own adapter and device, and
 * its pipelines are compiled before the clock starts.
 */
import { chainModel } from "./onnx.js";
import { rowMajor } from "./operands.js";
import { onnxruntime, ROUNDING, tfjs } from "./peers.js";

/** @typedef {import("./rounds.js").Entry} Entry */

const USAGE = 0x80 | 0x04 | 0x08; // GPUBufferUsage's STORAGE, COPY_SRC, COPY_DST
const JAX = "/node_modules/@jax-js/jax/dist/index.js";

/**
 * tfjs returns at once and submits commands when it likes: without these three a timing is that of its queue.
 * @param {any} tf
 */
function finish(tf) {
  const backend = tf.backend();
  backend.endComputePassEncoder();
  backend.submitQueue();
  return backend.queue.onSubmittedWorkDone();
}

/** @param {number} n */
export const tfjsWebgpu = (n) => tfjs("webgpu", n, finish);

/** @param {number} n @returns {Entry} */
export function onnxWebgpu(n) {
  const name = "peer/onnxruntime-web-webgpu";
  const make = async () => {
    const ort = await onnxruntime("webgpu");
    const options = { executionProviders: ["webgpu"], preferredOutputLocation: "gpu-buffer" };
    const session = await ort.InferenceSession.create(chainModel(n, 1), options);
    /** @type {GPUDevice} */
    const device = await ort.env.webgpu.device;
    const { a, b } = await rowMajor(n);
    const upload = (/** @type {Float32Array<ArrayBuffer>} */ values) => {
      const buffer = device.createBuffer({ size: values.byteLength, usage: USAGE });
      device.queue.writeBuffer(buffer, 0, values);
      return ort.Tensor.fromGpuBuffer(buffer, { dataType: "float32", dims: [n, n] });
    };
    const feeds = { a: upload(a), b: upload(b) };
    return {
      name,
      ...square(n),
      run: async (/** @type {number} */ calls) => {
        for (let i = 0; i < calls; i += 1) (await session.run(feeds)).y.dispose();
        await device.queue.onSubmittedWorkDone();
      },
      product: async () => {
        const { y } = await session.run(feeds);
        const values = await y.getData();
        y.dispose();
        return values;
      },
      close: () => session.release(),
    };
  };
  return { name, make };
}

/** @param {number} n @returns {Entry} */
export function jaxWebgpu(n) {
  const name = "peer/jax-js-webgpu";
  const make = async () => {
    const jax = await import(JAX);
    const devices = await jax.init("webgpu");
    if (!devices.includes("webgpu")) throw new Error("jax-js has no webgpu device here");
    jax.defaultDevice("webgpu");
    const { a, b } = await rowMajor(n);
    const x = jax.numpy.array(a).reshape([n, n]), y = jax.numpy.array(b).reshape([n, n]);
    // Arrays are given away when used; .ref keeps them. jax-js is lazy and one that is disposed unread is never computed.
    const multiply = () => jax.numpy.matmul(x.ref, y.ref);
    return {
      name,
      ...square(n),
      run: async (/** @type {number} */ calls) => {
        const products = Array.from({ length: calls }, multiply);
        await jax.blockUntilReady(products);
        for (const product of products) product.dispose();
      },
      product: async () => new Float32Array(await multiply().data()),
      close: () => [x, y].forEach((array) => array.dispose()),
    };
  };
  return { name, make };
}

/** @param {number} n */
const square = (n) => ({ flop: 2 * n ** 3, truth: { n, dtype: "f32", factors: 1 }, errorMax: ROUNDING });
