// The device's session without a socket: events in, effects out. Run by test_javascript.py with `node --test`.
import assert from "node:assert/strict";
import test from "node:test";

import { encode, ProtocolError } from "../../web/static/js/protocol.js";
import { Session } from "../../web/static/js/session.js";

const LIMITS = {
  frame_bytes_max: 1 << 20, panel_bytes_max: 64 << 20, result_bytes_max: 64 << 20, leases_max: 8, ping_s: 1, silence_s_max: 8,
};
const IDENTITY = { device: "d1", secret: "0123456789abcdef" };

/** A session that has been welcomed, and the means to talk to it. `sent`, `did`: what it wanted since the last look. */
function device({ workers = 1, depth = 1, capacityBytes = 1 << 20, identity = IDENTITY, welcome = true } = {}) {
  const session = new Session({
    workers, depth, capacityBytes, identity, name: "n", visible: true, random: () => 0,
    claims: { kernel: "k", flops: 1e9, agent: "test" },
  });
  const self = {
    session, effects: [], at: 0,
    say: (message, payload = new Uint8Array(0)) => self.keep(session.message(self.at, message, payload)),
    keep: (effects) => (self.effects.push(...effects), self),
    take: () => self.effects.splice(0),
    sent: (type) => self.effects.filter((e) => e.do === "send" && (!type || e.message.type === type)).map((e) => e.message),
    did: (what) => self.effects.filter((e) => e.do === what),
    panel: (panel, rows, columns) => self.say(
      { type: "PANEL", panel, rows, columns, offset: 0, size: 4 * rows * columns, dtype: "f32" }, new Uint8Array(4 * rows * columns)),
    lease: (lease, { k = 2, a = "a", b = "b", ...over } = {}) => self.say({
      type: "LEASE", lease, job: "j", batch: 1, m: 2, n: 2, terms: [{ k, a, b, a_row: 0, a_column: 0, b_row: 0, b_column: 0 }],
      deadline_s: 9, a_by_k: false, b_by_k: false, kind: "tile", dtype: "f32", accuracy: "rowwise", ...over,
    }),
    ack: (lease, verdict = "accepted", flop = 16) => self.say({ type: "ACK", lease, job: "j", verdict, reason: "", flop }),
    compute: (lease, worker = 0, size = 16) => self.keep(session.computed(self.at, worker, lease, new Uint8Array(size), 0.1)),
    reconnect: () => {
      self.keep(session.closed(self.at, "gone"));
      self.at += 60;
      self.keep(session.tick(self.at)).keep(session.opened(self.at));
      return self.say({ type: "WELCOME", device: "d1", name: "n", limits: LIMITS, secret: null });
    },
  };
  self.keep(session.start(0)).keep(session.opened(0));
  if (welcome) self.say({ type: "WELCOME", device: "d1", name: "n", limits: LIMITS, secret: null });
  return self;
}

/** With both panels of `lease` here. */
function withPanels(options) {
  const d = device(options);
  d.panel("a", 2, 2).panel("b", 2, 2).take();
  return d;
}

test("HELLO carries who we are; WELCOME's secret is kept; STATUS follows", () => {
  const d = device({ identity: null, welcome: false });
  assert.deepEqual([d.sent("HELLO")[0].device, d.sent("HELLO")[0].secret], [null, null]);
  d.say({ type: "WELCOME", device: "d9", name: "Otter", limits: LIMITS, secret: "s".repeat(16) });
  assert.deepEqual(d.did("identity")[0], { do: "identity", identity: { device: "d9", secret: "s".repeat(16) }, name: "Otter" });
  assert.equal(d.sent("STATUS")[0].state, "ready");
  assert.equal(d.session.view(0).state, "ready");
});

