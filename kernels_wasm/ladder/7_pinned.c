/* 5 x 8, with pins that keep the compiler from spilling: ten sums use the registers that 4 x 8 leaves idle. */
#include <wasm_simd128.h>
enum { MR = 5, NR = 8, STEPS = 1 };
#include "nest.h"
#include "transpose.h"

#define ROWS(DO) DO(0) DO(1) DO(2) DO(3) DO(4)
static inline v128_t madd(v128_t x, v128_t y, v128_t sum) { return wasm_f32x4_add(sum, wasm_f32x4_mul(x, y)); }
#include "pinned.h"
