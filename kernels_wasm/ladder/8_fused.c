/* Relaxed SIMD: multiply and add in one instruction, so no register is needed between them and 6 x 8 fits. */
#include <wasm_simd128.h>
enum { MR = 6, NR = 8, STEPS = 1 };
#include "nest.h"
#include "transpose.h"

#define ROWS(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5)
static inline v128_t madd(v128_t x, v128_t y, v128_t sum) { return wasm_f32x4_relaxed_madd(x, y, sum); }
#include "pinned.h"
