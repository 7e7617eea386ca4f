/**
 * Which engine computes on this device: every one that runs here is proved and measured, and the fastest correct one wins,
 * never by name (a software GPU loses to WASM).
 *
 * Engines are tried in tiers; a later tier only where nothing of the tiers before it works, because it cannot win there:
 * scalar WASM is what is left without SIMD, and Pyodide, 13 MB to load, what is left without anything else.
 */
import { prove, proveLarge, speed } from "./check.js";
import { words } from "./errors.js";

/**
 * @typedef {import("../../../types/engine.js").Engine} Engine
 * @typedef {import("../../../types/engine.js").EngineOptions} EngineOptions
 * @typedef {import("../../../types/engine.js").Open} Open
 * @typedef {{ kernel: string, flops: number, reason: string }} Trial flops 0: not used, and reason says why
 * @typedef {{ engine: Engine, flops: number, trials: Trial[] }} Choice
 * @typedef {{ name: string, load: () => Promise<Open>, gpu: boolean }} Candidate
 */

/** @type {Candidate[][]} modules are loaded only when their engine is tried */
const TIERS = [
  [
    { name: "wasm-relaxed", load: async () => (await import("./wasm.js")).openRelaxed, gpu: false },
    { name: "wasm-strict", load: async () => (await import("./wasm.js")).openStrict, gpu: false },
    { name: "webgpu", load: async () => (await import("./webgpu.js")).open, gpu: true },
  ],
  [{ name: "wasm-scalar", load: async () => (await import("./wasm.js")).openScalar, gpu: false }],
  [{ name: "pyodide", load: async () => (await import("./pyodide.js")).open, gpu: false }],
  [{ name: "python", load: async () => (await import("./pyodide.js")).openPython, gpu: false }],
];

export const KERNELS = TIERS.flat().map(({ name }) => name);

/** Whether one Worker with this kernel is all that a device has use for. @param {string} kernel */
export function alone(kernel) {
  return TIERS.flat().some(({ name, gpu }) => gpu && name === kernel);
}

/**
 * @param {object} wish
 * @param {string[]} wish.kernels those that may be used; none: all
 * @param {string[]} wish.barred those that failed on this device before
 * @param {number} wish.threads Workers that would compute with a CPU kernel; a GPU has one
 * @param {number} wish.cpuBytesMax @param {number} wish.gpuBytesMax memory of one Worker with either
 * @param {(kernel: string) => Omit<EngineOptions, "bytesMax">} options
 * @returns {Promise<Choice>} rejects with every engine's reason where none works
 */
export async function choose({ kernels, barred, threads, cpuBytesMax, gpuBytesMax }, options) {
  /** @type {Trial[]} */
  const trials = [];
  for (const tier of TIERS) {
    /** @type {{ engine: Engine, flops: number, worth: number }|null} */
    let best = null;
    for (const { name, load, gpu } of tier) {
      if ((kernels.length && !kernels.includes(name)) || barred.includes(name)) continue;
      const { trial, engine } = await attempt(load, name, { ...options(name), bytesMax: gpu ? gpuBytesMax : cpuBytesMax });
      trials.push(trial);
      if (!engine) continue;
      const worth = trial.flops * (gpu ? 1 : threads);
      if (!best || worth > best.worth) {
        best?.engine.close();
        best = { engine, flops: trial.flops, worth };
      } else engine.close();
    }
    if (best) return { engine: best.engine, flops: best.flops, trials };
  }
  throw new Error(trials.map(({ kernel, reason }) => `${kernel}: ${reason}`).join("; ") || "no such kernel");
}

/**
 * @param {() => Promise<Open>} load @param {string} name @param {EngineOptions} options
 * @returns {Promise<{ trial: Trial, engine: Engine|null }>}
 */
async function attempt(load, name, options) {
  /** @type {Engine|null} */
  let engine = null;
  try {
    engine = await (await load())(options);
    await prove(engine);
    const flops = await speed(engine);
    await proveLarge(engine, flops);
    return { trial: { kernel: engine.kernel, flops, reason: engine.note }, engine };
  } catch (error) {
    engine?.close();
    return { trial: { kernel: engine?.kernel ?? name, flops: 0, reason: words(error) }, engine: null };
  }
}
