/**
 * A Worker of the kernel bench: runs the section it is told and answers with its figures, or with why there are none.
 */

/** @type {Record<string, () => Promise<{ run: (plan: import("./kernels.js").Plan) => Promise<unknown> }>>} */
const SECTIONS = {
  wasm: () => import("./kernels_wasm.js"),
  ladder: () => import("./kernels_ladder.js"),
  pyodide: () => import("./kernels_pyodide.js"),
  pair: () => import("./kernels_pair.js"),
  webgpu: () => import("./kernels_webgpu.js"),
};

self.onmessage = async ({ data: { section, plan } }) => {
  try {
    self.postMessage({ value: await (await SECTIONS[section]()).run(plan) });
  } catch (error) {
    self.postMessage({ error: error instanceof Error ? `${error.name}: ${error.message}` : String(error) });
  }
};
