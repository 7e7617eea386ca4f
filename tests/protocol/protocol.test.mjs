// The browser's protocol module against the golden vectors; run by test_golden_vectors.py with `node --test`.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import test from "node:test";

import * as protocol from "../../web/static/js/protocol.js";

const { KIND, FRAME_BYTES_MAX, CHUNK_BYTES_MAX, META_BYTES_MAX, ProtocolError, VersionMismatch, Reassembly } = protocol;
const { chunks, decode, encode } = protocol;

const read = (name) => JSON.parse(readFileSync(new URL(`../golden/${name}`, import.meta.url), "utf-8"));
const bytes = (hex) => Uint8Array.from(Buffer.from(hex, "hex"));
const hex = (array) => Buffer.from(array).toString("hex");

for (const vector of read("valid.json")) {
  test(`reads ${vector.name}`, () => {
    const frame = bytes(vector.frame).buffer;
    const [message, payload] = decode(frame);
    assert.deepEqual(message, { type: vector.type, ...vector.fields });
    assert.equal(hex(payload), vector.payload);
    assert.equal(payload.buffer, frame, "the payload is a view, not a copy");
    assert.equal(payload.byteOffset % 16, 0);
    if (vector.canonical) assert.equal(hex(encode(message, payload)), vector.frame);
    else assert.deepEqual(decode(encode(message, payload).buffer)[0], message);
  });
}

for (const vector of read("malformed.json")) {
  test(`refuses ${vector.name}`, () => {
    assert.throws(() => decode(bytes(vector.frame).buffer), { name: vector.error });
  });
}

test("the vectors cover every kind", () => {
  const seen = new Set(read("valid.json").map((vector) => vector.type));
  assert.deepEqual([...seen].sort(), Object.keys(KIND).sort());
});

test("a random frame only ever raises ProtocolError", () => {
  let state = 1;
  const random = () => (state = (state * 48271) % 2147483647) / 2147483647;
  const frames = read("valid.json").map((vector) => bytes(vector.frame));
  for (let round = 0; round < 3000; round += 1) {
    const frame = frames[round % frames.length].slice();
    for (let edit = 0; edit <= random() * 3; edit += 1) frame[Math.floor(random() * frame.length)] = random() * 256;
    const cut = random() < 0.2 ? frame.slice(0, random() * frame.length) : frame;
    try {
      decode(cut.buffer);
    } catch (error) {
      assert.ok(error instanceof ProtocolError, String(error));
    }
  }
});

test("frames and metadata over the limit are refused both ways", () => {
  const result = { type: "RESULT", lease: 1, job: "j", seconds: 0.5, offset: 0, size: 2 * FRAME_BYTES_MAX };
  const largest = encode(result, new Uint8Array(CHUNK_BYTES_MAX));
  assert.equal(decode(largest.buffer)[1].length, CHUNK_BYTES_MAX);
  assert.throws(() => encode(result, new Uint8Array(FRAME_BYTES_MAX)), RangeError);
  assert.throws(() => decode(new ArrayBuffer(FRAME_BYTES_MAX + 1)), ProtocolError);
  assert.throws(() => encode({ type: "DROP", panels: Array(4096).fill("p".repeat(64)) }), RangeError);
  assert.throws(() => encode({ type: "PING", nonce: -1 }), RangeError);
  const longMeta = new Uint8Array(16 + META_BYTES_MAX + 16).fill(32);
  longMeta.set(encode({ type: "PING", nonce: 1 }));
  new DataView(longMeta.buffer).setUint32(4, META_BYTES_MAX + 16, true);
  assert.throws(() => decode(longMeta.buffer), /metadata of/);
  assert.ok(new VersionMismatch("v") instanceof ProtocolError);
});

test("chunks cover a payload in order and Reassembly puts it together", () => {
  const source = Uint8Array.from({ length: 50_001 }, (_, index) => index % 251);
  const whole = new Reassembly(source.length);
  let next = 0;
  for (const [offset, length] of chunks(source.length, 4096 + 1024 + 7)) {
    assert.equal(offset, next);
    assert.equal(offset % 16, 0);
    assert.ok(length <= 1024);
    next = offset + length;
    assert.equal(whole.add(offset, source.length, source.subarray(offset, next)), next === source.length);
  }
  assert.deepEqual(whole.data, source);
  assert.ok(whole.complete);
  assert.deepEqual([...chunks(0)], []);
  assert.throws(() => [...chunks(1, 4096)], RangeError);
});

test("Reassembly refuses gaps, repeats, changes of size and overflow", () => {
  const chunk = new Uint8Array(16);
  const started = () => {
    const whole = new Reassembly(64);
    assert.equal(whole.add(0, 48, chunk), false);
    return whole;
  };
  assert.throws(() => new Reassembly(64).add(0, 65, chunk), ProtocolError);
  assert.throws(() => new Reassembly(64).add(0, 0, chunk), ProtocolError);
  assert.throws(() => new Reassembly(64).add(16, 48, chunk), ProtocolError);
  assert.throws(() => started().add(0, 48, chunk), ProtocolError);
  assert.throws(() => started().add(32, 48, chunk), ProtocolError);
  assert.throws(() => started().add(16, 64, chunk), ProtocolError);
  assert.throws(() => started().add(16, 48, new Uint8Array(33)), ProtocolError);
  assert.throws(() => started().add(16, 48, new Uint8Array(0)), ProtocolError);
});
