/* SGEMM in strict WASM SIMD128: C[m,n] (+)= A[m,k] B[k,n], float32, one thread, the same bits on every machine.
 *
 * The idea is the classical one (Goto): C is cut into MR x NR register blocks; A and B are first copied into panels in
 * exactly the order in which the innermost loop reads them, so that loop is nothing but loads, multiplies and adds.
 *
 *   for each NC columns of C
 *     for each KC of k                        packed B: KC x NC floats, 512 KiB, stays in L2
 *       for each MC rows of C                 packed A: MC x KC floats, 60 KiB, stays in L2
 *         for each MR rows                      one MR-high strip of it: 5 KiB, stays in L1
 *           for each NR columns: the register block
 *
 *   packed A (MR = 5)                   packed B (NR = 8)
 *   | a00 a10 a20 a30 a40 |  l = 0      | b00 b01 b02 b03 b04 b05 b06 b07 |  l = 0
 *   | a01 a11 a21 a31 a41 |  l = 1      | b10 b11 ...                     |  l = 1
 *
 * Rows and columns beyond the edge are packed as zeros and computed, and not stored: one code path for every shape. k is
 * never padded, so a NaN or an infinity reaches exactly the elements that depend on it.
 *
 * Strict SIMD has no fused multiply-add: every product and every sum is rounded by IEEE 754 in the order written here,
 * so two devices that run this file agree to the last bit. Left out: threads (one tile per Worker needs none), relaxed
 * SIMD (its rounding depends on the CPU), and batches (the caller loops).
 *
 * The module allocates nothing. The caller owns the memory from __heap_base on and passes byte addresses; strides and
 * sizes are in elements. All addresses are 16-byte aligned, except that rows inside a matrix may start anywhere.
 */
#include <wasm_simd128.h>

typedef __UINT32_TYPE__ u32;
typedef const float *restrict in_ptr;

enum { MR = 5, NR = 8, KC = 256, MC = 60, NC = 512 };

#define EXPORT(name) __attribute__((export_name(#name)))

static u32 min_u32(u32 x, u32 y) { return x < y ? x : y; }

/* Bytes that gemm() needs at `scratch`: both packed blocks and one register block for the edges. */
EXPORT(gemm_scratch_bytes) u32 gemm_scratch_bytes(void) { return (MC * KC + KC * NC + MR * NR) * sizeof(float); }

static void transpose4(in_ptr r0, in_ptr r1, in_ptr r2, in_ptr r3, v128_t out[4]) {
  v128_t x0 = wasm_v128_load(r0), x1 = wasm_v128_load(r1), x2 = wasm_v128_load(r2), x3 = wasm_v128_load(r3);
  v128_t t0 = wasm_i32x4_shuffle(x0, x1, 0, 4, 1, 5), t1 = wasm_i32x4_shuffle(x0, x1, 2, 6, 3, 7);
  v128_t t2 = wasm_i32x4_shuffle(x2, x3, 0, 4, 1, 5), t3 = wasm_i32x4_shuffle(x2, x3, 2, 6, 3, 7);
  out[0] = wasm_i64x2_shuffle(t0, t2, 0, 2);
  out[1] = wasm_i64x2_shuffle(t0, t2, 1, 3);
  out[2] = wasm_i64x2_shuffle(t1, t3, 0, 2);
  out[3] = wasm_i64x2_shuffle(t1, t3, 1, 3);
}

/* Packs `lines` lines of `k` elements, `width` lines abreast, zeros beyond the last. A line is a row of A or a column of
 * B; `along` is the stride inside a line, `across` from one to the next. Lines that are contiguous in memory, which is
 * how panels arrive, go four by four through registers. */
static inline __attribute__((always_inline)) void pack(u32 lines, u32 k, const float *src, u32 across, u32 along,
                                                       float *restrict dst, u32 width) {
  for (u32 first = 0; first < lines; first += width, src += across * width, dst += k * width) {
    u32 live = min_u32(width, lines - first), l = 0;
    if (live == width && along == 1) {
      for (; l + 4 <= k; l += 4) {
        u32 i = 0;
        for (; i + 4 <= width; i += 4) {
          const float *row = src + i * across + l;
          v128_t columns[4];
          transpose4(row, row + across, row + 2 * across, row + 3 * across, columns);
          for (u32 step = 0; step < 4; ++step) wasm_v128_store(dst + (l + step) * width + i, columns[step]);
        }
        for (; i < width; ++i)
          for (u32 step = 0; step < 4; ++step) dst[(l + step) * width + i] = src[i * across + l + step];
      }
    }
    for (; l < k; ++l)
      for (u32 i = 0; i < width; ++i) dst[l * width + i] = i < live ? src[i * across + l * along] : 0.0f;
  }
}