test("HELLO can be sent however many panels are held", () => {
  const d = device({ capacityBytes: 1 << 26 });
  for (let at = 0; at < 3000; at += 1) d.panel(`${at}`.padStart(64, "p"), 2, 2);
  d.take();
  d.reconnect();
  const [hello] = d.sent("HELLO");
  assert.ok(hello.panels.length > 0);
  encode(hello);
});

test("PING is answered at once with its nonce, even before WELCOME", () => {
  const d = device({ welcome: false });
  d.say({ type: "PING", nonce: 42 });
  assert.deepEqual(d.sent("PONG"), [{ type: "PONG", nonce: 42 }]);
});

test("a lease goes to the Worker with its panels first, and its result back until the ACK", () => {
  const d = withPanels();
  d.lease(1);
  assert.deepEqual(d.effects.map((e) => e.do), ["panel", "panel", "tile"]);
  assert.equal(d.did("panel")[0].handOver, true, "one Worker: the bytes are handed over");
  d.take();
  d.compute(1);
  const [result] = d.sent("RESULT");
  assert.deepEqual([result.lease, result.job, result.offset, result.size, result.seconds], [1, "j", 0, 16, 0.1]);
  assert.equal(d.session.view(0).uploadBytes, 16, "held until the ACK");
  d.ack(1);
  assert.equal(d.session.view(0).uploadBytes, 0);
  assert.deepEqual([d.session.view(0).tiles, d.session.view(0).flop], [1, 16]);
  d.ack(1);
  assert.equal(d.session.view(0).tiles, 1, "a second ACK counts nothing");
});

test("a missing panel is asked for once, and its lease waits while others run", () => {
  const d = withPanels();
  d.lease(1, { a: "x" }).lease(2).lease(3, { a: "x" });
  assert.deepEqual(d.sent("NEED"), [{ type: "NEED", panel: "x", lease: 1 }]);
  assert.deepEqual(d.did("tile").map((e) => e.lease.lease), [2]);
  d.take();
  d.panel("x", 2, 2);
  assert.deepEqual(d.did("tile").map((e) => e.lease.lease), [1], "a Worker holds two at most");
});

test("a panel still arriving is not asked for", () => {
  const d = device();
  d.panel("b", 2, 2);
  d.say({ type: "PANEL", panel: "a", rows: 2, columns: 2, offset: 0, size: 16, dtype: "f32" }, new Uint8Array(8));
  d.lease(1);
  assert.equal(d.sent("NEED").length, 0);
  d.say({ type: "PANEL", panel: "a", rows: 2, columns: 2, offset: 8, size: 16, dtype: "f32" }, new Uint8Array(8));
  assert.equal(d.did("tile").length, 1);
});

test("a chunk at offset 0 begins a panel anew", () => {
  const d = device();
  const chunk = (offset, value) => d.say({ type: "PANEL", panel: "a", rows: 2, columns: 2, offset, size: 16, dtype: "f32" }, new Uint8Array(8).fill(value));
  d.panel("b", 2, 2).lease(1);
  chunk(0, 1);
  chunk(0, 2);
  assert.equal(d.did("tile").length, 0);
  chunk(8, 2);
  assert.deepEqual([...d.did("panel")[0].bytes], Array(16).fill(2));
  assert.deepEqual(d.did("panel")[0].form, { rows: 2, columns: 2, dtype: "f32" });
  assert.equal(d.did("tile").length, 1);
});

test("a panel that was dropped while a lease needed it, and sent again, is kept", () => {
  const d = withPanels();
  d.lease(1).say({ type: "DROP", panels: ["a", "b"] }).panel("a", 2, 2).panel("b", 2, 2).take();
  d.compute(1).ack(1);
  assert.deepEqual(d.did("drop"), []);
  d.take();
  d.lease(2);
  assert.deepEqual(d.sent("NEED"), []);
});

