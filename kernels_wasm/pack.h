/* Packing: lines of A or B copied into strips, in exactly the order in which the innermost loop reads them.
 *
 * A line is a row of A or a column of B, with k elements. A strip holds `width` lines abreast (MR of A, NR of B):
 *
 *   strip of A, width 6                     strip of B, width 8
 *   | a00 a10 a20 a30 a40 a50 |  l = 0      | b00 b01 b02 b03 b04 b05 b06 b07 |  l = 0
 *   | a01 a11 a21 a31 a41 a51 |  l = 1      | b10 b11 ...                     |  l = 1
 *
 * bf16, f16 and i8 become float32 on the way, so the innermost loop knows one type only and narrow operands cost no more
 * than wide ones. bf16 and f16 are exact, subnormals, infinities and NaN included; i8 is multiplied by its scale, one for
 * each line and block of 128 along k. A strip with fewer than `width` lines left repeats its last one: nothing that comes
 * of it is stored. k is never padded, so a NaN or an infinity reaches exactly the elements that depend on it.
 */
#ifndef PACK_H
#define PACK_H

#include "block.h"

enum { F32, BF16, F16, I8, SCALE_BLOCK = 128 };

typedef struct {
  const u8 *data;
  u32 across, along; /* elements from a line to the next, and from an element of a line to the next */
  u32 type;
  const float *scales; /* of i8: scales[line * scale_blocks + l / SCALE_BLOCK] */
  u32 scale_blocks;
} Operand;

static INLINE u32 size_of(u32 type) { return type == F32 ? 4 : type == I8 ? 1 : 2; }

static INLINE float float_of(u32 bits) {
  union {
    u32 bits;
    float value;
  } as = {bits};
  return as.value;
}

/* f16 to f32 in integers, because a CPU takes a hundred cycles for each subnormal operand: exponents move from bias 15 to
 * 127, the largest (infinity, NaN) to 255, and a subnormal is what lies beyond 2^-14. */
static INLINE float from_f16(u32 half) {
  u32 sign = (half & 0x8000) << 16, bits = (half & 0x7fff) << 13;
  float size = float_of(bits + (112 << 23));
  if (bits >= 31u << 23) size = float_of(bits + (224u << 23));
  if (bits < 1u << 23) size = float_of(bits + (113 << 23)) - float_of(113 << 23);
  return sign ? -size : size;
}

static INLINE float read1(u32 type, const u8 *at, float scale) {
  if (type == F32) return *(const float *)at;
  if (type == BF16) return float_of((u32) * (const u16 *)at << 16);
  if (type == F16) return from_f16(*(const u16 *)at);
  return (float)*(const signed char *)at * scale;
}

#ifdef __wasm_simd128__
static INLINE v128_t from_f16x4(v128_t half) {
  v128_t sign = wasm_i32x4_shl(wasm_v128_and(half, wasm_i32x4_const_splat(0x8000)), 16);
  v128_t bits = wasm_i32x4_shl(wasm_v128_and(half, wasm_i32x4_const_splat(0x7fff)), 13);
  v128_t size = wasm_i32x4_add(bits, wasm_i32x4_const_splat(112 << 23));
  v128_t large = wasm_i32x4_ge(bits, wasm_i32x4_const_splat(31 << 23));
  size = wasm_i32x4_add(size, wasm_v128_and(large, wasm_i32x4_const_splat(112 << 23)));
  v128_t least = wasm_i32x4_const_splat(113 << 23);
  v128_t small = wasm_f32x4_sub(wasm_i32x4_add(bits, least), least);
  size = wasm_v128_bitselect(small, size, wasm_i32x4_lt(bits, wasm_i32x4_const_splat(1 << 23)));
  return wasm_v128_or(size, sign);
}

static INLINE v128_t read4(u32 type, const u8 *at, float scale) {
  if (type == F32) return wasm_v128_load(at);
  if (type == BF16) return wasm_i32x4_shl(wasm_u32x4_load16x4(at), 16);
  if (type == F16) return from_f16x4(wasm_u32x4_load16x4(at));
  v128_t bytes = wasm_v128_load32_zero(at);
  v128_t whole = wasm_i32x4_extend_low_i16x8(wasm_i16x8_extend_low_i8x16(bytes));
  return wasm_f32x4_mul(wasm_f32x4_convert_i32x4(whole), wasm_f32x4_splat(scale));
}

