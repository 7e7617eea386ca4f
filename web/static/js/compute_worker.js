/**
 * A compute Worker: receives panels and tiles from the net Worker, computes, hands the products back.
 *
 * While a kernel runs this Worker hears nothing. So a tile is not computed in the handler of its message: it is queued
 * and the Worker sends itself a message, behind which every REVOKE that has arrived meanwhile is read first. Driven by
 * messages alone: browsers slow timers in hidden tabs, not messages.
 */
import { KERNEL_NAME } from "./device_limits.js";
import { prove, speed } from "./kernel_check.js";
import { MissingPanel, TileEngine } from "./tile_engine.js";
import { OutOfMemory } from "./wasm_kernel.js";

/**
 * @typedef {import("./protocol.js").Lease} Lease
 * @typedef {{ is: "start", module: WebAssembly.Module, bytesMax: number }
 *   | { is: "panel", panel: string, bytes: Uint8Array<ArrayBuffer> }
 *   | { is: "tile", lease: Lease } | { is: "drop", panels: string[] } | { is: "revoke", leases: number[] }} Order
 * @typedef {{ is: "able", kernel: string, flops: number } | { is: "unable", reason: string }
 *   | { is: "computed", lease: number, bytes: Uint8Array<ArrayBuffer>, seconds: number, heapBytes: number }
 *   | { is: "failed", lease: number, code: "memory"|"kernel"|"panel", text: string, lost: string[] }
 *   | { is: "skipped", lease: number }} Answer
 */

const self_ = /** @type {import("../../types/worker.js").WorkerScope<Order, Answer>} */ (/** @type {unknown} */ (globalThis));
const next = new MessageChannel();
/** @type {TileEngine|null} */
let engine = null;
/** @type {Lease[]} */
const queue = [];

self_.onmessage = ({ data }) => {
  if (data.is === "start") return begin(data.module, data.bytesMax);
  if (!engine) return undefined;
  switch (data.is) {
    case "panel": return engine.put(data.panel, data.bytes);
    case "drop": return engine.drop(data.panels);
    case "tile": {
      queue.push(data.lease);
      return next.port2.postMessage(null);
    }
    case "revoke": return revoke(data.leases);
  }
};

next.port1.onmessage = () => {
  const lease = queue.shift();
  if (lease && engine) compute(engine, lease);
};

/** @param {WebAssembly.Module} module @param {number} bytesMax */
function begin(module, bytesMax) {
  try {
    const made = new TileEngine(module, bytesMax);
    prove(made);
    self_.postMessage({ is: "able", kernel: KERNEL_NAME, flops: speed(made) });
    engine = made;
  } catch (error) {
    self_.postMessage({ is: "unable", reason: error instanceof Error ? error.message : String(error) });
  }
}

/** @param {number[]} leases */
function revoke(leases) {
  for (const lease of leases) {
    const index = queue.findIndex((queued) => queued.lease === lease);
    if (index < 0) continue;
    queue.splice(index, 1);
    self_.postMessage({ is: "skipped", lease });
  }
}

/** @param {TileEngine} engine @param {Lease} lease */
function compute(engine, lease) {
  try {
    const { bytes, seconds } = engine.compute(lease);
    self_.postMessage({ is: "computed", lease: lease.lease, bytes, seconds, heapBytes: engine.memory.bytes }, [bytes.buffer]);
  } catch (error) {
    const code = error instanceof OutOfMemory ? "memory" : error instanceof MissingPanel ? "panel" : "kernel";
    const text = error instanceof Error ? error.message : String(error);
    self_.postMessage({ is: "failed", lease: lease.lease, code, text, lost: engine.takeLost() });
  }
}
