/* Fewer than 2 m n k operations: Strassen's product in one level, Winograd's form of it around that in two.
 *
 * One level cuts A, B and C into quarters and makes C of 7 products of sums of quarters instead of 8 products:
 *
 *   (A11+A22)(B11+B22) -> C11 C22        A11 (B12-B22) -> C12 C22        (A21-A11)(B11+B12) -> C22
 *   (A21+A22) B11 -> C21 -C22            A22 (B21-B11) -> C11 C21        (A12-A22)(B21+B22) -> C11
 *   (A11+A12) B22 -> C12 -C11
 *
 * The sums need no passes over memory of their own: they are formed while operands are packed, and a register block is
 * added to the one or two quarters of C to which it belongs while it is still in L1. So one level needs no memory but
 * the packed blocks. A second level around it does write its sums, because sums of four quarters would read each
 * element too often: Winograd's form has the fewest and, in the order of winograd(), needs two quarters aside.
 *
 * The core is a multiple of the register block, and of 4 along k, in each part; gemm() computes what is left at three
 * edges. Strict: every rounding is in the order written, so every machine gives the same bits.
 *
 * Accuracy is norm-wise: an element errs with the largest row of A and column of B, not with its own. With u = 2^-24,
 *
 *   max |error| <= 80 u max_i |A[i,:]| max_j |B[:,j]|      (Euclidean norms; practical)
 *
 * and in the worst case G (k / 2^levels + 6) u times these norms, G = 12 for one level and 12 * 18 for two (after
 * Higham, Accuracy and Stability of Numerical Algorithms, chapter 23: Strassen's form grows 12 a level, Winograd's 18).
 * Measured: 4 u with one level and 14 u with two over normal, scaled, sparse, cancelling data; all of one sign 25 u;
 * constant matrices, whose roundings all agree, 66 u, as in gemm() itself. That is why FAST_KC is 256: 512 is no faster
 * on large tiles and makes it 119 u. An infinity or a NaN spreads over C.
 *
 * Left out: a third level (more error for little), other types, accumulation and bias (gemm() has them).
 */
#ifdef __wasm_simd128__
#include "pack.h"

enum { FAST_KC = 256, FAST_MC = 20 * MR, FAST_NC = 512 };
/* Where a level pays, measured: one from sides of 192 on, two where m and n have 768 and k 256. */
enum { ONE_LEVEL_MIN = 192, TWO_LEVELS_MIN = 768, TWO_LEVELS_MIN_K = 256 };

typedef struct {
  const float *at;
  u32 across; /* elements from a line to the next; a line is a row of A or a column of B */
} Lines;

typedef struct {
  u32 m, n, k;
} Shape;

typedef enum { OVERWRITE, ADD, SUBTRACT } Mode;

/* x + sign y of two quarters; sign 0: x alone. Of C: where a product goes, `sign` of it to y. */
typedef struct {
  signed char x, y, sign;
} Sum;

/* Quarters: 0 first half of lines and of k, 1 second half of k, 2 second half of lines, 3 both; of C 1 is on the right.
 * So A12 is 1, A21 2, and B12 2, B21 1. `fresh`: how many of x, y in C no product before this one has reached. */
typedef struct {
  Sum a, b, c;
  u32 fresh;
} Step;
static const Step STEPS[7] = {
    {{0, 3, 1}, {0, 3, 1}, {0, 3, 1}, 2},  {{2, 3, 1}, {0, 0, 0}, {2, 3, -1}, 1},
    {{0, 0, 0}, {2, 3, -1}, {1, 3, 1}, 1}, {{3, 0, 0}, {1, 0, -1}, {0, 2, 1}, 0},
    {{0, 1, 1}, {3, 0, 0}, {1, 0, -1}, 0}, {{2, 0, -1}, {0, 2, 1}, {3, 0, 0}, 0},
    {{1, 3, -1}, {1, 3, 1}, {0, 0, 0}, 0},
};

