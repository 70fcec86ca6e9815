// A selection: where the budget went, what changed, and every block with its reason and scores.

import { path } from "./api.js";
import { bar, fill, h, table } from "./dom.js";
import { number, plural, score, share, small } from "./format.js";

const CHANGES = {
  kept: "sent before and now",
  revived: "left out before, sent now",
  new: "first selected from now, and sent",
  dropped: "sent before, left out now",
  "still out": "left out before and now",
  "out at once": "first selected from now, and left out",
};

/** `served`: it was sent; otherwise it says what would have been. */
export function selectionView(name, selection, comparedWith, served) {
  if (!selection.blocks.length) return h("p", { class: "quiet" }, "No history yet: there is nothing to choose from.");
  const { spent } = selection;
  const left = Math.max(0, selection.budget - selection.cost);
  const over = Math.max(0, spent.protected - selection.budget); // expansion has room of its own beyond the budget
  const parts = [
    ["protected", spent.protected, "protected"], ["packed", spent.packed, "packed"], ["expanded", spent.expanded, "expanded"], ["left", left, "free"],
  ].map(([part, value, tone]) => ({ name: part, value, text: number(value), tone }));
  const kept = selection.blocks.filter((block) => block.kept).length;
  const chosen = { change: "", text: "" };
  const list = h("div");
  const draw = () => {
    const wanted = chosen.text.toLowerCase();
    fill(list, blocks(name, selection.rule, served, selection.blocks.filter((block) =>
      (!chosen.change || block.change === chosen.change) && (!wanted || `${block.label} ${block.detail} ${block.kind} ${block.ordinal}`.toLowerCase().includes(wanted)))));
  };
  const chips = Object.keys(CHANGES).filter((change) => selection.changes[change]).map((change) => {
    const chip = h("button", { type: "button", "data-key": change, class: `chip ${change.replaceAll(" ", "-")}`, "aria-pressed": "false", title: CHANGES[change], onclick: () => {
      chosen.change = chosen.change === change ? "" : change;
      for (const other of chips) other.setAttribute("aria-pressed", String(other === chip && chosen.change === change));
      draw();
    } }, `${change} ${number(selection.changes[change])}`);
    return chip;
  });
  draw();
  const { weights } = selection;
  return h("div", {},
    h("p", {}, `${served ? "Sent" : "Would send"} ${number(kept)} of ${plural(selection.blocks.length, "history block")}: ${number(selection.cost)} of ${number(selection.total)} characters (${share(selection.cost, selection.total)}), budget ${number(selection.budget)}${over ? `, exceeded by ${number(over)}` : ""}.`),
    bar(`budget of ${number(selection.budget)} characters${over ? `, exceeded by ${number(over)}` : ""}`, parts, selection.budget, { limit: over > 0 }),
    h("p", { class: "legends" }, parts.map((part) => h("span", { class: "legend" }, h("i", { class: part.tone }), `${part.name} ${part.text}`)),
      over > 0 && h("span", { class: "legend bad" }, h("i", { class: "limit" }), `budget ${number(selection.budget)}, exceeded by ${number(over)}`)),
    h("p", {}, `Against ${comparedWith}: `, h("span", { class: "chips", role: "group", "aria-label": "Show only" }, chips)),
    h("p", { class: "quiet" }, selection.selector === "recap" ? "" : `Selector ${selection.selector}, not recap. `, `Rule ${selection.rule}: score = ${signals(selection.rule)} + ${weights.lam} z(words) + ${weights.eps} explore, less ${weights.kappa} if stale. z: standard deviations from the blocks' mean. Blocks are packed by rank, in characters; one that is larger than what is left is passed over ("did not fit").`),
    h("label", { class: "filter" }, "Filter blocks ", h("input", { type: "search", oninput: (event) => { chosen.text = event.target.value; draw(); } })),
    list);
}

const signals = (rule) => ({ paper: "z(u)", mass: "z(u)", "past-use": "z(past)", hybrid: "z(u) + z(past)" })[rule] ?? rule;

function blocks(name, rule, served, rows) {
  const words = served ? ["sent", "left out"] : ["would be sent", "would be left out"];
  return table("Blocks of the selection", [
    { name: "block", cell: (row) => [h("a", { href: `#/session/${path(name)}/block/${row.ordinal}` }, `${row.ordinal}`), h("span", { class: "quiet" }, ` ${row.kind ?? ""}`)] },
    { name: "what became of it", cell: (row) => [h("span", { class: `state ${row.kept ? "kept" : "out"}` }, words[row.kept ? 0 : 1]), h("span", { class: "quiet" }, ` ${row.change}`)] },
    { name: "why", cell: (row) => h("span", { class: "why" }, row.kept && row.detail ? `${row.rule}: ${row.detail}` : row.detail || row.rule) },
    { name: "tokens", right: true, cell: (row) => number(row.tokens) },
    { name: "characters", right: true, title: "what counts against the budget", cell: (row) => number(row.cost) },
    { name: "rank", right: true, cell: (row) => number(row.rank) },
    { name: "score", right: true, cell: (row) => score(row.score) },
    rows.some((row) => row.u !== null) && { name: "u", right: true, title: "importance that replays gave it, as the selection knew it", cell: (row) => [small(row.u), row.stale && h("span", { class: "state bad" }, "stale")] },
    signals(rule).includes("z(u)") && { name: "z(u)", right: true, cell: (row) => score(row.z_u) },
    signals(rule).includes("z(past)") && { name: "z(past)", right: true, title: "how much of it the last turn named", cell: (row) => score(row.z_past) },
    { name: "z(words)", right: true, title: "words that it shares with the request", cell: (row) => score(row.z_words) },
    { name: "explore", right: true, title: "a draw for blocks that no replay has observed", cell: (row) => score(row.exploration) },
    { name: "what", cell: (row) => h("span", { class: "label" }, row.label) },
  ].filter(Boolean), rows, { key: (row) => row.ordinal, empty: "No block fits." });
}
