/**
 * Known answers for tiles that are more than one product of two whole panels: sums of terms, operands that lie by k, parts
 * of panels, batches, and every element type of panels and results. Each is small; together they ask for each way in which
 * a lease can read a panel (check.js proves an engine with them).
 */
import { place, rounded, SCALE_BLOCK } from "./elements.js";
import { stream } from "./known_answers.js";

/**
 * @typedef {import("../../../types/engine.js").Engine} Engine
 * @typedef {import("../../../types/engine.js").Dtype} Dtype
 * @typedef {import("../../../types/engine.js").PanelForm} PanelForm
 * @typedef {import("../../../types/engine.js").TileWork} TileWork
 * @typedef {{ form: PanelForm, bytes: Uint8Array<ArrayBuffer>, values: Float64Array }} Made values: as they are, in float64
 */

const UNIT_ROUNDOFF = 2 ** -24;
const RESULT_UNITS = { f32: 0, bf16: 2 ** -8, f16: 2 ** -11 };
const [ROWS, COLUMNS] = [150, 140]; // two blocks of scales to a row

/** @typedef {{ batch: number, aByK: boolean, bByK: boolean, dtypes: [Dtype, Dtype], dtype: "f32"|"bf16"|"f16", ks: number[], row: number, column: number }} Case */
/** @type {Case[]} */
const CASES = [
  { batch: 1, aByK: false, bByK: true, dtypes: ["f32", "f32"], dtype: "f32", ks: [129, 7], row: 3, column: 2 },
  { batch: 1, aByK: true, bByK: true, dtypes: ["f32", "f32"], dtype: "bf16", ks: [33, 64], row: 5, column: 0 },
  { batch: 3, aByK: true, bByK: false, dtypes: ["bf16", "bf16"], dtype: "bf16", ks: [40], row: 1, column: 9 },
  { batch: 2, aByK: false, bByK: false, dtypes: ["f16", "f16"], dtype: "f16", ks: [131], row: 2, column: 1 },
  { batch: 1, aByK: false, bByK: false, dtypes: ["i8", "i8"], dtype: "bf16", ks: [140, 140], row: 4, column: 0 },
  { batch: 1, aByK: false, bByK: true, dtypes: ["i8", "i8"], dtype: "f32", ks: [70], row: 7, column: 3 },
];
const [M, N] = [19, 21];

/** @param {Dtype} dtype @param {number} seed @returns {Made} */
export function panel(dtype, seed, rows = ROWS, columns = COLUMNS) {
  const next = stream(seed), form = { rows, columns, dtype };
  if (dtype === "i8") {
    const elements = Int8Array.from({ length: rows * columns }, () => (next() % 255) - 127);
    const blocks = Math.ceil(columns / SCALE_BLOCK);
    const scales = Float32Array.from({ length: rows * blocks }, () => (1 + (next() % 128)) / 2 ** 14);
    const bytes = new Uint8Array(Math.ceil(elements.length / 4) * 4 + scales.byteLength);
    bytes.set(new Uint8Array(elements.buffer));
    bytes.set(new Uint8Array(scales.buffer), bytes.length - scales.byteLength);
    const scale = (/** @type {number} */ at) => scales[Math.floor(at / columns) * blocks + Math.floor((at % columns) / SCALE_BLOCK)];
    return { form, bytes, values: Float64Array.from(elements, (q, at) => q * scale(at)) };
  }
  // Numbers of 8 significant bits are what they are in each type.
  const floats = Float32Array.from({ length: rows * columns }, () => ((next() % 511) - 255) / 256);
  return { form, bytes: rounded(floats, dtype), values: Float64Array.from(floats) };
}

/**
 * What is wrong with a tile's result, or "": each element against float64, within float32's worst case and its rounding.
 * @param {TileWork} work @param {Map<string, Made>} panels @param {Uint8Array} bytes
 */
export function tileFault(work, panels, bytes) {
  const { batch, m, n, terms, dtype } = work;
  const got = widened(bytes, dtype);
  if (got.length !== batch * m * n) return `${bytes.length} bytes for ${batch} x ${m} x ${n} ${dtype}`;
  const depth = terms.reduce((sum, { k }) => sum + k, 0);
  for (let at = 0; at < got.length; at += 1) {
    const z = Math.floor(at / (m * n)), i = Math.floor(at / n) % m, j = at % n;
    let sum = 0, size = 0;
    for (const term of terms) {
      const made = /** @type {const} */ (["a", "b"]).map((side) => /** @type {Made} */ (panels.get(term[side])));
      const [a, b] = made.map(({ form }, number) => place(work, term, number ? "b" : "a", form));
      for (let l = 0; l < term.k; l += 1) {
        const product = made[0].values[a.base + z * a.entry + i * a.across + l * a.along]
          * made[1].values[b.base + z * b.entry + j * b.across + l * b.along];
        sum += product;
        size += Math.abs(product);
      }
    }
    const allowed = (depth + 4) * UNIT_ROUNDOFF * size + RESULT_UNITS[dtype] * Math.abs(sum) * 1.001;
    if (!(Math.abs(got[at] - sum) <= allowed)) return `[${z},${i},${j}]: ${got[at]}, expected ${sum}`;
  }
  return "";
}

/** @param {Uint8Array} bytes @param {"f32"|"bf16"|"f16"} dtype @returns {Float32Array} */
function widened(bytes, dtype) {
  if (dtype === "f32") return new Float32Array(bytes.buffer, bytes.byteOffset, bytes.length / 4);
  const halves = new Uint16Array(bytes.buffer, bytes.byteOffset, bytes.length / 2);
  if (dtype === "bf16") return new Float32Array(Uint32Array.from(halves, (half) => half << 16).buffer);
  return Float32Array.from(halves, (half) => {
    const sign = half >> 15 ? -1 : 1, exponent = (half >> 10) & 31, fraction = half & 1023;
    return sign * (exponent ? (1024 + fraction) * 2 ** (exponent - 25) : fraction * 2 ** -24);
  });
}

/** Rejects with an Error that names the first wrong tile. @param {Engine} engine */
export async function proveTiles(engine) {
  for (const [number, { batch, aByK, bByK, dtypes, dtype, ks, row, column }] of CASES.entries()) {
    /** @type {Map<string, Made>} */
    const panels = new Map();
    const terms = ks.map((k, index) => {
      const [a, b] = dtypes.map((each, side) => {
        const id = `known.${number}.${index}.${side}`;
        panels.set(id, panel(each, 1 + 8 * number + 2 * index + side));
        return id;
      });
      return { k, a, b, aRow: row, aColumn: column, bRow: row + index, bColumn: column };
    });
    const work = { batch, m: M, n: N, aByK, bByK, terms, dtype, accuracy: /** @type {const} */ ("rowwise") };
    panels.forEach(({ bytes, form }, id) => engine.put(id, bytes.slice(), form));
    try {
      const wrong = tileFault(work, panels, (await engine.compute(work)).bytes);
      if (wrong) throw new Error(`wrong tile ${number} (${dtypes[0]} to ${dtype}) ${wrong}`);
    } finally {
      engine.drop([...panels.keys()]);
    }
  }
}
