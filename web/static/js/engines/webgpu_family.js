/**
 * The family of WGSL kernels that multiply packed panels: which there are, and their source.
 *
 * No kernel is best on every GPU, so there are a few of each kind, and each device measures them (webgpu_tuner.js). All
 * have one shape: a workgroup of wide x high threads computes a block of C, each thread rows x cols of it in registers, and
 * nothing is checked in the loop, because the panels come packed and padded with zeros (webgpu_ends.js):
 *
 *   packed A: strips of S = high * rows lines      vec4 number (strip * k + l) * S / 4 + p * high + y
 *   | l = 0: S elements | l = 1: S elements | …     holds lines 4 (p * high + y) … + 3 of the strip at l
 *   packed B: the same with S = wide * cols; neighbouring threads read neighbouring vec4s
 *   C: row-major, padded to whole strips, vec4 by vec4
 *
 * - registers: operands come straight from memory; the caches are enough on many GPUs, and software has nothing else.
 * - shared: `step` elements of k at a time are copied to workgroup memory first.
 * - subgroups: lanes of a subgroup load a part of A each and tell one another; a workgroup is one row of blocks there.
 * - halves: f16 in memory, float32 in registers; twice the operands for each byte, exact where the operands are f16.
 * - bytes: int8 with dot4I8Packed, four elements of k in a u32; sums of 128 are exact, then both scales are applied.
 *
 * k is summed in chains of 256, whose sums are added to C in memory, as the CPU kernels do it: a sum of thousands of terms
 * one after another errs several times as much where they are alike. Dispatches along k end where a chain does.
 *
 * Everything is unrolled here because Tint does not. Left out: f16 arithmetic. It errs by 2^-11 of every product, which no
 * accuracy that a problem can ask for allows.
 */

/**
 * @typedef {"f32"|"f16"|"i8"} Form how packed elements are kept
 * @typedef {object} Member one kernel
 * @property {string} name unique in the family
 * @property {Form} form
 * @property {number} rows @property {number} cols of C to a thread, multiples of 4
 * @property {number} wide @property {number} high threads of a workgroup
 * @property {number} step elements of k (i8: groups of four) to one turn of the loop
 * @property {GPUFeatureName|""} needs a feature of the device
 * @property {string} language a WGSL language feature, or ""
 * @property {number} sharedBytes workgroup memory
 * @property {(member: Member) => string} source
 */

/** A remembered choice of another version is ignored: count it up when a kernel or the packing changes. */
export const FAMILY_VERSION = 2;
/** k is padded to a multiple of this; every `step` divides it. i8: to whole blocks of scales. */
export const K_PAD = { f32: 16, f16: 16, i8: 128 };
/** Elements of k in one packed row of a strip. */
export const K_PACKED = { f32: 1, f16: 1, i8: 4 };
/** Products of k that are added up one after another; the sums of such chains are then added. `step` divides it. */
export const CHAIN = 256;
const SCALE_BLOCK = 128;
const LANES = ["x", "y", "z", "w"];

/** Uniforms of every multiply kernel; webgpu_product.js fills them in this order. kFrom, kTo, k in packed rows. */
const WORK = `struct Work { kFrom: u32, kTo: u32, k: u32, stripsA: u32, stripsB: u32, x0: u32, y0: u32, z0: u32 }
@group(0) @binding(0) var<uniform> work: Work;
@group(0) @binding(3) var<storage, read_write> c: array<vec4f>;
`;

/** @param {number} count @param {(index: number) => string} line */
const lines = (count, line) => Array.from({ length: count }, (_, index) => line(index)).join("\n");

/**
 * Declares and names the workgroup's place, the thread's, and where its operands begin.
 * @param {Member} member @param {string} [builtin] one more parameter of main
 */
function opening({ rows, cols, wide, high }, builtin = "") {
  return `@compute @workgroup_size(${wide}, ${high})
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_id) at: vec3u,
        @builtin(local_invocation_index) thread: u32${builtin}) {
let stripA = (group.z + work.z0) * work.stripsA + group.y + work.y0;
let stripB = (group.z + work.z0) * work.stripsB + group.x + work.x0;
let x = at.x;
let y = at.y;
var pa = (stripA * work.k + work.kFrom) * ${(rows * high) / 4}u;
var pb = (stripB * work.k + work.kFrom) * ${(cols * wide) / 4}u;
`;
}

/** For each vec4 of the thread's block of C: its sum's name and its place in C. @param {Member} member */
function sums({ rows, cols, wide, high }) {
  const width = `(work.stripsB * ${(cols * wide) / 4}u)`;
  const made = [];
  for (let r = 0; r < rows; r += 1) {
    const line = `(stripA * ${rows * high}u + (${r >> 2}u * ${high}u + y) * 4u + ${r & 3}u)`;
    for (let q = 0; q < cols / 4; q += 1) {
      const column = `(group.x + work.x0) * ${(cols * wide) / 4}u + ${q * wide}u + x`;
      made.push({ name: `c${r}_${q}`, r, q, place: `c[${line} * ${width} + ${column}]` });
    }
  }
  return made;
}

