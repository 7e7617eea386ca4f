/**
 * The net Worker: carries the session's effects out and tells it what happens. Owns the socket, the clock and the
 * compute Workers; computes nothing itself, so that a PING is answered at once whatever the kernels do (a Worker that
 * computes cannot send).
 *
 * The only timer is the half-second tick, which notices silence, ends a back-off and refreshes the page; no tile waits
 * for it.
 */
import { shares } from "./device_limits.js";
import { alone } from "./engines/choice.js";
import { words } from "./engines/errors.js";
import { decode, encode, ProtocolError } from "./protocol.js";
import { Session } from "./session.js";

const TICK_MS = 500;

/**
 * @typedef {{ url: string, threads: number, memoryBytes: number, name: string, agent: string,
 *   identity: import("./session.js").Identity|null, visible: boolean, kernels: string[],
 *   remembered: Record<string, string> }} StartOptions kernels: only these; none: any. remembered: by engines, by kernel
 * @typedef {{ is: "start", options: StartOptions } | { is: "visible", visible: boolean }
 *   | { is: "stop", reason: string }} Wish
 * @typedef {ReturnType<Session["view"]> & { kernel: string, kernelFlops: number, trials: Trial[], heapBytes: number, sentBytes: number,
 *   receivedBytes: number }} View
 * @typedef {{ is: "view", view: View } | { is: "identity", identity: import("./session.js").Identity|null, name: string }
 *   | { is: "remember", kernel: string, text: string } | { is: "unable", reason: string }} News
 * @typedef {import("./engines/choice.js").Trial} Trial
 * @typedef {Extract<Answer, { is: "able" }>} Able
 * @typedef {import("./compute_worker.js").Answer} Answer
 * @typedef {import("./compute_worker.js").Order} Order
 */

const self_ = /** @type {import("../../types/worker.js").WorkerScope<Wish, News>} */ (/** @type {unknown} */ (globalThis));
const now = () => performance.now() / 1000;

/** @type {Session|null} */
let session = null;
/** @type {WebSocket|null} */
let socket = null;
/** @type {Worker[]} */
let workers = [];
/** @type {number[]} */
let heapBytes = [];
/** What each Worker computes with. @type {Able[]} */
let able = [];
/** @type {StartOptions} */
let options;
let sentBytes = 0;
let receivedBytes = 0;

self_.onmessage = ({ data }) => {
  if (data.is === "start") void begin(data.options);
  else if (data.is === "visible") carryOut(session?.visibility(now(), data.visible));
  else {
    carryOut(session?.stop(data.reason));
    workers.forEach((worker) => worker.terminate());
    workers = [];
    tell();
  }
};

/** The first Worker chooses the kernel, as many more as that has use for follow; then it connects. @param {StartOptions} given */
async function begin(given) {
  options = given;
  try {
    const first = await hire(0, options.kernels);
    const { kernel, depth } = first;
    const count = alone(kernel) ? 1 : options.threads;
    await Promise.all(Array.from({ length: count - 1 }, (_, index) => hire(index + 1, [kernel])));
    const { capacityBytes } = shares(options.memoryBytes, count);
    session = new Session({
      workers: count, depth, capacityBytes, name: options.name, identity: options.identity, visible: options.visible,
      claims: claims(), random: Math.random,
    });
  } catch (error) {
    workers.forEach((worker) => worker.terminate());
    return self_.postMessage({ is: "unable", reason: words(error) });
  }
  setInterval(() => {
    carryOut(session?.tick(now()));
    tell();
  }, TICK_MS);
  carryOut(session.start(now()));
  tell();
}

/** What HELLO says of this device. */
function claims() {
  return { kernel: able[0].kernel, flops: flops(), agent: options.agent.slice(0, 300) };
}

/** FLOP/s of all Workers, as each measured alone. */
function flops() {
  return able.reduce((sum, each) => sum + each.flops, 0);
}

/**
 * Starts a compute Worker; resolves when it has chosen and proved its kernel.
 * @param {number} index @param {string[]} kernels that it may choose from; none: any
 * @returns {Promise<Able>}
 */
