/**
 * Matrices for the suite: reproducible from their description, as bytes in any type and layout, and as exact float64.
 *
 * What lies around the matrix (before a view, between its lines, behind its last element) is filled with 0xff: NaN in the
 * float types, -1 in i8, so that an engine that reads where it should not spoils its product.
 *
 * @typedef {{ line: number, l: number, value: "nan"|"inf"|"-inf" }} Special
 * @typedef {{ dtype: "f32"|"bf16"|"f16"|"i8", layout: "along"|"across"|"both", gap: number, offset: number, scale: number,
 *   uneven: boolean, whole?: boolean }} Description offset and gap in elements; uneven: lines of very different size; whole:
 *   f32 only, whole numbers up to 4, whose sums have no rounding
 */
export const I8_BLOCK = 128;
const SIZES = { f32: 4, bf16: 2, f16: 2, i8: 1 };
const UNEVEN_BITS = 10;
const SPECIALS = {
  f32: { nan: 0x7fc00000, inf: 0x7f800000, "-inf": 0xff800000 },
  bf16: { nan: 0x7fc0, inf: 0x7f80, "-inf": 0xff80 },
  f16: { nan: 0x7e00, inf: 0x7c00, "-inf": 0xfc00 },
};

const word = new DataView(new ArrayBuffer(4));

/** Uniform 32-bit numbers. @param {number} seed */
export function stream(seed) {
  let state = seed | 0;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let x = Math.imul(state ^ (state >>> 15), state | 1);
    x = (x + Math.imul(x ^ (x >>> 7), x | 61)) ^ x;
    return (x ^ (x >>> 14)) >>> 0;
  };
}

/** The value of bits of a type. @param {"f32"|"bf16"|"f16"} dtype @param {number} bits */
function decoded(dtype, bits) {
  if (dtype === "f16") {
    const sign = bits >> 15 ? -1 : 1, exponent = (bits >> 10) & 31, fraction = bits & 1023;
    if (exponent === 31) return fraction ? NaN : sign * Infinity;
    return sign * (exponent ? (1024 + fraction) * 2 ** (exponent - 25) : fraction * 2 ** -24);
  }
  word.setUint32(0, dtype === "bf16" ? bits << 16 : bits);
  return word.getFloat32(0);
}

/** Bits of a random element: about `size` large, one in 16 of them zero. f16 covers its own range, subnormals included. */
function randomBits(dtype, next, size, whole) {
  const random = next();
  if (whole) {
    word.setFloat32(0, (random % 9) - 4);
    return word.getUint32(0);
  }
  if (random % 16 === 0) return 0;
  if (dtype === "f16") return ((random >>> 31) << 15) | ((random >>> 8) % (31 << 10));
  word.setFloat32(0, (random / 2 ** 31 - 1) * size);
  return dtype === "bf16" ? word.getUint16(0) : word.getUint32(0);
}

/** Float32 numbers of about `size`, a view into a larger buffer. @param {number} count */
export function floats(count, seed, size = 1) {
  const next = stream(seed);
  const values = new Float32Array(count + 8).fill(NaN).subarray(4, 4 + count);
  for (let i = 0; i < count; i += 1) values[i] = (next() / 2 ** 31 - 1) * size;
  return values;
}

/** @param {Description["layout"]} layout @returns {[number, number]} across, along */
function strides(layout, lines, k, gap) {
  if (layout === "along") return [k + gap, 1];
  if (layout === "across") return [1, lines + gap];
  return [k * (2 + gap) + gap, 2 + gap];
}

/**
 * `lines` lines of k elements: the operand as an engine takes it, and its values in float64, line after line.
 * @param {Description} description @param {Special[]} specials
 */
export function matrix(lines, k, description, seed, specials = []) {
  const { dtype, layout, gap, offset, scale, uneven, whole } = description;
  const next = stream(seed), size = SIZES[dtype], blocks = Math.ceil(k / I8_BLOCK);
  const [across, along] = strides(layout, lines, k, gap);
  const length = (lines - 1) * across + (k - 1) * along + 1;
  const bytes = new Uint8Array((offset + length + 3) * size).fill(0xff).subarray(offset * size, (offset + length) * size);
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const exact = new Float64Array(lines * k);
  const scales = dtype === "i8" ? floats(lines * blocks, seed + 1) : undefined;
  for (let line = 0; line < lines; line += 1) {
    const sized = scale * (uneven ? 2 ** ((next() % (2 * UNEVEN_BITS + 1)) - UNEVEN_BITS) : 1);
    for (let block = 0; scales && block < blocks; block += 1) scales[line * blocks + block] = ((1 + next() / 2 ** 32) * sized) / 127;
    for (let l = 0; l < k; l += 1) {
      const at = line * across + l * along;
      if (scales) {
        view.setInt8(at, (next() % 256) - 128);
        exact[line * k + l] = view.getInt8(at) * scales[line * blocks + Math.floor(l / I8_BLOCK)];
        continue;
      }
      const special = specials.find((each) => each.line === line && each.l === l);
      const bits = special ? SPECIALS[dtype][special.value] : randomBits(dtype, next, sized, whole);
      if (size === 4) view.setUint32(at * 4, bits, true);
      else view.setUint16(at * 2, bits, true);
      exact[line * k + l] = decoded(dtype, bits);
    }
  }
  return { operand: { bytes, dtype, across, along, scales }, exact };
}
