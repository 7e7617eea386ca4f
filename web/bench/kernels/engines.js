/**
 * Our engines as the kernel bench's contestants, through the one interface that a volunteer's tab uses.
 */
import { operands } from "./operands.js";

/** @typedef {import("../../types/engine.js").Engine} Engine */
/** @typedef {import("../../types/engine.js").Open} Open */
/** @typedef {import("./rounds.js").Contestant} Contestant */

const ROUNDING = 2e-6;
const BYTES_MAX = 1 << 29;

/**
 * Opens an engine as on a device that never was here.
 * @param {Open} open @param {(text: string) => void} [remember] gets what the engine would have remembered
 * @returns {Promise<Engine>}
 */
export function fresh(open, remember = () => {}) {
  const base = new URL("/static/", location.href).href;
  return open({ bytesMax: BYTES_MAX, base, remembered: null, remember });
}

/** @param {number} n @param {string} a @param {string} b @returns {import("../../types/engine.js").TileWork} */
function wholeTile(n, a, b) {
  const terms = [{ k: n, a, b, aRow: 0, aColumn: 0, bRow: 0, bColumn: 0 }];
  return { batch: 1, m: n, n, aByK: false, bByK: false, terms, dtype: "f32", accuracy: "rowwise" };
}

/** @param {number} n @returns {import("../../types/engine.js").PanelForm} */
const whole = (n) => ({ rows: n, columns: n, dtype: "f32" });

/**
 * Panels that are there; a call is a tile computed from them, as many at once as the engine wants. Timed is what the
 * engine says of its kernel ("kernel"), or the wall clock until the product is JavaScript's ("tile").
 * @param {string} name @param {Engine} engine @param {number} n @param {"kernel"|"tile"} clock
 * @returns {Promise<Contestant>}
 */
export async function resident(name, engine, n, clock) {
  const { a, bt } = await operands(n, "f32");
  const ids = { a: `${name} a ${n}`, b: `${name} b ${n}` };
  engine.put(ids.a, a, whole(n));
  engine.put(ids.b, bt, whole(n));
  const tile = () => engine.compute(wholeTile(n, ids.a, ids.b));
  return {
    ...square(name, n, tile),
    run: async (calls) => {
      let seconds = 0;
      await inFlight(engine.depth, calls, async () => {
        seconds += (await tile()).seconds;
      });
      return clock === "kernel" ? seconds : undefined;
    },
    close: () => engine.drop([ids.a, ids.b]),
  };
}

/**
 * Panels that come anew for each tile, and go: the wall clock with all transfers.
 * @param {string} name @param {Engine} engine @param {number} n @returns {Promise<Contestant>}
 */
export async function arriving(name, engine, n) {
  const { a, bt } = await operands(n, "f32");
  let last = 0;
  const tile = async () => {
    last += 1;
    const ids = { a: `${name} a ${last}`, b: `${name} b ${last}` };
    engine.put(ids.a, a, whole(n));
    engine.put(ids.b, bt, whole(n));
    const product = await engine.compute(wholeTile(n, ids.a, ids.b));
    engine.drop([ids.a, ids.b]);
    return product;
  };
  return { ...square(name, n, tile), run: (calls) => inFlight(engine.depth, calls, tile) };
}

/** @param {number} depth calls under way at once @param {number} calls @param {() => Promise<unknown>} once */
async function inFlight(depth, calls, once) {
  let left = calls;
  const lane = async () => {
    while (left > 0) {
      left -= 1;
      await once();
    }
  };
  await Promise.all(Array.from({ length: depth }, lane));
}

/** @param {string} name @param {number} n @param {() => Promise<import("../../types/engine.js").Product>} tile */
function square(name, n, tile) {
  return {
    name,
    flop: 2 * n ** 3,
    truth: { n, dtype: "f32", factors: 1 },
    errorMax: ROUNDING,
    product: async () => new Float32Array((await tile()).bytes.buffer),
  };
}
