/**
 * One suite over all engines: what the tests in Python ask of one engine, by name. Runs in a Worker (or the window).
 *
 * An order is plain data and says all of its case, so that hypothesis can shrink it and a printed order reproduces a
 * failure. An answer of "" is a right one; anything else says what was wrong. Left out: timing.
 */
import { alive } from "./suite_alive.js";
import { flatMemory } from "./suite_flat.js";
import { alike, empty, product, sameBits } from "./suite_products.js";
import { anyTile, closed, inFlight, missingPanel, noRoom, noRoomForProduct, tile } from "./suite_tiles.js";

const ENGINES = new URL("/static/js/engines/", import.meta.url);
const MODULES = {
  "wasm-relaxed": ["wasm.js", "openRelaxed"],
  "wasm-strict": ["wasm.js", "openStrict"],
  "wasm-scalar": ["wasm.js", "openScalar"],
  webgpu: ["webgpu.js", "open"],
  pyodide: ["pyodide.js", "open"],
  python: ["pyodide.js", "openPython"],
};
/** @type {Map<string, string>} */
const memory = new Map();
/** @type {import("../../web/types/engine.js").Engine|null} */
let engine = null;
let errors = null;

/** Opens the engine; what it remembers lives as long as this page. */
async function open({ kernel, bytes_max: bytesMax }) {
  engine?.close();
  engine = null;
  errors = await import(new URL("errors.js", ENGINES).href);
  const [file, name] = MODULES[kernel];
  const module = await import(new URL(file, ENGINES).href);
  engine = await module[name]({
    bytesMax,
    base: new URL("/static/", import.meta.url).href,
    remembered: memory.get(kernel) ?? null,
    remember: (text) => memory.set(kernel, text),
  });
  return { kernel: engine.kernel, depth: engine.depth, note: engine.note };
}

const ORDERS = {
  open,
  product: (order) => product(engine, order),
  alike: (order) => alike(engine, order),
  empty: () => empty(engine),
  sameBits: (order) => sameBits(engine, order),
  tile: (order) => tile(engine, order),
  anyTile: (order) => anyTile(engine, order),
  inFlight: (order) => inFlight(engine, errors, order),
  missingPanel: (order) => missingPanel(engine, errors, order),
  noRoom: (order) => noRoom(engine, errors, order),
  noRoomForProduct: (order) => noRoomForProduct(engine, errors, order),
  closed: (order) => closed(engine, order),
  flatMemory: (order) => flatMemory(engine, order),
  memory: () => engine.memory,
  alive,
  close: () => {
    engine.close();
    engine = null;
  },
};

/** @param {{ do: keyof typeof ORDERS }} order */
export async function run(order) {
  return ORDERS[order.do](order);
}

if (typeof window === "undefined") {
  globalThis.onmessage = async ({ data: { id, order } }) => {
    try {
      globalThis.postMessage({ id, answer: await run(order) });
    } catch (error) {
      globalThis.postMessage({ id, error: error instanceof Error ? `${error.name}: ${error.message}\n${error.stack}` : String(error) });
    }
  };
}
