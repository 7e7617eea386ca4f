/**
 * Leases from their arrival until a compute Worker is through with them, and the panels that they need.
 *
 * A lease is queued while its panels arrive or every Worker has enough; then it runs: it is handed to a Worker, which
 * works on it or has it next. Every lease handed to a Worker is answered by that Worker exactly once, revoked or not, so
 * the count of what each has to do is always right. session.js owns the connection and what happens to results.
 */
import { PanelIndex } from "./panel_index.js";
import { panelsOf, resultBytes } from "./protocol.js";

/**
 * @typedef {import("./protocol.js").Lease} Lease
 * @typedef {{ message: Lease, worker: number, revoked: boolean, retried: boolean }} Held worker -1: queued
 * @typedef {{ emit: (effect: import("./session.js").Effect) => void,
 *   fail: (lease: Lease, code: import("./protocol.js").FailCode, text: string) => void }} Out
 */

export class Tiles {
  /** @type {Map<number, Held>} */
  #leases = new Map();
  /** Leases handed to each Worker. @type {number[]} */
  #busy;
  #out;

  /** @param {number} capacityBytes @param {number} workers @param {number} depth tiles a Worker runs at once @param {Out} out */
  constructor(capacityBytes, workers, depth, out) {
    this.depth = depth;
    this.panels = new PanelIndex(capacityBytes, workers);
    this.#busy = Array(workers).fill(0);
    this.#out = out;
  }

  get size() {
    return this.#leases.size;
  }

