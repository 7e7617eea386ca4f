/**
 * What is WebGPU's own, for tests/engines/test_webgpu_*.py: the kernels one by one, the tuner, pieces, refusals of memory,
 * and the loss of the GPU. Products of every shape and dtype are the business of suite.js.
 */
import { prove, tileOf } from "/static/js/engines/check.js";
import { fault } from "/static/js/engines/known_answers.js";
import { openWith } from "/static/js/engines/webgpu.js";
import { faultOf, operand } from "/static/js/engines/webgpu_answers.js";
import { openDevice } from "/static/js/engines/webgpu_device.js";
import { FAMILY } from "/static/js/engines/webgpu_family.js";
import { cut } from "/static/js/engines/webgpu_product.js";
import { GpuSession } from "/static/js/engines/webgpu_session.js";

const AWKWARD = [
  [1, 1, 1, 1], [31, 33, 32, 1e15], [32, 31, 33, 1], [33, 32, 31, 1], [499, 8, 129, 1], [500, 7, 31, 1], [513, 3, 257, 1e15],
  [2, 513, 40, 1], [1, 1152, 384, 1], [257, 130, 384, 1], [8, 5, 4, 1],
];
const BYTES_MAX = 64 << 20;
let engine = null;
let told = [];

/** Members that a wish names; "wrong": the first kernel, doubled; "broken": one that does not compile. */
function familyOf(names) {
  const [first] = FAMILY;
  const wrong = { ...first, name: "wrong", source: (member) => first.source(member).replaceAll("fma(", "fma(2.0 * ") };
  const broken = { ...first, name: "broken", source: () => "this is no WGSL" };
  const brokenBytes = { ...broken, name: "broken bytes", form: "i8" };
  return names.map((name) => [...FAMILY, wrong, broken, brokenBytes].find((member) => member.name === name));
}

/** Counts what is submitted to any queue. */
let submissions = 0;
const { submit } = GPUQueue.prototype;
GPUQueue.prototype.submit = function counted(buffers) {
  submissions += 1;
  return submit.call(this, buffers);
};

/** Sources of the shaders compiled since the last engine was opened. */
let sources = [];
const { createShaderModule } = GPUDevice.prototype;
GPUDevice.prototype.createShaderModule = function noting(descriptor) {
  sources.push(descriptor.code);
  return createShaderModule.call(this, descriptor);
};

/** While positive, so many new buffers of at least `refusedFrom` bytes are refused, as a driver does: in the error scope. */
let refusals = 0;
let refusedFrom = 0;
const { createBuffer } = GPUDevice.prototype;
GPUDevice.prototype.createBuffer = function refusing(descriptor) {
  if (refusals > 0 && descriptor.size >= refusedFrom) {
    refusals -= 1;
    this.createTexture({ size: [8192, 8192, 256], format: "rgba32float", usage: GPUTextureUsage.STORAGE_BINDING });
  }
  return createBuffer.call(this, descriptor);
};

/** A panel of small whole numbers, and the float64 product of two of them: exact in float32. */
const whole = (count, seed) => Float32Array.from({ length: count }, (_, at) => (((at + seed) * 7919) % 17) - 8);
const bytesOf = (floats) => new Uint8Array(floats.buffer.slice(0));

function right({ m, n, k, seed = 1 }, c) {
  const a = whole(m * k, seed), b = whole(n * k, seed + 5);
  for (let i = 0; i < m; i += 1) {
    for (let j = 0; j < n; j += 1) {
      let sum = 0;
      for (let l = 0; l < k; l += 1) sum += a[i * k + l] * b[j * k + l];
      if (c[i * n + j] !== sum) return false;
    }
  }
  return true;
}

/** One tile from two panels of its own, put here unless they are; how it ended. */
async function tile({ m, n, k, seed = 1, keep = false }) {
  const [a, b] = [`a${m}x${k}.${seed}`, `b${n}x${k}.${seed}`];
  engine.put(a, bytesOf(whole(m * k, seed)), { rows: m, columns: k, dtype: "f32" });
  engine.put(b, bytesOf(whole(n * k, seed + 5)), { rows: n, columns: k, dtype: "f32" });
  try {
    const { bytes } = await engine.compute(tileOf(m, n, k, a, b, "rowwise"));
    return right({ m, n, k, seed }, new Float32Array(bytes.buffer)) ? "right" : "wrong";
  } catch (error) {
    return error.constructor.name;
  } finally {
    if (!keep) engine.drop([a, b]);
  }
}

