// One turn: what was decided at its beginning and on which facts, what was sent, what the provider said.

import { Watched, now, path } from "../api.js";
import { bar, facts, fill, h, table } from "../dom.js";
import { bytes, duration, moment, number, plural, saved, share } from "../format.js";
import { selectionView } from "../selection_table.js";

const BOUNDARIES = { cold: "cold", warm: "warm", step: "left alone", none: "left alone" };

export async function open(root, name, turn) {
  const watched = new Watched(`sessions/${path(name)}/turns/${turn}`);
  async function refresh() {
    const answer = await watched.next();
    if (answer === null) return;
    for (const [part, draw] of [[head, top], [choice, selected], [sent, asked]]) { // what did not change stays as it is
      const text = JSON.stringify(part === head ? { ...answer, requests: null, selection: null } : part === choice ? [answer.selection, answer.selected_here, answer.served, answer.earlier] : answer.requests);
      if (drawn.get(part) !== text) fill(part, draw(answer));
      drawn.set(part, text);
    }
    tick();
  }

  function tick() {
    for (const cell of sent.querySelectorAll("[data-since]")) cell.textContent = `${duration(now() - Number(cell.dataset.since))} so far`;
  }

  const drawn = new Map();
  const [head, choice, sent] = [h("div"), h("section", { class: "card" }), h("section")];
  fill(root, head, choice, sent);
  await refresh();
  return { refresh, tick };
}

function top(turn) {
  const to = (number, text) => number !== undefined && h("a", { href: `#/session/${path(turn.session)}/turn/${number}`, "data-key": text }, text);
  const place = turn.turns.indexOf(turn.turn);
  const { facts: known } = turn;
  return [
    h("p", { class: "crumbs" }, h("a", { href: "#/sessions" }, "Sessions"), " / ", h("a", { href: `#/session/${path(turn.session)}` }, turn.session), ` / turn ${turn.turn}`,
      h("span", { class: "turns" }, to(turn.turns[place - 1], "← turn before"), " ", to(turn.turns[place + 1], "turn after →"))),
    h("h1", { tabindex: "-1" }, `Turn ${turn.turn} of ${turn.session}`),
    turn.asked && h("blockquote", { class: "asked" }, turn.asked),
    h("section", { class: "card" },
      h("h2", {}, "Boundary ", h("span", { class: `state ${turn.boundary}` }, BOUNDARIES[turn.boundary])),
      h("p", {}, turn.reason),
      facts([
        ["mode now", known.mode], ["history", `${plural(known.history_blocks, "block")}, ${number(known.history_chars)} characters`],
        ["pause before it", known.idle_s === null ? null : duration(known.idle_s)], ["cold after, now", duration(known.idle_after_s)],
        ["against the history before", known.outcome], ["saved by the provider's count", saved(turn.savings)],
      ])),
  ];
}

function selected(turn) {
  const { selection } = turn;
  return [h("h2", {}, "Selection"),
      selection === null ? h("p", { class: "quiet" }, "None: what came last was sent as the client sent it.") : [
        h("p", {}, turn.selected_here ? `Made here: ${selection.reason}.` : `Made in turn ${selection.turn}${selection.made_by === turn.session ? "" : ` of ${selection.made_by}`} and kept, so that the provider's cache stays warm: ${selection.reason}.`),
        !selection.applied && h("p", { class: "notice" }, "The mode was off: it was recorded and not sent."),
        selection.applied && !turn.served && h("p", { class: "notice bad" }, "The upstream refused the request that was made of it: the client's own was sent instead, with everything."),
        selectionView(turn.session, selection, former(selection), turn.served)],
      turn.earlier.map((one) => h("details", {}, h("summary", {}, `Made in this turn and then replaced: ${one.reason}`),
        selectionView(turn.session, one, former(one), one.applied)))];
}

const former = (selection) => selection.former_turn === null ? "the full history" : `the selection of turn ${selection.former_turn}`;

const asked = (turn) => [h("h2", {}, "Requests"), requests(turn.requests)];

function requests(rows) {
  const longest = Math.max(...rows.map((row) => row.seconds ?? 0), 0.001);
  return [
    table("Requests of the turn", [
      { name: "step", cell: (row) => [row.outcome === "side" ? "side" : number(row.step), row.running && h("span", { class: "state running" }, "running")] },
      { name: "sent", title: "tokens as sent and as the client sent them (o200k)", cell: (row) => [`${number(row.tokens_sent)} of ${number(row.tokens_full)} tokens`, h("span", { class: "quiet below" }, `${row.messages_sent} of ${plural(row.messages, "message")}, ${bytes(row.bytes_sent)} of ${bytes(row.bytes)}`)] },
      { name: "prefix kept", title: "what is the same as at the beginning of the request sent before", cell: (row) => [plural(row.prefix_messages, "message"), h("span", { class: "quiet below" }, bytes(row.prefix_bytes))] },
      { name: "input", right: true, title: "by the provider", cell: (row) => number(row.input_tokens) },
      { name: "cached", right: true, cell: (row) => [number(row.cached_tokens), h("span", { class: "quiet below" }, share(row.cached_tokens, row.input_tokens))] },
      { name: "output", right: true, cell: (row) => [number(row.output_tokens), row.reasoning_tokens ? h("span", { class: "quiet below" }, `${number(row.reasoning_tokens)} reasoning`) : null] },
      { name: "time", title: "until the first byte, and after it", cell: (row) => row.running ? h("span", { "data-since": row.started_at }) : [duration(row.seconds), timing(row, longest)] },
      { name: "ended", cell: (row) => [`${row.status ?? "–"} ${row.ending}`, row.resent && h("span", { class: "state bad" }, "original sent again"), row.error && h("span", { class: "quiet below" }, row.error)] },
    ], rows, { key: (row) => row.id }),
    h("details", {}, h("summary", {}, "What the provider reported, as it came"),
      rows.map((row) => h("pre", {}, `${moment(row.started_at)} ${row.path} ${row.model}\n${row.usage ?? "no usage"}`))),
  ];
}

function timing(row, longest) {
  if (row.seconds === null) return null;
  const wait = row.first_byte_s ?? row.seconds;
  return bar("time", [
    { name: "until the first byte", value: wait, text: duration(wait), tone: "packed" },
    { name: "after it", value: row.seconds - wait, text: duration(row.seconds - wait), tone: "sent" },
  ], longest);
}
