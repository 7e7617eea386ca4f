/** The leaderboard: an order and a page of it, both in the address, so that a link shows what its sender saw. */
import { $, dot, failed, link, make, repeat, show, text } from "./dom.js";
import { credit, number, scaled } from "./format.js";
import { get } from "./rest.js";

const ROWS = 50;
const REFRESH_MS = 10000;
const ORDERS = /** @type {Record<string, number>} */ ({ rac: 2, day: 3, total: 4 }); // and the column each sorts by

const query = new URLSearchParams(location.search);
const order = Object.hasOwn(ORDERS, query.get("order") ?? "") ? /** @type {string} */ (query.get("order")) : "rac";
const pageNumber = Math.max(1, Math.floor(Number(query.get("page"))) || 1);
const offset = (pageNumber - 1) * ROWS;

/** @param {import("./rest.js").Leader} row */
function line(row) {
  const name = make("a", { href: `/devices/${encodeURIComponent(row.id)}`, class: "untrusted" }, row.name || row.id);
  const cell = make("td", {}, dot(row.online ? "good" : "idle"), name);
  cell.title = row.online ? "online" : "offline";
  const figures = [credit(row.rac), credit(row.day_credit), credit(row.credit), scaled(row.flop, "FLOP")];
  return make("tr", {}, make("td", {}, number(row.rank)), cell, ...figures.map((value, index) =>
    make("td", { class: index + 2 === ORDERS[order] ? "number chosen" : "number" }, value)));
}

async function refresh() {
  const board = /** @type {{ total: number, rows: import("./rest.js").Leader[] }} */ (
    await get(`/leaderboard?by=device&order=${order}&limit=${ROWS}&offset=${offset}`));
  $("rows").replaceChildren(...board.rows.map(line));
  show("empty", board.rows.length === 0);
  text("shown", board.rows.length ? `${number(offset + 1)} to ${number(offset + board.rows.length)} of ${number(board.total)}` : "");
  go("previous", pageNumber > 1 ? pageNumber - 1 : 0, "Previous");
  go("next", offset + ROWS < board.total ? pageNumber + 1 : 0, "Next");
  failed("");
}

/** @param {string} id @param {number} target 0 for nowhere @param {string} label */
function go(id, target, label) {
  if (target) link(id, `?order=${order}&page=${target}`, label);
  else $(id).removeAttribute("href");
}

for (const tab of document.querySelectorAll("[data-order]")) {
  if (tab.getAttribute("data-order") === order) tab.setAttribute("aria-current", "page");
}
const sorted = document.querySelectorAll("th")[ORDERS[order]];
sorted.setAttribute("aria-sort", "descending");
sorted.classList.add("chosen");
repeat(refresh, REFRESH_MS);
