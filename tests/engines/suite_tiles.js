/**
 * The life of panels and tiles in an engine: put, compute, drop; a panel that is missing, one that has no room; several
 * tiles in flight; the end.
 */
import { wrongElement } from "./suite_exact.js";
import { floats, matrix } from "./suite_numbers.js";
import { panel, tileFault } from "/static/js/engines/known_tiles.js";

const MIB = 1 << 20;
const PLAIN = { dtype: "f32", layout: "along", gap: 0, offset: 0, scale: 1, uneven: false };

/** A tile of two whole float32 panels, as an engine takes it. */
export function tileOf({ batch, m, n, k, a, b, accuracy }) {
  const terms = [{ k, a, b, aRow: 0, aColumn: 0, bRow: 0, bColumn: 0 }];
  return { batch, m, n, aByK: false, bByK: false, terms, dtype: "f32", accuracy };
}

/** @param {number} k columns of the panel */
export const formOf = (bytes, k) => ({ rows: bytes.length / 4 / k, columns: k, dtype: "f32" });

/** A tile whose panels the engine holds afterwards under names of their own. */
function put(engine, name, { batch, m, n, k, accuracy = "rowwise", offset = 0, scale = 1, uneven = false, poison = false, step = 1, seed }) {
  const poisoned = poison && accuracy === "rowwise" ? [{ line: 0, l: k - 1, value: "nan" }] : []; // by the norm NaN may spread
  const left = matrix(batch * m, k, { ...PLAIN, offset, scale, uneven }, seed, poisoned);
  const right = matrix(batch * n, k, { ...PLAIN, offset, uneven }, seed + 1);
  const work = { batch, m, n, k, a: `${name}.a`, b: `${name}.b`, accuracy };
  engine.put(work.a, left.operand.bytes, formOf(left.operand.bytes, k));
  engine.put(work.b, right.operand.bytes, formOf(right.operand.bytes, k));
  return { work, a: left.exact, b: right.exact, step };
}

/** What is wrong with a tile's product, or "". */
export function wrongTile({ work: { batch, m, n, k, accuracy }, a, b, step = 1 }, { bytes, seconds }) {
  if (bytes.byteLength !== 4 * batch * m * n) return `the product has ${bytes.byteLength} bytes, not ${4 * batch * m * n}`;
  if (bytes.byteOffset || bytes.buffer.byteLength !== bytes.byteLength) return "the product does not own its buffer";
  if (!(seconds >= 0)) return `${seconds} seconds`;
  const got = new Float32Array(bytes.buffer);
  for (let i = 0; i < batch; i += 1) {
    const want = { m, n, k, a: a.subarray(i * m * k), b: b.subarray(i * n * k), cRow: n, accuracy, step };
    const wrong = wrongElement(want, got.subarray(i * m * n));
    if (wrong) return `product ${i} of ${batch}: ${wrong}`;
  }
  return "";
}

const names = ({ work }) => [work.a, work.b];

/** The name of what a promise was rejected with, as far as an engine's user tells errors apart. */
async function rejection(errors, promise) {
  try {
    await promise;
  } catch (error) {
    const kind = Object.keys(errors).find((name) => error instanceof errors[name]);
    return kind ?? `${error}`;
  }
  return "nothing";
}

/** One tile, from its panels' arrival to their end; afterwards the engine uses what it used before. */
export async function tile(engine, order) {
  const usedBefore = engine.memory.used;
  const made = put(engine, "tile", order);
  const wrong = wrongTile(made, await engine.compute(tileOf(made.work))) || wrongTile(made, await engine.compute(tileOf(made.work)));
  const { bytes, used } = engine.memory;
  engine.drop(names(made));
  if (wrong) return wrong;
  const panels = 4 * order.batch * order.k * (order.m + order.n);
  if (used < usedBefore + panels || used > bytes) return `with ${panels} bytes of panels ${used} of ${bytes} bytes are used`;
  return engine.memory.used === usedBefore ? "" : `uses ${engine.memory.used} bytes after the tile, ${usedBefore} before`;
}

/**
 * `depth` tiles at once, each with panels put while those before compute, and dropped while they compute themselves; one
 * more, whose panel is missing, fails alone.
 */
export async function inFlight(engine, errors, { rounds, shapes, seed }) {
  const usedBefore = engine.memory.used;
  for (let round = 0; round < rounds; round += 1) {
    const made = [], products = [];
    for (let i = 0; i < engine.depth; i += 1) {
      const index = round * engine.depth + i;
      made.push(put(engine, `flight-${index}`, { ...shapes[index % shapes.length], seed: seed + 2 * index }));
      products.push(engine.compute(tileOf(made[i].work)));
    }
    const astray = rejection(errors, engine.compute(tileOf({ ...made[0].work, b: "nowhere" })));
    await new Promise((resolve) => setTimeout(resolve)); // a drop is another message, never in compute's own turn
    engine.drop(made.flatMap(names));
    for (const [i, promise] of products.entries()) {
      const wrong = wrongTile(made[i], await promise);
      if (wrong) return `round ${round}, place ${i}: ${wrong}`;
    }
    if ((await astray) !== "MissingPanel") return `the stray tile was rejected with ${await astray}`;
  }
  return engine.memory.used === usedBefore ? "" : `uses ${engine.memory.used} bytes afterwards, ${usedBefore} before`;
}

