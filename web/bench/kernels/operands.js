/**
 * The kernel bench's matrices, which its server draws, and the server's judgement of a product against float64.
 */

/** @typedef {{ n: number, dtype: string, factors: number }} Truth the product A B^factors of the operands of that type */

/**
 * A and B^T as lines of their type, as a volunteer gets them, and the int8 scales of both.
 * @typedef {{ a: Uint8Array<ArrayBuffer>, bt: Uint8Array<ArrayBuffer>, aScales: Uint8Array<ArrayBuffer>,
 *   btScales: Uint8Array<ArrayBuffer> }} Operands
 */

const BYTES = new Map([["f32", 4], ["bf16", 2], ["f16", 2], ["i8", 1]]);

/** @param {number} n @param {string} dtype @returns {Promise<Operands>} */
export async function operands(n, dtype) {
  const response = await fetch(`/operands?n=${n}&dtype=${dtype}`);
  if (!response.ok) throw new Error(`no operands: ${response.status}`);
  const buffer = await response.arrayBuffer();
  const bytes = n * n * (BYTES.get(dtype) ?? 0);
  const scales = (buffer.byteLength - 2 * bytes) / 2;
  const part = (/** @type {number} */ at, /** @type {number} */ size) => new Uint8Array(buffer.slice(at, at + size));
  return {
    a: part(0, bytes),
    bt: part(bytes, bytes),
    aScales: part(2 * bytes, scales),
    btScales: part(2 * bytes + scales, scales),
  };
}

/** A and B by rows in float32, as the peers take them. @param {number} n */
export async function rowMajor(n) {
  const { a, bt } = await operands(n, "f32");
  const columns = new Float32Array(bt.buffer), b = new Float32Array(n * n);
  for (let j = 0; j < n; j += 1) for (let l = 0; l < n; l += 1) b[l * n + j] = columns[j * n + l];
  return { a: new Float32Array(a.buffer), b };
}

/**
 * The error of a contestant's product; rejects where it is too large.
 * @param {import("./rounds.js").Contestant} contestant
 * @returns {Promise<number>} largest error over largest element
 */
export async function judge({ product, truth, errorMax }) {
  if (!product || !truth || !errorMax) throw new Error("a contestant without a product cannot be judged");
  const c = await product();
  const query = new URLSearchParams({ n: String(truth.n), dtype: truth.dtype, factors: String(truth.factors) });
  const body = new Uint8Array(c.buffer, c.byteOffset, c.byteLength).slice();
  const response = await fetch(`/product?${query}`, { method: "POST", body });
  const { error } = await response.json();
  if (!(error <= errorMax)) throw new Error(`wrong product: error ${error} of the largest element, at most ${errorMax}`);
  return error;
}