  /** Leases that the server still counts on. @returns {Lease[]} */
  open() {
    return [...this.#leases.values()].filter((held) => !held.revoked).map((held) => held.message);
  }

  /** @param {number} lease */
  has(lease) {
    return this.#leases.has(lease);
  }

  /** A new lease; returns the panels that are neither here nor on their way. @param {Lease} message @returns {string[]} */
  add(message) {
    this.#leases.set(message.lease, { message, worker: -1, revoked: false, retried: false });
    return panelsOf(message).filter((id) => this.panels.ask(this.panels.retain(id)));
  }

  /**
   * A chunk of a panel; true when leases that wait for it can move.
   * @param {Required<import("./protocol.js").Panel>} message @param {Uint8Array} payload
   */
  panel(message, payload) {
    /** @type {string[]} */
    const evicted = [];
    const complete = this.panels.add(message, payload, evicted);
    this.#drop(evicted);
    return complete || this.panels.get(message.panel)?.state === "refused";
  }

  /** Hands out what can run, oldest first. */
  advance() {
    for (const held of [...this.#leases.values()]) if (held.worker < 0) this.#assign(held);
  }

  /** A Worker is through with a lease. @param {number} worker @param {number} number @returns {Held|undefined} */
  answered(worker, number) {
    const held = this.#leases.get(number);
    if (held?.worker !== worker) return undefined;
    this.#busy[worker] -= 1;
    this.#release(held.message);
    return held;
  }

  /** @param {number[]} numbers */
  revoke(numbers) {
    for (const number of numbers) {
      const held = this.#leases.get(number);
      if (!held || held.revoked) continue;
      if (held.worker < 0) this.#release(held.message);
      else {
        held.revoked = true;
        this.#out.emit({ do: "revoke", worker: held.worker, leases: [number] });
      }
    }
  }

  /** The connection is gone: nothing is leased any more, what was arriving will not come. */
  disconnected() {
    this.revoke([...this.#leases.keys()]);
    this.#drop(this.panels.disconnected());
  }

  /** The server's DROP. @param {string[]} ids */
  drop(ids) {
    this.#drop(this.panels.drop(ids));
  }

  /**
   * A Worker ran out of memory, and `lost` found no room there. Every idle panel goes, and the lease gets a second try,
   * since first-fit leaves gaps. Returns it when that was its second, and [panel, lease] for each panel to send again.
   * @param {number} worker @param {number} number @param {string[]} lost
   * @returns {{ failed: Held|undefined, needs: [string, number][] }}
   */
  outOfMemory(worker, number, lost) {
    const held = this.#leases.get(number);
    if (held?.worker !== worker) return { failed: undefined, needs: [] };
    const again = !held.revoked && !held.retried;
    if (again) {
      this.#busy[worker] -= 1;
      Object.assign(held, { worker: -1, retried: true });
    } else this.answered(worker, number);
    this.panels.lost(worker, lost);
    /** @type {[string, number][]} */
    const needs = [];
    // Its own too: they may have been lost with a tile that had its second try, when nobody waited for them.
    for (const id of new Set([...lost, ...panelsOf(held.message)])) {
      const waiting = [...this.#leases.values()].find(({ worker: at, message }) => at < 0 && panelsOf(message).includes(id));
      const entry = this.panels.get(id);
      if (waiting && entry && this.panels.ask(entry)) needs.push([id, waiting.message.lease]);
    }
    this.#drop(this.panels.evictIdle());
    return { failed: again ? undefined : held, needs };
  }

  /** To the Worker with the least to do; among equals, to the one that lacks the fewest bytes. @param {Held} held */
  #assign(held) {
    const { message } = held;
    const ids = panelsOf(message);
    const panels = ids.map((id) => this.panels.get(id));
    if (panels.some((panel) => panel?.state === "refused")) return this.#give(held, "memory", "no room for the panels");
    /** @type {import("./panel_index.js").Entry[]} */
    const here = [];
    for (const panel of panels) if (panel?.state === "held") here.push(panel);
    if (here.length < ids.length) return;
    const wrong = mismatch(message, new Map(here.map((panel) => [panel.id, panel])));
    if (wrong) return this.#give(held, "panel", wrong);
    const missing = (/** @type {number} */ worker) => here.reduce((sum, p) => sum + (p.workers.has(worker) ? 0 : p.size), 0);
    // What runs and one that is next, so that a Worker never waits for the net.
    const free = this.#busy.map((_, worker) => worker).filter((worker) => this.#busy[worker] <= this.depth)
      .filter((worker) => here.every((panel) => this.panels.reaches(panel, worker)))
      .sort((x, y) => this.#busy[x] - this.#busy[y] || missing(x) - missing(y));
    if (!free.length) return;
    const worker = held.worker = free[0];
    this.#busy[worker] += 1;
    this.#reserve();
    for (const { id: panel, rows, columns, dtype } of here) {
      const placed = this.panels.place(panel, worker);
      if (placed) this.#out.emit({ do: "panel", worker, panel, form: { rows, columns, dtype }, ...placed });
    }
    this.#out.emit({ do: "tile", worker, lease: message });
  }

  /** Keeps room for the largest products that a Worker may be computing. */
  #reserve() {
    const running = [...this.#leases.values()].filter((held) => held.worker >= 0);
    this.panels.reserveBytes = this.depth * Math.max(0, ...running.map(({ message }) => resultBytes({ ...message, dtype: "f32" })));
    /** @type {string[]} */
    const evicted = [];
    this.panels.makeRoom(0, evicted);
    this.#drop(evicted);
  }

  /** Gives a queued lease back. @param {Held} held @param {import("./protocol.js").FailCode} code @param {string} text */
  #give({ message }, code, text) {
    this.#release(message);
    this.#out.fail(message, code, text);
  }

  /** @param {Lease} message */
  #release(message) {
    this.#leases.delete(message.lease);
    this.#drop(panelsOf(message).filter((id) => this.panels.release(id)));
  }

  /** @param {string[]} panels */
  #drop(panels) {
    if (panels.length) this.#out.emit({ do: "drop", panels });
  }
}

/**
 * Why these panels cannot be the lease's operands, or "".
 * @param {Lease} lease @param {Map<string, import("./panel_index.js").Entry>} panels
 */
function mismatch({ batch, m, n, terms, a_by_k: aByK, b_by_k: bByK }, panels) {
  for (const { k, a, b, a_row: aRow = 0, a_column: aColumn = 0, b_row: bRow = 0, b_column: bColumn = 0 } of terms) {
    for (const [id, byK, lines, row, column] of /** @type {const} */ ([[a, aByK, m, aRow, aColumn], [b, bByK, n, bRow, bColumn]])) {
      const panel = /** @type {import("./panel_index.js").Entry} */ (panels.get(id));
      const [height, width] = byK ? [k, lines] : [lines, k];
      const rows = row + batch * height, columns = column + width;
      if (rows > panel.rows || columns > panel.columns) {
        return `panel ${id} is ${panel.rows} x ${panel.columns}, the lease reaches to ${rows} x ${columns}`;
      }
    }
  }
  return "";
}
