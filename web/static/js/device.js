/** One device: what it is, what it does now, what it has given. */
import { $, failed, link, repeat, show, text } from "./dom.js";
import { bytes, credit, duration, gflops, kernelName, moment, number, scaled } from "./format.js";
import { get, page } from "./rest.js";

const REFRESH_MS = 2000;

/** @param {import("./rest.js").Device} device @returns {[string, string]} mood and words */
function condition(device) {
  const until = device.quarantined_until_s ?? 0;
  if (until * 1000 > Date.now()) return ["bad", `Quarantined until ${moment(until)}`];
  if (!device.online) return ["idle", "Offline"];
  const why = device.reason ? ` (${device.reason})` : "";
  if (device.state === "paused") return ["warn", `Paused${why}`];
  return device.job ? ["good", "Computing"] : ["good", "Online, waiting for work"];
}

/** @param {number|null} flops */
const speed = (flops) => (flops === null ? "–" : `${gflops(flops)} GFLOP/s`);

/** A link's speed; 0 is not measured yet. @param {number|null} bps bytes each second */
const rate = (bps) => (bps ? `${bytes(bps)}/s` : "–");

async function refresh() {
  const device = /** @type {import("./rest.js").Device} */ (await get(`/devices/${encodeURIComponent(page.device ?? "")}`));
  const [mood, state] = condition(device);
  $("dot").dataset.mood = mood;
  text("state", state);
  text("name", device.name || device.id);
  text("credit", credit(device.credit));
  text("rac", credit(device.rac));
  text("accepted", number(device.accepted));
  text("rejects", number(device.rejects));
  text("claimed", speed(device.claimed_flops));
  text("measured", speed(device.measured_flops));
  text("kernel", device.kernel ? kernelName(device.kernel) : "–");
  text("workers", number(device.workers));
  text("link", `${rate(device.down_bps)} / ${rate(device.up_bps)}`);
  text("rtt", duration(device.rtt_s));
  text("flop", scaled(device.flop, "FLOP"));
  text("first-seen", moment(device.first_seen_s));
  text("last-seen", moment(device.last_seen_s));
  link("job", `/jobs/${encodeURIComponent(device.job ?? "")}`, device.job ?? "");
  show("no-job", !device.job);
  failed("");
}

repeat(refresh, REFRESH_MS);
