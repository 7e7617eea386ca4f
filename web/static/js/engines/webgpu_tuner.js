/**
 * Which kernel of the family this device uses: measured here once, remembered for this adapter.
 *
 * A fixed kernel reaches about 60% of each GPU's own best, the worst ones a third. So every kernel of a form that the device
 * can run is compiled, proved and timed until the time is up; then the best few take turns once more. At join that is
 * float32, the form of panels, and it is remembered; the others wait until someone multiplies such operands. A text from
 * another adapter, another version of the family or another program is ignored.
 */
import { words } from "./errors.js";
import { FAMILY_VERSION } from "./webgpu_family.js";
import { faultOf, operand } from "./webgpu_answers.js";
import { product } from "./webgpu_product.js";

/**
 * @typedef {import("./webgpu_session.js").GpuSession} GpuSession
 * @typedef {import("./webgpu_family.js").Member} Member
 * @typedef {import("./webgpu_family.js").Form} Form
 * @typedef {import("./webgpu_product.js").Work} Work
 * @typedef {{ member: Member, flops: number, dropped: string[] }} Choice the fastest kernel of a form
 * @typedef {{ member: Member, flops: number }} Trial
 */

const TUNE_SECONDS = 2.5; // a join may take 3
const RUN_SECONDS_MIN = 0.004; // a run shorter than this is mostly latency
const SIZES = [256, 1024]; // the second where the first is too short; a large GPU is not filled by less
const REPEATS_MAX = 64;
const FLOPS = [1e6, 1e15]; // a remembered figure beyond this is none
const FINALISTS = 3;
const ROUNDS = 3;

/**
 * @param {GpuSession} gpu @param {Member[]} family @param {Form} form
 * @returns {Promise<Choice>} rejects when no kernel of this form works
 */
export async function tune(gpu, family, form) {
  const until = performance.now() + 1000 * TUNE_SECONDS;
  /** @type {Trial[]} */
  const trials = [];
  /** @type {string[]} */
  const dropped = [];
  for (const member of family.filter((each) => each.form === form && runs(gpu, each))) {
    if (performance.now() > until && trials.length) break; // one is needed, however slow
    try {
      const wrong = await faultOf(gpu, member);
      if (wrong) throw new Error(wrong);
      trials.push({ member, flops: await speedOf(gpu, member) });
    } catch (error) {
      if (gpu.lost) throw error;
      dropped.push(`${member.name}: ${words(error)}`);
    }
  }
  const fastest = () => trials.sort((x, y) => y.flops - x.flops);
  for (let round = 0; round < ROUNDS && performance.now() < until; round += 1) {
    for (const trial of fastest().slice(0, FINALISTS)) {
      trial.flops = Math.max(trial.flops, await speedOf(gpu, trial.member));
    }
  }
  const [best] = fastest();
  if (!best) throw new Error(`no kernel works on this GPU: ${dropped.join("; ")}`);
  return { ...best, dropped };
}

/** Whether the device has what a member needs. @param {GpuSession} gpu @param {Member} member */
function runs({ device: { features, limits } }, { needs, language, sharedBytes, wide, high }) {
  return (!needs || features.has(needs)) && (!language || navigator.gpu.wgslLanguageFeatures.has(language)) &&
    sharedBytes <= limits.maxComputeWorkgroupStorageSize && wide * high <= limits.maxComputeInvocationsPerWorkgroup;
}

/** FLOP per second of the multiplication, its panels packed. @param {GpuSession} gpu @param {Member} member */
async function speedOf(gpu, member) {
  let flops = 0;
  for (const n of SIZES) {
    const panels = [21, 22].map((seed) => {
      const { bytes, scales } = operand(member.form, n, n, seed, 1);
      const raw = gpu.memory.take("storage", bytes.length, bytes);
      const scaleBytes = scales && new Uint8Array(scales.buffer);
      return { raw, dtype: member.form, across: n, along: 1, base: 0, entry: 0, packed: new Map(),
        scales: scaleBytes && gpu.memory.take("storage", scaleBytes.length, scaleBytes) };
    });
    const blocks = () => panels.flatMap(({ raw, scales, packed }) =>
      [raw, ...(scales ? [scales] : []), ...[...packed.values()].map(({ block }) => block)]);
    try {
      await Promise.all(blocks().map(({ ready }) => ready));
      const work = { batch: 1, m: n, n, k: n, a: panels[0], b: panels[1], row: n, count: n * n, c: null, bias: null };
      const run = await timed(gpu, member, work);
      flops = run.flops;
      if (run.seconds >= RUN_SECONDS_MIN) break;
    } finally {
      blocks().forEach((block) => gpu.memory.give(block));
    }
  }
  return flops;
}

/**
 * Repeats until one submission is long enough to be timed.
 * @param {GpuSession} gpu @param {Member} member @param {Work} work
 */
async function timed(gpu, member, work) {
  const flop = 2 * work.m * work.n * work.k;
  await product(gpu, member, work); // packs, compiles
  const once = (await product(gpu, member, work)).seconds;
  if (once >= RUN_SECONDS_MIN) return { seconds: once, flops: flop / once };
  const repeats = Math.min(Math.ceil((2 * RUN_SECONDS_MIN) / once), REPEATS_MAX);
  const { seconds } = await product(gpu, member, work, repeats);
  return { seconds: seconds / repeats, flops: (flop * repeats) / seconds };
}

/** @param {string} identity @param {Choice} choice @returns {string} what to remember */
export function toText(identity, { member, flops }) {
  return JSON.stringify({ adapter: identity, family: FAMILY_VERSION, kernel: member.name, flops: Math.round(flops) });
}

/**
 * The remembered choice, proved again; null where the text does not fit this adapter or this family, or the kernel fails.
 * @param {GpuSession} gpu @param {Member[]} family @param {string|null} text @returns {Promise<Choice|null>}
 */
export async function fromText(gpu, family, text) {
  const known = parse(text, gpu, family);
  const wrong = known && (await faultOf(gpu, known.member).catch(String));
  return known && !wrong ? { ...known, dropped: [] } : null;
}

/** @param {string|null} text @param {GpuSession} gpu @param {Member[]} family @returns {Trial|null} */
function parse(text, gpu, family) {
  try {
    const { adapter, family: version, kernel, flops } = JSON.parse(text ?? "null") ?? {};
    const possible = Number.isFinite(flops) && flops >= FLOPS[0] && flops <= FLOPS[1];
    if (adapter !== gpu.identity || version !== FAMILY_VERSION || !possible) return null;
    const member = family.find(({ name, form }) => name === kernel && form === "f32");
    return member && runs(gpu, member) ? { member, flops } : null;
  } catch {
    return null;
  }
}