void gemm(u32 m, u32 n, u32 k, const void *a, u32 a_across, u32 a_along, u32 a_type, const float *a_scales,
          const void *b, u32 b_across, u32 b_along, u32 b_type, const float *b_scales, float *c, u32 c_row,
          u32 accumulate, const float *bias, void *scratch);
u32 gemm_scratch_bytes(void);

static u32 quarter(u32 number, u32 lines, u32 across, u32 along) {
  return (number >> 1) * lines * across + (number & 1) * along;
}

/* Packs x + sign y, line by line as far apart as `across`, into strips of `width` lines. Sixteen elements of a line, a
 * whole cache line, at a time: lines are often a power of two apart and push each other out of L1. */
static INLINE void pack_sum(u32 width, u32 lines, u32 k, const float *x, const float *y, float sign, u32 across,
                            float *restrict dst) {
  v128_t signs = wasm_f32x4_splat(sign);
  for (u32 strip = 0; strip < lines; strip += width, dst += k * width, x += width * across, y += width * across)
    for (u32 from = 0; from < k; from += 16) {
      u32 to = min_u32(k, from + 16);
#pragma clang loop unroll(full)
      for (u32 i = 0; i < width; i += 4)
        for (u32 l = from; l < to; l += 4) {
          u32 count = width - i < 4 ? width - i : 4;
          v128_t sum[4] = {};
#pragma clang loop unroll(full)
          for (u32 j = 0; j < count; ++j) {
            sum[j] = wasm_v128_load(x + (i + j) * across + l);
            if (sign) sum[j] = madd(wasm_v128_load(y + (i + j) * across + l), signs, sum[j]);
          }
          transpose(count, sum, dst + l * width + i, width);
        }
    }
}

static INLINE void pack_quarters(u32 width, Lines from, Sum sum, u32 half_lines, u32 half_k, u32 line, u32 lines,
                                 u32 start, u32 k, float *dst) {
  const float *base = from.at + line * from.across + start;
  const float *x = base + quarter(sum.x, half_lines, from.across, half_k);
  const float *y = base + quarter(sum.y, half_lines, from.across, half_k);
  if (sum.sign == 0)
    pack_sum(width, lines, k, x, x, 0, from.across, dst);
  else
    pack_sum(width, lines, k, x, y, sum.sign, from.across, dst);
}

/* c (+)= sign x aside, one register block. */
static INLINE void put(const float *restrict aside, float *restrict c, u32 c_row, float sign, u32 fresh) {
  v128_t signs = wasm_f32x4_splat(sign);
  for (u32 i = 0; i < MR; ++i, c += c_row, aside += NR)
    for (u32 j = 0; j < NR; j += 4) {
      v128_t x = wasm_v128_load(aside + j);
      wasm_v128_store(c + j, fresh ? x : madd(x, signs, wasm_v128_load(c + j)));
    }
}

/* The product of two packed blocks, to one or two quarters of C. */
static void spread(Shape part, const float *a, const float *b, float *x, float *y, u32 c_row, float x_sign,
                   float y_sign, u32 fresh, float *aside) {
  for (u32 i = 0; i < part.m; i += MR, a += MR * part.k)
    for (u32 j = 0; j < part.n; j += NR) {
      u32 at = i * c_row + j;
      block(part.k, a, b + j * part.k, aside, NR, 0, 0);
      put(aside, x + at, c_row, x_sign, fresh >= 1);
      if (y_sign != 0) put(aside, y + at, c_row, y_sign, fresh >= 2);
    }
}

