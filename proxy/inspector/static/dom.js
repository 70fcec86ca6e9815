// Elements from values. Text becomes text nodes and nothing else: history is never taken for markup.

import { number } from "./format.js";

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

/** Put new children into an element; whoever had the focus (by data-key) has it again. */
export function fill(element, ...children) {
  const key = element.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  element.replaceChildren();
  append(element, children);
  if (key) element.querySelector(`[data-key="${CSS.escape(key)}"]`)?.focus({ preventScroll: true });
  return element;
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
  const more = h("button", { type: "button", class: "more" });
  const grow = () => {
    for (const row of rows.slice(shown, shown + step)) {
      body.append(
        h("tr", { dataset: key ? { row: key(row) } : {} },
          columns.map((column) => h("td", { class: column.right && "right", "data-label": column.name }, column.cell(row)))),
      );
    }
    shown = Math.min(rows.length, shown + step);
    more.hidden = shown === rows.length;
    more.textContent = `Show more (${rows.length - shown} left)`;
  };
  more.addEventListener("click", grow);
  grow();
  const heads = columns.map((c) => h("th", { scope: "col", class: c.right && "right", title: c.title }, c.name));
  return h("div", { class: "table", tabindex: "0", role: "region", "aria-label": caption },
    h("table", {}, h("caption", { class: "unseen" }, caption), h("thead", {}, h("tr", {}, heads)), body), more);
}

export function facts(pairs) {
  return h("dl", { class: "facts" },
    pairs.filter(([, value]) => value !== null && value !== undefined && value !== "")
      .map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

/** A bar of parts: [{ name, value, tone }]; its text says the same. */
export function bar(label, parts, total) {
  const whole = Math.max(total, parts.reduce((sum, part) => sum + part.value, 0), 1);
  return h("div", { class: "bar", role: "img", "aria-label": `${label}: ${parts.map((p) => `${p.name} ${p.text}`).join(", ")}` },
    parts.filter((part) => part.value > 0).map((part) =>
      h("span", { class: `part ${part.tone}`, title: `${part.name}: ${part.text}`, style: { width: `${(100 * part.value) / whole}%` } })));
}

/** How much of a history a request sent, in words and as a bar. */
export function sizes({ tokens_sent: sent, tokens_full: full }) {
  const parts = [
    { name: "sent", value: sent, text: number(sent), tone: "sent" },
    { name: "left out", value: full - sent, text: number(full - sent), tone: "out" },
  ];
  return [h("span", {}, `${number(sent)} of ${number(full)}`), bar("tokens", parts, full)];
}
