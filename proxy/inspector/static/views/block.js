// One block: everything it says, as text; where it was sent; what attention it got; pin, mute, copy, download.

import { Watched, path, post } from "../api.js";
import { facts, fill, h, say } from "../dom.js";
import { number, plural, ranges, small } from "../format.js";

const CHARS_SHOWN = 100_000; // of a message at first; the rest on demand

export async function open(root, name, ordinal) {
  const address = `sessions/${path(name)}/blocks/${ordinal}`;
  const head = h("div");
  const text = h("section");
  const watched = new Watched(address);
  let said = "";
  let current = null;

  async function refresh() {
    const block = await watched.next();
    if (block === null) return;
    current = block;
    fill(head, top(block, mark));
    const says = JSON.stringify([block.messages, block.earlier]);
    if (says !== said) fill(text, messages(block.messages), block.earlier.map(former)); // what somebody reads stays where it is
    said = says;
  }

  async function mark(wanted) {
    try {
      const { unheeded } = await post(`${address}/mark`, { mark: wanted });
      await refresh();
      const takes = wanted === "pin" && current.pin_takes ? ` It ${current.pin_takes}.` : "";
      say(`${{ pin: "Pinned", mute: "Muted" }[wanted] ?? "The mark is taken away"}: ${effect(wanted, unheeded)}.${takes}`);
    } catch (error) {
      say(error.message);
    }
  }

  fill(root, head, text);
  await refresh();
  return { refresh };
}

const EFFECTS = { pin: "sent", mute: "not chosen" };
const effect = (mark, unheeded) => unheeded ? `without effect for now, ${unheeded}` : `${EFFECTS[mark] ?? "it counts by its score again"} from the next cold boundary on`;

function top(block, mark) {
  const at = `#/session/${path(block.session)}`;
  const toggle = (wanted, name, help) => h("button", {
    type: "button", "data-key": wanted, "aria-pressed": String(block.mark === wanted), title: help,
    disabled: wanted === "mute" && block.protected !== null && block.mark !== "mute",
    onclick: () => mark(block.mark === wanted ? null : wanted),
  }, name);
  const ends = (edges) => edges.length ? h("ul", {}, [...edges].sort((a, b) => b.weight - a.weight).slice(0, 20).map((edge) =>
    h("li", {}, h("a", { href: `${at}/block/${edge.ordinal}` }, `block ${edge.ordinal}`), ` ${small(edge.weight)} `, h("span", { class: "quiet label" }, edge.label)))) : h("p", { class: "quiet" }, "none known");
  return [
    h("p", { class: "crumbs" }, h("a", { href: "#/sessions" }, "Sessions"), " / ", h("a", { href: at }, block.session), ` / block ${block.ordinal}`),
    h("h1", { tabindex: "-1" }, `Block ${block.ordinal}`),
    h("p", { class: "label" }, block.label),
    h("div", { class: "tools" },
      toggle("pin", "Pin", "send it at every cold boundary, whatever its score"),
      toggle("mute", "Mute", block.protected ? `it is protected (${block.protected}) and cannot be muted` : "never choose it for its score, nor because another one uses it"),
      h("button", { type: "button", onclick: () => copy(block) }, "Copy text"),
      h("button", { type: "button", onclick: () => download(block) }, "Download JSON")),
    block.mark && h("p", { class: "notice" }, `${block.mark === "pin" ? "Pinned" : "Muted"} by hand: ${effect(block.mark, block.unheeded)}.${block.mark === "pin" && block.pin_takes ? ` It ${block.pin_takes}.` : ""}`),
    h("div", { class: "columns" },
      h("section", { class: "card" }, h("h2", {}, "What is known of it"), facts([
        ["kind", block.kind], ["size", `${plural(block.tokens ?? 0, "token")}, ${plural(block.chars, "character")}`],
        ["edits", block.edits.join(", ")], ["protected", block.protected], ["a pin of it", block.mark === "pin" ? null : block.pin_takes],
        ["latest selection", block.verdict && `${block.verdict.kept ? `${block.verdict.rule}: ` : ""}${block.verdict.detail || block.verdict.rule}`],
        ["importance u", block.u === null ? "not observed yet" : `${small(block.u)}${block.stale ? ", stale: later edits or results replaced it" : ""} (rule ${block.rule})`],
        ["sent in turns", ranges(block.served.sent) || "none"], ["left out in turns", ranges(block.served.left_out) || "none"],
      ])),
      h("section", { class: "card" }, h("h2", {}, "Attention over turns"), chart(block.importance)),
      h("section", { class: "card" }, h("h2", {}, "It uses"), ends(block.supports), h("h2", {}, "Used by"), ends(block.dependents))),
  ];
}

function chart(readings) {
  if (!readings.length) return h("p", { class: "quiet" }, "No replay has observed it.");
  const [width, height, foot] = [320, 90, 14];
  const most = Math.max(...readings.map((r) => r.density), Number.MIN_VALUE);
  const step = width / readings.length;
  const tall = (value) => (height - foot) * Math.cbrt(value / most);
  return h("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `attention a token by turn: ${readings.slice(-30).map((r) => `turn ${r.turn} ${small(r.density)}`).join(", ")}` },
    readings.map((r, i) => h("rect", { x: i * step + 1, y: height - foot - tall(r.density), width: Math.max(1, step - 2), height: tall(r.density) }, h("title", {}, `turn ${r.turn}: density ${small(r.density)}, mass ${small(r.mass)}`))),
    h("text", { x: 0, y: height - 2 }, `turn ${readings[0].turn}`), h("text", { x: width, y: height - 2, "text-anchor": "end" }, `turn ${readings.at(-1).turn} (cube root)`));
}

const former = (version) => h("details", {}, h("summary", {}, `Before the client changed it: as in turns ${ranges(version.turns)}`), messages(version.messages));

function messages(all) {
  return [h("h2", {}, `${plural(all.length, "message")}, verbatim`), all.map((message, i) => {
    const body = h("pre", { tabindex: "0", role: "region", "aria-label": `text of message ${i + 1}` });
    const raw = h("pre", { tabindex: "0", role: "region", "aria-label": `message ${i + 1} as sent` });
    const show = (element, text, chars) => {
      const rest = text.length - chars;
      fill(element, text.slice(0, chars), rest > 0 && h("button", { type: "button", onclick: () => show(element, text, Infinity) }, `show ${number(rest)} more characters`));
    };
    show(body, message.text || "(no text)", CHARS_SHOWN);
    return h("article", { class: "card message" }, h("h3", {}, message.role), body,
      h("details", { ontoggle: () => show(raw, message.raw, CHARS_SHOWN) }, h("summary", {}, "as it was sent"), raw));
  })];
}

async function copy(block) {
  try {
    await navigator.clipboard.writeText(block.messages.map((message) => message.text).join("\n\n"));
    say("Copied.");
  } catch {
    say("The browser does not let this page copy: select the text instead.");
  }
}

function download(block) {
  const file = new Blob([`[${block.messages.map((message) => message.raw).join(",\n")}]\n`], { type: "application/json" });
  const link = h("a", { href: URL.createObjectURL(file), download: `${block.session}-block-${block.ordinal}.json` });
  link.click();
  URL.revokeObjectURL(link.href);
}