test("a lease of several terms waits for all their panels, and may read a part of each", () => {
  const d = withPanels();
  const at = (row, column) => ({ a_row: row, a_column: column, b_row: 0, b_column: 0 });
  d.lease(1, { m: 1, n: 2, a_by_k: true, terms: [{ k: 2, a: "a", b: "b", ...at(0, 1) }, { k: 1, a: "c", b: "b", ...at(3, 7) }] });
  assert.deepEqual(d.sent("NEED").map(({ panel }) => panel), ["c"]);
  assert.equal(d.did("tile").length, 0);
  d.panel("c", 4, 8);
  assert.deepEqual(d.did("panel").map(({ panel }) => panel), ["a", "b", "c"]);
  d.compute(1, 0, 8).lease(2, { dtype: "bf16" }).compute(2, 0, 8).take();
  d.lease(3, { a_by_k: true, m: 2, terms: [{ k: 1, a: "c", b: "b", ...at(3, 7) }] });
  assert.match(d.sent("FAIL")[0].message, /panel c is 4 x 8, the lease reaches to 4 x 9/);
});

test("a lease said twice runs once", () => {
  const d = withPanels();
  d.lease(1).lease(1);
  assert.equal(d.did("tile").length, 1);
  d.compute(1).lease(1);
  assert.equal(d.did("tile").length, 1);
  assert.equal(d.sent("RESULT").length, 1);
});

test("two Workers: the idle one first, each gets its own copy, the last one the bytes", () => {
  const d = withPanels({ workers: 2 });
  d.lease(1).lease(2).lease(3).lease(4).lease(5);
  assert.deepEqual(d.did("tile").map((e) => e.worker), [0, 1, 0, 1], "two each, the fifth waits");
  assert.deepEqual(d.did("panel").map((e) => [e.worker, e.panel, e.handOver]), [
    [0, "a", false], [0, "b", false], [1, "a", true], [1, "b", true],
  ]);
  d.take();
  d.compute(2, 1);
  assert.deepEqual(d.did("tile").map((e) => [e.lease.lease, e.worker]), [[5, 1]]);
  assert.equal(d.did("panel").length, 0, "it has them");
});

test("after a reconnect results without an ACK are listed and sent again, whole and in order", () => {
  const d = withPanels();
  d.lease(1).lease(2).compute(1).compute(2).ack(1).take();
  d.reconnect();
  assert.deepEqual(d.sent("HELLO")[0].leases, [2]);
  assert.deepEqual(d.sent("HELLO")[0].panels, ["a", "b"]);
  assert.deepEqual(d.sent("RESULT").map((r) => [r.lease, r.offset]), [[2, 0]]);
  d.take();
  d.ack(2, "late", 0).reconnect();
  assert.equal(d.sent("RESULT").length, 0, "late is a final word");
});

test("what a lost connection left running is thrown away, what was queued is forgotten", () => {
  const d = withPanels();
  d.lease(1).lease(2).lease(3).take();
  d.reconnect();
  assert.deepEqual(d.did("revoke").map((e) => e.leases), [[1], [2]]);
  d.take();
  d.compute(1).keep(d.session.skipped(0, 2));
  assert.equal(d.sent("RESULT").length, 0);
  assert.equal(d.session.view(0).leases, 0);
  d.lease(4);
  assert.equal(d.did("tile").length, 1, "the Worker is free again");
});

test("REVOKE drops queued, running and finished work", () => {
  const d = withPanels();
  d.lease(1).lease(2).lease(3).take();
  d.say({ type: "REVOKE", job: "j", leases: [1, 3, 77] });
  assert.deepEqual(d.did("revoke"), [{ do: "revoke", worker: 0, leases: [1] }]);
  d.compute(1).compute(2);
  assert.deepEqual(d.sent("RESULT").map((r) => r.lease), [2]);
  d.say({ type: "REVOKE", job: "j", leases: [2] });
  assert.equal(d.session.view(0).uploadBytes, 0);
  assert.equal(d.session.view(0).leases, 0);
});

