/* Packing from the sixth rung on: four elements of four lines are loaded, transposed in registers and stored. What is left
 * of a strip's lines goes one element at a time, as does all of an operand that does not lie along k.
 */
static void transpose4(const float *from, u32 across, float *dst, u32 width) {
  v128_t x0 = wasm_v128_load(from), x1 = wasm_v128_load(from + across);
  v128_t x2 = wasm_v128_load(from + 2 * across), x3 = wasm_v128_load(from + 3 * across);
  v128_t t0 = wasm_i32x4_shuffle(x0, x1, 0, 4, 1, 5), t1 = wasm_i32x4_shuffle(x0, x1, 2, 6, 3, 7);
  v128_t t2 = wasm_i32x4_shuffle(x2, x3, 0, 4, 1, 5), t3 = wasm_i32x4_shuffle(x2, x3, 2, 6, 3, 7);
  wasm_v128_store(dst, wasm_i64x2_shuffle(t0, t2, 0, 2));
  wasm_v128_store(dst + width, wasm_i64x2_shuffle(t0, t2, 1, 3));
  wasm_v128_store(dst + 2 * width, wasm_i64x2_shuffle(t1, t3, 0, 2));
  wasm_v128_store(dst + 3 * width, wasm_i64x2_shuffle(t1, t3, 1, 3));
}

static void pack_lines(u32 width, const float *from, u32 across, u32 along, u32 lines, u32 k, float *dst) {
  u32 l_end = along == 1 ? k / 4 * 4 : 0;
  for (u32 strip = 0; strip < lines; strip += width, from += width * across, dst += width * k) {
    u32 live = min_u32(width, lines - strip), fours = live == width ? width / 4 * 4 : 0;
    for (u32 l = 0; l < l_end; l += 4) {
      for (u32 i = 0; i < fours; i += 4) transpose4(from + i * across + l, across, dst + l * width + i, width);
      for (u32 step = l; step < l + 4; ++step)
        for (u32 i = fours; i < width; ++i) dst[step * width + i] = from[min_u32(i, live - 1) * across + step];
    }
    if (l_end < k) pack_plainly(width, from + l_end * along, across, along, live, k - l_end, dst + l_end * width);
  }
}
