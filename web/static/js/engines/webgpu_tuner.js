/**
 * Which kernel of the family this device uses: measured here once, remembered for this adapter.
 *
 * A fixed kernel reaches about 60% of each GPU's own best, the worst ones a third. So every kernel that the device can run
 * is compiled, proved and timed, those of float32 first, until the time is up; then the best few take turns once more. A
 * text from another adapter, another version of the family or another program is ignored.
 */
import { FAMILY_VERSION } from "./webgpu_family.js";
import { faultOf, operand } from "./webgpu_answers.js";
import { product } from "./webgpu_product.js";

/**
 * @typedef {import("./webgpu_session.js").GpuSession} GpuSession
 * @typedef {import("./webgpu_family.js").Member} Member
 * @typedef {import("./webgpu_family.js").Form} Form
 * @typedef {import("./webgpu_product.js").Work} Work
 * @typedef {Partial<Record<Form, Member>> & { f32: Member }} Kernels the one for each form; without one, operands are expanded
 * @typedef {{ kernels: Kernels, flops: number, dropped: string[] }} Choice
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
 * @param {GpuSession} gpu @param {Member[]} family @param {() => number} [now] ms
 * @returns {Promise<Choice>} rejects when no float32 kernel works
 */
export async function tune(gpu, family, now = () => performance.now()) {
  const until = now() + 1000 * TUNE_SECONDS;
  /** @type {Trial[]} */
  const trials = [];
  /** @type {string[]} */
  const dropped = [];
  const runnable = family.filter((member) => runs(gpu, member));
  for (const member of runnable) {
    // Out of time: still one float32 kernel is needed.
    if (now() > until && trials.some((trial) => trial.member.form === "f32")) break;
    try {
      const wrong = await faultOf(gpu, member);
      if (wrong) throw new Error(wrong);
      trials.push({ member, flops: await speedOf(gpu, member) });
    } catch (error) {
      if (gpu.lost) throw error;
      dropped.push(`${member.name}: ${error instanceof Error ? error.message : String(error)}`);
    }
  }
  for (let round = 0; round < ROUNDS && now() < until; round += 1) {
    for (const trial of fastest(trials, "f32").slice(0, FINALISTS)) {
      trial.flops = Math.max(trial.flops, await speedOf(gpu, trial.member));
    }
  }
  const [best] = fastest(trials, "f32");
  if (!best) throw new Error(`no kernel works on this GPU: ${dropped.join("; ")}`);
  /** @type {Kernels} */
  const kernels = { f32: best.member };
  for (const form of /** @type {const} */ (["f16", "i8"])) {
    const [first] = fastest(trials, form);
    if (first && first.flops > best.flops) kernels[form] = first.member;
  }
  return { kernels, flops: best.flops, dropped };
}

/** @param {Trial[]} trials @param {Form} form */
const fastest = (trials, form) => trials.filter(({ member }) => member.form === form).sort((x, y) => y.flops - x.flops);

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
      return { raw, dtype: member.form, across: n, along: 1, packed: new Map(),
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
export function toText(identity, { kernels, flops }) {
  const names = Object.fromEntries(Object.entries(kernels).map(([form, member]) => [form, member.name]));
  return JSON.stringify({ adapter: identity, family: FAMILY_VERSION, kernels: names, flops: Math.round(flops) });
}

/**
 * The remembered choice, proved again; null where the text does not fit this adapter or this family, or the kernels fail.
 * @param {GpuSession} gpu @param {Member[]} family @param {string|null} text @returns {Promise<Choice|null>}
 */
export async function fromText(gpu, family, text) {
  const kernels = parse(text, gpu, family);
  if (!kernels) return null;
  for (const member of Object.values(kernels.members)) {
    const wrong = await faultOf(gpu, member).catch((error) => String(error));
    if (wrong) return null;
  }
  return { kernels: kernels.members, flops: kernels.flops, dropped: [] };
}

/**
 * @param {string|null} text @param {GpuSession} gpu @param {Member[]} family
 * @returns {{ members: Kernels, flops: number }|null}
 */
function parse(text, gpu, family) {
  try {
    const { adapter, family: version, kernels, flops } = JSON.parse(text ?? "null") ?? {};
    if (adapter !== gpu.identity || version !== FAMILY_VERSION || !(Number.isFinite(flops) && flops >= FLOPS[0] && flops <= FLOPS[1])) return null;
    const members = Object.entries(kernels).map(([form, name]) =>
      [form, family.find((member) => member.name === name && member.form === form && runs(gpu, member))]);
    const known = members.every(([, member]) => member) && Object.fromEntries(members);
    return known && known.f32 ? { members: known, flops } : null;
  } catch {
    return null;
  }
}
