/**
 * The WebGPU engine: panels in GPU buffers, tiles multiplied by the WGSL kernel that this device was measured to run best.
 *
 * Two tiles are in flight, so that one's copies overlap the other's computing; more wait here. A GPU can go at any moment:
 * then everything on it is lost, the engine looks once for another, and goes on when there is one. A tile that was on its
 * way fails as if memory had been short (its panels are lost and have to come again); when no GPU comes, it and every tile
 * after it fail with EngineGone.
 */
import { place, rounded } from "./elements.js";
import { EngineGone, OutOfMemory, refuseEmpty } from "./errors.js";
import { openDevice } from "./webgpu_device.js";
import { FAMILY } from "./webgpu_family.js";
import { GpuPanels } from "./webgpu_panels.js";
import { bytesOf, product } from "./webgpu_product.js";
import { GpuSession } from "./webgpu_session.js";
import { fromText, toText, tune } from "./webgpu_tuner.js";

/**
 * @typedef {import("../../../types/engine.js").Engine} Engine
 * @typedef {import("../../../types/engine.js").EngineOptions} EngineOptions
 * @typedef {import("../../../types/engine.js").Operand} Operand
 * @typedef {import("../../../types/engine.js").Problem} Problem
 * @typedef {import("../../../types/engine.js").PanelForm} PanelForm
 * @typedef {import("../../../types/engine.js").TileWork} TileWork
 * @typedef {import("./webgpu_memory.js").Block} Block
 * @typedef {import("./webgpu_family.js").Member} Member
 * @typedef {import("./webgpu_family.js").Form} Form
 * @typedef {import("./webgpu_product.js").Side} Side
 * @typedef {import("./webgpu_product.js").Work} Work
 * @typedef {import("./webgpu_tuner.js").Choice} Choice
 * @typedef {{ gpu: GpuSession, choice: Choice, others: Map<Form, Promise<Choice|null>> }} Tuned others: than float32
 */

const DEPTH = 2;

/** @implements {Engine} */
class WebGpuEngine {
  kernel = "webgpu";
  depth = DEPTH;
  note = "";
  #options;
  #family;
  #panels = new GpuPanels();
  /** The device in use, or the search for one; null once there is none. @type {Promise<Tuned|null>} */
  #tuned = Promise.resolve(null);
  /** @type {GpuSession|null} */
  #gpu = null;
  #closed = false;
  #running = 0;
  /** Products that wait for one before them. @type {(() => void)[]} */
  #waiting = [];

  /** @param {EngineOptions} options @param {Member[]} family */
  constructor(options, family) {
    this.#options = options;
    this.#family = family;
  }

  /** Looks for a GPU and tunes; rejects with a reason in words. */
  async start() {
    const tuned = this.#enter();
    this.#tuned = tuned;
    await tuned;
  }

