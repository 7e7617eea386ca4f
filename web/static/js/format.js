/** Numbers as people read them. null and what is not finite become a dash. */

const DASH = "–";
const COBBLESTONES_PER_FLOP = 200 / 86400e9;
const DECIMAL = ["", "k", "M", "G", "T", "P", "E", "Z"];

/** @typedef {number|null|undefined} Maybe */

/** @param {Maybe} value @returns {value is number} */
const known = (value) => typeof value === "number" && Number.isFinite(value);

/** Three significant digits, thousands grouped. @param {Maybe} value */
export function number(value) {
  if (!known(value)) return DASH;
  const digits = Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 2;
  return value.toLocaleString("en", { maximumFractionDigits: Number.isInteger(value) ? 0 : digits });
}

/** 1.23 G and the like. @param {Maybe} value @param {string} unit */
export function scaled(value, unit) {
  if (!known(value)) return DASH;
  let power = 0, rest = value;
  for (; Math.abs(rest) >= 1000 && power < DECIMAL.length - 1; power += 1) rest /= 1000;
  return `${number(rest)} ${DECIMAL[power]}${unit}`;
}

/** @param {Maybe} value */
export const bytes = (value) => scaled(value, "B");

/** Memory, in the units it is sold in. @param {Maybe} value bytes */
export const memory = (value) => (known(value) ? `${number(value / 2 ** 20)} MiB` : DASH);

/** GFLOP/s without the unit. @param {Maybe} flops */
export const gflops = (flops) => (known(flops) ? number(flops / 1e9) : DASH);

const KERNELS = /** @type {Record<string, string>} */ ({
  "wasm-relaxed": "WebAssembly with relaxed SIMD", "wasm-strict": "WebAssembly with SIMD", "wasm-scalar": "WebAssembly without SIMD",
  webgpu: "WebGPU", pyodide: "WebAssembly inside Pyodide", python: "Python in Pyodide", "native-torch": "native, torch",
  "native-numpy": "native, NumPy",
});

/** A kernel as people call it. @param {string} kernel */
export const kernelName = (kernel) => (Object.hasOwn(KERNELS, kernel) ? KERNELS[kernel] : kernel);

/** Small credit is shown too: the first tile must be seen to count. @param {Maybe} cobblestones */
export function credit(cobblestones) {
  if (!known(cobblestones)) return DASH;
  if (cobblestones > 0 && cobblestones < 1) return cobblestones.toPrecision(2);
  return number(cobblestones);
}

/** @param {number} flop */
export const cobblestones = (flop) => flop * COBBLESTONES_PER_FLOP;

/** @param {Maybe} loss */
export const loss = (loss) => (known(loss) ? loss.toFixed(loss < 0.1 ? 5 : 3) : DASH);

/** @param {Maybe} share in [0, 1] */
export const percent = (share) => (known(share) ? `${number(100 * share)} %` : DASH);

/** @param {Maybe} seconds */
export function duration(seconds) {
  if (!known(seconds)) return DASH;
  if (seconds < 1) return `${number(seconds * 1000)} ms`;
  const s = Math.round(seconds), m = Math.floor(s / 60), h = Math.floor(m / 60), d = Math.floor(h / 24);
  if (d) return `${d} d ${h % 24} h`;
  if (h) return `${h} h ${m % 60} min`;
  return m ? `${m} min ${s % 60} s` : `${s} s`;
}

/** A server's unix time in this reader's words. @param {Maybe} unixS */
export function moment(unixS) {
  return known(unixS) ? new Date(unixS * 1000).toLocaleString("en", { dateStyle: "medium", timeStyle: "short" }) : DASH;
}
