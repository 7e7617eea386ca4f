/* A block of 2 x 4 sums stays in registers. Six loads now feed eight multiplications instead of sixteen. */
#define SCRATCH_FLOATS 4
#include "rung.h"

enum { MR = 2, NR = 4 };

static void multiply(const Problem *p) {
  u32 m = p->m / MR * MR, n = p->n / NR * NR;
  for (u32 i = 0; i < m; i += MR)
    for (u32 j = 0; j < n; j += NR) {
      float sum[MR][NR] = {};
      for (u32 l = 0; l < p->k; ++l)
        for (u32 x = 0; x < MR; ++x)
          for (u32 y = 0; y < NR; ++y) sum[x][y] += A(i + x, l) * B(l, j + y);
      for (u32 x = 0; x < MR; ++x)
        for (u32 y = 0; y < NR; ++y) C(i + x, j + y) += sum[x][y];
    }
  sums(p, 0, m, n, p->n, 0, p->k);
  sums(p, m, p->m, 0, p->n, 0, p->k);
}
