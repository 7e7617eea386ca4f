/**
 * Panels on the GPU: each as it came, and beside it the packed copies that tiles have read.
 *
 * How a panel is read is known only from the tile that names it, so it is packed when the first tile does; the copy stays for
 * the next ones while there is room, and goes first when there is none. A buffer can be refused after put() returned: the
 * panel is then lost. What a running tile reads is held until it is done, whatever is dropped meanwhile.
 */
import { i8Parts, widenI8 } from "./elements.js";
import { OutOfMemory } from "./errors.js";
import { LostPanels } from "./lost_panels.js";

/**
 * @typedef {import("./webgpu_memory.js").GpuMemory} GpuMemory
 * @typedef {import("./webgpu_memory.js").Block} Block
 * @typedef {{ block: Block, done: boolean, by: object|null }} Packed done: what fills it is in the queue, put there `by`
 * @typedef {import("../../../types/engine.js").PanelForm} PanelForm
 * @typedef {{ memory: GpuMemory, raw: Block, form: PanelForm, packed: Map<string, Packed>, holds: number, dropped: boolean }} Panel
 */

export class GpuPanels {
  /** The panel that was used last is last. @type {Map<string, Panel>} */
  #panels = new Map();
  #lost = new LostPanels();
  /** @type {GpuMemory|null} */
  #memory = null;

  /** From now on panels live there. @param {GpuMemory} memory */
  moveTo(memory) {
    this.loseAll();
    this.#memory = memory;
    memory.spare = () => this.#spare();
  }

  /** @param {string} id @param {Uint8Array<ArrayBuffer>} bytes @param {PanelForm} form */
  put(id, bytes, form) {
    if (this.#panels.has(id)) return;
    this.#lost.delete(id);
    const memory = this.#memory;
    if (!memory) return this.#lost.add(id);
    try {
      const data = upload(bytes, form), dtype = form.dtype === "i8" ? "f32" : form.dtype;
      const raw = memory.take("storage", data.length, data);
      const panel = { memory, raw, form: { ...form, dtype }, packed: new Map(), holds: 0, dropped: false };
      this.#panels.set(id, panel);
      raw.ready?.catch(() => {
        if (this.#panels.get(id) !== panel) return;
        this.#remove(id, panel);
        this.#lost.add(id);
      });
    } catch (error) {
      if (!(error instanceof OutOfMemory)) throw error;
      this.#lost.add(id);
    }
  }

  /** @param {string[]} ids */
  drop(ids) {
    for (const id of ids) {
      this.#lost.delete(id);
      const panel = this.#panels.get(id);
      if (panel) this.#remove(id, panel);
    }
  }

  /** The device that held them is gone, and their buffers with it. */
  loseAll() {
    for (const id of this.#panels.keys()) this.#lost.add(id);
    this.#panels.clear();
    this.#memory = null;
  }

  takeLost() {
    return this.#lost.take();
  }

  /** The panel, kept until release(). @param {string} id @returns {Panel} throws OutOfMemory, MissingPanel */
  hold(id) {
    const panel = this.#panels.get(id) ?? this.#lost.explain(id);
    this.#panels.delete(id);
    this.#panels.set(id, panel);
    panel.holds += 1;
    return panel;
  }

  /** @param {Panel} panel */
  release(panel) {
    panel.holds -= 1;
    if (panel.dropped && panel.holds === 0) this.#free(panel);
  }

  /** @param {string} id @param {Panel} panel */
  #remove(id, panel) {
    this.#panels.delete(id);
    panel.dropped = true;
    if (panel.holds === 0) this.#free(panel);
  }

  /** @param {Panel} panel */
  #free({ memory, raw, packed }) {
    memory.give(raw);
    packed.forEach(({ block }) => memory.give(block));
  }

  /** Frees the packed copies of the panel that was used longest ago. */
  #spare() {
    for (const { memory, packed, holds } of this.#panels.values()) {
      if (holds > 0 || packed.size === 0) continue;
      packed.forEach(({ block }) => memory.give(block));
      packed.clear();
      return true;
    }
    return false;
  }
}

/**
 * What goes up: whole words; i8 as float32, whose scales along other axes than k no kernel here reads.
 * @param {Uint8Array<ArrayBuffer>} bytes @param {PanelForm} form
 */
function upload(bytes, form) {
  if (form.dtype === "i8") {
    const { elements, scales } = i8Parts(bytes, form);
    return new Uint8Array(widenI8(elements, scales, form.columns, 0, form.rows).buffer);
  }
  if (bytes.length % 4 === 0) return bytes;
  const padded = new Uint8Array(bytes.length + 2);
  padded.set(bytes);
  return padded;
}