/**
 * The sums over k: each chain begins at zero, and its sums are added to what the chains before it left in C.
 * @param {Member} member @param {string} chain source that adds up packed rows `first` to `stop` @param {number} length
 */
const chains = (member, chain, length) => `for (var first = work.kFrom; first < work.kTo; first += ${length}u) {
let stop = min(first + ${length}u, work.kTo);
${sums(member).map(({ name }) => `var ${name} = vec4f();`).join("\n")}
${chain}
if (first > 0u) {
${sums(member).map(({ name, place }) => `${place} += ${name};`).join("\n")}
} else {
${sums(member).map(({ name, place }) => `${place} = ${name};`).join("\n")}
}
}
}
`;

/** The outer product of one l, from a0, a1, … and b0, b1, …. @param {Member} member */
const outer = (member) =>
  sums(member).map(({ name, r, q }) => `${name} = fma(vec4f(a${r >> 2}.${LANES[r & 3]}), b${q}, ${name});`).join("\n");

/** @param {Member} member */
function registers(member) {
  const { rows, cols, wide, high, step, form } = member;
  const type = form === "f16" ? "vec4h" : "vec4f";
  const [rowA, rowB] = [(rows * high) / 4, (cols * wide) / 4];
  return `${form === "f16" ? "enable f16;\n" : ""}${WORK}
@group(0) @binding(1) var<storage, read> a: array<${type}>;
@group(0) @binding(2) var<storage, read> b: array<${type}>;
${opening(member)}pa += y;
pb += x;
${chains(member, `for (var l = first; l < stop; l += ${step}u) {
${lines(step, (u) => `{
${lines(rows / 4, (p) => `let a${p} = vec4f(a[pa + ${u * rowA + p * high}u]);`)}
${lines(cols / 4, (q) => `let b${q} = vec4f(b[pb + ${u * rowB + q * wide}u]);`)}
${outer(member)}
}`)}
pa += ${step * rowA}u;
pb += ${step * rowB}u;
}`, CHAIN)}`;
}

/** @param {Member} member */
function shared(member) {
  const { rows, cols, wide, high, step, form } = member;
  const type = form === "f16" ? "vec4h" : "vec4f";
  const [rowA, rowB, threads] = [(rows * high) / 4, (cols * wide) / 4, wide * high];
  const copy = (/** @type {string} */ name, /** @type {number} */ row) => lines(Math.ceil((step * row) / threads), (i) => {
    const whole = (i + 1) * threads <= step * row;
    const place = `${i * threads}u + thread`;
    const line = `tile_${name}[${place}] = vec4f(${name}[p${name} + ${place}]);`;
    return whole ? line : `if (${place} < ${step * row}u) { ${line} }`;
  });
  return `${form === "f16" ? "enable f16;\n" : ""}${WORK}
@group(0) @binding(1) var<storage, read> a: array<${type}>;
@group(0) @binding(2) var<storage, read> b: array<${type}>;
var<workgroup> tile_a: array<vec4f, ${step * rowA}>;
var<workgroup> tile_b: array<vec4f, ${step * rowB}>;
${opening(member)}${chains(member, `for (var l = first; l < stop; l += ${step}u) {
workgroupBarrier();
${copy("a", rowA)}
${copy("b", rowB)}
workgroupBarrier();
${lines(step, (u) => `{
${lines(rows / 4, (p) => `let a${p} = tile_a[${u * rowA + p * high}u + y];`)}
${lines(cols / 4, (q) => `let b${q} = tile_b[${u * rowB + q * wide}u + x];`)}
${outer(member)}
}`)}
pa += ${step * rowA}u;
pb += ${step * rowB}u;
}`, CHAIN)}`;
}

/**
 * All threads of the workgroup read the same A: four lanes load four vec4s of it, for step * rows = 16.
 * @param {Member} member
 */
function subgroups(member) {
  const { rows, cols, wide, step } = member;
  const rowB = (cols * wide) / 4;
  return `enable subgroups;
${WORK}
@group(0) @binding(1) var<storage, read> a: array<vec4f>;
@group(0) @binding(2) var<storage, read> b: array<vec4f>;
${opening(member, ", @builtin(subgroup_invocation_id) lane: u32")}pa += lane & 3u;
pb += x;
${chains(member, `for (var l = first; l < stop; l += ${step}u) {
let mine = a[pa];
${lines(step, (u) => `{
${lines(rows / 4, (p) => `let a${p} = subgroupBroadcast(mine, ${(u * rows) / 4 + p}u);`)}
${lines(cols / 4, (q) => `let b${q} = b[pb + ${u * rowB + q * wide}u];`)}
${outer(member)}
}`)}
pa += ${(step * rows) / 4}u;
pb += ${step * rowB}u;
}`, CHAIN)}`;
}

