// @ts-check
/**
 * The wire protocol between a device and the server, version 2, as a browser speaks it.
 *
 * The mirror of tileweave/protocol (frames.py, messages.py, chunks.py); PROTOCOL.md has the byte picture, and the golden
 * vectors in tests/golden hold the two together. The idea: one table of fields, SCHEMAS, checks what comes in and what
 * goes out, so that the rest of the page meets only messages within their bounds; lengths are looked at before bytes,
 * and a payload is a view into the frame that arrived. Imports nothing, touches no DOM: it runs in a Worker and in Node.
 *
 * Left out: the order of messages and whose lease it is (the net worker's job). One difference to Python: JSON.parse
 * cannot tell 1.0 from 1, so an integer written as 1.0 passes here and is refused by the server.
 */

export const PROTOCOL_VERSION = 2;
export const FRAME_BYTES_MAX = 1 << 20;
export const META_BYTES_MAX = 1 << 16;
export const HEADER_BYTES = 16;
const CHUNK_HEADROOM_BYTES = 4096; // header, metadata of a PANEL or RESULT (under 400 bytes) and padding
export const CHUNK_BYTES_MAX = FRAME_BYTES_MAX - CHUNK_HEADROOM_BYTES;
export const DIMENSION_MAX = 2 ** 24;
const SIZE_MAX = 2 ** 40;
const ERROR_TEXT_MAX = 300; // of an error that may quote the peer; BYE carries up to 500
const NESTING_MAX = 64; // objects and lists within each other, the outermost included
const MAGIC = 0x5754; // "TW", little-endian
const ELEMENT_BYTES = { f32: 4, bf16: 2, f16: 2, i8: 1 };
export const TERMS_MAX = 256;
/** Elements of a row that share a scale in an i8 panel. */
export const SCALE_BLOCK = 128;

/** Message numbers: byte 3 of the header. Never reused. */
export const KIND = Object.freeze({
  HELLO: 1, WELCOME: 2, PANEL: 3, DROP: 4, NEED: 5, LEASE: 6, RESULT: 7,
  FAIL: 8, ACK: 9, REVOKE: 10, STATUS: 11, PING: 12, PONG: 13, BYE: 14,
});

/**
 * A message as encode takes it: fields with a default may be missing. `type` is its name; it is not a field on the wire.
 * @typedef {{kernel?: string, flops?: number, memory_bytes?: number, workers?: number, agent?: string}} Profile
 * @typedef {{frame_bytes_max: number, panel_bytes_max: number, result_bytes_max: number, leases_max: number,
 *   ping_s: number, silence_s_max: number}} Limits
 * @typedef {{type: "HELLO", client: string, profile: Profile, device?: string|null, secret?: string|null, name?: string,
 *   panels?: string[], leases?: number[]}} Hello
 * @typedef {{type: "WELCOME", device: string, name: string, limits: Limits, secret?: string|null}} Welcome
 * @typedef {{type: "PANEL", panel: string, rows: number, columns: number, offset: number, size: number, dtype?: Dtype}} Panel
 * @typedef {{type: "DROP", panels: string[]}} Drop
 * @typedef {{type: "NEED", panel: string, lease: number}} Need
 * @typedef {"f32"|"bf16"|"f16"|"i8"} Dtype
 * @typedef {{k: number, a: string, b: string, a_row?: number, a_column?: number, b_row?: number, b_column?: number}} Term
 * @typedef {{type: "LEASE", lease: number, job: string, batch: number, m: number, n: number, terms: Term[],
 *   deadline_s: number, a_by_k?: boolean, b_by_k?: boolean, kind?: "tile", dtype?: "f32"|"bf16"|"f16",
 *   accuracy?: "rowwise"|"normwise"}} Lease
 * @typedef {{type: "RESULT", lease: number, job: string, seconds: number, offset: number, size: number}} Result
 * @typedef {"memory"|"kernel"|"panel"|"unsupported"|"stopped"} FailCode
 * @typedef {{type: "FAIL", lease: number, job: string, code: FailCode, message?: string}} Fail
 * @typedef {"accepted"|"duplicate"|"late"|"rejected"} Verdict
 * @typedef {{type: "ACK", lease: number, job: string, verdict: Verdict, reason?: string, flop?: number}} Ack
 * @typedef {{type: "REVOKE", job: string, leases: number[]}} Revoke
 * @typedef {{type: "STATUS", state: "ready"|"paused"|"stopping", reason?: string, visible?: boolean,
 *   capacity_bytes?: number}} Status
 * @typedef {{type: "PING", nonce: number}} Ping
 * @typedef {{type: "PONG", nonce: number}} Pong
 * @typedef {"done"|"reload"|"protocol"|"refused"|"quarantined"|"busy"|"shutdown"|"replaced"|"silent"} ByeCode
 * @typedef {{type: "BYE", code: ByeCode, reason?: string, retry_s?: number}} Bye
 * @typedef {Hello|Welcome|Panel|Drop|Need|Lease|Result|Fail|Ack|Revoke|Status|Ping|Pong|Bye} Message
 */

