/**
 * The kernel bench's ladder section: each rung of kernels_wasm/ladder/, what ships, and tfjs, turn by turn. The rungs have the
 * signature of the shipped kernel.
 */
import { tfjsWasm } from "./peers.js";
import { compete, roundsAt } from "./rounds.js";
import { ours } from "./wasm.js";

const SHIPPED = ["strict", "relaxed"];

/** @param {import("./page.js").Plan} plan */
export async function run(plan) {
  const measured = [];
  for (const n of plan.ladder) {
    const rungs = plan.rungs.map((rung) => ours(`ladder/${rung}`, `/build/ladder/${rung}.wasm`, n, "f32"));
    const shipped = SHIPPED.map((build) => ours(`ladder/${build}`, `/static/wasm/gemm_${build}.wasm`, n, "f32"));
    measured.push(await compete("ladder", n, [tfjsWasm(n), ...rungs, ...shipped], roundsAt(n, plan)));
  }
  return { measured };
}
