/** The loss curve: uPlot with the page's own colours, redrawn at most once a frame and at every change of width. */
import uPlot from "/static/vendor/uplot/uPlot.esm.js";

const HEIGHT_PX = 300;

export class LossChart {
  /** @type {Map<number, number|null>} */
  #losses = new Map();
  #scheduled = false;
  #plot;

  /** @param {HTMLElement} parent */
  constructor(parent) {
    this.parent = parent;
    this.#plot = this.#draw();
    new ResizeObserver(() => this.#plot.setSize({ width: parent.clientWidth, height: HEIGHT_PX })).observe(parent);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      this.#plot.destroy();
      this.#plot = this.#draw();
    });
  }

  get steps() {
    return this.#losses.size;
  }

  /** Later rows of a step replace earlier ones: a job that went back to a checkpoint runs them again.
   * @param {import("./rest.js").StepRow[]} rows */
  add(rows) {
    for (const { step, loss } of rows) this.#losses.set(step, loss);
    if (this.#scheduled) return;
    this.#scheduled = true;
    requestAnimationFrame(() => {
      this.#scheduled = false;
      this.#plot.setData(this.#data());
    });
  }

  /** @returns {[number[], (number|null)[]]} */
  #data() {
    const steps = [...this.#losses.keys()].sort((a, b) => a - b);
    return [steps, steps.map((step) => this.#losses.get(step) ?? null)];
  }

  #draw() {
    const colour = (/** @type {string} */ name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line"), width: 1 } };
    return new uPlot({
      width: this.parent.clientWidth, height: HEIGHT_PX,
      scales: { x: { time: false } },
      axes: [{ ...axis, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 1e5] }, { ...axis, size: 56 }],
      series: [{ label: "Step", value: (_, value) => (value === null ? "–" : String(value)) }, {
        label: "Loss", stroke: colour("--accent"), width: 2, spanGaps: true, points: { show: false },
        value: (_, value) => (value === null ? "–" : value.toFixed(4)),
      }],
      cursor: { drag: { x: true, y: false } },
    }, this.#data(), this.parent);
  }
}
