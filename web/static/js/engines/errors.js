/**
 * Why an engine could not compute a tile, as far as someone acts on the difference. Everything else an engine throws is
 * a fault of the kernel on this device.
 */

/** The device cannot lend as much memory as a tile needs; the tile fails with code "memory", the device goes on. */
export class OutOfMemory extends Error {}

/** A lease names a panel that never reached this Worker. */
export class MissingPanel extends Error {}

/** The engine is gone for good (a GPU that does not come back); the Worker opens another. */
export class EngineGone extends Error {}
