/**
 * The volunteer's page: says what will run, starts it at the click, shows what it does and why it waits.
 *
 * Only words and numbers here; sockets and kernels live in Workers (net_worker.js). Before the click no Worker exists.
 * For demos and benches on this machine, `?autostart=1&threads=N&name=X&throwaway=1` clicks by itself, on localhost
 * only; `throwaway` neither reads nor writes what this browser remembers. `?kernel=wasm-strict` (one of choice.js; may be
 * repeated) lets only that kernel compute, anywhere.
 */
import { memoryBytes, threadsChosen, threadsMax } from "./device_limits.js";
import { $, failed, input, link, make, repeat, show, text, words } from "./dom.js";
import { bytes, cobblestones, credit, duration, gflops, kernelName, memory, number } from "./format.js";
import { jobItem, jobTitle } from "./job_list.js";
import { get, page } from "./rest.js";

const REFRESH_MS = 5000;
const STOPPED = "You stopped it: nothing runs on this device now.";
const LOCK = "tileweave-device"; // one tab of a browser is one device

/** @typedef {import("./net_worker.js").View} View */
/** @typedef {{ identity: import("./session.js").Identity|null, threads: number|null, name: string,
 *   choices: Record<string, string> }} Memory choices: what engines asked to remember, by kernel */

const query = new URLSearchParams(location.search);
const local = ["localhost", "127.0.0.1", "[::1]"].includes(location.hostname) || location.hostname.endsWith(".localhost");
const throwaway = local && query.get("throwaway") === "1";
const most = threadsMax(navigator.hardwareConcurrency);
const lent = memoryBytes(/** @type {any} */ (navigator).deviceMemory);
const remembered = recall();

/** @type {Worker|null} */
let net = null;
/** @type {View|null} */
let view = null;
/** @type {(() => void)|null} */
let unlock = null;
/** Credit of the device when last asked; what it earned since is in the view. */
let creditInAll = 0;
/** Titles of jobs seen. @type {Map<string, string>} */
const titles = new Map();

// --- what this browser remembers ---

/** @returns {Memory} */
function recall() {
  /** @type {Memory} */
  const blank = { identity: null, threads: null, name: "", choices: {} };
  if (throwaway) return blank;
  try {
    const kept = JSON.parse(localStorage.getItem("tileweave") ?? "{}");
    const { device, secret } = kept.identity ?? {};
    return {
      identity: typeof device === "string" && typeof secret === "string" ? { device, secret } : null,
      threads: typeof kept.threads === "number" ? kept.threads : null,
      name: typeof kept.name === "string" ? kept.name.slice(0, 40) : "",
      choices: Object.fromEntries(Object.entries(kept.choices ?? {}).filter(([, text]) => typeof text === "string")),
    };
  } catch {
    return blank; // storage is blocked, or holds something else
  }
}

/** @param {Partial<Memory>} changes */
function remember(changes) {
  Object.assign(remembered, changes);
  if (throwaway) return;
  try {
    localStorage.setItem("tileweave", JSON.stringify(remembered));
  } catch {
    // storage is blocked: this visit is a device of its own
  }
}

// --- start and stop ---

async function start() {
  show("setup", false);
  show("running", true);
  show("stop", false);
  show("again", false);
  show("reload", false);
  view = null;
  say("warn", "Starting", "");
  const threads = Number(input("threads").value);
  remember({ threads, name: input("name").value.trim() });
  if (!(await onlyTab())) return ended("Already running in another tab", "One tab of a browser is one device; that tab goes on.");
  show("stop", true);
  text("why", "Proving the kernels on this device and measuring them.");
  text("kernel", "measuring");
  text("heap", memory(0));
  net = new Worker(new URL("./net_worker.js", import.meta.url), { type: "module" });
  net.onmessage = ({ data }) => hear(data);
  net.onerror = (event) => ended("Stopped", `The Worker failed: ${event.message || "its script could not be loaded"}`);
  const socket = new URL(page.socket ?? "/ws/device", location.href);
  socket.protocol = location.protocol === "https:" ? "wss:" : "ws:";
  tell({
    is: "start",
    options: {
      url: socket.href, threads, memoryBytes: lent, kernels: query.getAll("kernel"), remembered: remembered.choices,
      name: remembered.name, identity: remembered.identity, agent: navigator.userAgent, visible: !document.hidden,
    },
  });
}

/** @param {import("./net_worker.js").Wish} wish */
function tell(wish) {
  net?.postMessage(wish);
}

function stop() {
  tell({ is: "stop", reason: "stopped by the volunteer" });
  if (!view) ended("Stopped", STOPPED); // the kernel was still being measured: there is no session to say so
}

/** @param {string} state @param {string} why */
function ended(state, why) {
  net?.terminate();
  net = null;
  unlock?.();
  unlock = null;
  say("idle", state, why);
  if (!view) text("kernel", "none");
  text("gflops", gflops(0));
  text("heap", memory(0));
  link("job", "", "");
  show("no-job", true);
  show("stop", false);
  show("again", true);
}

/** Whether this tab may be the device. Where the browser has no Web Locks the server tells two tabs apart. */
async function onlyTab() {
  if (!navigator.locks) return true;
  const name = throwaway ? `${LOCK}-${crypto.randomUUID()}` : LOCK;
  return new Promise((resolve) => {
    void navigator.locks.request(name, { ifAvailable: true }, (lock) => {
      resolve(lock !== null);
      return lock ? new Promise((release) => (unlock = () => release(undefined))) : undefined;
    });
  });
}

