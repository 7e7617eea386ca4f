/* B is copied into strips of 8 columns, so that vectors lie along a row of C. Nothing is added across lanes any more, and
 * the strip stays in L1 while all of A passes by. */
#include <wasm_simd128.h>
#define SCRATCH_FLOATS (KC * NR)
enum { MR = 4, NR = 8, KC = 256 };
#include "rung.h"

static void multiply(const Problem *p) {
  u32 m = p->m / MR * MR, n = p->n / NR * NR;
  for (u32 j = 0; j < n; j += NR)
    for (u32 from = 0; from < p->k; from += KC) {
      u32 k = min_u32(KC, p->k - from);
      pack_plainly(NR, &B(from, j), p->b_across, p->b_along, NR, k, p->scratch);
      for (u32 i = 0; i < m; i += MR) {
        v128_t sum[MR][2] = {};
        for (u32 l = 0; l < k; ++l)
          for (u32 x = 0; x < MR; ++x) {
            v128_t a = wasm_v128_load32_splat(&A(i + x, from + l));
            for (u32 y = 0; y < 2; ++y)
              sum[x][y] = wasm_f32x4_add(sum[x][y], wasm_f32x4_mul(a, wasm_v128_load(p->scratch + l * NR + 4 * y)));
          }
        for (u32 x = 0; x < MR; ++x)
          for (u32 y = 0; y < 2; ++y) {
            float *at = &C(i + x, j + 4 * y);
            wasm_v128_store(at, wasm_f32x4_add(wasm_v128_load(at), sum[x][y]));
          }
      }
    }
  sums(p, 0, m, n, p->n, 0, p->k);
  sums(p, m, p->m, 0, p->n, 0, p->k);
}
