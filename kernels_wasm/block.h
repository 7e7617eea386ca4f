/* The register block: the innermost loop, the sizes around it, and the one line that tells the three builds apart.
 *
 * C is cut into MR x NR blocks whose sums stay in registers while k runs. The shapes are those that 16 vector registers
 * hold: 6 x 8 is 12 sums, two vectors of B and one of A, and 12 independent chains hide the latency of a fused
 * multiply-add. Strict SIMD needs one more register for each product before it is added, so it has 5 x 8.
 *
 *   relaxed  multiply and add are one instruction, rounded once where the CPU fuses (i32x4/f32x4.relaxed_*)
 *   strict   every product and every sum is rounded by IEEE 754 in the order written: the same bits on every machine
 *   scalar   the same sums in the same order with no SIMD, so the same bits as strict
 *
 * Left out: edges (gemm.c computes them whole, aside) and copies (pack.h).
 */
#ifndef BLOCK_H
#define BLOCK_H

typedef __UINT8_TYPE__ u8;
typedef __UINT16_TYPE__ u16;
typedef __UINT32_TYPE__ u32;

#define EXPORT(name) __attribute__((export_name(#name)))
#define INLINE inline __attribute__((always_inline))

static INLINE u32 min_u32(u32 x, u32 y) { return x < y ? x : y; }

#ifdef __wasm_simd128__
enum { UNROLL = 8 }; /* steps of k without a branch: what counts the loop takes multipliers' ports */
#include <wasm_simd128.h>
#ifdef __wasm_relaxed_simd__
enum { MR = 6, NR = 8, KC = 256, MC = 120, NC = 512 };
static INLINE v128_t madd(v128_t x, v128_t y, v128_t sum) { return wasm_f32x4_relaxed_madd(x, y, sum); }
#define ROWS(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5)
#else
enum { MR = 5, NR = 8, KC = 256, MC = 60, NC = 512 };
static INLINE v128_t madd(v128_t x, v128_t y, v128_t sum) { return wasm_f32x4_add(sum, wasm_f32x4_mul(x, y)); }
#define ROWS(DO) DO(0) DO(1) DO(2) DO(3) DO(4)
#endif

/* clang would sink the additions below the next step's loads and spill; the pin keeps each step's work in its step. */
#define PIN(sum) __asm__ volatile("" : "+r"(sum))
#define ZERO(i) v128_t sum##i##0 = wasm_f32x4_const_splat(0), sum##i##1 = wasm_f32x4_const_splat(0);
#define STEP(i)                               \
  {                                           \
    v128_t x = wasm_v128_load32_splat(a + i); \
    sum##i##0 = madd(x, b0, sum##i##0);       \
    sum##i##1 = madd(x, b1, sum##i##1);       \
    PIN(sum##i##0);                           \
    PIN(sum##i##1);                           \
  }
#define ONE_OF_K                                                        \
  {                                                                     \
    v128_t b0 = wasm_v128_load(b), b1 = wasm_v128_load(b + 4);          \
    ROWS(STEP)                                                          \
  }
#define STORE(i)                                                                  \
  {                                                                               \
    float *row = c + i * c_row;                                                   \
    if (accumulate) {                                                             \
      sum##i##0 = wasm_f32x4_add(wasm_v128_load(row), sum##i##0);                 \
      sum##i##1 = wasm_f32x4_add(wasm_v128_load(row + 4), sum##i##1);             \
    }                                                                             \
    if (bias) {                                                                   \
      sum##i##0 = wasm_f32x4_add(sum##i##0, wasm_v128_load(bias));                \
      sum##i##1 = wasm_f32x4_add(sum##i##1, wasm_v128_load(bias + 4));            \
    }                                                                             \
    wasm_v128_store(row, sum##i##0);                                              \
    wasm_v128_store(row + 4, sum##i##1);                                          \
  }

/* One MR x NR block: C (+)= packed A strip times packed B strip (+ NR elements of bias, or 0, on every row). */
static void block(u32 k, const float *restrict a_strip, const float *restrict b_strip, float *restrict c, u32 c_row,
                  u32 accumulate, const float *bias) {
  ROWS(ZERO)
  const float *a = a_strip, *b = b_strip, *end = b_strip + k / UNROLL * UNROLL * NR;
  while (b != end) {
#pragma clang loop unroll(full)
    for (u32 l = 0; l < UNROLL; ++l, a += MR, b += NR) ONE_OF_K
  }
  for (end = b_strip + k * NR; b != end; a += MR, b += NR) ONE_OF_K
  ROWS(STORE)
}

#else
enum { MR = 2, NR = 4, KC = 256, MC = 60, NC = 512 };

static void block(u32 k, const float *restrict a, const float *restrict b, float *restrict c, u32 c_row, u32 accumulate,
                  const float *bias) {
  float sum[MR][NR] = {};
  for (u32 l = 0; l < k; ++l, a += MR, b += NR)
    for (u32 i = 0; i < MR; ++i)
      for (u32 j = 0; j < NR; ++j) sum[i][j] += a[i] * b[j];
  for (u32 i = 0; i < MR; ++i, c += c_row)
    for (u32 j = 0; j < NR; ++j) {
      float x = accumulate ? c[j] + sum[i][j] : sum[i][j];
      c[j] = bias ? x + bias[j] : x;
    }
}
#endif

/* A block that was computed aside to its place in C, or what of it lies inside. */
static INLINE void merge(u32 rows, u32 cols, const float *restrict from, float *restrict c, u32 c_row, u32 accumulate,
                         const float *bias) {
  for (u32 i = 0; i < rows; ++i, from += NR, c += c_row)
    for (u32 j = 0; j < cols; ++j) {
      float x = accumulate ? c[j] + from[j] : from[j];
      c[j] = bias ? x + bias[j] : x;
    }
}

#endif
