/**
 * Which panels an engine holds and where. A panel that found no room is remembered as lost until someone asks, so that
 * its tiles fail with "memory" and the net Worker can have it sent again.
 */
import { MissingPanel, OutOfMemory } from "./errors.js";

/** @template Place where an engine keeps a panel: an address, a buffer */
export class PanelStore {
  /** @type {Map<string, Place>} */
  #places = new Map();
  /** @type {Set<string>} */
  #lost = new Set();
  #free;

  /** @param {(place: Place) => void} free gives a place back */
  constructor(free) {
    this.#free = free;
  }

  /** Keeps a panel unless it is here. @param {string} id @param {() => Place} make may throw OutOfMemory */
  put(id, make) {
    if (this.#places.has(id)) return;
    this.#lost.delete(id);
    try {
      this.#places.set(id, make());
    } catch (error) {
      if (!(error instanceof OutOfMemory)) throw error;
      this.#lost.add(id);
    }
  }

  /** @param {string[]} ids */
  drop(ids) {
    for (const id of ids) {
      this.#lost.delete(id);
      const place = this.#places.get(id);
      if (place === undefined) continue;
      this.#places.delete(id);
      this.#free(place);
    }
  }

  dropAll() {
    this.drop([...this.#places.keys()]);
  }

  /** Panels lost since the last call. */
  takeLost() {
    const lost = [...this.#lost];
    this.#lost.clear();
    return lost;
  }

  /** @param {string} id @returns {Place} throws OutOfMemory, MissingPanel */
  get(id) {
    const place = this.#places.get(id);
    if (place !== undefined) return place;
    if (this.#lost.has(id)) throw new OutOfMemory(`no room for panel ${id}`);
    throw new MissingPanel(`panel ${id} is not here`);
  }
}
