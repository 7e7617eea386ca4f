/**
 * The wire's narrower elements in JavaScript: results rounded to them, panels widened from them, and where in a panel a
 * term's operand lies. Rounding is to nearest, ties to even; NaN stays NaN, what is too large becomes infinity.
 */

/**
 * @typedef {import("../../../types/engine.js").Dtype} Dtype
 * @typedef {import("../../../types/engine.js").PanelForm} PanelForm
 * @typedef {import("../../../types/engine.js").TileWork} TileWork
 * @typedef {import("../../../types/engine.js").Term} Term
 * @typedef {{ id: string, base: number, across: number, along: number, entry: number, row: number, column: number }} Place
 *   all in elements of the panel: element l of line i of entry z is at base + z * entry + i * across + l * along
 */

export const SCALE_BLOCK = 128;

/** Where a term's operand lies in its panel. @param {TileWork} work @param {Term} term @param {"a"|"b"} side @param {PanelForm} form @returns {Place} */
export function place({ m, n, aByK, bByK }, { k, a, b, aRow, aColumn, bRow, bColumn }, side, { columns }) {
  const [id, byK, lines, row, column] = side === "a" ? [a, aByK, m, aRow, aColumn] : [b, bByK, n, bRow, bColumn];
  const [across, along, height] = byK ? [1, columns, k] : [columns, 1, lines];
  return { id, base: row * columns + column, across, along, entry: height * columns, row, column };
}

/** The sum of its terms' lengths. @param {TileWork} work */
export function depth({ terms }) {
  return terms.reduce((sum, { k }) => sum + k, 0);
}

/** An i8 panel's two parts: elements, and scales of each row. @param {Uint8Array<ArrayBuffer>} bytes @param {PanelForm} form */
export function i8Parts(bytes, { rows, columns }) {
  const at = bytes.byteOffset, from = at + Math.ceil((rows * columns) / 4) * 4;
  const elements = new Int8Array(bytes.buffer, at, rows * columns);
  return { elements, scales: new Float32Array(bytes.buffer, from, rows * Math.ceil(columns / SCALE_BLOCK)) };
}

/**
 * Rows [row, row + count) of an i8 panel as float32, all of their columns.
 * @param {Int8Array} elements @param {Float32Array} scales @param {number} columns @param {number} row @param {number} count
 * @returns {Float32Array<ArrayBuffer>}
 */
export function widenI8(elements, scales, columns, row, count) {
  const wide = new Float32Array(count * columns), blocks = Math.ceil(columns / SCALE_BLOCK);
  for (let i = 0, at = 0; i < count; i += 1) {
    for (let block = 0; block < blocks; block += 1) {
      const scale = scales[(row + i) * blocks + block];
      const end = i * columns + Math.min(columns, (block + 1) * SCALE_BLOCK);
      for (; at < end; at += 1) wide[at] = elements[row * columns + at] * scale;
    }
  }
  return wide;
}

/** A result's bytes, in a buffer of their own. @param {Float32Array} values @param {"f32"|"bf16"|"f16"} dtype @returns {Uint8Array<ArrayBuffer>} */
export function rounded(values, dtype) {
  if (dtype === "f32") return new Uint8Array(values.slice().buffer);
  const bits = new Uint32Array(values.buffer, values.byteOffset, values.length);
  return new Uint8Array((dtype === "bf16" ? bfloat16(bits) : float16(bits)).buffer);
}

/** @param {Uint32Array} bits of float32 */
function bfloat16(bits) {
  const halves = new Uint16Array(bits.length);
  for (let i = 0; i < bits.length; i += 1) {
    const x = bits[i];
    halves[i] = (x & 0x7fffffff) > 0x7f800000 ? (x >>> 16) | 0x40 : (x + 0x7fff + ((x >>> 16) & 1)) >>> 16;
  }
  return halves;
}

/** @param {Uint32Array} bits of float32 */
function float16(bits) {
  const halves = new Uint16Array(bits.length);
  for (let i = 0; i < bits.length; i += 1) {
    const x = bits[i], sign = (x >>> 16) & 0x8000, size = x & 0x7fffffff;
    let half;
    if (size > 0x7f800000) half = 0x7e00; // NaN
    else if (size >= 0x477ff000) half = 0x7c00; // from half a unit beyond the largest on
    else if (size >= 0x38800000) half = (size - 0x38000000 + 0xfff + ((size >>> 13) & 1)) >>> 13;
    else if (size >= 0x33000000) { // subnormal
      const shift = 126 - (size >>> 23), fraction = (size & 0x7fffff) | 0x800000;
      const down = fraction >>> shift, rest = fraction & ((1 << shift) - 1), middle = 1 << (shift - 1);
      half = down + (rest > middle || (rest === middle && down & 1) ? 1 : 0);
    } else half = 0;
    halves[i] = sign | half;
  }
  return halves;
}