/**
 * A message as decode returns it: every field is there, defaults filled in.
 * @typedef {Message extends infer M ? M extends Message ? Required<M> : never : never} Decoded
 */

/** The peer sent bytes that are not this protocol. */
export class ProtocolError extends Error {
  /** @param {string} text what was got and what was expected */
  constructor(text) {
    super(text.slice(0, ERROR_TEXT_MAX));
    this.name = "ProtocolError";
  }
}

/** The peer speaks another version: this page is older or newer than the server, reload it. */
export class VersionMismatch extends ProtocolError {
  /** @param {string} text */
  constructor(text) {
    super(text);
    this.name = "VersionMismatch";
  }
}

// --- Field checks. A check returns "" or what it expected; messages.py has the same bounds. ---

/** @typedef {(value: unknown) => string} Check */
/** @typedef {{check: Check, required: boolean, default: unknown}} Field */

const ID_PATTERN = /^[A-Za-z0-9_.:-]{1,64}$/;

/** @type {(min: number, max: number) => Check} */
const integer = (min, max) => (value) =>
  Number.isInteger(value) && Number(value) >= min && Number(value) <= max ? "" : `an integer from ${min} to ${max}`;

/** @type {(max: number) => Check} */
const number = (max) => (value) =>
  typeof value === "number" && value >= 0 && value <= max ? "" : `a number from 0 to ${max}`;

/** Lengths count code points, as Python does. @type {(max: number, min?: number) => Check} */
const text = (max, min = 0) => (value) => {
  const length = typeof value === "string" && value.length <= 2 * max ? [...value].length : -1;
  return length >= min && length <= max ? "" : `a string of ${min} to ${max} characters`;
};

/** @type {(...values: string[]) => Check} */
const oneOf = (...values) => (value) =>
  values.includes(/** @type {string} */ (value)) ? "" : `one of ${values.join(", ")}`;

/** @type {(item: Check, max: number, min?: number) => Check} */
const listOf = (item, max, min = 0) => (value) => {
  if (!Array.isArray(value) || value.length > max || value.length < min) return `a list of ${min} to ${max}`;
  return value.map(item).find((fault) => fault !== "") ?? "";
};

/** @type {Check} */
const id = (value) => (typeof value === "string" && ID_PATTERN.test(value) ? "" : "an id of 1 to 64 of A-Za-z0-9_.:-");
/** @type {Check} */
const boolean = (value) => (typeof value === "boolean" ? "" : "true or false");
const leaseId = integer(0, Number.MAX_SAFE_INTEGER);
const dimension = integer(1, DIMENSION_MAX);
const size = integer(0, SIZE_MAX);
const seconds = number(1e7);

