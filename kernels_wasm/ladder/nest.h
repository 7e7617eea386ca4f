/* The loops around a register block from the fifth rung on: both operands packed, in portions that caches hold.
 *
 * Includes rung.h. A rung defines MR, NR, pack_lines() and block(), which adds one MR x NR block to C. Blocks at an edge
 * are computed aside.
 */
enum { KC = 256, MC = 60, NC = 512 };
#define SCRATCH_FLOATS (MC * KC + KC * NC + MR * NR)
#include "rung.h"

static void pack_lines(u32 width, const float *from, u32 across, u32 along, u32 lines, u32 k, float *dst);
static void block(u32 k, const float *a, const float *b, float *c, u32 c_row);

static void edge(u32 k, const float *a, const float *b, float *c, u32 c_row, u32 rows, u32 cols, float *aside) {
  for (u32 x = 0; x < MR * NR; ++x) aside[x] = 0;
  block(k, a, b, aside, NR);
  for (u32 i = 0; i < rows; ++i)
    for (u32 j = 0; j < cols; ++j) c[i * c_row + j] += aside[i * NR + j];
}

static void multiply(const Problem *p) {
  float *a = p->scratch, *b = a + MC * KC, *aside = b + KC * NC;
  for (u32 jc = 0; jc < p->n; jc += NC)
    for (u32 pc = 0; pc < p->k; pc += KC) {
      u32 nc = min_u32(NC, p->n - jc), kc = min_u32(KC, p->k - pc);
      pack_lines(NR, &B(pc, jc), p->b_across, p->b_along, nc, kc, b);
      for (u32 ic = 0; ic < p->m; ic += MC) {
        u32 mc = min_u32(MC, p->m - ic);
        pack_lines(MR, &A(ic, pc), p->a_across, p->a_along, mc, kc, a);
        for (u32 i = 0; i < mc; i += MR)
          for (u32 j = 0; j < nc; j += NR) {
            u32 rows = min_u32(MR, mc - i), cols = min_u32(NR, nc - j);
            float *at = &C(ic + i, jc + j);
            if (rows == MR && cols == NR)
              block(kc, a + i * kc, b + j * kc, at, p->c_row);
            else
              edge(kc, a + i * kc, b + j * kc, at, p->c_row, rows, cols, aside);
          }
      }
    }
}
