/**
 * The device's side of the protocol, without a socket, a clock or a Worker: events in, effects out.
 *
 * The net Worker (net_worker.js) calls one method per event, with the time in seconds by any monotonic clock, and carries
 * out the returned effects in order. The life of a connection:
 *
 *   start -> connecting --open--> greeting --WELCOME--> ready --closed, silent, BYE--> waiting --time--> connecting
 *                     any of them --stop, BYE reload, replaced, refused, broken kernel--> stopped
 *
 * Leases that a lost connection leaves behind are the server's to give again; finished results (uploads.js) are ours to
 * send again.
 *
 * Left out: panels and which Worker does what (tiles.js), kernels (engines/), the page (volunteer.js).
 */
import { ProtocolError, resultBytes } from "./protocol.js";
import { Tiles } from "./tiles.js";
import { Uploads } from "./uploads.js";

export const CLIENT = "tileweave-web/1";
const BACKOFF_S_MIN = 0.5;
const BACKOFF_S_MAX = 30;
const STABLE_S = 5; // a connection that lasted this long resets the back-off
const GREETING_S_MAX = 15;
const FREEZE_S = 5; // between two ticks: the browser froze us, the server's silence proves nothing
const KERNEL_FAILURES_MAX = 3; // in a row
const SPEED_WINDOW_S = 10;
const HELLO_PANELS_MAX = 512; // HELLO's metadata must stay under 64 KiB, however long the ids
const HELLO_LEASES_MAX = 64;

/**
 * @typedef {import("./protocol.js").Message} Message
 * @typedef {import("./protocol.js").Lease} Lease
 * @typedef {{ device: string, secret: string }} Identity
 * @typedef {{ kernel: string, flops: number, agent: string }} Claims
 * @typedef {{ workers: number, depth: number, capacityBytes: number, claims: Claims, name: string, identity: Identity|null,
 *   visible: boolean, random: () => number }} Options `random`: uniform in [0, 1)
 * @typedef {"connecting"|"greeting"|"ready"|"waiting"|"stopped"} State
 * @typedef {{ do: "connect" } | { do: "close" }
 *   | { do: "send", message: Message, payload?: Uint8Array<ArrayBuffer> }
 *   | { do: "panel", worker: number, panel: string, form: import("../../types/engine.js").PanelForm,
 *     bytes: Uint8Array<ArrayBuffer>, handOver: boolean }
 *   | { do: "tile", worker: number, lease: Lease }
 *   | { do: "drop", panels: string[] }
 *   | { do: "revoke", worker: number, leases: number[] }
 *   | { do: "prove" }
 *   | { do: "identity", identity: Identity|null, name: string }} Effect
 */

export class Session {
  /** @type {State} */
  #state = "connecting";
  #reason = "";
  #byeCode = "";
  /** @type {Effect[]} */
  #effects = [];
  #tiles;
  #uploads = new Uploads();
  /** @type {import("./protocol.js").Limits|null} */
  #limits = null;
  #attempts = 0;
  #retryAt = 0;
  #openedAt = 0;
  #heardAt = 0;
  #tickedAt = 0;
  #kernelFailures = 0;
  #refusedOnce = false;
  /** [time, FLOP] of tiles finished lately. @type {[number, number][]} */
  #finished = [];
  #totals = { tiles: 0, flop: 0, rejected: 0, late: 0, job: "" };

