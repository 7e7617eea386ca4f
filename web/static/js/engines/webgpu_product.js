/**
 * One product on the GPU, from panels in buffers to bytes in JavaScript: pack, multiply, store, read back.
 *
 * Everything it needs is taken first and awaited, then all its work is submitted in one go, so that two products never mix
 * and the second one's copies run while the first one computes. The buffers go back to the pool when the bytes are here.
 */
import { CHAIN, K_PACKED, K_PAD, strips } from "./webgpu_family.js";
import { PACK_SCALES, packSource, ROW_GROUPS, STORE, THREADS } from "./webgpu_ends.js";
import { PIECE_SECONDS } from "./webgpu_session.js";

/**
 * @typedef {import("./webgpu_session.js").GpuSession} GpuSession
 * @typedef {import("./webgpu_session.js").Piece} Piece
 * @typedef {import("./webgpu_memory.js").Block} Block
 * @typedef {import("./webgpu_memory.js").Use} Use
 * @typedef {import("./webgpu_panels.js").Packed} Packed
 * @typedef {import("./webgpu_family.js").Member} Member
 * @typedef {import("../../../types/engine.js").Dtype} Dtype
 * @typedef {object} Side one operand
 * @property {Block} raw @property {Dtype} dtype @property {number} across @property {number} along in elements
 * @property {number} base its first element @property {number} entry elements from one of a batch to the next
 * @property {Block|null} scales i8 only
 * @property {Map<string, Packed>|null} packed copies that outlive this product
 * @typedef {object} Work
 * @property {number} batch @property {number} m @property {number} n @property {number} k
 * @property {Side} a @property {Side} b
 * @property {number} row elements from one row of C to the next @property {number} count elements of C with its gaps
 * @property {Float32Array<ArrayBuffer>|null} c @property {Float32Array<ArrayBuffer>|null} bias
 * @typedef {Work & { first: number }} Part `batch` entries of the panels from number `first` on
 */

const SLICE_BYTES = 64 << 20; // of padded panels and product in one go
const ENDS_THREADS_MAX = 1 << 20; // to a piece: a hundredth of a second in software
const K_ROWS_MAX = 1 << 16; // to a piece: whatever the speed, one thread's steps take time one after another

/** Takes blocks for one product and gives all of them back. */
class Lent {
  /** @type {Block[]} */
  #blocks = [];
  /** @type {(Promise<void>|null)[]} */
  #waits = [];

  /** @param {GpuSession} gpu */
  constructor(gpu) {
    this.memory = gpu.memory;
    this.wait(gpu.nothing);
  }

  /** @param {Use} use @param {number} bytes @param {Uint8Array<ArrayBuffer>} [data] */
  take(use, bytes, data) {
    const block = this.memory.take(use, bytes, data);
    this.#blocks.push(block);
    this.wait(block);
    return block;
  }

  /** @param {Block} block somebody else's that this product uses */
  wait(block) {
    this.#waits.push(block.ready);
  }