/**
 * The scales lie behind the elements: one for each line and block. kFrom is a multiple of a block.
 * @param {Member} member
 */
function bytes(member) {
  const { rows, cols, wide, high } = member;
  const [rowA, rowB, turns] = [(rows * high) / 4, (cols * wide) / 4, SCALE_BLOCK / 4];
  const all = sums(member);
  const dots = (/** @type {string} */ x, /** @type {string} */ y) =>
    `vec4i(${LANES.map((lane) => `dot4I8Packed(${x}, ${y}.${lane})`).join(", ")})`;
  const scale = (/** @type {string} */ at, /** @type {string} */ strip, /** @type {number} */ row) =>
    `${at}Scales + (${strip} * blocks + block) * ${row}u`;
  return `${WORK}
@group(0) @binding(1) var<storage, read> a: array<vec4u>;
@group(0) @binding(2) var<storage, read> b: array<vec4u>;
${opening(member)}pa += y;
pb += x;
let blocks = work.k / ${turns}u;
let aScales = arrayLength(&a) / ${turns + 1}u * ${turns}u;
let bScales = arrayLength(&b) / ${turns + 1}u * ${turns}u;
${chains(member, `for (var l = first; l < stop; l += ${turns}u) {
${all.map(({ name }) => `var i${name} = vec4i();`).join("\n")}
for (var t = 0u; t < ${turns}u; t += 1u) {
${lines(rows / 4, (p) => `let a${p} = a[pa + ${p * high}u];`)}
${lines(cols / 4, (q) => `let b${q} = b[pb + ${q * wide}u];`)}
${all.map(({ name, r, q }) => `i${name} += ${dots(`a${r >> 2}.${LANES[r & 3]}`, `b${q}`)};`).join("\n")}
pa += ${rowA}u;
pb += ${rowB}u;
}
let block = l / ${turns}u;
${lines(rows / 4, (p) => `let sa${p} = bitcast<vec4f>(a[${scale("a", "stripA", rowA)} + ${p * high}u + y]);`)}
${lines(cols / 4, (q) => `let sb${q} = bitcast<vec4f>(b[${scale("b", "stripB", rowB)} + ${q * wide}u + x]);`)}
${all.map(({ name, r, q }) => `${name} += vec4f(i${name}) * (sa${r >> 2}.${LANES[r & 3]} * sb${q});`).join("\n")}
}`, CHAIN * turns)}`;
}

/**
 * @param {(member: Member) => string} source @param {string} kind @param {number[]} sizes rows, cols, wide, high, step
 * @param {Partial<Member>} [more] @returns {Member}
 */
function member(source, kind, [rows, cols, wide, high, step], more = {}) {
  const sharedBytes = source === shared ? 4 * step * (rows * high + cols * wide) : 0;
  const name = `${kind} ${rows}x${cols} ${wide}x${high} step ${step}`;
  return { name, form: "f32", rows, cols, wide, high, step, needs: "", language: "", sharedBytes, source, ...more };
}

const HALF = /** @type {const} */ ({ form: "f16", needs: "shader-f16" });
const BYTE = /** @type {const} */ ({ form: "i8", language: "packed_4x8_integer_dot_product" });

/** In the order in which the tuner tries them: when its time is up, the rest goes unmeasured. @type {Member[]} */
export const FAMILY = [
  member(registers, "registers", [8, 8, 4, 1, 1]),
  member(registers, "registers", [8, 8, 2, 2, 2]),
  member(shared, "shared", [8, 8, 8, 8, 16]),
  member(registers, "registers", [4, 4, 16, 8, 4]),
  member(registers, "registers", [16, 8, 2, 2, 1]),
  member(shared, "shared", [4, 4, 16, 16, 16]),
  member(registers, "registers", [8, 4, 8, 8, 2]),
  member(subgroups, "subgroups", [8, 4, 32, 1, 2], { needs: "subgroups" }),
  member(registers, "registers", [8, 8, 8, 8, 2]),
  member(subgroups, "subgroups", [8, 8, 32, 1, 2], { needs: "subgroups" }),
  member(shared, "halves shared", [8, 8, 8, 8, 16], HALF),
  member(registers, "halves", [8, 4, 8, 8, 2], HALF),
  member(registers, "halves", [8, 8, 4, 1, 1], HALF),
  member(bytes, "bytes", [4, 4, 8, 8, 32], BYTE),
  member(bytes, "bytes", [8, 4, 4, 1, 32], BYTE),
];

/** Lines of a strip of A and of B. @param {Member} member */
export const strips = ({ rows, cols, wide, high }) => ({ a: rows * high, b: cols * wide });
