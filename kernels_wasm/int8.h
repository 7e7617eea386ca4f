/* Products of two int8 operands: integer dot products, scaled to float32 once every 128 elements of k.
 *
 *   C[i,j] (+)= sum over blocks of 128 along k of  scale_a[i,block] scale_b[j,block] * (sum of a[i,l] b[j,l], in int32)
 *
 * The integers are exact (128 products of at most 2^14 stay below 2^24, so their float32 is exact too) and the float
 * part has one order, with nothing fused: every build gives the same bits. All of -128 .. 127 is right.
 *
 * Operands are packed as gemm.c packs them, in units of 32 bits instead of floats: 4 elements along k, or 2 widened to
 * 16 bits. The register block multiplies one unit of a line of A with units of 4 lines of B in one instruction:
 *
 *   quads   i32x4.relaxed_dot_i8x16_i7x16_add, 16 products; relaxed build only
 *   pairs   i32x4.dot_i16x8_s, 8 products and an addition
 *
 * What quads do with 8 bits in the second operand is the CPU's choice, which a program sees as fixed: ARM multiplies as
 * signed, x86 with VNNI as unsigned, both exactly; x86 without adds pairs in 16 bits and saturates. So each call asks
 * first (choose()). Signed: B as it is. Unsigned: B + 128, and every sum begins at -128 times the sum of A's line. Else
 * pairs, which are also the faster there. The scalar build has plain loops and packs nothing.
 *
 * Left out: saturation of any kind, zero points, blocks other than 128.
 */
#ifndef INT8_H
#define INT8_H

#include "pack.h"

enum { CHUNK = 512, CHUNK_BLOCKS = CHUNK / SCALE_BLOCK };

#ifdef __wasm_simd128__
typedef enum { PAIRS, SIGNED_QUADS, UNSIGNED_QUADS } Way;

/* Lines packed for one chunk: strips of units; for each strip and block, `width` scales and `width` first sums. */
typedef struct {
  u8 *units;
  float *scales;
  int *first;
} Packed;

#ifdef __wasm_relaxed_simd__
enum { PAIR_ROWS = 3 }; /* all six would need more registers than there are */
#define PAIR_LIST(DO) DO(0) DO(1) DO(2)
static Way choose(void) {
  v128_t a = wasm_i8x16_make(127, 127, 127, 127, -128, -128, -128, -128, 127, -128, 3, 5, -7, 127, -128, 1);
  v128_t b = wasm_i8x16_make(-1, -1, -1, -1, -1, -1, -1, -1, -128, 127, -77, -1, 2, -128, -127, 0);
  PIN(a); /* not for the compiler to decide */
  v128_t got = wasm_i32x4_relaxed_dot_i8x16_i7x16_add(a, b, wasm_i32x4_const_splat(1 << 20));
  v128_t first = wasm_i32x4_const_splat(1 << 20);
  v128_t is_signed = wasm_i32x4_const(-508, 512, -127 * 128 - 128 * 127 - 236, -14 - 127 * 128 + 128 * 127);
  v128_t is_unsigned = wasm_i32x4_const(127 * 1020, -128 * 1020, 127 * 128 - 128 * 127 + 3 * 179 + 5 * 255,
                                        -14 + 127 * 128 - 128 * 129);
  if (wasm_i32x4_all_true(wasm_i32x4_eq(got, wasm_i32x4_add(first, is_signed)))) return SIGNED_QUADS;
  if (wasm_i32x4_all_true(wasm_i32x4_eq(got, wasm_i32x4_add(first, is_unsigned)))) return UNSIGNED_QUADS;
  return PAIRS;
}
#else
enum { PAIR_ROWS = MR };
#define PAIR_LIST(DO) ROWS(DO)
static Way choose(void) { return PAIRS; }
#endif

