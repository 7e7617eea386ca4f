/**
 * Whether a product is right: every element against float64.
 *
 * Row by row: |c - exact| <= (k + 2 + r) u S + (k + 2) 2^-126, where u = 2^-24, S = sum |a b| + |c before| + |bias| of that
 * element, and r counts the further roundings: one for each i8 operand (its scale), for adding and for the bias. It is
 * the worst case of a float32 sum in any order (Higham, Accuracy and Stability, 2nd ed., (3.5)). The last term
 * forgives numbers below float32's normal range, which GPUs may take for zero. f16 arithmetic would not pass.
 *
 * By the norm: |c - exact| <= 64 u N_A N_B as well, where N is the largest 2-norm of a line: what algorithms of Strassen's
 * kind keep to (ch. 23; the constant is the one by which the server checks).
 *
 * Exactly, where sums of whole numbers have no rounding: at a large k the bound above would not see a term too many.
 *
 * NaN and infinity must be where float64 has them, with their sign, and nowhere else.
 */
const U = 2 ** -24;
const UNDERFLOW = 2 ** -126;

/** @param {Float64Array} lines @param {number} k */
function largestNorm(lines, k) {
  let most = 0;
  for (let at = 0; at < lines.length; at += k) {
    most = Math.max(most, lines.subarray(at, at + k).reduce((sum, value) => sum + value * value, 0));
  }
  return Math.sqrt(most);
}

/**
 * The first wrong element, or "". a: m lines, b: n lines, k along each. Every `step`-th row is looked at, and the last.
 * @param {{ m: number, n: number, k: number, a: Float64Array, b: Float64Array, cRow: number, before?: Float32Array,
 *   bias?: Float32Array, roundings?: number, accuracy?: "rowwise"|"normwise", step?: number,
 *   exactly?: boolean }} want
 * @param {Float32Array} got
 */
export function wrongElement(want, got) {
  const { m, n, k, a, b, cRow, before, bias, roundings = 0, accuracy = "rowwise", step = 1, exactly = false } = want;
  const units = (k + 2 + roundings + (before ? 1 : 0) + (bias ? 1 : 0)) * U;
  const norm = accuracy === "normwise" ? 64 * U * largestNorm(a.subarray(0, m * k), k) * largestNorm(b.subarray(0, n * k), k) : 0;
  for (let i = 0; i < m; i += 1) {
    if (i % step && i !== m - 1) continue;
    const row = a.subarray(i * k, i * k + k);
    for (let j = 0; j < n; j += 1) {
      const column = b.subarray(j * k, j * k + k);
      let exact = (before?.[i * cRow + j] ?? 0) + (bias?.[j] ?? 0);
      let size = Math.abs(before?.[i * cRow + j] ?? 0) + Math.abs(bias?.[j] ?? 0);
      for (let l = 0; l < k; l += 1) {
        const term = row[l] * column[l];
        exact += term;
        size += Math.abs(term);
      }
      const value = got[i * cRow + j];
      const bound = exactly ? 0 : Math.max(norm, units * size + (k + 2) * UNDERFLOW);
      const right = Number.isFinite(exact) ? Math.abs(value - exact) <= bound : Object.is(value, exact);
      if (!right) return `C[${i},${j}] of ${m}x${n}x${k} is ${value}, not ${exact} within ${bound}`;
    }
  }
  return "";
}

/** The largest element. @param {Float64Array} values */
export function largest(values) {
  return values.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
}
