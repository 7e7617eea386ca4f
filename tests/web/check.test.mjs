// The proof of an engine: right ones pass, and each way to be wrong is found by the part of it that is there to find it.
import assert from "node:assert/strict";
import test from "node:test";

import { prove, proveLarge } from "../../web/static/js/engines/check.js";

const FAST = 1e12; // an engine this fast is shown the large products too

/** An engine in plain JavaScript; `spoil(c, work)` changes its products. */
function engine(spoil = () => {}) {
  const panels = new Map();
  return {
    depth: 1,
    put: (id, bytes) => panels.set(id, new Float32Array(bytes.buffer, bytes.byteOffset, bytes.byteLength / 4)),
    drop: (ids) => ids.forEach((id) => panels.delete(id)),
    compute: async (work) => {
      const [{ m, n, k }, a, bt] = [work, panels.get(work.a), panels.get(work.b)];
      const c = new Float32Array(m * n);
      for (let i = 0; i < m; i += 1) {
        for (let j = 0; j < n; j += 1) {
          let sum = 0;
          for (let l = 0; l < k; l += 1) sum += a[i * k + l] * bt[j * k + l];
          c[i * n + j] = sum;
        }
      }
      spoil(c, work);
      return { bytes: new Uint8Array(c.buffer), seconds: 0 };
    },
    left: () => panels.size,
  };
}

const isLarge = ({ m, n, k }) => m * n * k > 1e7;

test("a right engine is proved and keeps no panel", async () => {
  const right = engine();
  await prove(right);
  await proveLarge(right, FAST);
  assert.equal(right.left(), 0);
});

for (const [name, spoil] of Object.entries({
  "one element of one product": (c, { m, n }) => { if (m === 513 && n === 4) c[c.length - 1] *= 1.001; },
  "a product that is flat": (c, { m }) => { if (m === 1) c.fill(0); },
  "not a number": (c) => { c[0] = NaN; },
})) {
  test(`small products find ${name}`, async () => {
    await assert.rejects(prove(engine(spoil)), /wrong product/);
  });
}

for (const [name, spoil] of Object.entries({
  "a row of zeros": (c, { n }) => c.fill(0, 300 * n, 301 * n),
  "one element that is a little off": (c) => { c[100_000] += 1e-2; },
  "two rows exchanged": (c, { n }) => {
    const row = c.slice(0, n);
    c.copyWithin(0, n, 2 * n);
    c.set(row, n);
  },
  "half precision": (c) => c.forEach((value, at) => { c[at] = Math.round(value * 512) / 512; }),
})) {
  test(`large products find ${name}, which no small one shows`, async () => {
    const wrong = engine((c, work) => { if (isLarge(work)) spoil(c, work); });
    await prove(wrong);
    await assert.rejects(proveLarge(wrong, FAST), /wrong product \(rowwise\) 513x499x500 row /);
  });
}

test("a fast algorithm is asked for, and found out, by itself", async () => {
  const wrong = engine((c, { accuracy }) => { if (accuracy === "normwise") c.fill(0); });
  await prove(wrong);
  await assert.rejects(proveLarge(wrong, FAST), /wrong product \(normwise\)/);
});

test("a slow engine is not kept waiting by large products", async () => {
  await proveLarge(engine((c, work) => assert.ok(!isLarge(work))), 1e6);
});
