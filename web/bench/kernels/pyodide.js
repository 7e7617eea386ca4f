/**
 * The kernel bench's Pyodide section: how long it takes to join with it, and its tiles against those of strict WASM.
 *
 * Joining is from nothing loaded to a proved kernel. Both engines compute through the same interface, by the wall clock,
 * the product's copy out of the heap included; tfjs and the CPU's peak take turns with them as in the CPU section.
 */
import { prove } from "/static/js/engines/check.js";
import { openStrict } from "/static/js/engines/wasm.js";
import { fresh, resident } from "./engines.js";
import { tfjsWasm } from "./peers.js";
import { compete, roundsAt } from "./rounds.js";
import { peak } from "./wasm.js";

const SIZE = 512;

/** @param {import("./page.js").Plan} plan */
export async function run(plan) {
  const n = Math.min(SIZE, ...plan.wasm);
  const start = performance.now();
  const { open } = await import("/static/js/engines/pyodide.js");
  const engine = await fresh(open);
  await prove(engine);
  const joined = (performance.now() - start) / 1000;
  if (engine.kernel !== "pyodide") throw new Error(`the side module cannot be used here: ${engine.note}`);
  const strict = await fresh(openStrict);
  const name = "pyodide/side module", other = "engine/wasm-strict";
  const entries = [
    { name, make: () => resident(name, engine, n, "tile") },
    { name: other, make: () => resident(other, strict, n, "tile") },
    tfjsWasm(n),
    peak("fused"),
  ];
  return { join_s: joined, measured: [await compete("pyodide", n, entries, roundsAt(n, plan))] };
}
