/** The admin's desk: a form made from a recipe's schema, and the jobs. */
import { $, failed, input, make, repeat, show, words } from "./dom.js";
import { jobItem, jobTitle } from "./job_list.js";
import { get, page, post } from "./rest.js";

const REFRESH_MS = 2000;
const JOBS = 30;

const recipes = page.recipes ?? [];
const choice = /** @type {HTMLSelectElement} */ ($("recipe"));

/** The chosen recipe. */
const recipe = () => recipes[choice.selectedIndex];

function drawForm() {
  const { summary, steps, schema } = recipe();
  $("summary").textContent = summary;
  input("steps").value = String(steps);
  $("fields").replaceChildren(...Object.entries(schema.properties).map(([name, field]) => {
    const numeric = field.type === "integer" || field.type === "number";
    const box = make("input", {
      id: `field-${name}`, name, type: numeric ? "number" : "text", step: field.type === "integer" ? "1" : "any",
      value: String(field.default ?? ""), min: field.minimum?.toString(), max: field.maximum?.toString(),
      "data-type": field.type, title: field.description,
    });
    return make("div", {}, make("label", { for: box.id }, name.replaceAll("_", " ")), box);
  }));
}

/** Only what differs from the recipe's defaults, so that a job's record says what was chosen. */
function config() {
  const { schema } = recipe();
  const boxes = /** @type {NodeListOf<HTMLInputElement>} */ ($("fields").querySelectorAll("input"));
  const chosen = [...boxes].filter((box) => box.value !== "").map((box) =>
    /** @type {[string, string|number]} */ ([box.name, box.type === "number" ? Number(box.value) : box.value]));
  return Object.fromEntries(chosen.filter(([name, value]) => value !== schema.properties[name].default));
}

/** @param {SubmitEvent} event */
async function launch(event) {
  event.preventDefault();
  const button = /** @type {HTMLButtonElement} */ ($("launch").querySelector("button"));
  button.disabled = true;
  try {
    const name = input("job-name").value.trim();
    const job = await post("/jobs", {
      kind: "train", recipe: recipe().name, config: config(), steps: Number(input("steps").value), mode: "tiles",
      accuracy: input("accuracy").value, wire: input("wire").value, ...(name && { name }),
    });
    location.assign(`/jobs/${encodeURIComponent(job.id)}`);
  } catch (error) {
    failed(words(error));
  } finally {
    button.disabled = false;
  }
}

/** @param {import("./rest.js").Job} job */
function cancelButton(job) {
  const button = make("button", { type: "button", class: "small", "aria-label": `Cancel ${jobTitle(job)}`, "data-job": job.id }, "Cancel");
  button.addEventListener("click", () => {
    if (!confirm(`Cancel ${jobTitle(job)}? It cannot be taken up again.`)) return;
    button.disabled = true;
    post(`/jobs/${encodeURIComponent(job.id)}/cancel`).then(refresh).catch((error) => failed(words(error)));
  });
  return button;
}

async function refresh() {
  const { jobs } = /** @type {{ jobs: import("./rest.js").Job[] }} */ (await get(`/jobs?limit=${JOBS}`));
  const focused = document.activeElement?.getAttribute("data-job");
  $("jobs").replaceChildren(...jobs.map((job) =>
    ["queued", "running"].includes(job.state) ? jobItem(job, cancelButton(job)) : jobItem(job)));
  if (focused) /** @type {HTMLElement|null} */ ($("jobs").querySelector(`[data-job="${CSS.escape(focused)}"]`))?.focus();
  show("no-jobs", jobs.length === 0);
}

choice.append(...recipes.map(({ name, title }) => make("option", { value: name }, title)));
choice.addEventListener("change", drawForm);
$("launch").addEventListener("submit", (event) => void launch(/** @type {SubmitEvent} */ (event)));
drawForm();
repeat(refresh, REFRESH_MS);
