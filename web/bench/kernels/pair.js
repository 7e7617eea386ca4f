/**
 * One of the two Workers of the kernel bench's pair section: told to go, it computes for a while and says how fast.
 */
import { ours } from "./wasm.js";

const SIZE_MAX = 512;
const TURN_MS = 250;

/** Gets ready and answers; from then on each message is an order to go. @param {import("./page.js").Plan} plan */
export async function run(plan) {
  const n = Math.min(SIZE_MAX, ...plan.wasm);
  const { flop, run: compute } = await ours("wasm/relaxed", "/static/wasm/gemm_relaxed.wasm", n, "f32").make();
  await compute(1);
  self.onmessage = async () => {
    const start = performance.now();
    let calls = 0;
    do {
      await compute(1);
      calls += 1;
    } while (performance.now() - start < TURN_MS);
    self.postMessage({ value: (calls * flop * 1000) / (performance.now() - start) / 1e9 });
  };
  return {};
}