const ORDERS = {
  family: () => FAMILY.map(({ name, form, needs }) => ({ name, form, needs })),

  /** What is wrong with one kernel, on a device of its own. */
  fault: async ({ name }) => {
    const { device, identity } = await openDevice();
    const complaints = [];
    device.onuncapturederror = ({ error }) => complaints.push(error.message);
    const wrong = await faultOf(new GpuSession(device, identity, BYTES_MAX), familyOf([name])[0], AWKWARD);
    device.destroy();
    return wrong || complaints.join("; ");
  },

  /** Opens an engine; says what it chose and whether it asked to remember. */
  open: async ({ names, remembered = null, bytesMax = BYTES_MAX }) => {
    engine?.close();
    told = [];
    sources = [];
    const options = { bytesMax, base: "/static/", remembered, remember: (text) => told.push(text) };
    engine = await openWith(options, names ? familyOf(names) : FAMILY);
    return { note: engine.note, told, memory: engine.memory };
  },
  prove: () => prove(engine),
  tile,
  tiles: ({ tiles }) => Promise.all(tiles.map(tile)),
  submissions: async ({ order }) => {
    const before = submissions;
    const ended = await tile(order);
    return { ended, submissions: submissions - before };
  },
  compiled: ({ text }) => sources.filter((source) => source.includes(text)).length,
  /** An int8 product, with what is wrong with it, or "". */
  multiplyBytes: async () => {
    const [m, n, k] = [9, 11, 140];
    const [a, b] = [operand("i8", m, k, 1, 1), operand("i8", n, k, 2, 1)];
    const side = ({ bytes, scales }) => ({ bytes, scales, dtype: "i8", across: k, along: 1 });
    const c = await engine.multiply({ m, n, k, a: side(a), b: side(b), cRow: n, accuracy: "rowwise" });
    return fault({ m, n, k, a: a.values, bt: b.values }, c);
  },
  refuse: ({ count, from }) => {
    refusals = count;
    refusedFrom = from;
  },
  put: ({ id, floats }) => engine.put(id, bytesOf(whole(floats, 3)), { rows: floats, columns: 1, dtype: "f32" }),
  takeLost: () => engine.takeLost(),
  memory: () => engine.memory,
  drop: ({ ids }) => engine.drop(ids),
  close: () => engine.close(),

  /** Computes one tile after another until one fails; `ended` waits for that. */
  begin: () => {
    const shape = { m: 256, n: 256, k: 512, keep: true };
    globalThis.running = (async () => {
      for (;;) {
        const ended = await tile(shape);
        if (ended !== "right") return ended;
      }
    })();
  },
  ended: () => globalThis.running,

  /** The dispatches of a product, added up: every cell of (z, y, x, l) once, none over the limit; what is wrong, or "". */
  pieces: ({ form, batch, kPacked, countA, countB, flopMax, groupsMax }) => {
    const [width, packed, unit] = [32, form === "i8" ? 4 : 1, form === "i8" ? 32 : 256];
    const size = { form, batch, kPacked, a: { count: countA, width }, b: { count: countB, width } };
    const seen = new Map();
    for (const { words: [from, to, , , , x0, y0, z0], groups } of cut(size, flopMax, groupsMax)) {
      if (groups.some((count) => count < 1 || count > groupsMax)) return `groups ${groups}`;
      const flop = 2 * width * width * packed * (to - from) * groups[0] * groups[1] * groups[2];
      const smallest = 2 * width * width * packed * Math.min(unit, kPacked);
      if (flop > Math.max(flopMax, smallest)) return `a piece of ${flop} FLOP`;
      for (let at = 0; at < groups[0] * groups[1] * groups[2]; at += 1) {
        const [x, row] = [x0 + (at % groups[0]), Math.floor(at / groups[0])];
        const cell = `${z0 + Math.floor(row / groups[1])} ${y0 + (row % groups[1])} ${x}`;
        if ((seen.get(cell) ?? 0) !== from) return `${cell} goes on at ${from}, not ${seen.get(cell)}`;
        if (to % unit && to !== kPacked) return `a piece ends at ${to}, within a chain`;
        seen.set(cell, to);
      }
    }
    if (seen.size !== batch * countA * countB) return `${seen.size} blocks`;
    return [...seen.values()].every((to) => to === kPacked) ? "" : "k is not whole";
  },
};

globalThis.gpu = (order) => ORDERS[order.do](order);