  get memory() {
    return { bytes: this.#gpu?.memory.bytes ?? 0, used: this.#gpu?.memory.usedBytes ?? 0 };
  }

  /** @param {string} id @param {Uint8Array<ArrayBuffer>} bytes @param {PanelForm} form */
  put(id, bytes, form) {
    this.#panels.put(id, bytes, form);
  }

  /** @param {string[]} ids */
  drop(ids) {
    this.#panels.drop(ids);
  }

  takeLost() {
    return this.#panels.takeLost();
  }

  /** Terms go one after the other, each added to the sum of those before. @param {TileWork} work */
  async compute(work) {
    const { batch, m, n, terms, dtype } = work;
    terms.forEach(({ k }) => refuseEmpty({ batch, m, n, k }));
    return this.#inTurn(async ({ gpu, choice }) => {
      /** @type {ReturnType<GpuPanels["hold"]>[]} */
      const held = [];
      try {
        for (const { a, b } of terms) held.push(this.#panels.hold(a), this.#panels.hold(b));
        /** @type {Float32Array<ArrayBuffer>|null} */
        let c = null;
        let seconds = 0;
        for (const [index, term] of terms.entries()) {
          const side = (/** @type {"a"|"b"} */ name) => {
            const { raw, packed, form } = held[2 * index + (name === "b" ? 1 : 0)];
            return { raw, packed, dtype: form.dtype, scales: null, ...place(work, term, name, form) };
          };
          const shape = { batch, m, n, k: term.k, row: n, count: batch * m * n, c, bias: null };
          const done = await product(gpu, choice.member, { ...shape, a: side("a"), b: side("b") });
          c = new Float32Array(done.bytes.buffer);
          seconds += done.seconds;
        }
        const sum = /** @type {Float32Array<ArrayBuffer>} */ (c);
        return { bytes: dtype === "f32" ? new Uint8Array(sum.buffer) : rounded(sum, dtype), seconds };
      } finally {
        held.forEach((panel) => this.#panels.release(panel));
      }
    });
  }

  /** @param {Problem} problem */
  async multiply({ m, n, k, a, b, cRow, c, bias }) {
    refuseEmpty({ m, n, k });
    const { bytes } = await this.#inTurn(async (tuned) => {
      const { gpu } = tuned;
      const member = await this.#memberFor(tuned, a.dtype === b.dtype && a.dtype !== "bf16" ? a.dtype : "f32");
      /** @type {Block[]} */
      const taken = [];
      const take = (/** @type {Uint8Array<ArrayBuffer>} */ data) => {
        taken.push(gpu.memory.take("storage", data.length, data));
        return taken[taken.length - 1];
      };
      const side = (/** @type {Operand} */ { bytes: data, dtype, across, along, scales }) => ({
        raw: take(data), dtype, across, along, base: 0, entry: 0, packed: null, scales: scales ? take(bytesOf(scales)) : null,
      });
      try {
        const out = { row: cRow, count: c?.length ?? (m - 1) * cRow + n, c: c ?? null, bias: bias ?? null };
        const work = { batch: 1, m, n, k, a: side(a), b: side(b), ...out };
        await Promise.all(taken.map(({ ready }) => ready));
        return await product(gpu, member, work);
      } finally {
        taken.forEach((block) => gpu.memory.give(block));
      }
    });
    return new Float32Array(bytes.buffer);
  }

  /**
   * The fastest kernel for such operands, measured when first asked for; where that is float32's, they are expanded.
   * @param {Tuned} tuned @param {Form} form
   */
  async #memberFor({ gpu, choice, others }, form) {
    if (form === "f32") return choice.member;
    const other = others.get(form) ?? tune(gpu, this.#family, form).catch(() => null);
    others.set(form, other);
    const measured = await other;
    return measured && measured.flops > choice.flops ? measured.member : choice.member;
  }

  close() {
    this.#closed = true;
    this.#panels.loseAll();
    this.#gpu?.device.destroy();
    this.#gpu = null;
    this.#tuned = Promise.resolve(null);
  }

  /** Opens a device and makes it ours; when it goes, looks for the next. @returns {Promise<Tuned>} */
  async #enter() {
    const { device, identity } = await openDevice();
    const gpu = new GpuSession(device, identity, this.#options.bytesMax);
    gpu.onLost = () => {
      if (this.#gpu === gpu) this.#leave();
    };
    try {
      const known = await gpu.whileAlive(fromText(gpu, this.#family, this.#options.remembered));
      const choice = known ?? (await gpu.whileAlive(tune(gpu, this.#family, "f32")));
      if (this.#closed || gpu.lost) throw new Error("the GPU went while it was measured");
      if (!known) this.#options.remember(toText(identity, choice));
      // Another GPU may follow this one, and this one may come back.
      this.#options = { ...this.#options, remembered: toText(identity, choice) };
      gpu.flops = choice.flops;
      this.note = noteOf(gpu, choice);
      this.#gpu = gpu;
      this.#panels.moveTo(gpu.memory);
      return { gpu, choice, others: new Map() };
    } catch (error) {
      device.destroy();
      throw error;
    }
  }

  /** The device is lost: one search for another. */
  #leave() {
    this.#gpu = null;
    this.#panels.loseAll();
    this.#tuned = this.#enter().catch(() => null);
  }

  /**
   * Runs a product when fewer than DEPTH run. Where memory is short it waits for one beside it and tries again.
   * @template T @param {(tuned: Tuned) => Promise<T>} run @returns {Promise<T>}
   */
  async #inTurn(run) {
    for (;;) {
      while (this.#running >= DEPTH) await this.#oneDone();
      this.#running += 1;
      let ended = true;
      try {
        const tuned = await this.#tuned;
        if (!tuned) throw new EngineGone("the GPU is gone and no other came");
        try {
          return await tuned.gpu.whileAlive(run(tuned));
        } catch (error) {
          if (tuned.gpu.lost) await this.#explainLoss();
          if (!(error instanceof OutOfMemory) || this.#running === 1) throw error;
          ended = false;
        }
      } finally {
        this.#running -= 1;
        // One that only steps back wakes nobody: two of them would wake each other for ever.
        if (ended) this.#waiting.splice(0).forEach((wake) => wake());
      }
      await this.#oneDone();
    }
  }

  /** @returns {Promise<void>} */
  #oneDone() {
    return new Promise((resolve) => this.#waiting.push(resolve));
  }

  /** Throws what became of a product whose device was lost. @returns {Promise<never>} */
  async #explainLoss() {
    if (await this.#tuned) throw new OutOfMemory("the GPU was lost with this product; there is another now");
    throw new EngineGone("the GPU is gone and no other came");
  }
}

/** @param {GpuSession} gpu @param {Choice} choice */
function noteOf({ identity }, { member, dropped }) {
  return [`${identity}, ${member.name}`, ...dropped.map((text) => `not used: ${text}`)].join("; ");
}

/** @type {import("../../../types/engine.js").Open} */
export const open = (options) => openWith(options, FAMILY);

/** For tests: a family of their own. @param {EngineOptions} options @param {Member[]} family @returns {Promise<Engine>} */
export async function openWith(options, family) {
  const engine = new WebGpuEngine(options, family);
  await engine.start();
  return engine;
}
