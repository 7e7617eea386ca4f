/**
 * A Worker of the kernel bench: runs the section it is told and answers with its figures, or with why there are none.
 */

/** @type {Record<string, () => Promise<{ run: (plan: import("./page.js").Plan) => Promise<unknown> }>>} */
const SECTIONS = {
  wasm: () => import("./wasm.js"),
  ladder: () => import("./ladder.js"),
  pyodide: () => import("./pyodide.js"),
  pair: () => import("./pair.js"),
  webgpu: () => import("./webgpu.js"),
};

self.onmessage = async ({ data: { section, plan } }) => {
  try {
    self.postMessage({ value: await (await SECTIONS[section]()).run(plan) });
  } catch (error) {
    self.postMessage({ error: error instanceof Error ? `${error.name}: ${error.message}` : String(error) });
  }
};
