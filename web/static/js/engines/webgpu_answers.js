/**
 * Known answers for one WGSL kernel: small products of each form, whose operands are made and multiplied here in float64.
 *
 * Drivers return wrong products without an error, so a kernel is asked before it is measured: edges of every kind, a k
 * beyond one block of scales, large values, and an infinity that must reach its row and nothing else.
 * The whole engine is proved again afterwards by check.js; this proves its parts, so that one bad kernel costs only itself.
 */
import { fault, stream } from "./known_answers.js";
import { product } from "./webgpu_product.js";

/**
 * @typedef {import("./webgpu_session.js").GpuSession} GpuSession
 * @typedef {import("./webgpu_family.js").Member} Member
 * @typedef {import("./webgpu_family.js").Form} Form
 * @typedef {import("./webgpu_memory.js").Block} Block
 * @typedef {{ bytes: Uint8Array<ArrayBuffer>, scales: Float32Array<ArrayBuffer>|null, values: Float64Array<ArrayBuffer> }} Made
 */

/** [m, n, k, largest value] */
const SHAPES = [[37, 41, 45, 1], [1, 5, 3, 1], [70, 33, 259, 1e15]];

/**
 * @param {Form} form @param {number} lines @param {number} k @param {number} seed @param {number} largest for f32
 * @returns {Made}
 */
export function operand(form, lines, k, seed, largest) {
  const next = stream(seed);
  const values = new Float64Array(lines * k);
  if (form === "f32") {
    const floats = Float32Array.from(values, () => (next() / 2 ** 31 - 1) * largest);
    return { bytes: new Uint8Array(floats.buffer), scales: null, values: Float64Array.from(floats) };
  }
  if (form === "f16") {
    const halves = new Uint16Array(lines * k);
    values.forEach((_, at) => {
      const [sign, exponent, fraction] = [next() & 1, 10 + (next() % 10), next() & 1023];
      halves[at] = (sign << 15) | (exponent << 10) | fraction;
      values[at] = (1 - 2 * sign) * 2 ** (exponent - 15) * (1 + fraction / 1024);
    });
    return { bytes: new Uint8Array(halves.buffer), scales: null, values };
  }
  const blocks = Math.ceil(k / 128);
  const scales = Float32Array.from({ length: lines * blocks }, () => next() / 2 ** 38);
  const bytes = Int8Array.from(values, () => (next() % 255) - 127);
  values.forEach((_, at) => { values[at] = bytes[at] * scales[Math.floor(at / k) * blocks + Math.floor((at % k) / 128)]; });
  return { bytes: new Uint8Array(bytes.buffer), scales, values };
}

/** What is wrong with a kernel, or "". @param {GpuSession} gpu @param {Member} member @param {number[][]} [shapes] */
export async function faultOf(gpu, member, shapes = SHAPES) {
  for (const [index, [m, n, k, largest]] of shapes.entries()) {
    const a = operand(member.form, m, k, 11 + index, largest), b = operand(member.form, n, k, 111 + index, largest);
    if (index === 0 && member.form === "f32") {
      new Float32Array(a.bytes.buffer)[k + 2] = Infinity;
      a.values[k + 2] = Infinity;
    }
    const { bytes } = await multiply(gpu, member, [m, n, k], a, b);
    const wrong = fault({ m, n, k, a: a.values, bt: b.values }, new Float32Array(bytes.buffer));
    if (wrong) return wrong;
  }
  return "";
}

/** @param {GpuSession} gpu @param {Member} member @param {number[]} shape @param {Made} a @param {Made} b */
async function multiply(gpu, member, [m, n, k], a, b) {
  /** @type {Block[]} */
  const taken = [];
  const take = (/** @type {Uint8Array<ArrayBuffer>} */ bytes) => {
    taken.push(gpu.memory.take("storage", bytes.length, bytes));
    return taken[taken.length - 1];
  };
  const side = (/** @type {Made} */ { bytes, scales }) => ({
    raw: take(bytes), dtype: member.form, across: k, along: 1, base: 0, entry: 0,
    scales: scales && take(new Uint8Array(scales.buffer)), packed: null,
  });
  try {
    const work = { batch: 1, m, n, k, a: side(a), b: side(b), row: n, count: m * n, c: null, bias: null };
    await Promise.all(taken.map(({ ready }) => ready));
    return await product(gpu, member, work);
  } finally {
    taken.forEach((block) => gpu.memory.give(block));
  }
}
