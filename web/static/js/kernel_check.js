/**
 * Proves a kernel on this device before it touches anyone's work, and measures it.
 *
 * The shapes are those at which browsers, drivers and compilers have been seen to fail: one element, either side of a
 * vector or block width, tall, flat, a k beyond one block, values that leave float32's comfortable range. Every element
 * is compared with a float64 product. A kernel that fails is not used, and the page says why.
 */
import { TileEngine } from "./tile_engine.js";

/** [m, n, k] */
const SHAPES = [
  [1, 1, 1], [31, 33, 32], [32, 31, 33], [33, 32, 31], [1, 384, 257], [257, 1, 384], [5, 8, 4], [7, 3, 600],
  [64, 7, 129], [61, 520, 70], [13, 17, 1],
];
const SCALES = [1, 1e-15, 1e15]; // of A; B is scaled by the inverse root, so that the large case stays finite
const SPEED_SHAPE = 256;
const SPEED_MS = 150;
const UNIT_ROUNDOFF = 2 ** -24;

/** Reproducible numbers in [-1, 1). @param {number} count @param {number} seed */
function numbers(count, seed) {
  let state = (seed * 2654435761) >>> 0 || 1;
  return Float32Array.from({ length: count }, () => {
    state ^= state << 13;
    state ^= state >>> 17;
    state ^= state << 5;
    return (state >>> 0) / 2 ** 31 - 1;
  });
}

/** @param {Float32Array<ArrayBuffer>} floats */
const asBytes = (floats) => new Uint8Array(floats.buffer);

/**
 * The first wrong element, or "" for a right product. An honest sum of k products errs by about sqrt(k) units; the bound
 * is the worst case, k units of sum |a b|.
 * @param {Float32Array} a @param {Float32Array} bt @param {Float32Array} c
 * @param {number} m @param {number} n @param {number} k
 */
export function fault(a, bt, c, m, n, k) {
  for (let i = 0; i < m; i += 1) {
    for (let j = 0; j < n; j += 1) {
      let sum = 0, size = 0;
      for (let l = 0; l < k; l += 1) {
        const product = a[i * k + l] * bt[j * k + l];
        sum += product;
        size += Math.abs(product);
      }
      const got = c[i * n + j];
      if (!(Math.abs(got - sum) <= (k + 1) * UNIT_ROUNDOFF * size)) return `${m}x${n}x${k} [${i},${j}]: ${got}, expected ${sum}`;
    }
  }
  return "";
}

/** Throws an Error that names the first wrong product. @param {TileEngine} engine */
export function prove(engine) {
  SHAPES.forEach(([m, n, k], index) => {
    const scale = SCALES[index % SCALES.length];
    const a = numbers(m * k, index + 1).map((x) => x * scale);
    const bt = numbers(n * k, index + 101).map((x) => x / Math.sqrt(scale));
    engine.put("check.a", asBytes(a));
    engine.put("check.b", asBytes(bt));
    const shape = { batch: 1, m, n, k, a: "check.a", b: "check.b", lease: 0, job: "check", deadline_s: 0 };
    const { bytes } = engine.compute({ type: "LEASE", ...shape });
    engine.drop(["check.a", "check.b"]);
    const wrong = fault(a, bt, new Float32Array(bytes.buffer), m, n, k);
    if (wrong) throw new Error(`wrong product ${wrong}`);
  });
}

/** FLOP per second, in well under half a second. @param {TileEngine} engine */
export function speed(engine) {
  const n = SPEED_SHAPE;
  engine.put("check.a", asBytes(numbers(n * n, 7)));
  engine.put("check.b", asBytes(numbers(n * n, 8)));
  const shape = { batch: 1, m: n, n, k: n, a: "check.a", b: "check.b", lease: 0, job: "check", deadline_s: 0 };
  const start = performance.now();
  let best = Infinity;
  do {
    best = Math.min(best, Math.max(engine.compute({ type: "LEASE", ...shape }).seconds, 1e-5));
  } while (performance.now() - start < SPEED_MS);
  engine.drop(["check.a", "check.b"]);
  return (2 * n ** 3) / best;
}
