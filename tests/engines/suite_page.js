/**
 * The suite's page: passes orders to suite.js, in a Worker as the product computes, or in the window (`?window`) where
 * DevTools can see the heap. Every order is answered within the deadline or fails, so that a hung engine is a failed test.
 */
const DEADLINE_MS = 60_000;

/** @type {Map<number, { resolve: (value: any) => void, reject: (error: Error) => void }>} */
const waiting = new Map();
let last = 0;

function worker() {
  const made = new Worker(new URL("suite.js", import.meta.url), { type: "module" });
  made.onerror = (event) => waiting.forEach(({ reject }) => reject(new Error(`the Worker failed: ${event.message}`)));
  made.onmessage = ({ data: { id, answer, error } }) => {
    const call = waiting.get(id);
    waiting.delete(id);
    if (error === undefined) call.resolve(answer);
    else call.reject(new Error(error));
  };
  return (order) => new Promise((resolve, reject) => {
    last += 1;
    waiting.set(last, { resolve, reject });
    made.postMessage({ id: last, order });
  });
}

const inWindow = () => {
  const suite = import("./suite.js");
  return async (order) => (await suite).run(order);
};
const run = location.search === "?window" ? inWindow() : worker();

globalThis.suite = (order) => {
  let timer;
  const late = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new Error(`no answer to ${JSON.stringify(order)} in ${DEADLINE_MS} ms`)), DEADLINE_MS);
  });
  return Promise.race([run(order), late]).finally(() => clearTimeout(timer));
};