/** @type {(fields: Record<string, Field>) => Check} */
const object = (fields) => (value) => {
  try {
    readFields(fields, value);
    return "";
  } catch (error) {
    return error instanceof ProtocolError ? error.message : String(error);
  }
};

/** @type {(check: Check) => Field} */
const must = (check) => ({ check, required: true, default: undefined });
/** @type {(check: Check, fallback: unknown) => Field} */
const may = (check, fallback) => ({ check, required: false, default: fallback });
/** @type {(check: Check) => Check} */
const orNull = (check) => (value) => (value === null ? "" : check(value));

const PROFILE = {
  kernel: may(text(32), "unknown"), flops: may(number(1e18), 0), memory_bytes: may(size, 0),
  workers: may(integer(1, 256), 1), agent: may(text(300), ""),
};
const LIMITS = {
  frame_bytes_max: must(size), panel_bytes_max: must(size), result_bytes_max: must(size),
  leases_max: must(integer(1, 64)), ping_s: must(seconds), silence_s_max: must(seconds),
};
const position = integer(0, DIMENSION_MAX);
const TERM = {
  k: must(dimension), a: must(id), b: must(id), a_row: may(position, 0), a_column: may(position, 0),
  b_row: may(position, 0), b_column: may(position, 0),
};
/** Objects inside messages, so that their defaults are filled in too. @type {Record<string, Record<string, Field>>} */
const NESTED = { profile: PROFILE, limits: LIMITS, terms: TERM };

/** Fields in the order of messages.py. @type {Record<Message["type"], Record<string, Field>>} */
const SCHEMAS = {
  HELLO: {
    client: must(text(64)), profile: must(object(PROFILE)), device: may(orNull(id), null),
    secret: may(orNull(text(128, 16)), null), name: may(text(64), ""), panels: may(listOf(id, 4096), []),
    leases: may(listOf(leaseId, 64), []),
  },
  WELCOME: {
    device: must(id), name: must(text(64)), limits: must(object(LIMITS)), secret: may(orNull(text(128, 16)), null),
  },
  PANEL: {
    panel: must(id), rows: must(dimension), columns: must(dimension), offset: must(size), size: must(size),
    dtype: may(oneOf("f32", "bf16", "f16", "i8"), "f32"),
  },
  DROP: { panels: must(listOf(id, 4096)) },
  NEED: { panel: must(id), lease: must(leaseId) },
  LEASE: {
    lease: must(leaseId), job: must(id), batch: must(dimension), m: must(dimension), n: must(dimension),
    terms: must(listOf(object(TERM), TERMS_MAX, 1)), deadline_s: must(seconds), a_by_k: may(boolean, false),
    b_by_k: may(boolean, false), kind: may(oneOf("tile"), "tile"), dtype: may(oneOf("f32", "bf16", "f16"), "f32"),
    accuracy: may(oneOf("rowwise", "normwise"), "rowwise"),
  },
  RESULT: { lease: must(leaseId), job: must(id), seconds: must(seconds), offset: must(size), size: must(size) },
  FAIL: {
    lease: must(leaseId), job: must(id), code: must(oneOf("memory", "kernel", "panel", "unsupported", "stopped")),
    message: may(text(500), ""),
  },
  ACK: {
    lease: must(leaseId), job: must(id), verdict: must(oneOf("accepted", "duplicate", "late", "rejected")),
    reason: may(text(500), ""), flop: may(integer(0, Number.MAX_SAFE_INTEGER), 0),
  },
  REVOKE: { job: must(id), leases: must(listOf(leaseId, 4096)) },
  STATUS: {
    state: must(oneOf("ready", "paused", "stopping")), reason: may(text(500), ""), visible: may(boolean, true),
    capacity_bytes: may(size, 0),
  },
  PING: { nonce: must(integer(0, Number.MAX_SAFE_INTEGER)) },
  PONG: { nonce: must(integer(0, Number.MAX_SAFE_INTEGER)) },
  BYE: {
    code: must(oneOf("done", "reload", "protocol", "refused", "quarantined", "busy", "shutdown", "replaced", "silent")),
    reason: may(text(500), ""), retry_s: may(seconds, 0),
  },
};

