/* GEMM in WASM: C[m,n] (+)= A[m,k] B[k,n] (+ bias), float32 sums of float32, bf16, f16 or i8 operands, one thread.
 *
 * The idea is the classical one (Goto): C is cut into MR x NR register blocks (block.h); A and B are first copied into
 * panels in exactly the order in which the innermost loop reads them (pack.h), so that loop is nothing but loads,
 * multiplies and adds.
 *
 *   for each NC columns of C
 *     for each KC of k                        packed B: KC x NC floats, 512 KiB, stays in L2
 *       for each MC rows of C                 packed A: MC x KC floats, stays in L2
 *         for each MR rows                      one MR-high strip of it: 6 KiB, stays in L1
 *           for each NR columns: the register block
 *
 * Rows and columns beyond the edge are computed and not stored: one code path for every shape. Each element of C is a sum
 * over KC of k in order, added to the sums before it in order, whatever the layout and the block's shape: strict and
 * scalar builds agree to the last bit on every machine. Three builds of this source are made (build.py).
 *
 * Two i8 operands have a way of their own (int8.h). fast.c is a second entry, with fewer operations and less accuracy.
 * Left out: threads (one tile per Worker needs none) and batches (the caller loops).
 *
 * The module allocates nothing. The caller owns the memory from __heap_base on and passes byte addresses; strides and
 * sizes are in elements. All addresses are 16-byte aligned, except that rows inside a matrix may start anywhere.
 */
#include "int8.h"
#include "pack.h"

/* Bytes that gemm() needs at `scratch`: both packed blocks and one register block for the edges, or what int8 wants. */
EXPORT(gemm_scratch_bytes) u32 gemm_scratch_bytes(void) {
  u32 bytes = (MC * KC + KC * NC + MR * NR) * sizeof(float);
  return bytes > gemm_int8_scratch_bytes() ? bytes : gemm_int8_scratch_bytes();
}

/* A block at the edge: computed whole, aside, and only the part inside C is stored. */
static void edge_block(u32 k, const float *a, const float *b, float *restrict c, u32 c_row, u32 accumulate,
                       const float *bias, u32 rows, u32 cols, float *restrict aside) {
  block(k, a, b, aside, NR, 0, 0);
  merge(rows, cols, aside, c, c_row, accumulate, bias);
}

/* mc x nc elements of C from both packed blocks. */
static void packed_product(u32 mc, u32 nc, u32 kc, const float *a, const float *b, float *c, u32 c_row, u32 accumulate,
                           const float *bias, float *aside) {
  for (u32 i = 0; i < mc; i += MR)
    for (u32 j = 0; j < nc; j += NR) {
      u32 rows = min_u32(MR, mc - i), cols = min_u32(NR, nc - j);
      const float *a_strip = a + i * kc, *b_strip = b + j * kc, *bias_strip = bias ? bias + j : 0;
      float *at = c + i * c_row + j;
      if (rows == MR && cols == NR)
        block(kc, a_strip, b_strip, at, c_row, accumulate, bias_strip);
      else
        edge_block(kc, a_strip, b_strip, at, c_row, accumulate, bias_strip, rows, cols, aside);
    }
}

/* Types: 0 f32, 1 bf16, 2 f16, 3 i8, each with any layout (Operand in pack.h): A, A^T, B and B^T are all the same to it.
 * C[i,j] lies at c + i c_row + j. `accumulate` 0 overwrites C, which need not be initialised. `bias`: n floats added to
 * every row, or 0. The scales are read for i8 only. m, n, k >= 1. */
EXPORT(gemm)
void gemm(u32 m, u32 n, u32 k, const void *a, u32 a_across, u32 a_along, u32 a_type, const float *a_scales, const void *b,
          u32 b_across, u32 b_along, u32 b_type, const float *b_scales, float *c, u32 c_row, u32 accumulate,
          const float *bias, void *scratch) {
  u32 scale_blocks = (k + SCALE_BLOCK - 1) / SCALE_BLOCK;
  Operand rows = {a, a_across, a_along, a_type, a_scales, scale_blocks};
  Operand columns = {b, b_across, b_along, b_type, b_scales, scale_blocks};
  if (a_type == I8 && b_type == I8) return gemm_int8(m, n, k, &rows, &columns, c, c_row, accumulate, bias, scratch);
  float *a_packed = scratch, *b_packed = a_packed + MC * KC, *aside = b_packed + KC * NC;
  for (u32 jc = 0; jc < n; jc += NC) {
    u32 nc = min_u32(NC, n - jc);
    for (u32 pc = 0; pc < k; pc += KC) {
      u32 kc = min_u32(KC, k - pc), add = accumulate | (pc != 0);
      const float *last_bias = bias && pc + kc == k ? bias + jc : 0;
      pack(NR, &columns, jc, nc, pc, kc, b_packed);
      for (u32 ic = 0; ic < m; ic += MC) {
        u32 mc = min_u32(MC, m - ic);
        pack(MR, &rows, ic, mc, pc, kc, a_packed);
        packed_product(mc, nc, kc, a_packed, b_packed, c + ic * c_row + jc, c_row, add, last_bias, aside);
      }
    }
  }
}
