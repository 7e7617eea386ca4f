/**
 * Pyodide's memory as an engine uses it: byte arrays of Python's that JavaScript fills and reads, up to a limit.
 *
 * A place is a Python bytearray and its size. Bytes go in with one copy and come out with one, through a view of Python's
 * own buffer. Pyodide's memory grows by a fifth at a time and has no limit of its own, so growing it is refused here
 * beyond `bytesMax`; a little below that only places are refused, since Python itself cannot go on without memory.
 */
import { OutOfMemory } from "./errors.js";

/**
 * What this project uses of Pyodide: its own types need more libraries than tsc has here.
 * @typedef {{ destroy: () => void }} Proxy of something in Python
 * @typedef {Proxy & { getBuffer: (type: "u8") => { data: Uint8Array, release: () => void } }} Bytes
 * @typedef {{ bytes: Bytes, size: number }} Place
 */

const PAGE_BYTES = 65536;
const PYTHON_BYTES = 4 << 20; // what Python may need beside the places: its own objects grow in arenas of 1 MiB

export class PyodideHeap {
  #memory;
  #alloc;
  #limit;
  #used = 0;

  /**
   * @param {WebAssembly.Memory} memory Pyodide's
   * @param {(size: number) => Bytes|undefined} alloc Python's
   * @param {number} bytesMax of the whole memory; throws OutOfMemory where Pyodide already has more
   */
  constructor(memory, alloc, bytesMax) {
    this.#memory = memory;
    this.#alloc = alloc;
    this.bytesMax = bytesMax;
    this.#limit = bytesMax;
    if (this.bytes + PYTHON_BYTES > bytesMax) throw new OutOfMemory(`Pyodide alone has ${this.bytes} bytes, may use ${bytesMax}`);
    memory.grow = (pages) => {
      if (this.bytes + pages * PAGE_BYTES > this.#limit) throw new RangeError("the memory is at its limit");
      return WebAssembly.Memory.prototype.grow.call(memory, pages);
    };
  }

  /** Bytes of the whole memory now. */
  get bytes() {
    return this.#memory.buffer.byteLength;
  }

  /** Bytes of all places. */
  get usedBytes() {
    return this.#used;
  }

  /** @param {number} size bytes @returns {Place} of zeros; throws OutOfMemory */
  alloc(size) {
    this.#limit = this.bytesMax - PYTHON_BYTES;
    const bytes = this.#alloc(size);
    this.#limit = this.bytesMax;
    if (!bytes) throw new OutOfMemory(`no room for ${size} bytes in ${this.bytes}, may use ${this.bytesMax}`);
    this.#used += size;
    return { bytes, size };
  }

  /** @param {Uint8Array<ArrayBuffer>} from @returns {Place} throws OutOfMemory */
  load(from) {
    const place = this.alloc(from.length);
    const view = place.bytes.getBuffer("u8");
    view.data.set(from);
    view.release();
    return place;
  }

  /** A copy of its own of all bytes of a place. @param {Place} place @returns {Uint8Array<ArrayBuffer>} */
  read(place) {
    const view = place.bytes.getBuffer("u8");
    const copy = /** @type {Uint8Array<ArrayBuffer>} */ (view.data.slice());
    view.release();
    return copy;
  }

  /** @param {Place} place not freed yet */
  free({ bytes, size }) {
    bytes.destroy();
    this.#used -= size;
  }
}
