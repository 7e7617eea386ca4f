/** Which panels an engine holds and where, and which found no room. */
import { OutOfMemory } from "./errors.js";
import { LostPanels } from "./lost_panels.js";

/** @template Place where an engine keeps a panel: an address, a buffer */
export class PanelStore {
  /** @type {Map<string, Place>} */
  #places = new Map();
  #lost = new LostPanels();
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

  takeLost() {
    return this.#lost.take();
  }

  /** @param {string} id @returns {Place} throws OutOfMemory, MissingPanel */
  get(id) {
    return this.#places.get(id) ?? this.#lost.explain(id);
  }
}