test("DROP frees a panel at once, or when its last lease is through", () => {
  const d = withPanels();
  d.lease(1).take();
  d.panel("c", 1, 1).take();
  d.say({ type: "DROP", panels: ["a", "c", "unknown"] });
  assert.deepEqual(d.did("drop"), [{ do: "drop", panels: ["c"] }]);
  d.compute(1);
  assert.deepEqual(d.did("drop").at(-1), { do: "drop", panels: ["a"] });
});

test("beyond its capacity the device lets the oldest idle panel go and asks for it when needed", () => {
  const d = device({ capacityBytes: 40 });
  d.panel("a", 2, 2).panel("b", 2, 2).take();
  d.panel("c", 2, 2);
  assert.deepEqual(d.did("drop"), [{ do: "drop", panels: ["a"] }]);
  assert.ok(d.session.view(0).panelBytes <= 40);
  d.lease(1);
  assert.deepEqual(d.sent("NEED"), [{ type: "NEED", panel: "a", lease: 1 }]);
  d.panel("a", 2, 2);
  assert.equal(d.did("tile").length, 1);
  d.lease(2, { a: "huge" }).panel("huge", 8, 8);
  assert.deepEqual(d.sent("FAIL").map((f) => [f.lease, f.code]), [[2, "memory"]]);
});

test("room for the product that is being computed is made before its lease is handed out", () => {
  const d = device({ capacityBytes: 60 });
  d.panel("old", 2, 2).panel("a", 2, 2).panel("b", 2, 2).take();
  d.lease(1);
  assert.deepEqual(d.effects.map((e) => e.do), ["drop", "panel", "panel", "tile"], "48 bytes of panels and 16 of product");
  assert.deepEqual(d.did("drop")[0].panels, ["old"]);
});

test("a Worker without memory: idle panels go, lost ones are asked for, and the lease has a second try", () => {
  const d = withPanels();
  d.panel("idle", 1, 1).lease(1).take();
  d.keep(d.session.failed(0, 1, "memory", "full", ["a"]));
  assert.deepEqual(d.did("drop"), [{ do: "drop", panels: ["idle"] }]);
  assert.deepEqual(d.sent(), [{ type: "NEED", panel: "a", lease: 1 }]);
  d.take();
  d.panel("a", 2, 2);
  assert.deepEqual(d.effects.map((e) => e.do), ["panel", "tile"], "b is still there");
  d.take();
  d.keep(d.session.failed(0, 1, "memory", "full", []));
  assert.deepEqual(d.sent("FAIL").map((f) => [f.lease, f.code, f.message]), [[1, "memory", "full"]]);
  assert.equal(d.session.view(0).leases, 0);
});

test("tiles that miss the same panel each get it asked for, also when the first has had its second try", () => {
  const d = withPanels();
  d.lease(1).take();
  d.keep(d.session.failed(0, 1, "memory", "full", ["a"]));
  d.panel("a", 2, 2);
  d.lease(2).take();
  d.keep(d.session.failed(0, 1, "memory", "full", ["a"]));
  assert.deepEqual(d.sent().map((m) => [m.type, m.lease]), [["FAIL", 1]], "the other is at the Worker and does not ask yet");
  d.take();
  d.keep(d.session.failed(0, 2, "memory", "full", ["a"]));
  assert.deepEqual(d.sent(), [{ type: "NEED", panel: "a", lease: 2 }]);
  d.take();
  d.panel("a", 2, 2);
  assert.deepEqual(d.effects.map((e) => e.do), ["panel", "tile"]);
});

