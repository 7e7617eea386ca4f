/**
 * Numbers that are the same every time, and the judge of a product of them: every element against float64. For the proof of
 * a whole engine (check.js) and of one WGSL kernel (webgpu_answers.js).
 */

/**
 * @typedef {Float32Array<ArrayBuffer>|Float64Array<ArrayBuffer>} Values
 * @typedef {{ m: number, n: number, k: number, a: Values, bt: Values }} Problem both line after line, k to a line
 */

const UNIT_ROUNDOFF = 2 ** -24;
const SCALED = 4; // units for what a form of operands rounds besides: the scales of int8

/** A generator of whole numbers in [0, 2^32). @param {number} seed */
export function stream(seed) {
  let state = (seed * 2654435761) >>> 0 || 1;
  return () => {
    state ^= state << 13;
    state ^= state >>> 17;
    state ^= state << 5;
    return state >>> 0;
  };
}

/**
 * The first wrong element, or "" for a right product. An honest sum of k products errs by about sqrt(k) units; the bound
 * is the worst case, k units of sum |a b|. A sum that is not finite must be just that.
 * @param {Problem} problem @param {Float32Array} c
 */
export function fault({ m, n, k, a, bt }, c) {
  for (let i = 0; i < m; i += 1) {
    for (let j = 0; j < n; j += 1) {
      let sum = 0, size = 0;
      for (let l = 0; l < k; l += 1) {
        const product = a[i * k + l] * bt[j * k + l];
        sum += product;
        size += Math.abs(product);
      }
      const got = c[i * n + j];
      const right = Number.isFinite(sum) ? Math.abs(got - sum) <= (k + SCALED) * UNIT_ROUNDOFF * size : Object.is(got, sum);
      if (!right) return `${m}x${n}x${k} [${i},${j}]: ${got}, expected ${sum}`;
    }
  }
  return "";
}
