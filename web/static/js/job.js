/** A job's public page: its history once, then what changes as server-sent events, until the job ends. */
import { LossChart } from "./chart.js";
import { $, dot, failed, link, make, repeat, show, text, words } from "./dom.js";
import { bytes, duration, gflops, loss, number, percent } from "./format.js";
import { JOB_MOOD, jobTitle, progress } from "./job_list.js";
import { get, page } from "./rest.js";

const FLEET_MS = 5000;
const FLEET_ROWS = 12;
const RETRY_MS = 3000;
const ENDED = ["succeeded", "failed", "cancelled"];

/** @typedef {import("./rest.js").Job} Job */

const path = `/jobs/${encodeURIComponent(page.job ?? "")}`;
const chart = new LossChart($("chart"));
/** @type {Job|null} */
let job = null;
let sampleStep = -1;

/** @param {Job} now */
function draw(now) {
  job = now;
  text("name", jobTitle(now));
  $("dot").dataset.mood = now.waiting ? "warn" : JOB_MOOD[now.state];
  text("state", now.state[0].toUpperCase() + now.state.slice(1));
  text("why", now.reason || now.waiting || "");
  /** @type {HTMLProgressElement} */ ($("progress")).value = progress(now);
  text("eta", now.eta_s === null || ENDED.includes(now.state) ? "" : `about ${duration(now.eta_s)} left`);
  text("step", number(now.step ?? 0));
  text("steps", now.steps ? `of ${number(now.steps)}` : "");
  text("loss", loss(now.loss));
  text("first-loss", now.first_loss === null ? "" : `from ${loss(now.first_loss)}`);
  const held = now.validation;
  text("validation", held ? `validation ${loss(held.value)} at step ${number(held.step)}` : "");
  text("devices", number(now.devices));
  text("gflops", number(now.gflops));
  text("tiles", number(now.tiles));
  text("tile-rate", !now.tiles_per_s ? "" : `${number(now.tiles_per_s)} / s`);
  const unit = now.unit || "samples";
  text("rate-unit", `${unit[0].toUpperCase()}${unit.slice(1)} per second`);
  text("rate", number(now.samples_per_s));
  text("share", percent(now.offloaded_flop_share));
  text("bytes", bytes(now.bytes_per_step));
  text("wire", `as ${now.wire}`);
  text("elapsed", duration(now.elapsed_s));
  if (now.sample) drawSample(now.sample);
}

/** The newest one: a job's own record may be older than an event. @param {{ step: number, text: string }} sample */
function drawSample(sample) {
  if (sample.step < sampleStep) return;
  sampleStep = sample.step;
  text("sample", sample.text);
  text("sample-step", `at step ${number(sample.step)}`);
  show("sample-card", true);
}

/** @param {import("./rest.js").StepRow[]} rows */
function addSteps(rows) {
  chart.add(rows);
  show("chart", chart.steps > 0);
  show("no-steps", chart.steps === 0);
}

async function history() {
  draw(await get(path));
  const { rows } = /** @type {{ rows: import("./rest.js").StepRow[] }} */ (await get(`${path}/metrics`));
  addSteps(rows);
}

/** Listens until the job ends. After a break everything is read again: events that were missed are in the history. */
function listen() {
  const events = new EventSource(`${page.api}${path}/events`);
  /** @param {string} name @param {(data: any) => void} take */
  const on = (name, take) => events.addEventListener(name, (event) => {
    failed("");
    take(JSON.parse(/** @type {MessageEvent} */ (event).data));
  });
  on("job", draw);
  on("step", (row) => addSteps([row]));
  on("sample", drawSample);
  events.onerror = () => {
    events.close();
    if (!job || !ENDED.includes(job.state)) setTimeout(begin, RETRY_MS);
  };
}

async function begin() {
  try {
    await history();
    failed("");
    if (!job || !ENDED.includes(job.state)) listen();
  } catch (error) {
    failed(words(error));
    setTimeout(begin, RETRY_MS);
  }
}

async function fleet() {
  const { devices } = /** @type {{ devices: import("./rest.js").Device[] }} */ (await get("/devices?limit=100"));
  const here = devices.filter((device) => device.online && device.job === page.job);
  $("fleet").replaceChildren(...here.slice(0, FLEET_ROWS).map((device) => make("li", { class: "split" },
    make("span", { class: "state" }, dot("good"),
      make("a", { href: `/devices/${encodeURIComponent(device.id)}`, class: "untrusted" }, device.name || device.id)),
    make("span", { class: "quiet" }, `${gflops(device.flops)} GFLOP/s · ${number(device.accepted)} tiles`))));
  show("no-fleet", here.length === 0);
}

link("csv", `${page.api}${path}/metrics?format=csv`, "Metrics as CSV");
link("json", `${page.api}${path}/metrics`, "Metrics as JSON");
link("rest", `${page.api}${path}`, "This job over REST");
void begin();
repeat(fleet, FLEET_MS);
