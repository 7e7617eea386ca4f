/**
 * The kernel bench's page: runs each section of the plan in a Worker of its own, one after another, and posts what they
 * measured.
 *
 * Volunteers compute in Workers, so everything is measured there, ours and the peers in the same one: no library is held
 * up by a page's rendering, and what one leaves behind goes with its Worker. The plan comes in the address; what the
 * figures mean is worked out in Python (backend/bench/kernels/bench.py). A section that cannot run says why and the others go
 * on: a browser without WebGPU still gives its WASM figures.
 */

/**
 * @typedef {object} Plan
 * @property {string[]} sections modules of this folder that export run(), in this order
 * @property {number[]} wasm sizes n of the CPU's kernels @property {number[]} fast sizes of the fast kernel
 * @property {number[]} gpu sizes of the WebGPU kernels @property {number[]} ladder sizes of the ladder's rungs
 * @property {number} rounds of 512-sized work; larger sizes have fewer (rounds.js)
 * @property {number} roundMs least time of one contestant's turn
 * @property {string[]} rungs the ladder's modules by name
 */

/** @param {string} section @param {Plan} plan */
function begin(section, plan) {
  const worker = new Worker("/bench/kernels/worker.js", { type: "module" });
  worker.postMessage({ section, plan });
  return worker;
}

/** The next message of a Worker. @param {Worker} worker @returns {Promise<any>} */
function next(worker) {
  return new Promise((resolve, reject) => {
    worker.onmessage = ({ data }) => ("error" in data ? reject(new Error(data.error)) : resolve(data.value));
    worker.onerror = (event) => reject(new Error(event.message || "a Worker could not be started"));
  });
}

/** @param {string} section @param {Plan} plan */
async function inWorker(section, plan) {
  const worker = begin(section, plan);
  try {
    return await next(worker);
  } finally {
    worker.terminate();
  }
}

/**
 * One Worker against two at once, turn by turn: calls of the relaxed kernel per second, alone and together. No memory is
 * shared; what two lose is what the machine's caches, clock and memory take.
 * @param {Plan} plan
 */
async function pair(plan) {
  const workers = [begin("pair", plan), begin("pair", plan)];
  try {
    await Promise.all(workers.map(next));
    const turn = async (/** @type {Worker[]} */ running) => {
      const rates = await Promise.all(
        running.map((worker) => {
          const answer = next(worker);
          worker.postMessage("go");
          return answer;
        }),
      );
      return rates.reduce((sum, rate) => sum + rate, 0);
    };
    await turn(workers);
    /** @type {{ alone: number, together: number }[]} */
    const rounds = [];
    for (let i = 0; i < plan.rounds / 2; i += 1) {
      // Either Worker alone by turns, so that neither's core is favoured.
      const alone = await turn([workers[i % 2]]);
      rounds.push({ alone, together: await turn(workers) });
    }
    return { rounds };
  } finally {
    for (const worker of workers) worker.terminate();
  }
}

/** @param {Plan} plan */
async function measure(plan) {
  /** @type {Record<string, unknown>} */
  const sections = {};
  for (const name of plan.sections) {
    await fetch("/progress", { method: "POST", body: name });
    sections[name] = await (name === "pair" ? pair(plan) : inWorker(name, plan)).catch((error) => ({ failed: String(error) }));
  }
  return { browser: navigator.userAgent, sections };
}

const plan = JSON.parse(new URLSearchParams(location.search).get("plan") ?? "{}");
const figures = await measure(plan).catch((error) => ({ error: String(error) }));
const out = document.getElementById("out");
if (out) out.textContent = JSON.stringify(figures, null, 2);
await fetch("/figures", { method: "POST", body: JSON.stringify(figures) });
