/**
 * The kernel bench's WebGPU section: the kernel that our tuner chose and the peers, in one Worker and turn by turn.
 * In software a turn takes seconds, so there are a quarter of the CPU section's rounds.
 *
 * `webgpu/tuned` is what the engine's own clock says of tiles from panels on the device: from submission until the GPU is
 * done, the copy of the product to a readable buffer included, which the peers are not asked for. `transfers/tuned` is the
 * wall clock with both panels' way up and the product's way down, two tiles in flight.
 */
import { arriving, fresh, resident } from "./engines.js";
import { jaxWebgpu, onnxWebgpu, tfjsWebgpu } from "./peers_webgpu.js";
import { compete, roundsAt } from "./rounds.js";

/** @typedef {import("./rounds.js").Entry} Entry */

/** @param {import("./page.js").Plan} plan */
export async function run(plan) {
  const adapter = await navigator.gpu?.requestAdapter();
  if (!adapter) throw new Error("this browser gives no WebGPU adapter");
  const { vendor, architecture, device, description, isFallbackAdapter } = adapter.info;
  const { entries, ...join } = await ours();
  const measured = [];
  for (const n of plan.gpu) {
    const field = [...entries.map((entry) => entry(n)), tfjsWebgpu(n), onnxWebgpu(n), jaxWebgpu(n)];
    measured.push(await compete("webgpu", n, field, roundsAt(n, { ...plan, rounds: plan.rounds / 4 })));
  }
  return { adapter: { vendor, architecture, device, description, fallback: isFallbackAdapter, ...join }, measured };
}

/**
 * The engine opened, tuning included. Where it cannot be, its contestants are refused with the reason and the peers run.
 * @returns {Promise<{ join_s: number|null, entries: ((n: number) => Entry)[] }>}
 */
async function ours() {
  const start = performance.now();
  let choice = "";
  const remember = (/** @type {string} */ text) => void (choice = JSON.parse(text).kernel);
  /** @type {Promise<import("../../types/engine.js").Engine>} */
  const opened = import("/static/js/engines/webgpu.js").then(({ open }) => fresh(open, remember));
  const joined = await opened.then(() => (performance.now() - start) / 1000, () => null);
  const tuned = (/** @type {number} */ n) => ({
    name: "webgpu/tuned",
    make: async () => {
      return { ...(await resident("webgpu/tuned", await opened, n, "kernel")), note: choice };
    },
  });
  const transfers = (/** @type {number} */ n) => ({
    name: "transfers/tuned",
    make: async () => arriving("transfers/tuned", await opened, n),
  });
  return { join_s: joined, entries: [tuned, transfers] };
}
