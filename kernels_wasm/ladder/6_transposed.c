/* Packing moves four lines by four elements through registers instead of one element at a time. */
#include <wasm_simd128.h>
enum { MR = 4, NR = 8 };
#include "nest.h"
#include "plain_block.h"
#include "transpose.h"
