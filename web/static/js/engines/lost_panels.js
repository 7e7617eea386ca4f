/**
 * Panels that were sent here and are not: they found no room, or went with a GPU. Each tile that wants one fails with
 * "memory" and has it told again, so that the net Worker can have it sent again, however many tiles wait for it.
 */
import { MissingPanel, OutOfMemory } from "./errors.js";

export class LostPanels {
  /** Lost and neither sent again nor dropped. @type {Set<string>} */
  #lost = new Set();
  /** Those of them that are still to be told. @type {Set<string>} */
  #untold = new Set();

  /** @param {string} id */
  add(id) {
    this.#lost.add(id);
    this.#untold.add(id);
  }

  /** It was sent again, or dropped. @param {string} id */
  delete(id) {
    this.#lost.delete(id);
    this.#untold.delete(id);
  }

  /** Those that were lost, or missed, since the last call. */
  take() {
    const lost = [...this.#untold];
    this.#untold.clear();
    return lost;
  }

  /** Throws why a panel is not here, OutOfMemory or MissingPanel. @param {string} id @returns {never} */
  explain(id) {
    if (!this.#lost.has(id)) throw new MissingPanel(`panel ${id} is not here`);
    this.#untold.add(id);
    throw new OutOfMemory(`panel ${id} found no room, or went with a lost GPU`);
  }
}