/** A tile whose panel never came, came and went, or came again. */
export async function missingPanel(engine, errors, order) {
  const made = put(engine, "gone", order);
  for (const panel of ["a", "b"]) {
    const kind = await rejection(errors, engine.compute(tileOf({ ...made.work, [panel]: "never-sent" })));
    if (kind !== "MissingPanel") return `without its panel ${panel}: rejected with ${kind}`;
  }
  engine.drop([...names(made), "never-sent"]);
  const kind = await rejection(errors, engine.compute(tileOf(made.work)));
  if (kind !== "MissingPanel") return `with dropped panels: rejected with ${kind}`;
  if (engine.takeLost().length) return "a dropped panel counts as lost";
  const again = put(engine, "gone", { ...order, seed: order.seed + 9 });
  const wrong = wrongTile(again, await engine.compute(tileOf(again.work)));
  engine.drop(names(again));
  return wrong;
}

/** Panels until there is no room: the last is lost, its tile fails, all others go on; what is dropped makes room. */
export async function noRoom(engine, errors, { bytes_max: bytesMax, ...order }) {
  const usedBefore = engine.memory.used;
  const kept = put(engine, "kept", order);
  const [m, n, k] = [4096, 1, 1024];
  const panel = floats(m * k, order.seed), b = floats(n * k, order.seed + 1);
  engine.put("column", new Uint8Array(b.buffer, b.byteOffset, b.byteLength), { rows: n, columns: k, dtype: "f32" });
  const ids = Array.from({ length: Math.ceil(bytesMax / (16 * MIB)) + 1 }, (_, index) => `fill-${index}`);
  const fill = (id) => engine.put(id, new Uint8Array(panel.slice().buffer), { rows: m, columns: k, dtype: "f32" });
  ids.forEach(fill);
  const workOf = (a) => ({ batch: 1, m, n, k, a, b: "column", accuracy: "rowwise" });
  const check = async (a) => wrongTile({ work: workOf(a), a: Float64Array.from(panel), b: Float64Array.from(b) }, await engine.compute(tileOf(workOf(a))));
  const last = ids.at(-1);

  const kind = await rejection(errors, engine.compute(tileOf(workOf(last))));
  if (kind !== "OutOfMemory") return `without room for its panel: rejected with ${kind}`;
  const lost = engine.takeLost();
  if (!lost.includes(last) || lost.includes(ids[0])) return `lost ${lost} of ${ids}`;
  if (engine.takeLost().length) return "what was lost is told twice";
  const next = await rejection(errors, engine.compute(tileOf(workOf(last))));
  if (next !== "OutOfMemory") return `the next tile without its panel: rejected with ${next}`;
  if (!engine.takeLost().includes(last)) return "what a second tile misses is not told";
  const { bytes, used } = engine.memory;
  if (used > bytes || bytes > bytesMax) return `${used} of ${bytes} bytes are used, ${bytesMax} may be`;
  engine.drop(ids.slice(1, -1));
  let wrong = wrongTile(kept, await engine.compute(tileOf(kept.work))) || (await check(ids[0]));
  if (wrong) return `afterwards: ${wrong}`;
  fill(last);
  wrong = await check(last);
  if (wrong) return `sent again: ${wrong}`;
  engine.drop([...ids, "column", ...names(kept)]);
  if (engine.takeLost().length) return "a dropped panel counts as lost";
  return engine.memory.used === usedBefore ? "" : `uses ${engine.memory.used} bytes afterwards, ${usedBefore} before`;
}

/** A tile whose panels fit and whose product does not. */
export async function noRoomForProduct(engine, errors, { bytes_max: bytesMax, ...order }) {
  const usedBefore = engine.memory.used;
  const side = Math.ceil(Math.sqrt(bytesMax / 4)) + 64;
  const kept = put(engine, "kept", order);
  engine.put("long", new Uint8Array(new Float32Array(side).buffer), { rows: side, columns: 1, dtype: "f32" });
  const kind = await rejection(errors, engine.compute(tileOf({ batch: 1, m: side, n: side, k: 1, a: "long", b: "long", accuracy: "rowwise" })));
  if (kind !== "OutOfMemory") return `a product of ${4 * side ** 2} bytes: rejected with ${kind}`;
  if (engine.takeLost().length) return "a panel counts as lost, but only the product had no room";
  const wrong = wrongTile(kept, await engine.compute(tileOf(kept.work)));
  engine.drop(["long", ...names(kept)]);
  if (wrong) return `afterwards: ${wrong}`;
  return engine.memory.used === usedBefore ? "" : `uses ${engine.memory.used} bytes afterwards, ${usedBefore} before`;
}

/** A closed engine computes nothing and says so; what was on its way comes to an end. */
export async function closed(engine, order) {
  const made = put(engine, "last", order);
  const wrong = wrongTile(made, await engine.compute(tileOf(made.work)));
  if (wrong) return wrong;
  const pending = [engine.compute(tileOf(made.work)), engine.compute(tileOf(made.work))];
  engine.close();
  await Promise.allSettled(pending);
  return engine.compute(tileOf(made.work)).then(() => "a closed engine computed", () => "");
}

/**
 * A tile of any kind: `order` is a TileWork without its panels' names, and of each term's panels the type and size. The
 * engine uses afterwards what it used before.
 */
export async function anyTile(engine, { panels: described, seed, ...work }) {
  const usedBefore = engine.memory.used;
  const panels = new Map(described.map(({ id, dtype, rows, columns }, index) => [id, panel(dtype, seed + index, rows, columns)]));
  panels.forEach(({ bytes, form }, id) => engine.put(id, bytes.slice(), form));
  const { bytes, seconds } = await engine.compute(work);
  engine.drop([...panels.keys()]);
  if (bytes.byteOffset || bytes.buffer.byteLength !== bytes.byteLength) return "the product does not own its buffer";
  if (!(seconds >= 0)) return `${seconds} seconds`;
  const wrong = tileFault(work, panels, bytes);
  if (wrong) return wrong;
  return engine.memory.used === usedBefore ? "" : `uses ${engine.memory.used} bytes after the tile, ${usedBefore} before`;
}
