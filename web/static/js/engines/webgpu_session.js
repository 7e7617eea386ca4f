/**
 * One device's life: its memory, its compiled kernels, how fast it is, and the submission of work in pieces.
 *
 * A dispatch that runs for long freezes the volunteer's screen, and one of two seconds resets the GPU on Windows. So work
 * comes here cut by what this device was measured to do in PIECE_SECONDS, and each piece is submitted by itself.
 */
import { GpuMemory } from "./webgpu_memory.js";

/**
 * @typedef {import("./webgpu_memory.js").Block} Block
 * @typedef {{ words: number[], groups: [number, number, number] }} Piece one dispatch: its uniforms and workgroups
 */

export const PIECE_SECONDS = 0.05;
const FLOPS_UNTIL_MEASURED = 1e9;
const UNIFORM_STRIDE = 256; // the largest alignment that a device may ask for
const COMPUTE = 4; // GPUShaderStage.COMPUTE

export class GpuSession {
  /** Pieces are cut by it. @type {number} */
  flops = FLOPS_UNTIL_MEASURED;
  lost = false;
  /** Called before whoever waits for the device hears of its loss. */
  onLost = () => {};
  /** When the last work was done, performance.now(). */
  doneAt = 0;
  /** @type {Map<string, Promise<GPUComputePipeline>>} */
  #pipelines = new Map();
  /** Of the work that runs. @type {Set<(error: Error) => void>} */
  #rejects = new Set();
  #layout;
  #pipelineLayout;

  /** @param {GPUDevice} device @param {string} identity @param {number} bytesMax */
  constructor(device, identity, bytesMax) {
    this.device = device;
    this.identity = identity;
    this.memory = new GpuMemory(device, bytesMax);
    /** Bound where a kernel's operand is absent. */
    this.nothing = this.memory.take("storage", 4);
    const storage = (/** @type {GPUBufferBindingType} */ type, /** @type {number} */ binding) =>
      ({ binding, visibility: COMPUTE, buffer: { type, hasDynamicOffset: type === "uniform" } });
    /** @type {GPUBufferBindingType[]} */
    const types = ["uniform", "read-only-storage", "read-only-storage", "storage"];
    this.#layout = device.createBindGroupLayout({ entries: types.map(storage) });
    this.#pipelineLayout = device.createPipelineLayout({ bindGroupLayouts: [this.#layout] });
    void device.lost.then(({ message }) => {
      this.lost = true;
      this.onLost();
      this.#rejects.forEach((reject) => reject(new Error(`the GPU was lost: ${message}`)));
    });
  }

  /**
   * The work, or its failure as soon as the device is lost, whether or not the work ever ends by itself.
   * @template T @param {Promise<T>} work @returns {Promise<T>}
   */
  whileAlive(work) {
    return new Promise((resolve, reject) => {
      this.#rejects.add(reject);
      work.then(resolve, reject).finally(() => this.#rejects.delete(reject));
    });
  }

  /**
   * @param {string} name @param {() => string} source
   * @returns {Promise<GPUComputePipeline>} rejects where it does not compile
   */
  pipeline(name, source) {
    let made = this.#pipelines.get(name);
    if (!made) {
      const module = this.device.createShaderModule({ code: source() });
      const compute = { module, entryPoint: "main" };
      made = this.device.createComputePipelineAsync({ layout: this.#pipelineLayout, compute });
      this.#pipelines.set(name, made);
    }
    return made;
  }

  /** Bytes of uniforms for so many pieces. @param {number} pieces */
  uniformBytes(pieces) {
    return pieces * UNIFORM_STRIDE;
  }

  /**
   * @param {GPUComputePipeline} pipeline @param {Piece[]} pieces
   * @param {Block} uniforms @param {[Block, number][]} operands three, with the bytes of each that are bound
   */
  submit(pipeline, pieces, uniforms, operands) {
    const words = new Uint32Array((UNIFORM_STRIDE / 4) * pieces.length);
    pieces.forEach((piece, index) => words.set(piece.words, (UNIFORM_STRIDE / 4) * index));
    this.device.queue.writeBuffer(uniforms.buffer, 0, words);
    const entries = [{ binding: 0, resource: { buffer: uniforms.buffer, size: UNIFORM_STRIDE } }];
    operands.forEach(([{ buffer }, size], index) => entries.push({ binding: index + 1, resource: { buffer, size } }));
    const group = this.device.createBindGroup({ layout: this.#layout, entries });
    pieces.forEach(({ groups }, index) => {
      const encoder = this.device.createCommandEncoder();
      const pass = encoder.beginComputePass();
      pass.setPipeline(pipeline);
      pass.setBindGroup(0, group, [UNIFORM_STRIDE * index]);
      pass.dispatchWorkgroups(...groups);
      pass.end();
      this.device.queue.submit([encoder.finish()]);
    });
  }

  /**
   * Work of `flop` in `pieces` took so long. One piece may have been mostly latency, so alone it can only raise the pace.
   * @param {number} flop @param {number} seconds @param {number} pieces
   */
  measured(flop, seconds, pieces) {
    const flops = flop / Math.max(seconds, 1e-6);
    if (pieces > 1 || flops > this.flops) this.flops = flops;
  }
}
