/**
 * Which panels this device holds, where their bytes are, and how many it may hold.
 *
 * A panel arrives in chunks into one buffer here, in the net Worker. Its bytes then go to each compute Worker that needs
 * them: copied while another Worker might still need them, handed over once every other Worker has its own. So one panel
 * is never in memory more often than there are Workers, and with one Worker it exists exactly once, in the WASM heap.
 *
 * `capacityBytes` counts each panel once, and `reserveBytes`, the largest products that are being computed; it is what the
 * server is told. Beyond it the panel used longest ago goes, but never one that a lease still needs: then the newcomer is
 * refused, and its lease fails with code "memory".
 */
import { ProtocolError, Reassembly } from "./protocol.js";

/**
 * @typedef {object} Entry
 * @property {string} id
 * @property {number} rows
 * @property {number} columns
 * @property {import("./protocol.js").Dtype} dtype
 * @property {number} size bytes; 0 while only leases know of it
 * @property {"wanted"|"arriving"|"held"|"refused"} state
 * @property {Reassembly|null} assembly
 * @property {Uint8Array<ArrayBuffer>|null} bytes here, in the net Worker
 * @property {Set<number>} workers that hold a copy
 * @property {number} leases that need it
 * @property {boolean} dropped the server will not name it again
 * @property {boolean} asked NEED was sent for it
 * @property {boolean} sent a Worker was given it, and remembers it until told to drop it, even as lost
 */

export class PanelIndex {
  /** By the time of last use, oldest first. @type {Map<string, Entry>} */
  #entries = new Map();
  #workerCount;
  reserveBytes = 0;

  /** @param {number} capacityBytes @param {number} workerCount */
  constructor(capacityBytes, workerCount) {
    this.capacityBytes = capacityBytes;
    this.#workerCount = workerCount;
  }