function hire(index, kernels) {
  const worker = new Worker(new URL("./compute_worker.js", import.meta.url), { type: "module" });
  workers[index] = worker;
  heapBytes[index] = 0;
  return new Promise((resolve, reject) => {
    worker.onerror = (event) => reject(new Error(`a compute Worker failed: ${event.message}`));
    worker.onmessage = (/** @type {MessageEvent<Answer>} */ { data }) => {
      if (data.is === "able") {
        able[index] = data;
        carryOut(session?.changed(claims(), data.depth)); // its engine was lost, and this is another
        resolve(data);
      } else if (data.is === "unable") {
        reject(new Error(`no kernel works on this device: ${data.reason}`));
        carryOut(session?.stop(`no kernel works on this device any more: ${data.reason}`));
      } else answer(index, data);
    };
    const { threads, memoryBytes, remembered } = options;
    const cpuBytesMax = shares(memoryBytes, threads).heapBytesMax, gpuBytesMax = shares(memoryBytes, 1).heapBytesMax;
    order(index, { is: "start", wish: { kernels, threads, cpuBytesMax, gpuBytesMax, remembered } });
  });
}

/** @param {number} index @param {Answer} data */
function answer(index, data) {
  if (data.is === "remember") return self_.postMessage(data);
  if (!session) return;
  if (data.is === "computed") {
    heapBytes[index] = data.heapBytes;
    carryOut(session.computed(now(), index, data.lease, data.bytes, data.seconds));
  } else if (data.is === "failed") carryOut(session.failed(index, data.lease, data.code, data.text, data.lost));
  else if (data.is === "skipped") carryOut(session.skipped(index, data.lease));
}

/** @param {number} index @param {Order} message @param {Transferable[]} [transfer] */
function order(index, message, transfer = []) {
  workers[index]?.postMessage(message, transfer);
}

/** @param {import("./session.js").Effect[]} [effects] */
function carryOut(effects = []) {
  for (const effect of effects) {
    switch (effect.do) {
      case "connect": connect(); break;
      case "close": close(); break;
      case "send": send(effect.message, effect.payload); break;
      case "panel": {
        const { worker, panel, form, bytes, handOver } = effect;
        order(worker, { is: "panel", panel, form, bytes }, handOver ? [bytes.buffer] : []);
        break;
      }
      case "tile": order(effect.worker, { is: "tile", lease: effect.lease }); break;
      case "drop": workers.forEach((_, index) => order(index, { is: "drop", panels: effect.panels })); break;
      case "revoke": order(effect.worker, { is: "revoke", leases: effect.leases }); break;
      case "prove": workers.forEach((_, index) => order(index, { is: "prove" })); break;
      case "identity": self_.postMessage({ is: "identity", identity: effect.identity, name: effect.name }); break;
    }
  }
}

function connect() {
  const opened = new WebSocket(options.url);
  opened.binaryType = "arraybuffer";
  socket = opened;
  const mine = (/** @type {() => import("./session.js").Effect[]|undefined} */ event) => {
    if (socket === opened) carryOut(event());
  };
  opened.onopen = () => mine(() => session?.opened(now()));
  opened.onclose = (event) => mine(() => session?.closed(now(), closeReason(event)));
  opened.onmessage = ({ data }) => mine(() => receive(data));
}

/** @param {CloseEvent} event */
function closeReason(event) {
  return event.reason || (event.code === 1006 ? "the server cannot be reached" : `the connection closed (${event.code})`);
}

/** @param {unknown} data */
function receive(data) {
  if (!session) return undefined;
  try {
    if (!(data instanceof ArrayBuffer)) throw new ProtocolError("a text message, expected binary frames");
    receivedBytes += data.byteLength;
    const [message, payload] = decode(data);
    const effects = session.message(now(), message, payload);
    if (message.type !== "PANEL" && message.type !== "PING") tell();
    return effects;
  } catch (error) {
    if (!(error instanceof ProtocolError)) throw error;
    return session.broken(now(), error);
  }
}

/** @param {import("./protocol.js").Message} message @param {Uint8Array} [payload] */
function send(message, payload) {
  if (socket?.readyState !== WebSocket.OPEN) return;
  const frame = encode(message, payload);
  sentBytes += frame.length;
  socket.send(frame);
}

function close() {
  const old = socket;
  socket = null;
  old?.close();
}

let told = -Infinity;
/** Tells the page, at most ten times a second unless the state changed. */
function tell() {
  if (!session) return;
  const view = {
    ...session.view(now()), kernel: able[0].kernel, kernelFlops: flops(), trials: able[0].trials, sentBytes, receivedBytes,
    heapBytes: heapBytes.reduce((a, b) => a + b, 0),
  };
  if (now() - told < 0.1 && view.state === "ready") return;
  told = now();
  self_.postMessage({ is: "view", view });
}
