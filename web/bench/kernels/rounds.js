/**
 * The kernel bench's clock: every contestant proves its product, then all take turns, round by round.
 *
 * A contestant's turn is as many calls as fill `roundMs`, counted out before, and the clock stops when the last result is
 * there. Taking turns makes a change of the CPU's clock or a neighbour on the machine hit all alike; who compares two
 * contestants compares them within each round. A contestant whose product is wrong, or that cannot run, is refused with
 * the reason and not timed.
 */
import { words } from "/static/js/engines/errors.js";
import { judge } from "./operands.js";

/**
 * @typedef {object} Contestant
 * @property {string} name engine/kernel: wasm/relaxed, peer/tfjs-wasm, peak/fused
 * @property {number} flop of one call
 * @property {(calls: number) => number|void|Promise<number|void>} run that many products, all of them finished when it
 *   returns; a number is the seconds that count, else the wall clock does
 * @property {() => Promise<Float32Array>} [product] of one call, by rows; a peak has none
 * @property {import("./operands.js").Truth} [truth] what the product is compared with
 * @property {number} [errorMax] largest error over largest element that is still right
 * @property {() => void} [close]
 * @property {string} [note]
 */

/** @typedef {{ name: string, make: () => Promise<Contestant> }} Entry the contestant of that name, yet to be made */

/**
 * @typedef {object} Measured
 * @property {number} n
 * @property {Record<string, number[]>} gflops by name: one figure a round, all of the same length
 * @property {Record<string, number>} errors by name: largest error over largest element
 * @property {{ name: string, reason: string }[]} refused
 * @property {Record<string, string>} notes
 */

const CLOCK_S = 1e-4; // a page that is not isolated has no finer clock

/** @param {string} text */
export const say = (text) => fetch("/progress", { method: "POST", body: text });

/** Seconds of `calls` calls. @param {Contestant} contestant @param {number} calls */
async function timed({ run }, calls) {
  const start = performance.now();
  const own = await run(calls);
  return Math.max(own ?? (performance.now() - start) / 1000, CLOCK_S);
}

/**
 * @param {string} title for the progress line
 * @param {number} n
 * @param {Entry[]} entries
 * @param {{ rounds: number, roundMs: number }} plan
 * @returns {Promise<Measured>}
 */
export async function compete(title, n, entries, { rounds, roundMs }) {
  /** @type {Measured} */
  const measured = { n, gflops: {}, errors: {}, refused: [], notes: {} };
  /** @type {{ contestant: Contestant, calls: number }[]} */
  const field = [];
  for (const { name, make } of entries) {
    try {
      const contestant = await make();
      if (contestant.product) measured.errors[name] = await judge(contestant);
      if (contestant.note) measured.notes[name] = contestant.note;
      const seconds = await timed(contestant, 1);
      field.push({ contestant, calls: Math.max(1, Math.round(roundMs / 1000 / seconds)) });
      measured.gflops[name] = [];
    } catch (error) {
      measured.refused.push({ name, reason: words(error) });
    }
  }
  await say(`${title} ${n}: ${rounds} rounds of ${Object.keys(measured.gflops).join(", ")}`);
  for (let round = 0; round < rounds; round += 1) {
    for (const { contestant, calls } of field) {
      const seconds = await timed(contestant, calls);
      measured.gflops[contestant.name].push((calls * contestant.flop) / seconds / 1e9);
    }
  }
  for (const { contestant } of field) contestant.close?.();
  for (const { name, reason } of measured.refused) await say(`${title} ${n}: ${name} refused: ${reason}`);
  return measured;
}

/** Fewer turns where each takes long. @param {number} n @param {{ rounds: number, roundMs: number }} plan */
export function roundsAt(n, { rounds, roundMs }) {
  return { rounds: Math.max(3, Math.round((rounds * 512) / Math.max(n, 512))), roundMs };
}
