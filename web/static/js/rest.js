/**
 * The server's REST interface, as pages use it. Errors carry the server's own words (`detail`).
 *
 * A page that changes something sends its session's CSRF token; the session itself is a cookie that scripts cannot see.
 */

/**
 * @typedef {{ id: string, name: string, kind: string, recipe: string|null, config: Record<string, unknown>, mode: string,
 *   state: "queued"|"running"|"succeeded"|"failed"|"cancelled", reason: string|null, step: number|null, steps: number,
 *   loss: number|null, first_loss: number|null, created_s: number, started_s: number|null, ended_s: number|null,
 *   elapsed_s: number|null, samples_per_s: number|null, unit: string|null, tiles: number|null, flop: number|null,
 *   gflops: number|null, tiles_per_s: number|null, devices: number|null, eta_s: number|null,
 *   offloaded_flop_share: number|null, bytes_per_step: number|null, wire: string, waiting: string|null,
 *   sample: { step: number, text: string }|null,
 *   validation: { step: number, value: number }|null, has_checkpoint: boolean, has_result: boolean }} Job
 * @typedef {{ step: number, loss: number|null }} StepRow
 * @typedef {{ id: string, name: string, online: boolean, state: string|null, reason: string|null, job: string|null,
 *   kernel: string|null, workers: number|null, flops: number|null, claimed_flops: number|null,
 *   measured_flops: number|null, down_bps: number|null, up_bps: number|null,
 *   rtt_s: number|null, accepted: number, rejects: number, flop: number, credit: number, rac: number,
 *   first_seen_s: number, last_seen_s: number, quarantined_until_s: number|null }} Device
 * @typedef {{ rank: number, id: string, name: string, flop: number, credit: number, rac: number, day_credit: number,
 *   online: boolean }} Leader
 * @typedef {{ name: string, title: string, summary: string, steps: number, schema: Schema }} Recipe
 * @typedef {{ properties: Record<string, { type?: string, default?: unknown, description?: string, minimum?: number,
 *   maximum?: number, exclusiveMinimum?: number, title?: string }> }} Schema
 * @typedef {{ api: string, socket?: string, job?: string, device?: string, recipes?: Recipe[] }} PageConfig
 */

/** What the server wrote into the page. @type {PageConfig} */
export const page = JSON.parse(document.body.dataset.config || "{}");

/** @param {string} path below the interface's root @returns {Promise<any>} */
export async function get(path) {
  return read(await fetch(page.api + path, { headers: { Accept: "application/json" } }));
}

/** @param {string} path @param {unknown} [body] @returns {Promise<any>} */
export async function post(path, body) {
  const headers = { Accept: "application/json", "Content-Type": "application/json", "X-CSRF-Token": document.body.dataset.csrf ?? "" };
  return read(await fetch(page.api + path, { method: "POST", headers, body: body === undefined ? undefined : JSON.stringify(body) }));
}

/** @param {Response} response */
async function read(response) {
  const text = await response.text();
  let body = null;
  try {
    body = JSON.parse(text);
  } catch {
    if (response.ok) throw new Error(`${response.url}: the answer is not JSON`);
  }
  if (response.ok) return body;
  throw new Error(detailText(body?.detail) || `${response.status} ${response.statusText}`);
}

/** FastAPI's validation errors are a list. @param {unknown} detail @returns {string} */
function detailText(detail) {
  if (!Array.isArray(detail)) return typeof detail === "string" ? detail : "";
  return detail.map((each) => `${(each.loc ?? []).join(".")}: ${each.msg ?? ""}`).join("; ");
}
