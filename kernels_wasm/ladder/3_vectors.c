/* Four elements of k in one vector. Both operands lie along k, so nothing moves; the four parts are added at the end. */
#include <wasm_simd128.h>
#define SCRATCH_FLOATS 4
#include "rung.h"

enum { MR = 2, NR = 4, LANES = 4 };

static void multiply(const Problem *p) {
  u32 contiguous = p->a_along == 1 && p->b_along == 1, k = p->k / LANES * LANES;
  u32 m = contiguous ? p->m / MR * MR : 0, n = p->n / NR * NR;
  for (u32 i = 0; i < m; i += MR)
    for (u32 j = 0; j < n; j += NR) {
      v128_t sum[MR][NR] = {};
      for (u32 l = 0; l < k; l += LANES)
        for (u32 x = 0; x < MR; ++x)
          for (u32 y = 0; y < NR; ++y) {
            v128_t product = wasm_f32x4_mul(wasm_v128_load(&A(i + x, l)), wasm_v128_load(&B(l, j + y)));
            sum[x][y] = wasm_f32x4_add(sum[x][y], product);
          }
      for (u32 x = 0; x < MR; ++x)
        for (u32 y = 0; y < NR; ++y) {
          v128_t pairs = wasm_f32x4_add(sum[x][y], wasm_i64x2_shuffle(sum[x][y], sum[x][y], 1, 0));
          C(i + x, j + y) += wasm_f32x4_extract_lane(pairs, 0) + wasm_f32x4_extract_lane(pairs, 1);
        }
    }
  sums(p, 0, m, 0, n, k, p->k);
  sums(p, 0, m, n, p->n, 0, p->k);
  sums(p, m, p->m, 0, p->n, 0, p->k);
}