/** @type {Map<number, Message["type"]>} */
const TYPE_OF_NUMBER = new Map(Object.entries(KIND).map(([type, kind]) => [kind, /** @type {keyof typeof KIND} */ (type)]));

/**
 * The known fields of `value`, checked, defaults filled in, unknown ones left out.
 * @param {Record<string, Field>} fields
 * @param {unknown} value
 * @returns {Record<string, unknown>}
 */
function readFields(fields, value) {
  if (typeof value !== "object" || value === null || Array.isArray(value)) throw new ProtocolError("expected an object");
  const given = /** @type {Record<string, unknown>} */ (value);
  const read = /** @type {Record<string, unknown>} */ ({});
  for (const [name, field] of Object.entries(fields)) {
    const present = Object.hasOwn(given, name) && given[name] !== undefined;
    if (!present && field.required) throw new ProtocolError(`field ${name} is missing`);
    const content = present ? given[name] : field.default;
    const expected = field.check(content);
    if (expected) throw new ProtocolError(`field ${name}: expected ${expected}`);
    const nested = NESTED[name];
    read[name] = !nested ? content
      : Array.isArray(content) ? content.map((item) => readFields(nested, item)) : readFields(nested, content);
  }
  return read;
}

/**
 * One frame to send.
 * @param {Message} message
 * @param {Uint8Array} [payload] for PANEL and RESULT; copied once
 * @returns {Uint8Array<ArrayBuffer>}
 * @throws {RangeError} when the frame would break a limit: a bug of the caller
 */
export function encode(message, payload = new Uint8Array(0)) {
  try {
    const fields = readFields(SCHEMAS[message.type], message);
    const meta = new TextEncoder().encode(JSON.stringify(fields));
    const payloadStart = HEADER_BYTES + Math.ceil(meta.length / 16) * 16;
    const length = payloadStart + payload.byteLength;
    const fits = meta.length <= META_BYTES_MAX && length <= FRAME_BYTES_MAX;
    if (!fits) throw new ProtocolError(`frame of ${length} bytes, metadata ${meta.length}; cut the payload by chunks()`);
    checkPayload(/** @type {Decoded} */ ({ type: message.type, ...fields }), payload.byteLength);
    const frame = new Uint8Array(length);
    const header = new DataView(frame.buffer);
    header.setUint16(0, MAGIC, true);
    header.setUint8(2, PROTOCOL_VERSION);
    header.setUint8(3, KIND[message.type]);
    header.setUint32(4, meta.length, true);
    header.setUint32(8, payload.byteLength, true);
    frame.set(meta, HEADER_BYTES);
    frame.set(payload, payloadStart);
    return frame;
  } catch (error) {
    throw error instanceof ProtocolError ? new RangeError(`${message.type}: ${error.message}`) : error;
  }
}

/**
 * The message in a received frame, and its payload as a 16-aligned view into `frame` (empty unless PANEL or RESULT).
 * @param {ArrayBuffer} frame
 * @returns {[Decoded, Uint8Array<ArrayBuffer>]}
 * @throws {ProtocolError} for anything that is not a valid frame, and nothing else
 */
