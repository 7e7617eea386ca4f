/**
 * Proves an engine on this device before it touches anyone's work, and measures it.
 *
 * The shapes are those at which browsers, drivers and compilers have been seen to fail: one element, either side of a
 * vector or block width, flat, a k beyond one block, 500 rows and more, values that leave float32's comfortable range. The
 * engine is asked as it is for a tile, panels and all (known_tiles.js has tiles of other kinds). Small products are compared with float64 element by element, large
 * ones by a random projection, as the server does. An engine that fails is not used, and the page says why.
 */
import { fault, stream } from "./known_answers.js";
import { proveTiles } from "./known_tiles.js";

/**
 * @typedef {import("../../../types/engine.js").Engine} Engine
 * @typedef {import("../../../types/engine.js").Accuracy} Accuracy
 * @typedef {{ m: number, n: number, k: number, a: Float32Array<ArrayBuffer>, bt: Float32Array<ArrayBuffer> }} Sample
 */

/** [m, n, k] */
const SHAPES = [
  [1, 1, 1], [31, 33, 32], [32, 31, 33], [33, 32, 31], [1, 1152, 384], [1, 384, 257], [257, 1, 384], [5, 8, 4], [7, 3, 600],
  [64, 7, 129], [61, 520, 70], [13, 17, 1], [499, 8, 33], [500, 5, 32], [513, 4, 31], [3, 513, 8], [2, 500, 40], [1, 499, 16],
];
const LARGE = [513, 499, 500];
const LARGE_FLOPS_MIN = 1e9; // a slower engine would need longer than a volunteer waits
const SCALES = [1, 1e-15, 1e15]; // of A; B is scaled by the inverse root, so that the large case stays finite
const SPEED_N_MAX = 512;
const SPEED_ROUND_MS = 20; // a round shorter than this is timed at twice the size
const SPEED_MS = 150;
const UNIT_ROUNDOFF = 2 ** -24;
const PROJECTION_BOUND = 16; // the server's is 8, for two projections and every device's sum

/** Numbers in [-1, 1). @param {number} count @param {number} seed */
function numbers(count, seed) {
  const next = stream(seed);
  return Float32Array.from({ length: count }, () => next() / 2 ** 31 - 1);
}

/** @param {number} m @param {number} n @param {number} k @param {number} seed @param {number} [scale] @returns {Sample} */
function sample(m, n, k, seed, scale = 1) {
  const a = numbers(m * k, seed).map((x) => x * scale);
  return { m, n, k, a, bt: numbers(n * k, seed + 100).map((x) => x / Math.sqrt(scale)) };
}

/**
 * The first wrong row, or "": C r against A (B r) for a random r, both in float64, in O(mn + mk + nk). An honest row's
 * rounding projects to about u sqrt(k) sqrt(sum_l A_il^2 beta_l^2), beta_l = |row l of B|.
 * @param {Sample} sample @param {Float32Array} c @param {Accuracy} [accuracy]
 */
function rowFault({ m, n, k, a, bt }, c, accuracy = "rowwise") {
  // None near zero, so that no single wrong element can hide behind a small weight.
  const r = Float64Array.from({ length: n }, () => (Math.random() < 0.5 ? -1 : 1) * (1 - Math.random() / 2));
  const br = new Float64Array(k), beta2 = new Float64Array(k);
  for (let j = 0; j < n; j += 1) {
    for (let l = 0; l < k; l += 1) {
      br[l] += bt[j * k + l] * r[j];
      beta2[l] += bt[j * k + l] ** 2;
    }
  }
  const unit = UNIT_ROUNDOFF * Math.sqrt(k) * (accuracy === "normwise" ? PROJECTION_BOUND : 1);
  for (let i = 0; i < m; i += 1) {
    let exact = 0, size2 = 0, got = 0;
    for (let l = 0; l < k; l += 1) {
      exact += a[i * k + l] * br[l];
      size2 += a[i * k + l] ** 2 * beta2[l];
    }
    for (let j = 0; j < n; j += 1) got += c[i * n + j] * r[j];
    if (!(Math.abs(got - exact) <= PROJECTION_BOUND * unit * Math.sqrt(size2))) {
      return `${m}x${n}x${k} row ${i}: ${got} by a random projection, expected ${exact}`;
    }
  }
  return "";
}

/** A tile of two whole panels. @param {number} m @param {number} n @param {number} k @param {string} a @param {string} b @param {Accuracy} accuracy @returns {import("../../../types/engine.js").TileWork} */
export function tileOf(m, n, k, a, b, accuracy) {
  const terms = [{ k, a, b, aRow: 0, aColumn: 0, bRow: 0, bColumn: 0 }];
  return { batch: 1, m, n, aByK: false, bByK: false, terms, dtype: "f32", accuracy };
}

/**
 * One product as a tile would have it, operands up and product down included.
 * @param {Engine} engine @param {Sample} sample @param {string} name @param {Accuracy} [accuracy]
 * @returns {Promise<Float32Array<ArrayBuffer>>}
 */
async function product(engine, { m, n, k, a, bt }, name, accuracy = "rowwise") {
  const panels = [`check.a.${name}`, `check.b.${name}`];
  engine.put(panels[0], new Uint8Array(a.buffer), { rows: m, columns: k, dtype: "f32" });
  engine.put(panels[1], new Uint8Array(bt.buffer), { rows: n, columns: k, dtype: "f32" });
  try {
    const { bytes } = await engine.compute(tileOf(m, n, k, panels[0], panels[1], accuracy));
    return new Float32Array(bytes.buffer, bytes.byteOffset, m * n);
  } finally {
    engine.drop(panels);
  }
}

/** Rejects with an Error that names the first wrong product. @param {Engine} engine */
export async function prove(engine) {
  for (const [index, [m, n, k]] of SHAPES.entries()) {
    const given = sample(m, n, k, index + 1, SCALES[index % SCALES.length]);
    const wrong = fault(given, await product(engine, given, "small"));
    if (wrong) throw new Error(`wrong product ${wrong}`);
  }
  await proveTiles(engine);
}

/** The same for a product of many blocks, either accuracy. @param {Engine} engine @param {number} flops as measured */
export async function proveLarge(engine, flops) {
  if (flops < LARGE_FLOPS_MIN) return;
  const given = sample(LARGE[0], LARGE[1], LARGE[2], 50);
  for (const accuracy of /** @type {Accuracy[]} */ (["rowwise", "normwise"])) {
    const wrong = rowFault(given, await product(engine, given, "large", accuracy), accuracy);
    if (wrong) throw new Error(`wrong product (${accuracy}) ${wrong}`);
  }
}

/**
 * FLOP per second with everything in it: operands up, kernel, product down, as many tiles in flight as the engine likes.
 * The best round of about a sixth of a second.
 * @param {Engine} engine
 */
export async function speed(engine) {
  const start = performance.now();
  let best = 0;
  for (let n = 64; ;) {
    const given = sample(n, n, n, 7);
    const before = performance.now();
    await Promise.all(Array.from({ length: engine.depth }, (_, index) => product(engine, given, `speed${index}`)));
    const now = performance.now(), ms = Math.max(now - before, 0.01);
    best = Math.max(best, (engine.depth * 2 * n ** 3) / (ms / 1000));
    if (now - start > SPEED_MS) return best;
    if (ms < SPEED_ROUND_MS && n < SPEED_N_MAX) n *= 2;
  }
}