/* Four elements of each of `count` lines, 4 or fewer, to four places `width` apart. */
static INLINE void transpose(u32 count, const v128_t x[4], float *dst, u32 width) {
  if (count == 1) {
    wasm_v128_store32_lane(dst, x[0], 0);
    wasm_v128_store32_lane(dst + width, x[0], 1);
    wasm_v128_store32_lane(dst + 2 * width, x[0], 2);
    wasm_v128_store32_lane(dst + 3 * width, x[0], 3);
    return;
  }
  v128_t t0 = wasm_i32x4_shuffle(x[0], x[1], 0, 4, 1, 5), t1 = wasm_i32x4_shuffle(x[0], x[1], 2, 6, 3, 7);
  if (count == 2) {
    wasm_v128_store64_lane(dst, t0, 0);
    wasm_v128_store64_lane(dst + width, t0, 1);
    wasm_v128_store64_lane(dst + 2 * width, t1, 0);
    wasm_v128_store64_lane(dst + 3 * width, t1, 1);
    return;
  }
  v128_t t2 = wasm_i32x4_shuffle(x[2], x[3], 0, 4, 1, 5), t3 = wasm_i32x4_shuffle(x[2], x[3], 2, 6, 3, 7);
  wasm_v128_store(dst, wasm_i64x2_shuffle(t0, t2, 0, 2));
  wasm_v128_store(dst + width, wasm_i64x2_shuffle(t0, t2, 1, 3));
  wasm_v128_store(dst + 2 * width, wasm_i64x2_shuffle(t1, t3, 0, 2));
  wasm_v128_store(dst + 3 * width, wasm_i64x2_shuffle(t1, t3, 1, 3));
}

/* Lines that are contiguous in memory, which is how panels arrive: four by four through registers. Returns how far. */
static INLINE u32 pack_contiguous(u32 type, u32 width, const u8 *const line[], const float scale[], u32 l, u32 end,
                                  float *restrict dst) {
  for (; l + 4 <= end; l += 4) {
#pragma clang loop unroll(full)
    for (u32 i = 0; i < width; i += 4) {
      u32 count = width - i < 4 ? width - i : 4;
      v128_t x[4] = {};
#pragma clang loop unroll(full)
      for (u32 j = 0; j < count; ++j) x[j] = read4(type, line[i + j] + l * size_of(type), scale[i + j]);
      transpose(count, x, dst + l * width + i, width);
    }
  }
  return l;
}
#endif

/* One strip's elements l .. end - 1. `line[i]` points to element 0, `scale[i]` holds for all of them. */
static INLINE void pack_run(u32 type, u32 width, const u8 *const line[], const float scale[], u32 along, u32 l, u32 end,
                            float *restrict dst) {
#ifdef __wasm_simd128__
  if (along == 1) l = pack_contiguous(type, width, line, scale, l, end, dst);
#endif
  for (; l < end; ++l)
    for (u32 i = 0; i < width; ++i) dst[l * width + i] = read1(type, line[i] + l * along * size_of(type), scale[i]);
}

static INLINE void pack_typed(u32 type, u32 width, const Operand *from, u32 first, u32 lines, u32 start, u32 k,
                              float *restrict dst) {
  for (u32 strip = 0; strip < lines; strip += width, dst += k * width) {
    const u8 *line[NR];
    const float *scales[NR];
    float scale[NR] = {};
    for (u32 i = 0; i < width; ++i) {
      u32 at = first + min_u32(strip + i, lines - 1);
      line[i] = from->data + (at * from->across + start * from->along) * size_of(type);
      scales[i] = from->scales + at * from->scale_blocks;
    }
    for (u32 l = 0, end = k; l < k; l = end) {
      if (type == I8) {
        u32 number = (start + l) / SCALE_BLOCK;
        for (u32 i = 0; i < width; ++i) scale[i] = scales[i][number];
        end = min_u32(k, (number + 1) * SCALE_BLOCK - start);
      }
      pack_run(type, width, line, scale, from->along, l, end, dst);
    }
  }
}

/* Lines first .. first + lines - 1, their elements start .. start + k - 1, into strips of `width` lines, a constant of at
 * most NR. `start` is a multiple of 4. */
static INLINE void pack(u32 width, const Operand *from, u32 first, u32 lines, u32 start, u32 k, float *restrict dst) {
  switch (from->type) {
    case F32: return pack_typed(F32, width, from, first, lines, start, k, dst);
    case BF16: return pack_typed(BF16, width, from, first, lines, start, k, dst);
    case F16: return pack_typed(F16, width, from, first, lines, start, k, dst);
    default: return pack_typed(I8, width, from, first, lines, start, k, dst);
  }
}

#endif