  /** Rejects with OutOfMemory when one of them was refused. */
  async ready() {
    await Promise.all(this.#waits);
  }

  giveBack() {
    this.#blocks.forEach((block) => this.memory.give(block));
  }
}

/**
 * @param {GpuSession} gpu @param {Member} member @param {Work} work
 * @param {number} [repeats] the multiplication alone runs so often, for the tuner's clock
 * @returns {Promise<{ bytes: Uint8Array<ArrayBuffer>, seconds: number }>} rejects with OutOfMemory, or as WebGPU does
 */
export async function product(gpu, member, work, repeats = 1) {
  const each = entriesAtOnce(gpu, member, work);
  if (each >= work.batch) return part(gpu, member, { ...work, first: 0 }, repeats);
  const bytes = new Uint8Array(4 * work.count);
  const entry = work.count / work.batch;
  let seconds = 0;
  for (let first = 0; first < work.batch; first += each) {
    const batch = Math.min(each, work.batch - first);
    const alone = (/** @type {Side} */ side) => ({ ...side, packed: null }); // a copy of a part would serve nobody else
    const some = { ...work, batch, first, count: batch * entry, a: alone(work.a), b: alone(work.b) };
    const done = await part(gpu, member, some, repeats);
    bytes.set(done.bytes, 4 * first * entry);
    seconds += done.seconds;
  }
  return { bytes, seconds };
}

/**
 * How many products of a batch to compute at once: lines are padded to whole strips, so that many small ones take many
 * times the memory of their panels.
 * @param {GpuSession} gpu @param {Member} member @param {Work} work
 */
function entriesAtOnce(gpu, member, work) {
  const { a, b, cBytes } = sizes(member, { ...work, batch: 1, first: 0 });
  return Math.max(1, Math.floor(Math.min(SLICE_BYTES, gpu.memory.bytesMax / 4) / (a.bytes + b.bytes + cBytes)));
}

/**
 * Some products of a batch, all at once.
 * @param {GpuSession} gpu @param {Member} member @param {Part} work @param {number} repeats
 * @returns {Promise<{ bytes: Uint8Array<ArrayBuffer>, seconds: number }>}
 */
async function part(gpu, member, work, repeats) {
  const lent = new Lent(gpu);
  /** @type {(() => void)[]} what is to be submitted, in order */
  const steps = [];
  try {
    const size = sizes(member, work);
    const a = await pack(gpu, lent, steps, member, work.a, size.a);
    const b = await pack(gpu, lent, steps, member, work.b, size.b);
    const c = lent.take("storage", size.cBytes);
    const pieces = cut(size, gpu.flops * PIECE_SECONDS, gpu.device.limits.maxComputeWorkgroupsPerDimension);
    const uniforms = lent.take("uniform", gpu.uniformBytes(pieces.length));
    const pipeline = await gpu.pipeline(member.name, () => member.source(member));
    for (let i = 0; i < repeats; i += 1) {
      steps.push(() => gpu.submit(pipeline, pieces, uniforms, [[a, size.a.bytes], [b, size.b.bytes], [c, size.cBytes]]));
    }
    const out = await store(gpu, lent, steps, work, size, c);
    const readback = lent.take("readback", 4 * work.count);
    await lent.ready();
    const start = performance.now();
    steps.forEach((step) => step());
    const encoder = gpu.device.createCommandEncoder();
    encoder.copyBufferToBuffer(out, 0, readback.buffer, 0, 4 * work.count);
    gpu.device.queue.submit([encoder.finish()]);
    const done = gpu.device.queue.onSubmittedWorkDone().then(() => performance.now());
    const bytes = await read(readback.buffer, 4 * work.count);
    const seconds = ((await done) - Math.max(start, gpu.doneAt)) / 1000;
    gpu.doneAt = await done;
    gpu.measured(repeats * size.flop, seconds, pieces.length * repeats);
    return { bytes, seconds };
  } finally {
    lent.giveBack();
  }
}

/** A view of the same bytes. @param {Float32Array<ArrayBuffer>} values */
export const bytesOf = ({ buffer, byteOffset, byteLength }) => new Uint8Array(buffer, byteOffset, byteLength);

/** @param {GPUBuffer} buffer @param {number} bytes */
async function read(buffer, bytes) {
  await buffer.mapAsync(1, 0, bytes); // GPUMapMode.READ
  const copy = new Uint8Array(buffer.getMappedRange(0, bytes).slice(0));
  buffer.unmap();
  return copy;
}

/**
 * What a member makes of a product's sizes: whole strips of lines, and k in packed rows.
 * @param {Member} member @param {Part} work
 */
function sizes(member, { batch, m, n, k, first }) {
  const { form } = member;
  const strip = strips(member);
  const kPacked = (Math.ceil(k / K_PAD[form]) * K_PAD[form]) / K_PACKED[form];
  const side = (/** @type {number} */ lines, /** @type {number} */ width) => {
    const count = Math.ceil(lines / width);
    const elements = batch * count * width * kPacked;
    const bytes = { f32: 4 * elements, f16: 2 * elements, i8: (4 * elements * 33) / 32 }[form];
    return { lines, batch, first, k, kPacked, width, count, bytes: Math.max(bytes, 16) };
  };
  const a = side(m, strip.a), b = side(n, strip.b);
  const [mPadded, nPadded] = [a.count * a.width, b.count * b.width];
  const count = batch * mPadded * nPadded;
  return { form, batch, kPacked, a, b, mPadded, nPadded, cBytes: 4 * count, flop: 2 * count * k };
}

/** @typedef {ReturnType<typeof sizes>} Size */

/**
 * Cuts a product into dispatches of at most flopMax: whole products of a batch, else rows of workgroups, else parts of a
 * row, else parts of k.
 * @param {Size} size @param {number} flopMax @param {number} groupsMax in one dimension @returns {Piece[]}
 */
export function cut({ form, batch, kPacked, a, b }, flopMax, groupsMax) {
  const rowFlop = 2 * a.width * b.width * K_PACKED[form];
  const unit = form === "i8" ? K_PAD.i8 / K_PACKED.i8 : CHAIN;
  const kRows = Math.min(Math.max(kPacked, unit), K_ROWS_MAX, Math.max(Math.floor(flopMax / rowFlop / unit), 1) * unit);
  const groups = Math.max(Math.floor(flopMax / (rowFlop * kRows)), 1);
  const wide = Math.min(b.count, groups, groupsMax);
  const high = wide < b.count ? 1 : Math.min(a.count, Math.max(Math.floor(groups / wide), 1), groupsMax);
  const deep = high < a.count ? 1 : Math.min(batch, Math.max(Math.floor(groups / wide / high), 1), groupsMax);
  /** @type {Piece[]} */
  const pieces = [];
  for (let z = 0; z < batch; z += deep) {
    for (let y = 0; y < a.count; y += high) {
      for (let x = 0; x < b.count; x += wide) {
        for (let l = 0; l === 0 || l < kPacked; l += kRows) {
          const words = [l, Math.min(l + kRows, kPacked), kPacked, a.count, b.count, x, y, z];
          const [across, down, layers] = [Math.min(wide, b.count - x), Math.min(high, a.count - y), Math.min(deep, batch - z)];
          pieces.push({ words, groups: [across, down, layers] });
        }
      }
    }
  }
  return pieces;
}

/**
 * Cuts a flat range of threads.
 * @param {number} count @param {number[]} words uniforms behind base and count @returns {Piece[]}
 */
function flat(count, words) {
  /** @type {Piece[]} */
  const pieces = [];
  for (let base = 0; base < count; base += ENDS_THREADS_MAX) {
    const groups = Math.ceil(Math.min(count - base, ENDS_THREADS_MAX) / THREADS);
    const [across, down] = [Math.min(groups, ROW_GROUPS), Math.ceil(groups / ROW_GROUPS)];
    pieces.push({ words: [base, count, ...words], groups: [across, down, 1] });
  }
  return pieces;
}

/**
 * The packed copy of an operand, and the steps that fill it unless it is there.
 * @param {GpuSession} gpu @param {Lent} lent @param {(() => void)[]} steps @param {Member} member
 * @param {Side} side @param {Size["a"]} size
 */
async function pack(gpu, lent, steps, { form }, side, size) {
  const { batch, lines, first, k, kPacked, width, count, bytes } = size;
  const copy = copyOf(lent, side, `${form} ${batch} ${lines} ${k} ${width} ${side.base} ${side.across}`, bytes);
  lent.wait(side.raw);
  if (copy.done) return copy.block;
  const quads = (batch * count * width) / 4;
  const blocks = Math.ceil(k / 128);
  const scales = side.scales ?? gpu.nothing;
  const { across, along, entry } = side, origin = side.base + first * entry;
  const words = [lines, quads, k, kPacked, across, along, blocks, width / 4, (count * width) / 4, origin, entry];
  const threads = Math.ceil(kPacked / 8) * Math.ceil(quads / 8) * 64;
  const dispatches = [{ name: `pack ${side.dtype} ${form}`, source: () => packSource(side.dtype, form), threads }];
  if (form === "i8") dispatches.push({ name: "pack scales", source: () => PACK_SCALES, threads: 4 * quads * blocks });
  for (const { name, source, threads: count } of dispatches) {
    const pieces = flat(count, words);
    if (!pieces.length) continue;
    const uniforms = lent.take("uniform", gpu.uniformBytes(pieces.length));
    const pipeline = await gpu.pipeline(name, source);
    steps.push(() => {
      if (copy.done && copy.by !== lent) return; // another product that waited beside this one filled it
      copy.done = true;
      copy.by = lent;
      gpu.submit(pipeline, pieces, uniforms, [[side.raw, side.raw.size], [scales, scales.size], [copy.block, bytes]]);
    });
  }
  return copy.block;
}

/** @param {Lent} lent @param {Side} side @param {string} key @param {number} bytes @returns {Packed} */
function copyOf(lent, { packed }, key, bytes) {
  if (!packed) return { block: lent.take("storage", bytes), done: false, by: null };
  let copy = packed.get(key);
  if (!copy) {
    const block = lent.memory.take("storage", bytes);
    copy = { block, done: false, by: null };
    packed.set(key, copy);
    block.ready?.catch(() => {
      if (packed.delete(key)) lent.memory.give(block);
    });
  }
  lent.wait(copy.block);
  return copy;
}

/**
 * Where C lies as it is wanted: in the kernel's own buffer when nothing is to be cut off or added, else where store puts it.
 * @param {GpuSession} gpu @param {Lent} lent @param {(() => void)[]} steps
 * @param {Part} work @param {Size} size @param {Block} c
 * @returns {Promise<GPUBuffer>}
 */
async function store(gpu, lent, steps, { batch, m, n, row, count, c: before, bias }, size, c) {
  if (!before && !bias && row === n && size.nPadded === n && (batch === 1 || size.mPadded === m)) return c.buffer;
  const out = lent.take("storage", 4 * count, before ? bytesOf(before) : undefined);
  const added = bias ? lent.take("storage", bias.byteLength, bytesOf(bias)) : gpu.nothing;
  const pieces = flat(batch * m * n, [m, n, size.nPadded, size.mPadded, row, before ? 1 : 0, bias ? 1 : 0]);
  const uniforms = lent.take("uniform", gpu.uniformBytes(pieces.length));
  const pipeline = await gpu.pipeline("store", () => STORE);
  steps.push(() => {
    if (!before && row > n) {
      const encoder = gpu.device.createCommandEncoder();
      encoder.clearBuffer(out.buffer);
      gpu.device.queue.submit([encoder.finish()]);
    }
    gpu.submit(pipeline, pieces, uniforms, [[c, size.cBytes], [added, added.size], [out, out.size]]);
  });
  return out.buffer;
}