test("a Worker that remembers a panel as lost is told to drop it once nobody wants it", () => {
  const lost = () => {
    const d = withPanels();
    d.lease(1).keep(d.session.failed(0, 1, "memory", "full", ["a"])).take();
    return d;
  };
  const dropped = (d) => d.did("drop").flatMap((e) => e.panels);
  const revoked = lost();
  revoked.say({ type: "REVOKE", leases: [1] });
  assert.deepEqual(dropped(revoked), ["a"], "b is still held there");
  const cut = lost();
  cut.say({ type: "PANEL", panel: "a", rows: 2, columns: 2, offset: 0, size: 16, dtype: "f32" }, new Uint8Array(8));
  cut.keep(cut.session.closed(0, "gone"));
  assert.deepEqual(dropped(cut), ["a"], "the rest of it will not come");
  const idle = withPanels();
  idle.lease(1).compute(1).ack(1).panel("c", 2, 2).panel("d", 2, 2).lease(2, { a: "c", b: "d" }).take();
  idle.keep(idle.session.failed(0, 2, "memory", "full", ["a"]));
  assert.deepEqual(dropped(idle).sort(), ["a", "b"], "lost, and idle");
});

test("with another engine come its depth and, with the next HELLO, its claims", () => {
  const d = withPanels({ depth: 2 });
  d.keep(d.session.changed({ kernel: "other", flops: 5, agent: "test" }, 1));
  for (const lease of [1, 2, 3]) d.lease(lease);
  assert.deepEqual(d.did("tile").map((e) => e.lease.lease), [1, 2], "one that runs and one that is next");
  d.reconnect();
  assert.deepEqual([d.sent("HELLO").at(-1).profile.kernel, d.sent("HELLO").at(-1).profile.flops], ["other", 5]);
});

test("wrong panel shapes and oversized results are refused, lease by lease", () => {
  const d = withPanels();
  d.lease(1, { k: 3 }).lease(2, { m: 1 << 14, n: 1 << 14 });
  assert.deepEqual(d.sent("FAIL").map((f) => [f.lease, f.code]), [[1, "panel"], [2, "unsupported"]]);
  for (let lease = 3; lease <= 12; lease += 1) d.lease(lease);
  assert.deepEqual(d.sent("FAIL").slice(2).map((f) => f.lease), [11, 12], "no more leases than WELCOME allows");
});

test("a kernel that always throws stops the device with a reason", () => {
  const d = withPanels();
  for (const lease of [1, 2, 3]) d.lease(lease).keep(d.session.failed(0, lease, "kernel", "boom", []));
  assert.deepEqual(d.sent("FAIL").map((f) => f.code), ["kernel", "kernel", "kernel"]);
  assert.equal(d.sent("BYE").length, 1);
  assert.match(d.session.view(0).reason, /kernel fails.*boom/);
  assert.equal(d.session.view(0).state, "stopped");
});

test("uploads keep a bounded window, moved on by PONG and ACK", () => {
  const d = withPanels();
  d.lease(1, {}).take();
  d.compute(1, 0, 32 << 20);
  const bytes = () => d.did("send").reduce((sum, e) => sum + (e.payload?.length ?? 0), 0);
  const first = bytes();
  assert.ok(first >= 8 << 20 && first <= 14 << 20, `${first} bytes at once`);
  let offset = 0;
  for (let round = 0; round < 100 && bytes() < 32 << 20; round += 1) {
    const before = bytes();
    for (const { nonce } of d.sent("PING").slice(round, round + 1)) d.say({ type: "PONG", nonce });
    assert.ok(bytes() > before, "a PONG lets more go");
  }
  for (const result of d.sent("RESULT")) {
    assert.equal(result.offset, offset, "chunks in order");
    offset += d.effects.find((e) => e.message === result).payload.length;
  }
  assert.equal(offset, 32 << 20);
});