/* `length` elements of a line as 16 i8 abreast, zeros up to a multiple of 16: in place, or copied to `aside`. */
static const signed char *line_at(const Operand *from, u32 line, u32 start, u32 length, signed char *aside) {
  const signed char *at = (const signed char *)from->data + line * from->across + start * from->along;
  if (from->along == 1 && length % 16 == 0) return at;
  for (u32 l = 0; l < SCALE_BLOCK; ++l) aside[l] = l < length ? at[l * from->along] : 0;
  return aside;
}

static int sum_of(const signed char *line, u32 length) {
  v128_t sum = wasm_i32x4_const_splat(0);
  for (u32 l = 0; l < length; l += 16) {
    v128_t halves = wasm_i16x8_extadd_pairwise_i8x16(wasm_v128_load(line + l));
    sum = wasm_i32x4_add(sum, wasm_i32x4_extadd_pairwise_i16x8(halves));
  }
  return wasm_i32x4_extract_lane(sum, 0) + wasm_i32x4_extract_lane(sum, 1) + wasm_i32x4_extract_lane(sum, 2) +
         wasm_i32x4_extract_lane(sum, 3);
}

/* One block of one strip, lines padded to `length`, a multiple of 16: units in the order of the inner loop. */
static INLINE void pack_block(u32 width, const signed char *const line[], u32 length, u32 pairs, v128_t flip,
                              float *dst) {
  u32 taken = pairs ? 8 : 16;
  for (u32 l = 0; l < length; l += taken, dst += 4 * width) {
#pragma clang loop unroll(full)
    for (u32 i = 0; i < width; i += 4) {
      u32 count = width - i < 4 ? width - i : 4;
      v128_t x[4] = {};
#pragma clang loop unroll(full)
      for (u32 j = 0; j < count; ++j)
        x[j] = pairs ? wasm_i16x8_load8x8(line[i + j] + l) : wasm_v128_xor(wasm_v128_load(line[i + j] + l), flip);
      transpose(count, x, dst + i, width);
    }
  }
}

static INLINE void pack_lines(u32 width, const Operand *from, u32 first, u32 lines, u32 start, u32 k, Way way, u32 is_b,
                              Packed to) {
  v128_t flip = wasm_i8x16_splat(is_b && way == UNSIGNED_QUADS ? -128 : 0);
  u32 unit_bytes = way == PAIRS ? 2 : 1;
  signed char aside[NR][SCALE_BLOCK];
  for (u32 strip = 0; strip < lines; strip += width)
    for (u32 l = 0; l < k; l += SCALE_BLOCK, to.scales += width, to.first += width) {
      u32 length = min_u32(SCALE_BLOCK, k - l), padded = (length + 15) & ~15u;
      const signed char *line[NR];
      for (u32 i = 0; i < width; ++i) {
        u32 at = first + min_u32(strip + i, lines - 1);
        line[i] = line_at(from, at, start + l, length, aside[i]);
        to.scales[i] = from->scales[at * from->scale_blocks + (start + l) / SCALE_BLOCK];
        if (!is_b) to.first[i] = way == UNSIGNED_QUADS ? -128 * sum_of(line[i], padded) : 0;
      }
      if (way == PAIRS)
        pack_block(width, line, padded, 1, flip, (float *)to.units);
      else
        pack_block(width, line, padded, 0, flip, (float *)to.units);
      to.units += padded * width * unit_bytes;
    }
}

static void pack_rows(const Operand *from, u32 first, u32 lines, u32 start, u32 k, Way way, Packed to) {
  pack_lines(MR, from, first, lines, start, k, way, 0, to);
}

static void pack_columns(const Operand *from, u32 first, u32 lines, u32 start, u32 k, Way way, Packed to) {
  pack_lines(NR, from, first, lines, start, k, way, 1, to);
}

