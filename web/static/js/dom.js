/** The little of the DOM that pages need. What others wrote (names, reasons, samples) goes in as text, never as markup. */
import { words } from "./engines/errors.js";

export { words };

/** The element with that id; a page without it is our bug. @param {string} id @returns {HTMLElement} */
export function $(id) {
  const element = document.getElementById(id);
  if (!element) throw new Error(`the page has no element #${id}`);
  return element;
}

/** @param {string} id */
export const input = (id) => /** @type {HTMLInputElement} */ ($(id));

/** Sets text only where it changed, so that screen readers are not told twice. @param {string} id @param {string} value */
export function text(id, value) {
  const element = $(id);
  if (element.textContent !== value) element.textContent = value;
}

/** @param {string} id @param {boolean} visible */
export function show(id, visible) {
  $(id).hidden = !visible;
}

/**
 * A new element.
 * @template {keyof HTMLElementTagNameMap} T
 * @param {T} tag @param {Partial<Record<string, string>>} attributes @param {...(Node|string)} children
 * @returns {HTMLElementTagNameMap[T]}
 */
export function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== undefined) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** A dot beside a state: good, warn, bad or idle; the words beside it say the same. @param {string} mood */
export const dot = (mood) => make("span", { class: "dot", "data-mood": mood, "aria-hidden": "true" });

/** Points a link somewhere, or hides it. @param {string} id @param {string} href @param {string} label */
export function link(id, href, label) {
  const element = /** @type {HTMLAnchorElement} */ ($(id));
  element.hidden = !label;
  if (!label) return;
  if (element.getAttribute("href") !== href) element.setAttribute("href", href);
  text(id, label);
}

/** The page's error line; "" hides it. @param {string} message */
export function failed(message) {
  text("failed", message);
  show("failed", message !== "");
}

/**
 * Runs `work` now and then again and again, `pauseMs` after each end, while the page is visible.
 * @param {() => Promise<void>} work @param {number} pauseMs
 */
export function repeat(work, pauseMs) {
  const round = async () => {
    if (!document.hidden) await work().catch((error) => failed(words(error)));
    setTimeout(round, pauseMs);
  };
  void round();
}
