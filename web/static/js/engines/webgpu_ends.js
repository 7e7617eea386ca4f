/**
 * The two ends of a product on the GPU, in WGSL: packing panels as they come, and storing C as it is wanted.
 *
 * pack reads any strides and any dtype, element by element, and writes the form that a multiply kernel reads without a
 * check (webgpu_family.js has the picture), zeros beyond the last line and beyond k. Both panels are padded, so what the
 * padding adds to a sum is 0 * 0, and a NaN or an infinity reaches only the elements that depend on it. f16 is expanded by
 * hand, because unpack2x16float may lose its subnormals. store knows the edges of C, its row stride, what it held before
 * and the bias. Each is one dispatch over a flat range that can be cut anywhere (`base`).
 * Left out: reading through workgroup memory. Both ends touch each element once, the kernels touch it hundreds of times.
 */

/**
 * @typedef {import("./webgpu_family.js").Form} Form
 * @typedef {import("../../../types/engine.js").Dtype} Dtype
 */

export const THREADS = 64;
/** Threads of a dispatch lie in rows of this many workgroups: one dimension alone has too few. */
export const ROW_GROUPS = 1024;
const FLAT = `let thread = work.base + (group.y * ${ROW_GROUPS}u + group.x) * ${THREADS}u + at;
  if (thread >= work.count) { return; }`;
const MAIN = `@compute @workgroup_size(${THREADS})
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) at: u32) {`;

/** Uniforms of pack: all in elements; entry z of a batch begins at origin + z * entry. webgpu_product.js fills them in this order. */
const PACK_WORK = `struct Work {
  base: u32, count: u32, lines: u32, quads: u32, k: u32, kPacked: u32, across: u32, along: u32, blocks: u32,
  quadsStrip: u32, quadsZ: u32, origin: u32, entry: u32,
}
@group(0) @binding(0) var<uniform> work: Work;
@group(0) @binding(1) var<storage, read> words: array<u32>;
@group(0) @binding(2) var<storage, read> scales: array<f32>;
`;

/** How element number `at` becomes a float32, before its scale. @type {Record<Dtype, string>} */
const EXPAND = {
  f32: "return bitcast<f32>(words[at]);",
  bf16: "return bitcast<f32>(((words[at >> 1u] >> ((at & 1u) * 16u)) & 0xffffu) << 16u);",
  f16: `let half = (words[at >> 1u] >> ((at & 1u) * 16u)) & 0xffffu;
  let sign = (half & 0x8000u) << 16u;
  let exponent = (half >> 10u) & 31u;
  let fraction = half & 0x3ffu;
  if (exponent == 31u) { return bitcast<f32>(sign | 0x7f800000u | (fraction << 13u)); }
  if (exponent == 0u) { return bitcast<f32>(sign | bitcast<u32>(f32(fraction) * 0x1p-24f)); }
  return bitcast<f32>(sign | ((exponent + 112u) << 23u) | (fraction << 13u));`,
  i8: "return f32(byte(at));",
};
const BYTE = "fn byte(at: u32) -> i32 { return extractBits(bitcast<i32>(words[at >> 2u]), (at & 3u) * 8u, 8u); }";

/**
 * Thread t packs one vec4: 8 elements of k by 8 quads of lines to a block of threads, so that neighbours read along k.
 * @param {Dtype} dtype @param {Form} form
 */
export function packSource(dtype, form) {
  const type = { f32: "vec4f", f16: "vec4h", i8: "vec4u" }[form];
  const scaled = dtype === "i8" ? " * scales[row * work.blocks + l / 128u]" : "";
  const lane = (/** @type {number} */ i) =>
    form === "i8" ? `four(z, line + ${i}u, l)` : `${form === "f16" ? "f16" : "f32"}(element(z, line + ${i}u, l))`;
  return `${form === "f16" ? "enable f16;\n" : ""}${PACK_WORK}
@group(0) @binding(3) var<storage, read_write> packed: array<${type}>;
${dtype === "i8" ? BYTE : ""}
fn expand(at: u32) -> f32 { ${EXPAND[dtype]} }
fn element(z: u32, row: u32, l: u32) -> f32 {
  if (row >= work.lines || l >= work.k) { return 0.0; }
  return expand(work.origin + z * work.entry + row * work.across + l * work.along)${scaled};
}
${form === "i8" ? `fn four(z: u32, row: u32, group: u32) -> u32 {
  var word = 0u;
  for (var i = 0u; i < 4u; i += 1u) {
    let l = group * 4u + i;
    if (row < work.lines && l < work.k) {
      word |= (bitcast<u32>(byte(work.origin + z * work.entry + row * work.across + l * work.along)) & 255u) << (i * 8u);
    }
  }
  return word;
}` : ""}
${MAIN}
  ${FLAT}
  let block = thread / 64u;
  let along = (work.kPacked + 7u) / 8u;
  let l = (block % along) * 8u + thread % 8u;
  let quad = (block / along) * 8u + (thread / 8u) % 8u;
  if (l >= work.kPacked || quad >= work.quads) { return; }
  let strip = quad / work.quadsStrip;
  let z = quad / work.quadsZ;
  let line = (quad % work.quadsZ) * 4u;
  packed[(strip * work.kPacked + l) * work.quadsStrip + quad % work.quadsStrip] =
    ${type}(${[0, 1, 2, 3].map(lane).join(", ")});
}`;
}

/** The scales of packed i8, behind its elements: [strip][block][line of the strip]; 0 beyond the last line. */
export const PACK_SCALES = `${PACK_WORK}
@group(0) @binding(3) var<storage, read_write> packed: array<u32>;
${MAIN}
  ${FLAT}
  let strip = work.quadsStrip * 4u;
  let block = thread / strip % work.blocks;
  let line = thread / strip / work.blocks * strip + thread % strip;
  let behind = arrayLength(&packed) / 33u * 32u;
  packed[behind + thread] = select(
    0u, bitcast<u32>(scales[min(line, work.lines - 1u) * work.blocks + block]), line < work.lines);
}`;

/** Thread t stores one element. cLine: elements of a row of padded C, cLines: padded rows of one product of a batch. */
export const STORE = `struct Work {
  base: u32, count: u32, m: u32, n: u32, cLine: u32, cLines: u32, row: u32, adds: u32, biased: u32,
}
@group(0) @binding(0) var<uniform> work: Work;
@group(0) @binding(1) var<storage, read> c: array<f32>;
@group(0) @binding(2) var<storage, read> bias: array<f32>;
@group(0) @binding(3) var<storage, read_write> out: array<f32>;
${MAIN}
  ${FLAT}
  let line = thread / work.n;
  let column = thread % work.n;
  var value = c[(line / work.m * work.cLines + line % work.m) * work.cLine + column];
  if (work.biased != 0u) { value += bias[column]; }
  let place = line * work.row + column;
  if (work.adds != 0u) { value += out[place]; }
  out[place] = value;
}`;
