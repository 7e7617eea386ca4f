/* A block of ROWS lines by 8 columns from the seventh rung on, with every sum pinned to its register after each step.
 *
 * clang moves loads and additions across steps of k, runs out of registers and spills; an empty asm that "changes" the sum
 * keeps each step's work in its step. A rung defines madd(), ROWS(DO) and STEPS, how many steps go by between two
 * branches.
 */
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
#define ONE_OF_K                                               \
  {                                                            \
    v128_t b0 = wasm_v128_load(b), b1 = wasm_v128_load(b + 4); \
    ROWS(STEP)                                                 \
    a += MR, b += NR;                                          \
  }
#define STORE(i)                                                                            \
  wasm_v128_store(c + i * c_row, wasm_f32x4_add(wasm_v128_load(c + i * c_row), sum##i##0)); \
  wasm_v128_store(c + i * c_row + 4, wasm_f32x4_add(wasm_v128_load(c + i * c_row + 4), sum##i##1));

static void block(u32 k, const float *a, const float *b, float *c, u32 c_row) {
  ROWS(ZERO)
  u32 left = k % STEPS;
  for (k -= left; k; k -= STEPS) {
#pragma clang loop unroll(full)
    for (u32 step = 0; step < STEPS; ++step) ONE_OF_K
  }
  for (; left; --left) ONE_OF_K
  ROWS(STORE)
}
