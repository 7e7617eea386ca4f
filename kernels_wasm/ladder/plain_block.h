/* A block of MR lines by 8 columns in the fifth and sixth rung, which differ in packing only. */
static void block(u32 k, const float *a, const float *b, float *c, u32 c_row) {
  v128_t sum[MR][2] = {};
  for (u32 l = 0; l < k; ++l, a += MR, b += NR)
    for (u32 x = 0; x < MR; ++x) {
      v128_t splat = wasm_v128_load32_splat(a + x);
      for (u32 y = 0; y < 2; ++y)
        sum[x][y] = wasm_f32x4_add(sum[x][y], wasm_f32x4_mul(splat, wasm_v128_load(b + 4 * y)));
    }
  for (u32 x = 0; x < MR; ++x, c += c_row)
    for (u32 y = 0; y < 2; ++y) wasm_v128_store(c + 4 * y, wasm_f32x4_add(wasm_v128_load(c + 4 * y), sum[x][y]));
}
