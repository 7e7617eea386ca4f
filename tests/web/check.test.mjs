// The proof of an engine: right ones pass, and each way to be wrong is found by the part of it that is there to find it.
import assert from "node:assert/strict";
import test from "node:test";

import { prove, proveLarge } from "../../web/static/js/engines/check.js";
import { i8Parts, place, rounded, widenI8 } from "../../web/static/js/engines/elements.js";

const FAST = 1e12; // an engine this fast is shown the large products too

/** An engine in plain JavaScript; `spoil(c, work)` changes its products, `misread(place, work)` where it finds operands. */
function engine(spoil = () => {}, misread = () => {}) {
  const panels = new Map();
  const widen = {
    f32: (bytes) => new Float32Array(bytes.buffer),
    bf16: (bytes) => new Float32Array(Uint32Array.from(new Uint16Array(bytes.buffer), (half) => half << 16).buffer),
    f16: (bytes) => Float32Array.from(new Uint16Array(bytes.buffer), half),
    i8: (bytes, form) => {
      const { elements, scales } = i8Parts(bytes, form);
      return widenI8(elements, scales, form.columns, 0, form.rows);
    },
  };
  return {
    depth: 1,
    put: (id, bytes, form) => panels.set(id, { form, values: widen[form.dtype](bytes.slice(), form) }),
    drop: (ids) => ids.forEach((id) => panels.delete(id)),
    compute: async (work) => {
      const { batch, m, n, terms, dtype } = work;
      const c = new Float32Array(batch * m * n);
      for (const term of terms) {
        const [a, b] = ["a", "b"].map((side) => {
          const { form, values } = panels.get(term[side]), at = place(work, term, side, form);
          misread(at, work);
          return { ...at, values };
        });
        for (let z = 0; z < batch; z += 1) {
          for (let i = 0; i < m; i += 1) {
            for (let j = 0; j < n; j += 1) {
              const x = a.base + z * a.entry + i * a.across, y = b.base + z * b.entry + j * b.across;
              let sum = 0;
              for (let l = 0; l < term.k; l += 1) sum += a.values[x + l * a.along] * b.values[y + l * b.along];
              c[(z * m + i) * n + j] += sum;
            }
          }
        }
      }
      spoil(c, { ...work, k: terms[0].k });
      return { bytes: rounded(c, dtype), seconds: 0 };
    },
    left: () => panels.size,
  };
}

/** The value of a binary16's bits. */
function half(bits) {
  const sign = bits >> 15 ? -1 : 1, exponent = (bits >> 10) & 31, fraction = bits & 1023;
  return sign * (exponent ? (1024 + fraction) * 2 ** (exponent - 25) : fraction * 2 ** -24);
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

for (const [name, misread] of Object.entries({
  "the other side of an operand by k": (at, { aByK }) => { if (aByK) [at.across, at.along] = [at.along, at.across]; },
  "the beginning of a panel instead of its place": (at) => { at.base = 0; },
  "a column instead of a row": (at) => { at.base = at.row + at.column * 140; },
  "the first of a batch for all": (at) => { at.entry = 0; },
})) {
  test(`known tiles find ${name}`, async () => {
    await assert.rejects(prove(engine(undefined, misread)), /wrong tile/);
  });
}

for (const [name, spoil] of Object.entries({
  "a term that is left out": (c, { terms }) => { if (terms.length > 1) c.forEach((value, at) => { c[at] = value / 2; }); },
  "results cut instead of rounded": (c, { dtype }) => { if (dtype === "bf16") c.forEach((value, at) => { c[at] = value * (1 - 2 ** -7); }); },
})) {
  test(`known tiles find ${name}`, async () => {
    await assert.rejects(prove(engine(spoil)), /wrong tile/);
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