test("silence leads to a reconnect with growing, jittered delays; a freeze does not", () => {
  const d = device();
  for (let at = 1; at <= 8; at += 1) d.keep(d.session.tick(at));
  assert.equal(d.did("close").length, 0);
  d.keep(d.session.tick(8.5));
  assert.equal(d.did("close").length, 1);
  assert.match(d.session.view(8.5).reason, /silent/);
  const delays = [];
  let now = 8.5;
  for (let attempt = 0; attempt < 9; attempt += 1) {
    const start = now;
    while (d.did("connect").length < attempt + 2) d.keep(d.session.tick((now += 0.25)));
    delays.push(now - start);
    d.keep(d.session.closed(now, "refused"));
  }
  assert.deepEqual(delays.map((delay) => Math.round(delay * 4) / 4), [0.5, 1, 2, 4, 8, 16, 30, 30, 30]);

  const frozen = device();
  frozen.keep(frozen.session.tick(1)).keep(frozen.session.tick(500));
  assert.equal(frozen.did("close").length, 0, "frozen, not silent");
  for (let at = 501; at < 520; at += 1) frozen.keep(frozen.session.tick(at));
  assert.equal(frozen.did("close").length, 1, "but now it is");
});

test("BYE: what each code leads to", () => {
  const after = (code, retryS = 0) => {
    const d = device();
    d.say({ type: "BYE", code, reason: "why", retry_s: retryS });
    return d.session.view(0);
  };
  for (const code of ["reload", "replaced"]) assert.deepEqual([after(code).state, after(code).bye], ["stopped", code]);
  const waiting = after("quarantined", 60);
  assert.deepEqual([waiting.state, waiting.bye, waiting.reason, waiting.retryInS], ["waiting", "quarantined", "why", 60]);
  assert.equal(after("busy", 5).retryInS, 5);
  for (const code of ["shutdown", "done", "silent", "protocol"]) assert.equal(after(code).state, "waiting");
});

test("a refused identity is forgotten once, then it is final", () => {
  const d = device({ welcome: false });
  d.say({ type: "BYE", code: "refused", reason: "unknown device", retry_s: 0 });
  assert.deepEqual(d.did("identity"), [{ do: "identity", identity: null, name: "n" }]);
  d.keep(d.session.tick(1)).keep(d.session.opened(1));
  assert.equal(d.sent("HELLO").at(-1).device, null);
  d.say({ type: "BYE", code: "refused", reason: "go away", retry_s: 0 });
  assert.deepEqual([d.session.view(1).state, d.session.view(1).reason], ["stopped", "go away"]);
});

test("a newer server's frames make the page reload; broken ones a new connection", () => {
  const d = device();
  const mismatch = new ProtocolError("protocol version 2");
  mismatch.name = "VersionMismatch";
  d.keep(d.session.broken(0, mismatch));
  assert.deepEqual([d.session.view(0).state, d.session.view(0).bye], ["stopped", "reload"]);
  const other = device();
  other.say({ type: "HELLO", client: "x", profile: {} });
  assert.deepEqual([other.session.view(0).state, other.sent("BYE")[0].code], ["waiting", "protocol"]);
});

test("stop gives back every lease, says BYE, and nothing follows", () => {
  const d = withPanels();
  d.lease(1).lease(2).lease(3).take();
  d.keep(d.session.stop("stopped here"));
  assert.deepEqual(d.sent("FAIL").map((f) => [f.lease, f.code]), [[1, "stopped"], [2, "stopped"], [3, "stopped"]]);
  assert.deepEqual(d.sent().map((m) => m.type).filter((t) => t !== "FAIL"), ["STATUS", "BYE"]);
  d.take();
  d.compute(1).keep(d.session.tick(99)).keep(d.session.closed(99, "x"));
  assert.deepEqual(d.take(), []);
});

test("2,000 tiles leave nothing behind", () => {
  const d = withPanels({ workers: 2 });
  for (let lease = 1; lease <= 2000; lease += 1) {
    d.at = lease / 10;
    d.lease(lease);
    const { worker } = d.did("tile").at(-1);
    d.compute(lease, worker).ack(lease).take();
  }
  const { leases, uploadBytes, panelBytes, tiles } = d.session.view(200);
  assert.deepEqual({ leases, uploadBytes, panelBytes, tiles }, { leases: 0, uploadBytes: 0, panelBytes: 32, tiles: 2000 });
});
