/**
 * Results from the moment a compute Worker hands them over until the server's final word on them.
 *
 * Sent in order, each in chunks. At most WINDOW_BYTES are on their way at a time, so that the socket's buffer stays
 * small, a PONG never waits behind a minute of upload, and nothing here needs a timer (hidden tabs slow those down): every
 * MARK_BYTES a PING follows the chunks, its PONG proves that they were read, and an ACK proves it too.
 *
 * After a reconnect every result without an ACK is sent again from its first byte.
 */
import { chunks } from "./protocol.js";

const WINDOW_BYTES = 12 << 20;
const MARK_BYTES = 4 << 20;

/** @typedef {{ lease: number, job: string, seconds: number, bytes: Uint8Array<ArrayBuffer>, end: number }} Upload */
/** @typedef {(message: import("./protocol.js").Message, payload?: Uint8Array<ArrayBuffer>) => void} Send */

export class Uploads {
  /** All without an ACK, in order of completion. @type {Map<number, Upload>} */
  #pending = new Map();
  /** Those not wholly sent on this connection. @type {Upload[]} */
  #queue = [];
  /** Chunks of the first of the queue. @type {Iterator<[number, number]>|null} */
  #chunks = null;
  #sent = 0;
  #confirmed = 0;
  #marked = 0;
  /** nonce -> bytes sent before it @type {Map<number, number>} */
  #marks = new Map();
  #nonce = 0;

  /** Leases with a result and no final word. */
  get leases() {
    return [...this.#pending.keys()];
  }

  /** Bytes held. */
  get bytes() {
    let sum = 0;
    for (const { bytes } of this.#pending.values()) sum += bytes.length;
    return sum;
  }

  /** @param {number} lease */
  has(lease) {
    return this.#pending.has(lease);
  }

  /** @param {number} lease @param {string} job @param {number} seconds @param {Uint8Array<ArrayBuffer>} bytes */
  add(lease, job, seconds, bytes) {
    const upload = { lease, job, seconds, bytes, end: 0 };
    this.#pending.set(lease, upload);
    this.#queue.push(upload);
  }

  /** A new connection: everything again, from the start. */
  restart() {
    this.#queue = [...this.#pending.values()];
    this.#chunks = null;
    this.#sent = this.#confirmed = this.#marked = 0;
    this.#marks.clear();
  }

  /** The final word. @param {number} lease @returns {boolean} whether it was still open */
  acked(lease) {
    const upload = this.#pending.get(lease);
    if (!upload) return false;
    this.#confirmed = Math.max(this.#confirmed, upload.end);
    this.#forget(upload);
    return true;
  }

  /** Not wanted any more; the server ignores what it has of it. @param {number} lease */
  revoke(lease) {
    const upload = this.#pending.get(lease);
    if (upload) this.#forget(upload);
  }

  /** @param {number} nonce of a PONG */
  pong(nonce) {
    this.#confirmed = Math.max(this.#confirmed, this.#marks.get(nonce) ?? 0);
    this.#marks.delete(nonce);
  }

  /** Sends what the window allows. @param {Send} send @param {number} frameBytesMax */
  pump(send, frameBytesMax) {
    while (this.#queue.length && this.#sent - this.#confirmed < WINDOW_BYTES) {
      const upload = this.#queue[0];
      this.#chunks ??= chunks(upload.bytes.length, frameBytesMax);
      const { value, done } = this.#chunks.next();
      if (done) {
        upload.end = this.#sent;
        this.#queue.shift();
        this.#chunks = null;
        continue;
      }
      const [offset, length] = value;
      const { lease, job, seconds, bytes } = upload;
      send({ type: "RESULT", lease, job, seconds, offset, size: bytes.length }, bytes.subarray(offset, offset + length));
      this.#sent += length;
      if (this.#sent - this.#marked >= MARK_BYTES) this.#mark(send);
    }
  }

  /** @param {Send} send */
  #mark(send) {
    this.#nonce += 1;
    this.#marked = this.#sent;
    this.#marks.set(this.#nonce, this.#sent);
    send({ type: "PING", nonce: this.#nonce });
  }

  /** @param {Upload} upload */
  #forget(upload) {
    this.#pending.delete(upload.lease);
    const index = this.#queue.indexOf(upload);
    if (index < 0) return;
    if (index === 0) this.#chunks = null;
    this.#queue.splice(index, 1);
  }
}