export function decode(frame) {
  const { type, metaLen, payloadLen } = readHeader(frame);
  const metaEnd = HEADER_BYTES + metaLen;
  const payloadStart = Math.ceil(metaEnd / 16) * 16;
  if (payloadStart + payloadLen !== frame.byteLength) {
    throw new ProtocolError(
      `frame of ${frame.byteLength} bytes, but its header says ${payloadStart} + ${payloadLen} (metadata, payload)`,
    );
  }
  if (new Uint8Array(frame, metaEnd, payloadStart - metaEnd).some((byte) => byte !== 0)) {
    throw new ProtocolError(`${type}: the padding after the metadata is not zero`);
  }
  const meta = parseMeta(type, new Uint8Array(frame, HEADER_BYTES, metaLen));
  const message = /** @type {Decoded} */ ({ type, ...readFields(SCHEMAS[type], meta) });
  checkPayload(message, payloadLen);
  return [message, new Uint8Array(frame, payloadStart, payloadLen)];
}

/**
 * @param {ArrayBuffer} frame
 * @returns {{type: Message["type"], metaLen: number, payloadLen: number}}
 */
function readHeader(frame) {
  if (frame.byteLength < HEADER_BYTES || frame.byteLength > FRAME_BYTES_MAX) {
    throw new ProtocolError(`frame of ${frame.byteLength} bytes, expected ${HEADER_BYTES} to ${FRAME_BYTES_MAX}`);
  }
  const header = new DataView(frame, 0, HEADER_BYTES);
  if (header.getUint16(0, true) !== MAGIC) throw new ProtocolError('frame does not start with "TW"');
  const version = header.getUint8(2);
  if (version !== PROTOCOL_VERSION) {
    throw new VersionMismatch(`protocol version ${version}, expected ${PROTOCOL_VERSION}; reload the page`);
  }
  const type = TYPE_OF_NUMBER.get(header.getUint8(3));
  if (type === undefined) throw new ProtocolError(`unknown message number ${header.getUint8(3)}`);
  if (header.getUint32(12, true) !== 0) throw new ProtocolError("reserved header bytes are not zero");
  const metaLen = header.getUint32(4, true);
  if (metaLen > META_BYTES_MAX) throw new ProtocolError(`metadata of ${metaLen} bytes, at most ${META_BYTES_MAX}`);
  return { type, metaLen, payloadLen: header.getUint32(8, true) };
}

/**
 * @param {string} type
 * @param {Uint8Array} bytes
 * @returns {unknown}
 */
function parseMeta(type, bytes) {
  let source, value;
  try {
    source = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);
    value = JSON.parse(source);
  } catch (error) {
    throw new ProtocolError(`${type}: metadata is not JSON in UTF-8: ${error}`);
  }
  // JSON.parse keeps the last of two equal keys without a word: a key written twice shows in the count.
  let written = 0;
  for (const token of source.matchAll(/"(?:[^"\\]|\\.)*"([ \t\r\n]*:)?/g)) if (token[1]) written += 1;
  if (countKeys(value, 0) !== written) throw new ProtocolError(`${type}: a JSON object names a key twice`);
  return value;
}

/**
 * Keys in all objects of `value`; refuses deep nesting and lone surrogates on the way.
 * @param {unknown} value
 * @param {number} depth
 * @returns {number}
 */
function countKeys(value, depth) {
  if (typeof value === "string" && /\p{Surrogate}/u.test(value)) throw new ProtocolError("a lone surrogate in a string");
  if (typeof value !== "object" || value === null) return 0;
  if (depth >= NESTING_MAX) throw new ProtocolError(`metadata nested over ${NESTING_MAX} levels`);
  if (Array.isArray(value)) return value.reduce((keys, item) => keys + countKeys(item, depth + 1), 0);
  const entries = Object.entries(value);
  return entries.reduce((keys, [key, item]) => keys + 1 + countKeys(key, depth) + countKeys(item, depth + 1), 0);
}

/**
 * @param {Decoded} message
 * @param {number} payloadLen
 */
