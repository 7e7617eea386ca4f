/**
 * What a device lends: threads and memory, from what the browser claims and the volunteer chose.
 *
 * Browsers round these numbers, hide them, or report nonsense; every claim is clamped, and a missing one has a default.
 */

const MIB = 1 << 20;
const MEMORY_BYTES_MAX = 512 * MIB;
const MEMORY_BYTES_MIN = 64 * MIB;
const MEMORY_SHARE = 1 / 8; // of what the browser says the machine has
const THREADS_MAX = 64;
const THREADS_UNKNOWN = 2;
const HEAP_RESERVE_BYTES = 4 * MIB; // the kernel's scratch, and what first-fit wastes

/** A whole number in [min, max], or the fallback. @param {unknown} value @param {number} min @param {number} max @param {number} fallback */
function clamped(value, min, max, fallback) {
  const number = Number(value);
  return Number.isFinite(number) && number >= min ? Math.min(Math.floor(number), max) : fallback;
}

/** Threads this device can offer. @param {unknown} hardwareConcurrency */
export function threadsMax(hardwareConcurrency) {
  return clamped(hardwareConcurrency, 1, THREADS_MAX, THREADS_UNKNOWN);
}

/** Threads to use: the volunteer's wish, or by default half of what there is. @param {unknown} wish @param {number} most */
export function threadsChosen(wish, most) {
  return clamped(wish === null ? NaN : wish, 1, most, Math.max(1, Math.floor(most / 2)));
}

/** Bytes to lend in all. @param {unknown} deviceMemoryGib navigator.deviceMemory */
export function memoryBytes(deviceMemoryGib) {
  const gib = Number(deviceMemoryGib);
  if (!(gib > 0 && gib <= 1024)) return MEMORY_BYTES_MAX;
  return Math.min(MEMORY_BYTES_MAX, Math.max(MEMORY_BYTES_MIN, Math.floor(gib * 1024 * MIB * MEMORY_SHARE)));
}

/**
 * How the bytes are shared out: each Worker's heap gets an equal part, and so does the net Worker, for results on their
 * way. What the server may fill is one heap, because every Worker may come to need every panel.
 * @param {number} bytes @param {number} workers
 */
export function shares(bytes, workers) {
  const heapBytesMax = Math.floor(bytes / (workers + 1));
  return { heapBytesMax, capacityBytes: Math.max(1, heapBytesMax - HEAP_RESERVE_BYTES) };
}
