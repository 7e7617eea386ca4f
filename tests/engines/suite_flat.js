/**
 * Thousands of tiles of changing shapes, with panels coming and going as in a training job.
 *
 * Every product is compared bit by bit with the first of its shape, and that with float64.
 */
import { matrix } from "./suite_numbers.js";
import { formOf, tileOf, wrongTile } from "./suite_tiles.js";

const PLAIN = { dtype: "f32", layout: "along", gap: 0, offset: 0, scale: 1, uneven: false };
const TILES_PER_B = 4; // a panel of B serves several tiles
let number = 0;

/** @type {Map<string, { work: object, a: Float64Array, b: Float64Array, panels: Uint8Array[], first: Float32Array|null }>} */
const sources = new Map();

function sourceOf(shape) {
  const { batch, m, n, k } = shape, key = `${batch}x${m}x${n}x${k}`;
  let source = sources.get(key);
  if (!source) {
    const left = matrix(batch * m, k, PLAIN, m + k), right = matrix(batch * n, k, PLAIN, n + k);
    source = { work: shape, a: left.exact, b: right.exact, panels: [left.operand.bytes, right.operand.bytes], first: null };
    sources.set(key, source);
  }
  return source;
}

async function settle(engine, { source, drops, promise }) {
  const product = await promise;
  engine.drop(drops);
  const got = new Float32Array(product.bytes.buffer);
  if (source.first) return got.every((value, index) => value === source.first[index]) ? "" : "a product differs from the first of its shape";
  source.first = got;
  return wrongTile(source, product);
}

/** Computes `tiles` tiles of these shapes, `depth` of them in flight. "" or what was wrong. */
export async function flatMemory(engine, { tiles, shapes }) {
  const flying = [];
  for (let done = 0; done < tiles; done += 1, number += 1) {
    const group = Math.floor(number / TILES_PER_B), shape = shapes[group % shapes.length], source = sourceOf(shape);
    const work = { ...shape, a: `a-${number}`, b: `b-${group}`, accuracy: "rowwise" };
    engine.put(work.a, source.panels[0].slice(), formOf(source.panels[0], shape.k));
    if (number % TILES_PER_B === 0) engine.put(work.b, source.panels[1].slice(), formOf(source.panels[1], shape.k));
    const drops = number % TILES_PER_B === TILES_PER_B - 1 ? [work.a, work.b] : [work.a];
    flying.push({ source, drops, promise: engine.compute(tileOf(work)) });
    if (flying.length < engine.depth) continue;
    const wrong = await settle(engine, flying.shift());
    if (wrong) return `tile ${number}: ${wrong}`;
  }
  while (flying.length) {
    const wrong = await settle(engine, flying.shift());
    if (wrong) return `a last tile: ${wrong}`;
  }
  return "";
}
