/* Both operands are packed, in portions that L2 holds. The innermost loop now reads memory in its order and nothing else;
 * the loops are in nest.h, the block is in plain_block.h. */
#include <wasm_simd128.h>
enum { MR = 4, NR = 8 };
#include "nest.h"
#include "plain_block.h"

static void pack_lines(u32 width, const float *from, u32 across, u32 along, u32 lines, u32 k, float *dst) {
  pack_plainly(width, from, across, along, lines, k, dst);
}
