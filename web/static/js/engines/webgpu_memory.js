/**
 * The memory of one GPU device: buffers in a few sizes, kept for the next use, counted, and bounded by bytesMax and by what
 * createBuffer really gives.
 *
 * A limit of a device is not memory: a buffer can be refused long after the call that made it. So each is made inside an
 * error scope, and a new one must not be used before its `ready`; one that is used again is ready at once. When a device
 * refuses, what it holds at that moment becomes the bound.
 */
import { OutOfMemory } from "./errors.js";

/**
 * @typedef {"storage"|"uniform"|"readback"} Use
 * @typedef {{ buffer: GPUBuffer, size: number, use: Use, ready: Promise<void>|null }} Block ready: null once it is
 */

// GPUBufferUsage, which TypeScript's library has as types only
const [MAP_READ, COPY_SRC, COPY_DST, UNIFORM, STORAGE] = [1, 4, 8, 64, 128];
const USAGE = { storage: STORAGE | COPY_SRC | COPY_DST, uniform: UNIFORM | COPY_DST, readback: MAP_READ | COPY_DST };
const SIZE_MIN = 256;
const STEPS = 4; // sizes between one power of two and the next: at most a quarter is wasted

export class GpuMemory {
  /** @type {Block[]} */
  #free = [];
  #device;
  #bytesMax;
  #bytes = 0;
  #freeBytes = 0;
  /** Gives something up that can be made again; false when there is nothing. @type {() => boolean} */
  spare = () => false;

  /** @param {GPUDevice} device @param {number} bytesMax */
  constructor(device, bytesMax) {
    this.#device = device;
    this.#bytesMax = bytesMax;
  }

  get bytes() {
    return this.#bytes;
  }

  /** What it may hold, as far as the device has shown. */
  get bytesMax() {
    return this.#bytesMax;
  }

  get usedBytes() {
    return this.#bytes - this.#freeBytes;
  }

  /**
   * @param {Use} use @param {number} bytes @param {Uint8Array<ArrayBuffer>} [data] what it holds
   * @returns {Block} throws OutOfMemory
   */
  take(use, bytes, data) {
    const size = rounded(bytes);
    const { maxBufferSize, maxStorageBufferBindingSize } = this.#device.limits;
    const limit = use === "storage" ? Math.min(maxBufferSize, maxStorageBufferBindingSize) : maxBufferSize;
    if (size > limit) throw new OutOfMemory(`needs a buffer of ${size} bytes, this GPU allows ${limit}`);
    const index = this.#free.findIndex((block) => block.use === use && block.size === size);
    if (index >= 0) {
      this.#freeBytes -= size;
      const [block] = this.#free.splice(index, 1);
      if (data) this.#write(block.buffer, data);
      return block;
    }
    this.#makeRoom(size);
    return this.#create(use, size, data);
  }

  /** @param {Block} block not mapped; work that was submitted with it may still run */
  give(block) {
    if (block.ready) return this.#discard(block);
    this.#free.push(block);
    this.#freeBytes += block.size;
  }

  /** @param {number} size */
  #makeRoom(size) {
    while (this.#bytes + size > this.#bytesMax) {
      const oldest = this.#free.shift();
      if (oldest) {
        this.#freeBytes -= oldest.size;
        this.#discard(oldest);
      } else if (!this.spare()) {
        throw new OutOfMemory(`needs ${this.#bytes + size} bytes of GPU memory, may use ${this.#bytesMax}`);
      }
    }
  }

  /**
   * New buffers take their data through a mapping: a write to one that is refused later would be an error of its own.
   * @param {Use} use @param {number} size @param {Uint8Array<ArrayBuffer>} [data] @returns {Block}
   */
  #create(use, size, data) {
    this.#device.pushErrorScope("out-of-memory");
    /** @type {GPUBuffer} */
    let buffer;
    try {
      buffer = this.#device.createBuffer({ size, usage: USAGE[use], mappedAtCreation: Boolean(data) });
      if (data) {
        new Uint8Array(buffer.getMappedRange()).set(data);
        buffer.unmap();
      }
    } catch (error) {
      void this.#device.popErrorScope().catch(() => {});
      throw new OutOfMemory(`no memory to fill a GPU buffer of ${size} bytes: ${error}`);
    }
    const scope = this.#device.popErrorScope();
    this.#bytes += size;
    /** @type {Block} */
    const block = { buffer, size, use, ready: null };
    block.ready = scope.then((error) => {
      if (error) {
        this.#bytesMax = Math.min(this.#bytesMax, Math.max(this.#bytes - size, 0));
        throw new OutOfMemory(`the GPU gives no more than ${this.#bytesMax} bytes: ${error.message}`);
      }
      block.ready = null;
    });
    block.ready.catch(() => {}); // whoever uses the block awaits it
    return block;
  }

  /** writeBuffer takes whole words only. @param {GPUBuffer} buffer @param {Uint8Array<ArrayBuffer>} data */
  #write(buffer, data) {
    const whole = data.length & ~3;
    if (whole) this.#device.queue.writeBuffer(buffer, 0, data, 0, whole);
    if (whole === data.length) return;
    const rest = new Uint8Array(4);
    rest.set(data.subarray(whole));
    this.#device.queue.writeBuffer(buffer, whole, rest);
  }

  /** @param {Block} block */
  #discard({ buffer, size }) {
    buffer.destroy();
    this.#bytes -= size;
  }
}

/** @param {number} bytes */
function rounded(bytes) {
  const wanted = Math.max(bytes, SIZE_MIN);
  const step = 2 ** Math.floor(Math.log2(wanted)) / STEPS;
  return Math.ceil(wanted / step) * step;
}
