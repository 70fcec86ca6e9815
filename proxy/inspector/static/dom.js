// Elements from values. Text becomes text nodes and nothing else: history is never taken for markup.

import { duration, number } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "rect", "line", "path", "title", "text", "g"]);

/** h("a", { href, class: "x", onclick }, "text", child, [more], null) */
export function h(tag, attributes = {}, ...children) {
  const element = SVG_TAGS.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.entries(value).forEach(([property, v]) => element.style.setProperty(property, v));
    else if (name === "dataset") Object.assign(element.dataset, value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

/** Put new children into an element. What a person did to the old ones, and the focus, goes over to their successors. */
export function fill(element, ...children) {
  const again = deeds(element);
  element.replaceChildren();
  append(element, children);
  for (const restore of again) restore();
  return element;
}

// Which parts a person changes, what is kept of each, and how it is put back.
const DEEDS = [
  ["details[open]", () => true, (now) => { now.open = true; }],
  [".table", (old) => old.wanted, (now, rows) => now.grow(rows)],
  ["input[type=search]", (old) => old.value, (now, text) => { now.value = text; now.dispatchEvent(new Event("input")); }],
  [".chip[aria-pressed=true]", () => true, (now) => now.click()],
  [".table, pre", (old) => (old.scrollLeft || old.scrollTop) && [old.scrollLeft, old.scrollTop], (now, place) => now.scrollTo(...place)],
];

function deeds(element) {
  const found = DEEDS.flatMap(([parts, of, restore]) => [...element.querySelectorAll(parts)].map((old) => {
    const [kept, next] = [of(old), successor(element, old)];
    return () => { if (kept && next()) restore(next(), kept); };
  }));
  const focused = document.activeElement;
  if (focused === element || !element.contains(focused)) return found;
  const [next, caret] = [successor(element, focused), focused.selectionStart ?? null];
  return [...found, () => {
    const now = next() ?? element.closest(".view")?.querySelector("h1"); // what is gone leaves the reader at the top
    now?.focus({ preventScroll: true });
    if (caret !== null) now?.setSelectionRange?.(caret, caret);
  }];
}

const NAMES = ["data-key", "id", "href", "aria-label"];

/** How to find, later, what stands for this part then: of its kind and name, at its place among those. */
function successor(element, part) {
  const name = NAMES.find((one) => part.hasAttribute(one));
  const kind = part.localName + (name ? `[${name}="${CSS.escape(part.getAttribute(name))}"]` : "");
  const place = [...element.querySelectorAll(kind)].indexOf(part);
  return () => {
    const alike = element.querySelectorAll(kind);
    return alike[Math.min(place, alike.length - 1)];
  };
}

const SAID_MS = 6000;
let saying = null;

/** A word on what just happened, which goes by itself. */
export function say(text) {
  const said = document.getElementById("said");
  said.textContent = text;
  clearTimeout(saying);
  saying = setTimeout(() => { said.textContent = ""; }, SAID_MS);
}

/**
 * A table that becomes cards on a phone. Columns: { name, cell: row => node or text, right, title }.
 * Shows `step` rows and a button for more, so that ten thousand rows stay quick.
 */
export function table(caption, columns, rows, { step = 200, key = null, empty = "none" } = {}) {
  if (!rows.length) return h("p", { class: "quiet" }, empty);
  const body = h("tbody");
  let shown = 0;
  const more = h("button", { type: "button", class: "more", "data-key": `more of ${caption}` });
  const heads = columns.map((c) => h("th", { scope: "col", class: c.right && "right", title: c.title }, c.name));
  const region = h("div", { class: "table", tabindex: "0", role: "region", "aria-label": caption },
    h("table", {}, h("caption", { class: "unseen" }, caption), h("thead", {}, h("tr", {}, heads)), body), more);
  region.grow = (wanted) => {
    region.wanted = wanted;
    for (const row of rows.slice(shown, wanted)) {
      body.append(
        h("tr", { dataset: key ? { row: key(row) } : {} },
          columns.map((column) => h("td", { class: column.right && "right", "data-label": column.name }, column.cell(row)))),
      );
    }
    shown = Math.max(shown, Math.min(rows.length, wanted));
    more.hidden = shown === rows.length;
    more.textContent = `Show more (${rows.length - shown} left)`;
  };
  more.addEventListener("click", () => {
    region.grow(region.wanted + step);
    if (more.hidden) region.focus({ preventScroll: true });
  });
  region.grow(step);
  return region;
}

export function facts(pairs) {
  return h("dl", { class: "facts" },
    pairs.filter(([, value]) => value !== null && value !== undefined && value !== "")
      .map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

/** A bar of parts: [{ name, value, tone }]; its text says the same. `limit`: a line at `total`, which they exceed. */
export function bar(label, parts, total, { limit = false } = {}) {
  const whole = Math.max(total, parts.reduce((sum, part) => sum + part.value, 0), 1);
  return h("div", { class: "bar", role: "img", "aria-label": `${label}: ${parts.map((p) => `${p.name} ${p.text}`).join(", ")}` },
    parts.filter((part) => part.value > 0).map((part) =>
      h("span", { class: `part ${part.tone}`, title: `${part.name}: ${part.text}`, style: { width: `${(100 * part.value) / whole}%` } })),
    limit && h("i", { class: "limit", style: { left: `${(100 * total) / whole}%` } }));
}

/** Whether the provider's cache is believed to hold a session still. `coolDown` keeps it true. */
export const cache = (session) =>
  ["running", "unknown"].includes(session.cache) ? h("span", { class: `state ${session.cache}` }, session.cache) : h("span", { class: "state", "data-cold-at": session.cold_at });

export function coolDown(root, now) {
  for (const cell of root.querySelectorAll("[data-cold-at]")) {
    const left = Number(cell.dataset.coldAt) - now;
    cell.textContent = left > 0 ? `warm, ${duration(left)} left` : "cold";
    cell.className = `state ${left > 0 ? "warm" : "cold"}`;
  }
}

/** How much of a history a request sent, in words and as a bar. */
export function sizes({ tokens_sent: sent, tokens_full: full }) {
  const parts = [
    { name: "sent", value: sent, text: number(sent), tone: "sent" },
    { name: "left out", value: full - sent, text: number(full - sent), tone: "out" },
  ];
  return [h("span", {}, `${number(sent)} of ${number(full)}`), bar("tokens", parts, full)];
}
