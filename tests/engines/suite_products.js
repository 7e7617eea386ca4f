/**
 * Engine.multiply against float64: any shape, layout and type, with and without an old C and a bias, and what it leaves
 * alone: its operands and the gaps of C.
 */
import { tileOf } from "./suite_tiles.js";
import { largest, wrongElement } from "./suite_exact.js";
import { floats, matrix } from "./suite_numbers.js";

const GUARD = -12345.5; // between the rows of C, before and after
const SPECIAL = { nan: NaN, inf: Infinity, "-inf": -Infinity };

/** The problem of an order, its exact operands, and the buffers that must be the same afterwards. */
function problemOf({ m, n, k, a, b, c_gap: gap, accumulate, bias, accuracy, specials, seed }) {
  const of = (name) => specials.filter((special) => special.in === name);
  const left = matrix(m, k, a, seed, of("a"));
  const right = matrix(n, k, b, seed + 1, of("b"));
  const size = largest(left.exact.filter(Number.isFinite)) * largest(right.exact.filter(Number.isFinite));
  const problem = { m, n, k, a: left.operand, b: right.operand, cRow: n + gap, accuracy };
  if (accumulate) {
    const c = floats((m - 1) * (n + gap) + n, seed + 2, size);
    for (let i = 0; i + 1 < m; i += 1) c.fill(GUARD, i * (n + gap) + n, (i + 1) * (n + gap));
    for (const { line, l, value } of of("c")) c[line * (n + gap) + l] = SPECIAL[value];
    problem.c = c;
  }
  if (bias) {
    problem.bias = floats(n, seed + 3, size);
    for (const { l, value } of of("bias")) problem.bias[l] = SPECIAL[value];
  }
  const kept = [problem.a.bytes, problem.b.bytes, problem.a.scales, problem.b.scales, problem.c, problem.bias];
  return { problem, left, right, buffers: kept.filter(Boolean).map((view) => view.buffer) };
}

const copies = (buffers) => buffers.map((buffer) => new Uint8Array(buffer.slice(0)));

function changedBuffer(buffers, before) {
  return buffers.findIndex((buffer, index) => {
    const now = new Uint8Array(buffer);
    return now.length !== before[index].length || now.some((byte, at) => byte !== before[index][at]);
  });
}

/** What is wrong with one product, or "". */
export async function product(engine, order) {
  const { m, n, k, accuracy, step } = order;
  const { problem, left, right, buffers } = problemOf(order);
  const before = copies(buffers);
  const got = await engine.multiply(problem);
  if (changedBuffer(buffers, before) >= 0) return `an operand changed: buffer ${changedBuffer(buffers, before)} of ${buffers.length}`;
  const { cRow, c, bias } = problem;
  const length = (m - 1) * cRow + n;
  if (!(got instanceof Float32Array) || got.length !== length) return `C has ${got.length} elements, not ${length}`;
  for (let i = 0; c && i + 1 < m; i += 1) {
    const gap = got.subarray(i * cRow + n, (i + 1) * cRow);
    if (gap.some((value) => value !== GUARD)) return `the gap behind row ${i} of C changed: ${gap}`;
  }
  const roundings = [problem.a, problem.b].filter(({ dtype }) => dtype === "i8").length;
  const want = { m, n, k, a: left.exact, b: right.exact, cRow, before: c, bias, roundings, accuracy, step, exactly: order.a.whole && order.b.whole };
  return wrongElement(want, got);
}

/** How far a product of terms that are all alike is off, relative to itself: where each rounding has the same sign. */
export async function alike(engine, { m, n, k, a, b }) {
  const operand = (lines, value) => {
    const numbers = new Float32Array(lines * k).fill(value);
    return { bytes: new Uint8Array(numbers.buffer), dtype: "f32", across: k, along: 1 };
  };
  const got = await engine.multiply({ m, n, k, a: operand(m, a), b: operand(n, b), cRow: n, accuracy: "rowwise" });
  const exact = k * Math.fround(a) * Math.fround(b);
  return Math.max(...got.map((value) => Math.abs(value - exact) / exact));
}

/** What an engine says to products of nothing: every size has its turn at 0, or "" where all are refused. */
export async function empty(engine) {
  const bytes = () => new Uint8Array(4);
  for (const size of ["m", "n", "k"]) {
    const sizes = { m: 1, n: 1, k: 1, [size]: 0 };
    const operand = () => ({ bytes: bytes(), dtype: "f32", across: 1, along: 1 });
    engine.put("empty", bytes(), { rows: 1, columns: 1, dtype: "f32" });
    const asked = [
      () => engine.multiply({ ...sizes, a: operand(), b: operand(), cRow: 1, accuracy: "rowwise" }),
      () => engine.compute(tileOf({ ...sizes, batch: 1, a: "empty", b: "empty", accuracy: "rowwise" })),
      () => engine.compute(tileOf({ m: 1, n: 1, k: 1, batch: 0, a: "empty", b: "empty", accuracy: "rowwise" })),
    ];
    for (const ask of asked) {
      const said = await ask().then((answer) => `computed ${answer}`, String);
      if (!said.startsWith("RangeError: nothing to multiply")) return `${size} = 0: ${said}`;
    }
    engine.drop(["empty"]);
  }
  return "";
}

/** "" where two orders give the same bits. */
export async function sameBits(engine, { orders }) {
  const [one, other] = [await engine.multiply(problemOf(orders[0]).problem), await engine.multiply(problemOf(orders[1]).problem)];
  const differing = one.findIndex((value, index) => !Object.is(value, other[index]));
  return differing < 0 ? "" : `element ${differing} is ${one[differing]} and ${other[differing]}`;
}
