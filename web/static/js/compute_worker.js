/**
 * A compute Worker: receives panels and tiles from the net Worker, has its engine compute, hands the products back.
 *
 * While a WASM kernel runs this Worker hears nothing. So a tile is not computed in the handler of its message: it is queued
 * and the Worker sends itself a message, behind which every REVOKE that has arrived meanwhile is read first. Driven by
 * messages alone: browsers slow timers in hidden tabs, not messages.
 *
 * When its engine is gone (a GPU that does not come back) or no longer proves right, the Worker chooses another for the rest
 * of the session; what it was computing is asked for again, panels included.
 */
import { prove, proveLarge } from "./engines/check.js";
import { choose } from "./engines/choice.js";
import { EngineGone, MissingPanel, OutOfMemory, words } from "./engines/errors.js";
import { panelsOf } from "./protocol.js";

/**
 * @typedef {import("./protocol.js").Lease} Lease
 * @typedef {import("../../types/engine.js").Engine} Engine
 * @typedef {import("./engines/choice.js").Trial} Trial
 * @typedef {{ kernels: string[], threads: number, cpuBytesMax: number, gpuBytesMax: number,
 *   remembered: Record<string, string> }} Wish
 * @typedef {import("../../types/engine.js").PanelForm} PanelForm
 * @typedef {import("../../types/engine.js").TileWork} TileWork
 * @typedef {{ is: "start", wish: Wish } | { is: "panel", panel: string, form: PanelForm, bytes: Uint8Array<ArrayBuffer> }
 *   | { is: "tile", lease: Lease } | { is: "drop", panels: string[] } | { is: "revoke", leases: number[] }
 *   | { is: "prove" }} Order
 * @typedef {{ is: "able", kernel: string, depth: number, flops: number, trials: Trial[] } | { is: "unable", reason: string }
 *   | { is: "remember", kernel: string, text: string }
 *   | { is: "computed", lease: number, bytes: Uint8Array<ArrayBuffer>, seconds: number, heapBytes: number }
 *   | { is: "failed", lease: number, code: "memory"|"kernel"|"panel", text: string, lost: string[] }
 *   | { is: "skipped", lease: number }} Answer
 */

const self_ = /** @type {import("../../types/worker.js").WorkerScope<Order, Answer>} */ (/** @type {unknown} */ (globalThis));
const next = new MessageChannel();
/** @type {Engine|null} */
let engine = null;
/** @type {Wish|null} */
let wish = null;
/** Kernels that failed in this session, and how. @type {Trial[]} */
const failed = [];
/** Panels sent here and not dropped. @type {Set<string>} */
const held = new Set();
/** Those of them that went with an engine. @type {Set<string>} */
const gone = new Set();
/** @type {Lease[]} */
const queue = [];
let running = 0;
let flops = 0;
let doubted = false;

self_.onmessage = ({ data }) => {
  switch (data.is) {
    case "start": {
      wish = data.wish;
      return void change();
    }
    case "panel": return keep(data.panel, data.bytes, data.form);
    case "drop": return drop(data.panels);
    case "tile": {
      queue.push(data.lease);
      return wake();
    }
    case "revoke": return revoke(data.leases);
    case "prove": {
      doubted = true;
      return wake();
    }
  }
};

/** @param {string} panel @param {Uint8Array<ArrayBuffer>} bytes @param {PanelForm} form */
function keep(panel, bytes, form) {
  held.add(panel);
  if (!engine) return void gone.add(panel);
  gone.delete(panel);
  engine.put(panel, bytes, form);
}

/** @param {string[]} panels */
function drop(panels) {
  engine?.drop(panels);
  for (const panel of panels) {
    held.delete(panel);
    gone.delete(panel);
  }
}

function wake() {
  next.port2.postMessage(null);
}

next.port1.onmessage = () => {
  if (!engine) return; // change() wakes us when there is another
  if (doubted) {
    if (running === 0) void proveAgain(engine);
  } else if (running < engine.depth) {
    const lease = queue.shift();
    if (lease) void compute(engine, lease);
  }
};

/** Chooses an engine, the first or the next. */
async function change() {
  const { remembered, ...limits } = /** @type {Wish} */ (wish);
  try {
    const base = new URL("..", import.meta.url).href;
    const chosen = await choose({ ...limits, barred: failed.map(({ kernel }) => kernel) }, (kernel) => ({
      base, remembered: remembered[kernel] ?? null,
      remember: (text) => self_.postMessage({ is: "remember", kernel, text }),
    }));
    ({ engine, flops } = chosen);
    const trials = [...failed, ...chosen.trials];
    self_.postMessage({ is: "able", kernel: engine.kernel, depth: engine.depth, flops, trials });
    queue.forEach(wake);
  } catch (error) {
    self_.postMessage({ is: "unable", reason: words(error) });
  }
}

/** The server called a product wrong: is it the kernel? @param {Engine} current */
async function proveAgain(current) {
  running += 1;
  try {
    await prove(current);
    await proveLarge(current, flops);
  } catch (error) {
    leave(current, words(error));
  }
  running -= 1;
  doubted = false;
  queue.forEach(wake);
}

/** Lets an engine go, once, and looks for another. @param {Engine} old @param {string} reason */
function leave(old, reason) {
  if (engine !== old) return;
  engine = null;
  failed.push({ kernel: old.kernel, flops: 0, reason });
  /** @type {Wish} */ (wish).kernels = [];
  held.forEach((panel) => gone.add(panel));
  old.close();
  void change();
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

/** @param {Engine} current @param {Lease} lease */
async function compute(current, lease) {
  running += 1;
  try {
    const missing = panelsOf(lease).filter((panel) => gone.has(panel));
    if (missing.length) return fail(lease, "memory", "the panels went with the engine that held them", missing);
    const { bytes, seconds } = await current.compute(workOf(lease));
    const heapBytes = current.memory.bytes;
    self_.postMessage({ is: "computed", lease: lease.lease, bytes, seconds, heapBytes }, [bytes.buffer]);
  } catch (error) {
    const text = words(error);
    if (error instanceof EngineGone) {
      leave(current, text);
      fail(lease, "memory", text, panelsOf(lease));
    } else if (error instanceof OutOfMemory) fail(lease, "memory", text, current.takeLost());
    else fail(lease, error instanceof MissingPanel ? "panel" : "kernel", text, current.takeLost());
  } finally {
    running -= 1;
    if (queue.length) wake();
  }
}

/** @param {Lease} lease @returns {TileWork} */
function workOf({ batch, m, n, terms, a_by_k: aByK = false, b_by_k: bByK = false, dtype = "f32", accuracy = "rowwise" }) {
  const places = terms.map(({ k, a, b, a_row: aRow = 0, a_column: aColumn = 0, b_row: bRow = 0, b_column: bColumn = 0 }) =>
    ({ k, a, b, aRow, aColumn, bRow, bColumn }));
  return { batch, m, n, aByK, bByK, terms: places, dtype, accuracy };
}

/** @param {Lease} lease @param {"memory"|"kernel"|"panel"} code @param {string} text @param {string[]} lost */
function fail({ lease }, code, text, lost) {
  self_.postMessage({ is: "failed", lease, code, text, lost });
}