#define BEGIN(i) v128_t sum##i##0 = wasm_v128_load32_splat(first + i), sum##i##1 = sum##i##0;
#define DOT(i)                                     \
  {                                                \
    v128_t x = wasm_v128_load32_splat(a + 4 * i);  \
    sum##i##0 = dot(x, b0, sum##i##0);             \
    sum##i##1 = dot(x, b1, sum##i##1);             \
    PIN(sum##i##0);                                \
    PIN(sum##i##1);                                \
  }
#define SCALE(i)                                                                                     \
  {                                                                                                  \
    v128_t scale = wasm_v128_load32_splat(a_scales + i);                                             \
    v128_t x0 = wasm_f32x4_mul(wasm_f32x4_convert_i32x4(sum##i##0), wasm_f32x4_mul(scale, s0));      \
    v128_t x1 = wasm_f32x4_mul(wasm_f32x4_convert_i32x4(sum##i##1), wasm_f32x4_mul(scale, s1));      \
    float *at = out + i * NR;                                                                        \
    wasm_v128_store(at, fresh ? x0 : wasm_f32x4_add(wasm_v128_load(at), x0));                        \
    wasm_v128_store(at + 4, fresh ? x1 : wasm_f32x4_add(wasm_v128_load(at + 4), x1));                \
  }
/* One block along k of some rows: out (+)= scaled sums. `a` and `b` are at the block's units. */
#define DEFINE_BLOCK(name, LIST, MULTIPLY)                                                                    \
  static INLINE v128_t name##_dot(v128_t x, v128_t y, v128_t sum) { return MULTIPLY; }                        \
  static void name(u32 steps, const u8 *restrict a, const u8 *restrict b, const int *first, const float *a_scales,\
                   const float *b_scales, float *restrict out, u32 fresh) {                                   \
    LIST(BEGIN)                                                                                               \
    for (const u8 *end = b + steps * 4 * NR; b != end; a += 4 * MR, b += 4 * NR) {                            \
      v128_t b0 = wasm_v128_load(b), b1 = wasm_v128_load(b + 16);                                             \
      LIST(DOT)                                                                                               \
    }                                                                                                         \
    v128_t s0 = wasm_v128_load(b_scales), s1 = wasm_v128_load(b_scales + 4);                                  \
    LIST(SCALE)                                                                                               \
  }
#define dot pairs_dot
DEFINE_BLOCK(pairs, PAIR_LIST, wasm_i32x4_add(sum, wasm_i32x4_dot_i16x8(x, y)))
#undef dot
#ifdef __wasm_relaxed_simd__
#define dot quads_dot
DEFINE_BLOCK(quads, ROWS, wasm_i32x4_relaxed_dot_i8x16_i7x16_add(x, y, sum))
#undef dot
#endif

/* One register block over a whole chunk: MR x NR floats in `out`. */
static void chunk_block(u32 k, Way way, Packed a, Packed b, float *restrict out) {
  for (u32 l = 0; l < k; l += SCALE_BLOCK) {
    u32 padded = (min_u32(SCALE_BLOCK, k - l) + 15) & ~15u;
    u32 steps = way == PAIRS ? padded / 2 : padded / 4;
#ifdef __wasm_relaxed_simd__
    if (way != PAIRS)
      quads(steps, a.units, b.units, a.first, a.scales, b.scales, out, l == 0);
    else
#endif
      for (u32 i = 0; i < MR; i += PAIR_ROWS)
        pairs(steps, a.units + 4 * i, b.units, a.first + i, a.scales + i, b.scales, out + i * NR, l == 0);
    a.units += steps * 4 * MR, a.first += MR, a.scales += MR;
    b.units += steps * 4 * NR, b.scales += NR;
  }
}

static Packed strip_of(Packed packed, u32 line, u32 unit_bytes, u32 padded, u32 blocks) {
  u8 *units = packed.units + line * unit_bytes * padded;
  return (Packed){units, packed.scales + line * blocks, packed.first + line * blocks};
}

/* Bytes that gemm_int8() needs at `scratch`, 16-byte aligned. */
static u32 gemm_int8_scratch_bytes(void) {
  return (MC + NC) * (CHUNK * 2 + CHUNK_BLOCKS * 8) + MR * NR * sizeof(float);
}

/* As gemm(), where both operands are i8. */
static void gemm_int8(u32 m, u32 n, u32 k, const Operand *a, const Operand *b, float *c, u32 c_row, u32 accumulate,
                      const float *bias, u8 *scratch) {
  Way way = choose();
  float *a_scales = (float *)(scratch + (MC + NC) * CHUNK * 2), *b_scales = a_scales + MC * CHUNK_BLOCKS;
  int *a_first = (int *)(b_scales + NC * CHUNK_BLOCKS), *b_first = a_first + MC * CHUNK_BLOCKS;
  float *out = (float *)(b_first + NC * CHUNK_BLOCKS);
  Packed rows = {scratch, a_scales, a_first}, columns = {scratch + MC * CHUNK * 2, b_scales, b_first};
  u32 unit_bytes = way == PAIRS ? 2 : 1;
  for (u32 jc = 0; jc < n; jc += NC)
    for (u32 pc = 0; pc < k; pc += CHUNK) {
      u32 nc = min_u32(NC, n - jc), kc = min_u32(CHUNK, k - pc);
      u32 padded = (kc + 15) & ~15u, blocks = (kc + SCALE_BLOCK - 1) / SCALE_BLOCK;
      const float *last_bias = bias && pc + kc == k ? bias + jc : 0;
      pack_columns(b, jc, nc, pc, kc, way, columns);
      for (u32 ic = 0; ic < m; ic += MC) {
        u32 mc = min_u32(MC, m - ic);
        pack_rows(a, ic, mc, pc, kc, way, rows);
        for (u32 i = 0; i < mc; i += MR)
          for (u32 j = 0; j < nc; j += NR) {
            chunk_block(kc, way, strip_of(rows, i, unit_bytes, padded, blocks),
                        strip_of(columns, j, unit_bytes, padded, blocks), out);
            merge(min_u32(MR, mc - i), min_u32(NR, nc - j), out, c + (ic + i) * c_row + jc + j, c_row,
                  accumulate | (pc != 0), last_bias ? last_bias + j : 0);
          }
      }
    }
}

#else
/* Row i times column j over one chunk, in the order of the other builds. */
static float dot_chunk(const Operand *a, u32 i, const Operand *b, u32 j, u32 start, u32 k) {
  const signed char *row = (const signed char *)a->data + i * a->across;
  const signed char *column = (const signed char *)b->data + j * b->across;
  const float *row_scales = a->scales + i * a->scale_blocks, *column_scales = b->scales + j * b->scale_blocks;
  float out = 0;
  for (u32 from = start, to; from < start + k; from = to) {
    int sum = 0;
    to = min_u32(start + k, from + SCALE_BLOCK);
    const signed char *x = row + from * a->along, *y = column + from * b->along;
    for (u32 l = from; l < to; ++l, x += a->along, y += b->along) sum += *x * *y;
    float term = (float)sum * (row_scales[from / SCALE_BLOCK] * column_scales[from / SCALE_BLOCK]);
    out = from == start ? term : out + term;
  }
  return out;
}

static u32 gemm_int8_scratch_bytes(void) { return 0; }

static void gemm_int8(u32 m, u32 n, u32 k, const Operand *a, const Operand *b, float *c, u32 c_row, u32 accumulate,
                      const float *bias, u8 *scratch) {
  (void)scratch;
  for (u32 pc = 0; pc < k; pc += CHUNK)
    for (u32 i = 0; i < m; ++i)
      for (u32 j = 0; j < n; ++j) {
        u32 kc = min_u32(CHUNK, k - pc);
        float x = dot_chunk(a, i, b, j, pc, kc);
        merge(1, 1, &x, c + i * c_row + j, c_row, accumulate | (pc != 0), bias && pc + kc == k ? bias + j : 0);
      }
}
#endif

#endif