  /** @param {Options} options */
  constructor(options) {
    this.options = { ...options };
    this.#tiles = new Tiles(options.capacityBytes, options.workers, options.depth, {
      emit: (effect) => this.#effects.push(effect),
      fail: (lease, code, text) => this.#fail(lease, code, text),
    });
  }

  /** What the page shows. @param {number} now */
  view(now) {
    this.#finished = this.#finished.filter(([at]) => at > now - SPEED_WINDOW_S);
    const flop = this.#finished.reduce((sum, [, each]) => sum + each, 0);
    return {
      state: this.#state, reason: this.#reason, bye: this.#byeCode, ...this.#totals,
      device: this.options.identity?.device ?? "", name: this.options.name,
      flops: flop / Math.min(SPEED_WINDOW_S, Math.max(1, now - this.#openedAt)),
      leases: this.#tiles.size, panelBytes: this.#tiles.panels.bytes, uploadBytes: this.#uploads.bytes,
      retryInS: this.#state === "waiting" ? Math.max(0, this.#retryAt - now) : 0,
    };
  }

  /** @param {number} now */
  start(now) {
    this.#connect(now);
    return this.#take();
  }

  /** The socket is open. @param {number} now */
  opened(now) {
    this.#state = "greeting";
    this.#heardAt = this.#openedAt = now;
    const { claims, capacityBytes, workers, name, identity } = this.options;
    this.#send({
      type: "HELLO", client: CLIENT, name, device: identity?.device ?? null, secret: identity?.secret ?? null,
      profile: { ...claims, memory_bytes: capacityBytes, workers },
      panels: this.#tiles.panels.heldIds(HELLO_PANELS_MAX), leases: this.#uploads.leases.slice(0, HELLO_LEASES_MAX),
    });
    return this.#take();
  }

  /** The socket closed or never opened. @param {number} now @param {string} why */
  closed(now, why) {
    if (this.#state !== "stopped" && this.#state !== "waiting") this.#retry(now, why);
    return this.#take();
  }

  /** Call it about twice a second. @param {number} now */
  tick(now) {
    if (now - this.#tickedAt > FREEZE_S) this.#heardAt = now;
    this.#tickedAt = now;
    if (this.#state === "waiting" && now >= this.#retryAt) this.#connect(now);
    const silence = this.#limits && this.#state === "ready" ? this.#limits.silence_s_max : GREETING_S_MAX;
    if (this.#state !== "waiting" && this.#state !== "stopped" && now - this.#heardAt > silence) {
      this.#retry(now, `the server was silent for ${silence} s`);
    }
    return this.#take();
  }

  /** @param {number} now @param {boolean} visible */
  visibility(now, visible) {
    this.options.visible = visible;
    if (this.#state === "ready") this.#status();
    return this.#take();
  }

  /** The volunteer's stop. @param {string} reason */
  stop(reason) {
    this.#stop("done", reason);
    return this.#take();
  }

  /** The peer sent bytes that are not a frame. @param {number} now @param {ProtocolError} error */
  broken(now, error) {
    const reload = error.name === "VersionMismatch";
    this.#send({ type: "BYE", code: reload ? "reload" : "protocol", reason: error.message });
    if (reload) this.#end("reload", error.message);
    else this.#retry(now, error.message);
    return this.#take();
  }

  /**
   * A frame came in.
   * @param {number} now @param {import("./protocol.js").Decoded} message @param {Uint8Array} payload
   */
  message(now, message, payload) {
    if (this.#state !== "greeting" && this.#state !== "ready") return [];
    this.#heardAt = now;
    try {
      this.#receive(now, message, payload);
    } catch (error) {
      if (!(error instanceof ProtocolError)) throw error;
      return this.broken(now, error);
    }
    return this.#take();
  }

  /**
   * A Worker has the product.
   * @param {number} now @param {number} worker @param {number} number lease @param {Uint8Array<ArrayBuffer>} bytes
   * @param {number} seconds
   */
  computed(now, worker, number, bytes, seconds) {
    const held = this.#tiles.answered(worker, number);
    this.#kernelFailures = 0;
    if (held) {
      const { batch, m, n, terms, job } = held.message;
      this.#finished.push([now, 2 * batch * m * n * terms.reduce((sum, { k }) => sum + k, 0)]);
      if (!held.revoked) this.#uploads.add(number, job, seconds, bytes);
    }
    this.#advance();
    return this.#take();
  }

  /**
   * A Worker could not; `lost` are panels it had no room for.
   * @param {number} worker @param {number} number lease @param {"memory"|"kernel"|"panel"} code @param {string} text
   * @param {string[]} lost
   */
  failed(worker, number, code, text, lost) {
    if (code === "memory") {
      const { failed, needs } = this.#tiles.outOfMemory(worker, number, lost);
      if (failed && !failed.revoked) this.#fail(failed.message, code, text);
      if (this.#state === "ready") for (const [panel, lease] of needs) this.#send({ type: "NEED", panel, lease });
    } else {
      const held = this.#tiles.answered(worker, number);
      if (held && !held.revoked) this.#fail(held.message, code, text);
    }
    this.#kernelFailures += code === "kernel" ? 1 : 0;
    if (this.#kernelFailures >= KERNEL_FAILURES_MAX) this.#stop("done", `the kernel fails on this device: ${text}`);
    else this.#advance();
    return this.#take();
  }

  /**
   * A Worker's engine is gone and it computes with another. The server hears of it in the next HELLO. There stay as many
   * Workers as there were (a lost GPU leaves one): panels and leases are placed by Worker, more would need a new session.
   * @param {Claims} claims @param {number} depth
   */
  changed(claims, depth) {
    this.options.claims = claims;
    this.#tiles.depth = depth;
    this.#advance();
    return this.#take();
  }

  /** A Worker let go of a revoked lease before it began. @param {number} worker @param {number} number lease */
  skipped(worker, number) {
    this.#tiles.answered(worker, number);
    this.#advance();
    return this.#take();
  }

  // --- connection ---

  /** @param {number} now */
  #connect(now) {
    this.#state = "connecting";
    this.#heardAt = now;
    this.#tickedAt = now;
    this.#effects.push({ do: "connect" });
  }

  /** Come back later. @param {number} now @param {string} why @param {number} [retryS] the server's wish */
  #retry(now, why, retryS = 0) {
    if (this.#state === "ready" && now - this.#openedAt > STABLE_S) this.#attempts = 0;
    const backoff = Math.min(BACKOFF_S_MAX, BACKOFF_S_MIN * 2 ** this.#attempts);
    this.#attempts += 1;
    this.#retryAt = now + Math.max(backoff, retryS) * (1 + this.options.random() / 2);
    this.#state = "waiting";
    this.#reason = why;
    this.#disconnect();
  }

  /** For good. @param {string} code BYE code that the page acts on @param {string} reason */
  #end(code, reason) {
    this.#state = "stopped";
    this.#byeCode = code;
    this.#reason = reason;
    this.#disconnect();
  }

  /** We end it, and say so. @param {import("./protocol.js").ByeCode} code @param {string} reason */
  #stop(code, reason) {
    if (this.#state === "stopped") return;
    if (this.#state === "ready") {
      this.#send({ type: "STATUS", state: "stopping", reason, visible: this.options.visible });
      for (const message of this.#tiles.open()) this.#fail(message, "stopped", reason);
    }
    if (this.#state === "ready" || this.#state === "greeting") this.#send({ type: "BYE", code, reason });
    this.#end(code, reason);
  }

  /** The server has taken back what it leased; what runs may finish and is thrown away. */
  #disconnect() {
    this.#limits = null;
    this.#byeCode = this.#state === "stopped" ? this.#byeCode : "";
    this.#tiles.disconnected();
    this.#effects.push({ do: "close" });
  }

  #status() {
    const { visible, capacityBytes } = this.options;
    this.#send({ type: "STATUS", state: "ready", visible, capacity_bytes: capacityBytes });
  }

  // --- messages ---

  /** @param {number} now @param {import("./protocol.js").Decoded} message @param {Uint8Array} payload */
  #receive(now, message, payload) {
    if (message.type === "PING") return this.#send({ type: "PONG", nonce: message.nonce });
    if (message.type === "BYE") return this.#bye(now, message);
    if (this.#state === "greeting") {
      if (message.type !== "WELCOME") throw new ProtocolError(`${message.type} before WELCOME`);
      return this.#welcome(message);
    }
    switch (message.type) {
      case "PANEL": return this.#panel(message, payload);
      case "LEASE": return this.#lease(message);
      case "DROP": return this.#tiles.drop(message.panels);
      case "REVOKE": {
        message.leases.forEach((lease) => this.#uploads.revoke(lease));
        this.#tiles.revoke(message.leases);
        return this.#advance();
      }
      case "ACK": return this.#ack(message);
      case "PONG": {
        this.#uploads.pong(message.nonce);
        return this.#advance();
      }
      default: throw new ProtocolError(`${message.type} is not for devices`);
    }
  }

  /** @param {Required<import("./protocol.js").Welcome>} message */
  #welcome({ device, name, limits, secret }) {
    this.#state = "ready";
    this.#reason = "";
    this.#limits = limits;
    this.options.name = name;
    if (secret) this.options.identity = { device, secret };
    this.#effects.push({ do: "identity", identity: this.options.identity, name });
    this.#status();
    this.#uploads.restart();
    this.#advance();
  }

  /** @param {number} now @param {Required<import("./protocol.js").Bye>} bye */
  #bye(now, { code, reason, retry_s: retryS }) {
    if (code === "refused" && this.options.identity && !this.#refusedOnce) {
      this.#refusedOnce = true; // an identity the server does not know (any more): come back as a new device, once
      this.options.identity = null;
      this.#effects.push({ do: "identity", identity: null, name: this.options.name });
      return this.#retry(now, reason);
    }
    if (code === "reload" || code === "replaced" || code === "refused") return this.#end(code, reason);
    this.#retry(now, reason || code, retryS);
    this.#byeCode = code;
  }

  /** @param {Required<import("./protocol.js").Panel>} message @param {Uint8Array} payload */
  #panel(message, payload) {
    if (message.offset === 0 && message.size > /** @type {import("./protocol.js").Limits} */ (this.#limits).panel_bytes_max) {
      throw new ProtocolError(`panel of ${message.size} bytes, over the limit that WELCOME named`);
    }
    if (this.#tiles.panel(message, payload)) this.#advance();
  }

  /** @param {Required<Lease>} message */
  #lease(message) {
    if (this.#tiles.has(message.lease) || this.#uploads.has(message.lease)) return; // said twice
    const bytes = resultBytes(message);
    const limits = /** @type {import("./protocol.js").Limits} */ (this.#limits);
    const open = this.#tiles.open().length;
    if (open >= limits.leases_max) return this.#fail(message, "unsupported", `${open} leases, at most ${limits.leases_max}`);
    if (bytes > limits.result_bytes_max) return this.#fail(message, "unsupported", `a result of ${bytes} bytes`);
    this.#totals.job = message.job;
    for (const panel of this.#tiles.add(message)) this.#send({ type: "NEED", panel, lease: message.lease });
    this.#advance();
  }

  /** @param {Required<import("./protocol.js").Ack>} ack */
  #ack({ lease, verdict, reason, flop }) {
    if (!this.#uploads.acked(lease)) return;
    this.#attempts = 0;
    if (verdict === "accepted") {
      this.#totals.tiles += 1;
      this.#totals.flop += flop;
      this.#reason = "";
    } else if (verdict === "rejected") {
      this.#totals.rejected += 1;
      this.#reason = reason;
      this.#effects.push({ do: "prove" });
    } else this.#totals.late += 1;
    this.#advance();
  }

  /** Hands out what can run and sends what is done. */
  #advance() {
    this.#tiles.advance();
    const limits = this.#limits;
    if (limits) this.#uploads.pump((message, payload) => this.#send(message, payload), limits.frame_bytes_max);
  }

  /** @param {Lease} message @param {import("./protocol.js").FailCode} code @param {string} text */
  #fail({ lease, job }, code, text) {
    if (this.#state === "ready") this.#send({ type: "FAIL", lease, job, code, message: text.slice(0, 500) });
  }

  /** @param {Message} message @param {Uint8Array<ArrayBuffer>} [payload] */
  #send(message, payload) {
    this.#effects.push(payload ? { do: "send", message, payload } : { do: "send", message });
  }

  #take() {
    const effects = this.#effects;
    this.#effects = [];
    return effects;
  }
}