/* One of the seven products. `half` is the shape of a quarter. */
static void step(const Step *step, Mode mode, Shape half, Lines a, Lines b, float *c, u32 c_row, float *scratch) {
  float *a_packed = scratch, *b_packed = a_packed + FAST_MC * FAST_KC, *aside = b_packed + FAST_KC * FAST_NC;
  float *x = c + quarter(step->c.x, half.m, c_row, half.n), *y = c + quarter(step->c.y, half.m, c_row, half.n);
  float sign = mode == SUBTRACT ? -1 : 1;
  Shape part;
  for (u32 jc = 0; jc < half.n; jc += FAST_NC)
    for (u32 pc = 0; pc < half.k; pc += FAST_KC) {
      u32 fresh = mode == OVERWRITE && pc == 0 ? step->fresh : 0;
      part.n = min_u32(FAST_NC, half.n - jc), part.k = min_u32(FAST_KC, half.k - pc);
      pack_quarters(NR, b, step->b, half.n, half.k, jc, part.n, pc, part.k, b_packed);
      for (u32 ic = 0; ic < half.m; ic += FAST_MC) {
        part.m = min_u32(FAST_MC, half.m - ic);
        pack_quarters(MR, a, step->a, half.m, half.k, ic, part.m, pc, part.k, a_packed);
        u32 at = ic * c_row + jc;
        spread(part, a_packed, b_packed, x + at, y + at, c_row, sign, sign * step->c.sign, fresh, aside);
      }
    }
}

/* C (+-)= A B, one level. All sides are even multiples of the register block, k of 8. */
static void strassen(Mode mode, Shape shape, Lines a, Lines b, float *c, u32 c_row, float *scratch) {
  Shape half = {shape.m / 2, shape.n / 2, shape.k / 2};
  for (u32 i = 0; i < 7; ++i) step(&STEPS[i], mode, half, a, b, c, c_row, scratch);
}

/* z = x + sign y */
static void combine(u32 lines, u32 k, Lines x, float sign, Lines y, float *z) {
  v128_t signs = wasm_f32x4_splat(sign);
  for (u32 i = 0; i < lines; ++i, x.at += x.across, y.at += y.across, z += k)
    for (u32 l = 0; l < k; l += 4)
      wasm_v128_store(z + l, madd(wasm_v128_load(y.at + l), signs, wasm_v128_load(x.at + l)));
}

/* Of the products P1 in C11, P6 in C12, P7 in C21 and P5 in C22: U2 = P1 + P6, U3 = U2 + P7; C12 = U2 + P5, C21 = U3,
 * C22 = U3 + P5. */
static void middle(Shape half, float *c, u32 c_row) {
  float *c11 = c, *c12 = c + half.n, *c21 = c + half.m * c_row, *c22 = c21 + half.n;
  for (u32 i = 0; i < half.m; ++i, c11 += c_row, c12 += c_row, c21 += c_row, c22 += c_row)
    for (u32 j = 0; j < half.n; j += 4) {
      v128_t u2 = wasm_f32x4_add(wasm_v128_load(c11 + j), wasm_v128_load(c12 + j));
      v128_t u3 = wasm_f32x4_add(u2, wasm_v128_load(c21 + j)), p5 = wasm_v128_load(c22 + j);
      wasm_v128_store(c12 + j, wasm_f32x4_add(u2, p5));
      wasm_v128_store(c21 + j, u3);
      wasm_v128_store(c22 + j, wasm_f32x4_add(u3, p5));
    }
}

