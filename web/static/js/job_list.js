/** Jobs as list items: name, state, progress. Used by the volunteer's and the admin's page. */
import { dot, make } from "./dom.js";
import { loss, number } from "./format.js";

/** @type {Record<string, string>} */
export const JOB_MOOD = { running: "good", queued: "warn", failed: "bad", succeeded: "idle", cancelled: "idle" };

/** Done steps of all, in [0, 1]. @param {import("./rest.js").Job} job */
export function progress(job) {
  return job.state === "succeeded" ? 1 : Math.min(1, (job.step ?? 0) / Math.max(1, job.steps));
}

/** @param {import("./rest.js").Job} job */
export const jobTitle = (job) => job.name || job.recipe || job.kind;

/** @param {import("./rest.js").Job} job @param {...Node} extra */
export function jobItem(job, ...extra) {
  const words = [`${job.state}, step ${number(job.step ?? 0)} of ${number(job.steps)}`];
  if (job.loss !== null) words.push(`loss ${loss(job.loss)}`);
  if (job.state === "running") words.push(`${number(job.devices ?? 0)} device${job.devices === 1 ? "" : "s"}`);
  if (job.state === "failed" && job.reason) words.push(job.reason);
  const title = make("a", { href: `/jobs/${encodeURIComponent(job.id)}`, class: "untrusted" }, jobTitle(job));
  const head = make("div", { class: "split" }, make("span", { class: "state" }, dot(JOB_MOOD[job.state]), title), ...extra);
  const bar = make("progress", { max: "1", value: String(progress(job)), "aria-label": `progress of ${jobTitle(job)}` });
  return make("li", {}, head, bar, make("span", { class: "quiet untrusted" }, words.join(" · ")));
}