function checkPayload(message, payloadLen) {
  const { type } = message;
  if (type !== "PANEL" && type !== "RESULT") {
    if (payloadLen) throw new ProtocolError(`${type}: carries a payload of ${payloadLen} bytes, expected none`);
    return;
  }
  if (payloadLen === 0) throw new ProtocolError(`${type}: carries no payload`);
  if (message.offset + payloadLen > message.size) {
    throw new ProtocolError(`${type}: bytes ${message.offset} + ${payloadLen} lie outside its size ${message.size}`);
  }
  if (type !== "PANEL") return;
  const expected = panelBytes(message.rows, message.columns, message.dtype);
  if (message.size !== expected) throw new ProtocolError(`PANEL: size ${message.size}, expected ${expected}`);
}

/** Where an i8 panel's scales begin, in bytes. @param {number} rows @param {number} columns */
export function scalesOffset(rows, columns) {
  return Math.ceil((rows * columns) / 4) * 4;
}

/** Bytes of a panel: its elements, and for i8 a float32 scale for each SCALE_BLOCK of a row. @param {number} rows @param {number} columns @param {Dtype} dtype */
export function panelBytes(rows, columns, dtype) {
  if (dtype === "i8") return scalesOffset(rows, columns) + 4 * rows * Math.ceil(columns / SCALE_BLOCK);
  return rows * columns * ELEMENT_BYTES[dtype];
}

/** Bytes of a lease's result. @param {Lease} lease */
export function resultBytes({ batch, m, n, dtype = "f32" }) {
  return batch * m * n * ELEMENT_BYTES[dtype];
}

/** The panels that a lease's terms name, each once, in order. @param {Lease} lease @returns {string[]} */
export function panelsOf({ terms }) {
  return [...new Set(terms.flatMap(({ a, b }) => [a, b]))];
}

/**
 * [offset, length] in bytes of each chunk of a payload of `size` bytes, in order; offsets are multiples of 16.
 * @param {number} size
 * @param {number} [frameBytesMax] WELCOME's limits.frame_bytes_max
 * @returns {Generator<[number, number], void, unknown>}
 */
export function* chunks(size, frameBytesMax = FRAME_BYTES_MAX) {
  const room = Math.floor((Math.min(frameBytesMax, FRAME_BYTES_MAX) - CHUNK_HEADROOM_BYTES) / 16) * 16;
  if (room <= 0) throw new RangeError(`frameBytesMax=${frameBytesMax}, expected over ${CHUNK_HEADROOM_BYTES + 16}`);
  for (let offset = 0; offset < size; offset += room) yield [offset, Math.min(room, size - offset)];
}

/** Collects the chunks of one payload, strictly in order, into one buffer that is allocated at the first chunk. */
export class Reassembly {
  /** @param {number} sizeMax bytes the first chunk may declare at most */
  constructor(sizeMax) {
    this.sizeMax = sizeMax;
    this.size = 0; // 0 until the first chunk
    this.received = 0;
    this.data = new Uint8Array(0); // the whole payload once `complete`
  }

  get complete() {
    return this.size > 0 && this.received === this.size;
  }

  /**
   * Takes the next chunk; true when it was the last.
   * @param {number} offset
   * @param {number} size
   * @param {Uint8Array} payload
   * @throws {ProtocolError} for a chunk out of order, past the end, of a changed or too large size
   * @throws {RangeError} when there is no memory for `size` bytes
   */
  add(offset, size, payload) {
    if (this.size === 0 && !(size > 0 && size <= this.sizeMax)) {
      throw new ProtocolError(`size of ${size} bytes, expected 1 to ${this.sizeMax}`);
    }
    if (this.size !== 0 && this.size !== size) throw new ProtocolError(`size changed from ${this.size} to ${size}`);
    if (offset !== this.received) throw new ProtocolError(`chunk at byte ${offset}, expected the one at ${this.received}`);
    if (payload.length === 0 || offset + payload.length > size) {
      throw new ProtocolError(`chunk of ${payload.length} bytes, expected 1 to ${size - offset}`);
    }
    if (this.size === 0) this.data = new Uint8Array(size);
    this.size = size;
    this.data.set(payload, offset);
    this.received += payload.length;
    return this.complete;
  }
}
