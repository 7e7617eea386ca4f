/* What every rung of the ladder shares: the signature of the shipped kernel, and what happens around the product.
 *
 * A rung defines multiply(), which adds A B to C, and SCRATCH_FLOATS. C is cleared or given its bias here, and sums() does
 * the rows and columns that a rung's blocks leave. Left out: types other than f32, and care for their speed.
 */
typedef __UINT32_TYPE__ u32;

#define EXPORT(name) __attribute__((export_name(#name)))

static inline u32 min_u32(u32 x, u32 y) { return x < y ? x : y; }

typedef struct {
  u32 m, n, k;
  const float *a;
  u32 a_across, a_along;
  const float *b;
  u32 b_across, b_along;
  float *c;
  u32 c_row;
  float *scratch;
} Problem;

#define A(i, l) p->a[(i) * p->a_across + (l) * p->a_along]
#define B(l, j) p->b[(j) * p->b_across + (l) * p->b_along]
#define C(i, j) p->c[(i) * p->c_row + (j)]

static void multiply(const Problem *p);

/* Rows i .. i_end - 1 and columns j .. j_end - 1 of C, elements l .. l_end - 1 of k, one at a time. */
static inline void sums(const Problem *p, u32 i, u32 i_end, u32 j_first, u32 j_end, u32 l_first, u32 l_end) {
  for (; i < i_end; ++i)
    for (u32 j = j_first; j < j_end; ++j) {
      float sum = 0;
      for (u32 l = l_first; l < l_end; ++l) sum += A(i, l) * B(l, j);
      C(i, j) += sum;
    }
}

/* Strips of `width` lines, as pack.h lays them; the last repeats its last line. */
static inline void pack_plainly(u32 width, const float *from, u32 across, u32 along, u32 lines, u32 k, float *dst) {
  for (u32 strip = 0; strip < lines; strip += width)
    for (u32 l = 0; l < k; ++l)
      for (u32 i = 0; i < width; ++i) *dst++ = from[min_u32(strip + i, lines - 1) * across + l * along];
}

EXPORT(gemm_scratch_bytes) u32 gemm_scratch_bytes(void) { return (SCRATCH_FLOATS) * sizeof(float); }

EXPORT(gemm)
void gemm(u32 m, u32 n, u32 k, const float *a, u32 a_across, u32 a_along, u32 a_type, const float *a_scales,
          const float *b, u32 b_across, u32 b_along, u32 b_type, const float *b_scales, float *c, u32 c_row,
          u32 accumulate, const float *bias, float *scratch) {
  (void)a_type, (void)a_scales, (void)b_type, (void)b_scales;
  for (u32 i = 0; i < m; ++i)
    for (u32 j = 0; j < n; ++j) c[i * c_row + j] = (accumulate ? c[i * c_row + j] : 0) + (bias ? bias[j] : 0);
  Problem problem = {m, n, k, a, a_across, a_along, b, b_across, b_along, c, c_row, scratch};
  multiply(&problem);
}