// --- what the net Worker says ---

/** @param {import("./net_worker.js").News} news */
function hear(news) {
  if (news.is === "remember") return remember({ choices: { ...remembered.choices, [news.kernel]: news.text } });
  if (news.is === "unable") return ended("This device cannot help", news.reason);
  if (news.is === "identity") {
    remember({ identity: news.identity });
    if (news.name) text("my-name", news.name);
    return void refreshTotal();
  }
  view = news.view;
  draw(view);
}

/** @param {string} mood @param {string} state @param {string} why */
function say(mood, state, why) {
  $("dot").dataset.mood = mood;
  text("state", state);
  text("why", why);
}

/** @param {View} now */
function draw(now) {
  text("gflops", gflops(now.flops));
  text("tiles", number(now.tiles));
  text("credit", credit(cobblestones(now.flop)));
  drawTotal();
  text("kernel", `${kernelName(now.kernel)}, ${gflops(now.kernelFlops)} GFLOP/s`);
  drawTrials(now);
  text("data", `${bytes(now.receivedBytes)} / ${bytes(now.sentBytes)}`);
  text("heap", memory(now.heapBytes));
  link("device", `/devices/${encodeURIComponent(now.device)}`, now.device);
  link("job", `/jobs/${encodeURIComponent(now.job)}`, now.job && (titles.get(now.job) ?? now.job));
  show("no-job", !now.job);
  drawState(now);
}

/** What else was tried, and why it is not used. @param {View} now */
function drawTrials({ kernel, trials }) {
  const others = trials.filter((trial) => trial.kernel !== kernel);
  show("trials", others.length > 0);
  const outcome = (/** @type {import("./engines/choice.js").Trial} */ { flops, reason }) =>
    flops ? `${gflops(flops)} GFLOP/s${reason && ` (${reason})`}` : `not used: ${reason}`;
  $("trials-list").replaceChildren(...others.map((trial) => make("li", {}, `${kernelName(trial.kernel)}: ${outcome(trial)}`)));
}

/** @param {View} now */
function drawState(now) {
  const soon = `next try in ${duration(Math.max(1, Math.ceil(now.retryInS)))}`;
  switch (now.state) {
    case "connecting":
    case "greeting": return say("warn", "Connecting", now.reason);
    case "ready": {
      const paused = document.hidden ? "This tab is hidden; it goes on, some browsers slow it down." : "";
      if (now.leases || now.uploadBytes) return say("good", "Computing", now.reason || paused);
      return say("good", "Waiting for work", now.reason || "Connected. Work starts by itself as soon as a job needs this device.");
    }
    case "waiting": {
      if (now.bye === "quarantined") return say("bad", "Quarantined", `${now.reason} (${soon})`);
      if (now.bye === "busy") return say("warn", "The server is busy", `${now.reason} (${soon})`);
      return say("warn", "Reconnecting", `${now.reason} (${soon})`);
    }
    case "stopped": return drawStopped(now);
  }
}

/** @param {View} now */
function drawStopped({ bye, reason }) {
  const states = /** @type {Record<string, string>} */ ({
    reload: "This page is older than the server", replaced: "This device is connected elsewhere", refused: "Refused by the server",
  });
  ended(states[bye] ?? "Stopped", bye === "done" ? STOPPED : reason);
  show("reload", bye === "reload");
  show("again", bye !== "reload");
}

// --- what the server says ---

async function refreshJobs() {
  const { jobs } = /** @type {{ jobs: import("./rest.js").Job[] }} */ (await get("/jobs?state=running"));
  for (const job of jobs) titles.set(job.id, jobTitle(job));
  $("jobs").replaceChildren(...jobs.map((job) => jobItem(job)));
  show("no-jobs", jobs.length === 0);
  if (view?.job && !titles.has(view.job)) titles.set(view.job, jobTitle(await get(`/jobs/${encodeURIComponent(view.job)}`)));
}

async function refreshTotal() {
  const device = remembered.identity?.device;
  if (!device || !net) return;
  const row = /** @type {import("./rest.js").Device} */ (await get(`/devices/${encodeURIComponent(device)}`));
  creditInAll = row.credit;
  drawTotal();
}

/** Never less than this visit's credit, which is told at once. */
function drawTotal() {
  text("total", credit(Math.max(creditInAll, cobblestones(view?.flop ?? 0))));
}

// --- the page ---

function noteInsecure() {
  if (window.isSecureContext) return;
  text("notice", "This page came over plain http, so the browser withholds features from it: the lock that keeps two tabs " +
    "apart, and the graphics processor. Computing works. An https address or localhost gives everything.");
  show("notice", true);
}

const threads = input("threads");
threads.max = String(most);
threads.value = String(threadsChosen((local && query.get("threads")) || remembered.threads, most));
const showThreads = () => text("threads-out", `${threads.value} of ${most}`);
threads.addEventListener("input", showThreads);
showThreads();
input("name").value = (local && query.get("name")) || remembered.name;
text("memory", memory(lent));
noteInsecure();

$("start").addEventListener("click", () => void start());
$("again").addEventListener("click", () => void start());
$("stop").addEventListener("click", stop);
$("reload").addEventListener("click", () => location.reload());
document.addEventListener("visibilitychange", () => tell({ is: "visible", visible: !document.hidden }));
repeat(async () => {
  await refreshJobs();
  await refreshTotal();
  failed("");
}, REFRESH_MS);
if (local && query.get("autostart") === "1") void start().catch((error) => ended("Stopped", words(error)));
