/**
 * Why an engine could not compute a tile, as far as someone acts on the difference. Everything else an engine throws is
 * a fault of the kernel on this device.
 */

/** The device cannot lend as much memory as a tile needs; the tile fails with code "memory", the device goes on. */
export class OutOfMemory extends Error {}

/** A lease names a panel that never reached this Worker. */
export class MissingPanel extends Error {}

/** What an error says. @param {unknown} error */
export const words = (error) => (error instanceof Error ? error.message : String(error));

/**
 * Throws for a product of nothing, which no lease asks for and a kernel would take for something else.
 * @param {{ m: number, n: number, k: number, batch?: number }} sizes
 */
export function refuseEmpty({ m, n, k, batch = 1 }) {
  if (!(batch > 0 && m > 0 && n > 0 && k > 0)) throw new RangeError(`nothing to multiply: ${batch} x ${m} x ${n} x ${k}`);
}

/** The engine is gone for good (a GPU that does not come back); the Worker opens another. */
export class EngineGone extends Error {}