  /** Bytes of all panels, each counted once. */
  get bytes() {
    let sum = 0;
    for (const { state, size } of this.#entries.values()) if (state === "arriving" || state === "held") sum += size;
    return sum;
  }

  /** Ids of the panels that are complete, for HELLO: the newest `max`. @param {number} max */
  heldIds(max) {
    return [...this.#entries.values()].filter((entry) => entry.state === "held" && !entry.dropped)
      .map((entry) => entry.id).slice(-max);
  }

  /** @param {string} id */
  get(id) {
    return this.#entries.get(id);
  }

  /**
   * Takes one PANEL message; true when the panel became complete. `evicted` collects what had to go for it.
   * @param {Required<import("./protocol.js").Panel>} message @param {Uint8Array} payload @param {string[]} evicted
   * @throws {ProtocolError} for chunks out of order
   */
  add(message, payload, evicted) {
    let entry = this.#entries.get(message.panel);
    if (entry?.state === "held") { // sent again: it is to be kept once more, whatever a DROP said before
      entry.dropped = false;
      return false;
    }
    if (entry?.state === "refused" && message.offset > 0) return false;
    if (!entry || entry.state !== "arriving" || message.offset === 0) {
      if (entry?.state === "arriving") Object.assign(entry, { state: "wanted", size: 0, assembly: null }); // begins anew
      entry = this.#begin(message, evicted);
      if (entry.state === "refused") return false;
    }
    if (entry.rows !== message.rows || entry.columns !== message.columns || entry.dtype !== message.dtype) {
      throw new ProtocolError(`panel ${message.panel} changed from ${entry.rows} x ${entry.columns} ${entry.dtype} `
        + `to ${message.rows} x ${message.columns} ${message.dtype}`);
    }
    const assembly = /** @type {Reassembly} */ (entry.assembly);
    if (!assembly.add(message.offset, message.size, payload)) return false;
    entry.bytes = /** @type {Uint8Array<ArrayBuffer>} */ (assembly.data);
    entry.assembly = null;
    entry.state = "held";
    return true;
  }

  /** A lease names this panel. @param {string} id @returns {Entry} */
  retain(id) {
    const entry = this.#entries.get(id) ?? this.#blank(id);
    this.#touch(entry);
    entry.leases += 1;
    return entry;
  }

  /** Whether to send NEED for a panel that a lease names; true once. @param {Entry} entry */
  ask(entry) {
    const first = entry.state === "wanted" && !entry.asked;
    entry.asked ||= first;
    return first;
  }

  /** A lease is over. @param {string} id @returns {boolean} whether the panel went with it */
  release(id) {
    const entry = this.#entries.get(id);
    if (!entry) return false;
    entry.leases -= 1;
    if (entry.leases > 0 || (entry.state === "held" && !entry.dropped) || entry.state === "arriving") return false;
    this.#entries.delete(id);
    return entry.state === "held" || entry.sent;
  }

  /**
   * The bytes to send to a Worker, or null when it has them. With `handOver` they leave the net Worker.
   * @param {string} id a held panel @param {number} worker
   * @returns {{ bytes: Uint8Array<ArrayBuffer>, handOver: boolean }|null}
   */
  place(id, worker) {
    const entry = /** @type {Entry} */ (this.#entries.get(id));
    this.#touch(entry);
    if (entry.workers.has(worker)) return null;
    const bytes = /** @type {Uint8Array<ArrayBuffer>} */ (entry.bytes);
    entry.workers.add(worker);
    entry.sent = true;
    const handOver = entry.workers.size === this.#workerCount;
    if (handOver) entry.bytes = null;
    return { bytes, handOver };
  }

  /** The server's DROP. @param {string[]} ids @returns {string[]} those that are gone now */
  drop(ids) {
    /** @type {string[]} */
    const gone = [];
    for (const id of ids) {
      const entry = this.#entries.get(id);
      if (!entry) continue;
      entry.dropped = true;
      if (entry.leases === 0) this.#forget(entry, gone);
    }
    return gone;
  }

  /**
   * Lets idle panels go, oldest first, until `bytes` more would fit; false when they do not even then.
   * @param {number} bytes @param {string[]} evicted
   */
  makeRoom(bytes, evicted) {
    let excess = this.bytes + this.reserveBytes + bytes - this.capacityBytes;
    for (const entry of [...this.#entries.values()]) {
      if (excess <= 0) break;
      if (entry.leases > 0 || entry.state !== "held") continue;
      excess -= entry.size;
      this.#forget(entry, evicted);
    }
    return excess <= 0;
  }

  /** Lets go of every panel that no lease needs. @returns {string[]} */
  evictIdle() {
    /** @type {string[]} */
    const gone = [];
    for (const entry of [...this.#entries.values()]) if (entry.leases === 0) this.#forget(entry, gone);
    return gone;
  }

  /** Whether a Worker has the bytes or can get them from here. @param {Entry} entry @param {number} worker */
  reaches(entry, worker) {
    return entry.bytes !== null || entry.workers.has(worker);
  }

  /**
   * A Worker found no room for these; what nobody has any more is wanted again.
   * @param {number} worker @param {string[]} ids
   */
  lost(worker, ids) {
    for (const id of ids) {
      const entry = this.#entries.get(id);
      if (!entry?.workers.delete(worker) || entry.bytes || entry.workers.size) continue;
      Object.assign(entry, { state: "wanted", size: 0, asked: false });
    }
  }

  /** The connection is gone, and with it the rest of what was arriving and the promise of what was wanted. @returns {string[]} */
  disconnected() {
    /** @type {string[]} */
    const gone = [];
    for (const entry of [...this.#entries.values()]) {
      if (entry.state === "held") continue;
      if (entry.leases === 0) this.#forget(entry, gone);
      else Object.assign(entry, { state: "wanted", size: 0, assembly: null, asked: false });
    }
    return gone;
  }

  /** @param {Required<import("./protocol.js").Panel>} message @param {string[]} evicted */
  #begin(message, evicted) {
    const entry = this.#entries.get(message.panel) ?? this.#blank(message.panel);
    const { rows, columns, dtype, size } = message;
    Object.assign(entry, { rows, columns, dtype, size, dropped: false, state: "refused" });
    this.#touch(entry);
    const fits = this.makeRoom(message.size, evicted);
    if (fits) Object.assign(entry, { state: "arriving", assembly: new Reassembly(message.size) });
    return entry;
  }

  /** @param {Entry} entry one that no lease needs @param {string[]} gone */
  #forget(entry, gone) {
    this.#entries.delete(entry.id);
    if (entry.state === "held" || entry.sent) gone.push(entry.id);
  }

  /** @param {string} id @returns {Entry} */
  #blank(id) {
    /** @type {Entry} */
    const entry = {
      id, rows: 0, columns: 0, dtype: "f32", size: 0, state: "wanted", assembly: null, bytes: null, workers: new Set(), leases: 0, dropped: false,
      asked: false, sent: false,
    };
    this.#entries.set(id, entry);
    return entry;
  }

  /** @param {Entry} entry */
  #touch(entry) {
    this.#entries.delete(entry.id);
    this.#entries.set(entry.id, entry);
  }
}