/* clang would sink the additions below the next step's loads and spill; the pin keeps each step's work in its step. */
#define PIN(acc) __asm__ volatile("" : "+r"(acc))
#define STEP(i)                                                \
  {                                                            \
    v128_t x = wasm_v128_load32_splat(a + i);                  \
    acc##i##0 = wasm_f32x4_add(acc##i##0, wasm_f32x4_mul(x, b0)); \
    acc##i##1 = wasm_f32x4_add(acc##i##1, wasm_f32x4_mul(x, b1)); \
    PIN(acc##i##0);                                            \
    PIN(acc##i##1);                                            \
  }
#define ZERO(i) v128_t acc##i##0 = wasm_f32x4_const_splat(0), acc##i##1 = wasm_f32x4_const_splat(0)
#define STORE(i)                                                                  \
  {                                                                               \
    float *row = c + i * c_row;                                                   \
    if (accumulate) {                                                             \
      acc##i##0 = wasm_f32x4_add(wasm_v128_load(row), acc##i##0);                 \
      acc##i##1 = wasm_f32x4_add(wasm_v128_load(row + 4), acc##i##1);             \
    }                                                                             \
    wasm_v128_store(row, acc##i##0);                                              \
    wasm_v128_store(row + 4, acc##i##1);                                          \
  }

/* One MR x NR block: C (+)= packed A strip times packed B strip. */
static void block(u32 k, in_ptr a_strip, in_ptr b_strip, float *restrict c, u32 c_row, u32 accumulate) {
  ZERO(0); ZERO(1); ZERO(2); ZERO(3); ZERO(4);
  const float *a = a_strip, *b = b_strip, *end = b_strip + k * NR;
  for (; b != end; a += MR, b += NR) {
    v128_t b0 = wasm_v128_load(b), b1 = wasm_v128_load(b + 4);
    STEP(0) STEP(1) STEP(2) STEP(3) STEP(4)
  }
  STORE(0) STORE(1) STORE(2) STORE(3) STORE(4)
}

/* A block at the edge: computed whole, aside, and only the part inside C is stored. */
static void edge_block(u32 k, in_ptr a, in_ptr b, float *restrict c, u32 c_row, u32 accumulate, u32 rows, u32 cols,
                       float *restrict aside) {
  block(k, a, b, aside, NR, 0);
  for (u32 i = 0; i < rows; ++i)
    for (u32 j = 0; j < cols; ++j) {
      float x = aside[i * NR + j];
      c[i * c_row + j] = accumulate ? c[i * c_row + j] + x : x;
    }
}

/* C[i,j] at c + i c_row + j; A[i,l] at a + i a_row + l a_col; B[l,j] at b + l b_row + j b_col: any of the layouts A, A^T,
 * B, B^T. `accumulate` 0 overwrites C, which need not be initialised. m, n, k >= 1. */
EXPORT(gemm)
void gemm(u32 m, u32 n, u32 k, const float *a, u32 a_row, u32 a_col, const float *b, u32 b_row, u32 b_col, float *c,
          u32 c_row, u32 accumulate, float *scratch) {
  float *a_packed = scratch, *b_packed = a_packed + MC * KC, *aside = b_packed + KC * NC;
  for (u32 jc = 0; jc < n; jc += NC) {
    u32 nc = min_u32(NC, n - jc);
    for (u32 pc = 0; pc < k; pc += KC) {
      u32 kc = min_u32(KC, k - pc), add = accumulate | (pc != 0);
      pack(nc, kc, b + pc * b_row + jc * b_col, b_col, b_row, b_packed, NR);
      for (u32 ic = 0; ic < m; ic += MC) {
        u32 mc = min_u32(MC, m - ic);
        pack(mc, kc, a + ic * a_row + pc * a_col, a_row, a_col, a_packed, MR);
        for (u32 i = 0; i < mc; i += MR)
          for (u32 j = 0; j < nc; j += NR) {
            u32 rows = min_u32(MR, mc - i), cols = min_u32(NR, nc - j);
            float *at = c + (ic + i) * c_row + jc + j;
            if (rows == MR && cols == NR)
              block(kc, a_packed + i * kc, b_packed + j * kc, at, c_row, add);
            else
              edge_block(kc, a_packed + i * kc, b_packed + j * kc, at, c_row, add, rows, cols, aside);
          }
      }
    }
  }
}
