/* What one core can do at most with 128-bit vectors, as the yardstick of the kernels: fused chains, and mul+add chains.
 *
 * A chain is an instruction that needs its own last result. 14 independent ones keep every multiplier busy, and nothing is
 * loaded or stored. Two loops: `peak_fused` is nothing but fused multiply-adds (relaxed SIMD in WASM, where the CPU has
 * them), `peak_separate` is as many multiplies as adds, what strict SIMD may use. The same file makes the WASM module and,
 * compiled for the host, a program that prints the fused peak in GFLOP/s (ladder.py builds both). For benches only.
 */
#ifdef __wasm__
#include <wasm_simd128.h>
typedef v128_t vector;
#define EXPORT(name) __attribute__((export_name(#name)))
#define PIN(x) __asm__ volatile("" : "+r"(x))
#define SPLAT(x) wasm_f32x4_splat(x)
#define FUSED(x, y, sum) wasm_f32x4_relaxed_madd(x, y, sum)
#define ADD(x, y) wasm_f32x4_add(x, y)
#define MUL(x, y) wasm_f32x4_mul(x, y)
#define FIRST(x) wasm_f32x4_extract_lane(x, 0)
#else
#include <stdio.h>
#include <time.h>
typedef float vector __attribute__((vector_size(16)));
#define EXPORT(name) static
#ifdef __x86_64__
#define PIN(x) __asm__ volatile("" : "+x"(x))
#else
#define PIN(x) __asm__ volatile("" : "+w"(x))
#endif
#define SPLAT(x) ((vector){x, x, x, x})
#define FUSED(x, y, sum) __builtin_elementwise_fma(x, y, sum)
#define FIRST(x) (x)[0]
#endif

enum { CHAINS = 14, FLOP_A_VECTOR = 4 };
#define EACH(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11) DO(12) DO(13)
#define START(i) vector x##i = SPLAT((float)i);
#define TOTAL(i) +FIRST(x##i)

/* Floating-point operations in `rounds` rounds of either loop. */
EXPORT(peak_fused_flop) double peak_fused_flop(unsigned rounds) { return 2.0 * CHAINS * FLOP_A_VECTOR * rounds; }

/* `one` is 1, which the compiler must not know. The result is of no use except that it forbids skipping the work. */
EXPORT(peak_fused) float peak_fused(unsigned rounds, float one) {
  vector x = SPLAT(one);
  EACH(START)
  for (unsigned r = 0; r < rounds; ++r) {
#define FUSE(i) x##i = FUSED(x, x, x##i); PIN(x##i);
    EACH(FUSE)
  }
  return 0 EACH(TOTAL);
}

#ifdef __wasm__
EXPORT(peak_separate_flop) double peak_separate_flop(unsigned rounds) { return 1.0 * CHAINS * FLOP_A_VECTOR * rounds; }

EXPORT(peak_separate) float peak_separate(unsigned rounds, float one) {
  vector x = SPLAT(one);
  EACH(START)
  for (unsigned r = 0; r < rounds; ++r) {
#define BOTH(i, j) x##i = MUL(x##i, x); PIN(x##i); x##j = ADD(x##j, x); PIN(x##j);
    BOTH(0, 1) BOTH(2, 3) BOTH(4, 5) BOTH(6, 7) BOTH(8, 9) BOTH(10, 11) BOTH(12, 13)
  }
  return 0 EACH(TOTAL);
}
#else
/* The best of some short runs, because another process may have had the core for a while. */
int main(int count, char **arguments) {
  enum { ROUNDS = 2000000, RUNS = 15 };
  double best = 1e9;
  volatile float one = 1, kept = 0;
  for (int run = 0; run < RUNS; ++run) {
    struct timespec start, end;
    clock_gettime(CLOCK_MONOTONIC, &start);
    kept += peak_fused(ROUNDS, one);
    clock_gettime(CLOCK_MONOTONIC, &end);
    double seconds = (double)(end.tv_sec - start.tv_sec) + 1e-9 * (double)(end.tv_nsec - start.tv_nsec);
    if (seconds < best) best = seconds;
  }
  (void)count, (void)arguments, (void)kept;
  printf("%.2f\n", peak_fused_flop(ROUNDS) / best * 1e-9);
}
#endif