/* C = A B, two levels. Sums of A take turns in `s`, sums of B in `t`; products that others wait for lie in C. */
static void winograd(Shape shape, Lines a, Lines b, float *c, u32 c_row, float *scratch) {
  Shape half = {shape.m / 2, shape.n / 2, shape.k / 2};
  u32 m = half.m, n = half.n, k = half.k;
  Lines s = {scratch, k}, t = {scratch + m * k, k};
  float *s_at = scratch, *t_at = scratch + m * k, *rest = t_at + n * k;
  float *c11 = c, *c12 = c + n, *c21 = c + m * c_row, *c22 = c21 + n;
  Lines a11 = a, a12 = {a.at + k, a.across}, a21 = {a.at + m * a.across, a.across}, a22 = {a21.at + k, a.across};
  Lines b11 = b, b21 = {b.at + k, b.across}, b12 = {b.at + n * b.across, b.across}, b22 = {b12.at + k, b.across};
  combine(m, k, a11, -1, a21, s_at);                        /* S3 */
  combine(n, k, b22, -1, b12, t_at);                        /* T3 */
  strassen(OVERWRITE, half, s, t, c21, c_row, rest);        /* P7 = S3 T3 */
  combine(m, k, a21, 1, a22, s_at);                         /* S1 */
  combine(n, k, b12, -1, b11, t_at);                        /* T1 */
  strassen(OVERWRITE, half, s, t, c22, c_row, rest);        /* P5 = S1 T1 */
  combine(m, k, s, -1, a11, s_at);                          /* S2 = S1 - A11 */
  combine(n, k, b22, -1, t, t_at);                          /* T2 = B22 - T1 */
  strassen(OVERWRITE, half, s, t, c12, c_row, rest);        /* P6 = S2 T2 */
  strassen(OVERWRITE, half, a11, b11, c11, c_row, rest);    /* P1 */
  middle(half, c, c_row);
  strassen(ADD, half, a12, b21, c11, c_row, rest);          /* P2: C11 = P1 + P2 */
  combine(m, k, a12, -1, s, s_at);                          /* S4 = A12 - S2 */
  strassen(ADD, half, s, b22, c12, c_row, rest);            /* P3: C12 = U2 + P5 + P3 */
  combine(n, k, t, -1, b21, t_at);                          /* T4 = T2 - B21 */
  strassen(SUBTRACT, half, a22, t, c21, c_row, rest);       /* P4: C21 = U3 - P4 */
}

static u32 levels(u32 m, u32 n, u32 k) {
  if (min_u32(m, n) >= TWO_LEVELS_MIN && k >= TWO_LEVELS_MIN_K) return 2;
  return min_u32(m, min_u32(n, k)) >= ONE_LEVEL_MIN;
}

/* What the levels divide evenly; gemm() computes the rest. */
static Shape core(u32 m, u32 n, u32 k, u32 parts) {
  return (Shape){m - m % (MR * parts), n - n % (NR * parts), k - k % (4 * parts)};
}

/* Bytes that gemm_fast() needs at `scratch`: 0.7 MB of packed blocks, and with two levels a quarter of A and one of B.
 * 0: gemm() is as fast here, and gemm_fast() does not apply. */
EXPORT(gemm_fast_scratch_bytes) u32 gemm_fast_scratch_bytes(u32 m, u32 n, u32 k) {
  u32 count = levels(m, n, k);
  if (count == 0) return 0;
  Shape whole = core(m, n, k, 1 << count);
  u32 sums = count == 2 ? (whole.m + whole.n) / 2 * (whole.k / 2) : 0;
  u32 bytes = (sums + FAST_MC * FAST_KC + FAST_KC * FAST_NC + MR * NR) * sizeof(float);
  return bytes > gemm_scratch_bytes() ? bytes : gemm_scratch_bytes();
}

/* C = A B, float32, k contiguous in both operands; C is overwritten. Only where gemm_fast_scratch_bytes() is not 0. */
EXPORT(gemm_fast)
void gemm_fast(u32 m, u32 n, u32 k, const float *a, u32 a_across, const float *b, u32 b_across, float *c, u32 c_row,
               void *scratch) {
  u32 count = levels(m, n, k);
  Shape whole = core(m, n, k, 1 << count);
  Lines rows = {a, a_across}, columns = {b, b_across};
  if (count == 2)
    winograd(whole, rows, columns, c, c_row, scratch);
  else
    strassen(OVERWRITE, whole, rows, columns, c, c_row, scratch);
  const float *a_below = a + whole.m * a_across, *b_right = b + whole.n * b_across;
  if (whole.k < k)
    gemm(whole.m, whole.n, k - whole.k, a + whole.k, a_across, 1, F32, 0, b + whole.k, b_across, 1, F32, 0, c, c_row, 1,
         0, scratch);
  if (whole.m < m)
    gemm(m - whole.m, n, k, a_below, a_across, 1, F32, 0, b, b_across, 1, F32, 0, c + whole.m * c_row, c_row, 0, 0,
         scratch);
  if (whole.n < n)
    gemm(whole.m, n - whole.n, k, a, a_across, 1, F32, 0, b_right, b_across, 1, F32, 0, c + whole.n, c_row, 0, 0,
         scratch);
}
#endif
