// All sessions at a glance, and a search over what was said in them.

import { Watched, get, now, path } from "../api.js";
import { cache, coolDown, fill, h, sizes, table } from "../dom.js";
import { moment, number, plural, share } from "../format.js";

const SEARCH_AFTER_MS = 350;

export async function open(root) {
  const list = h("div");
  const found = h("section", { "aria-live": "polite" });
  const input = h("input", { id: "search", type: "search", placeholder: "title, model, or anything that was said", autocomplete: "off" });
  const side = h("input", { id: "side", type: "checkbox" });
  fill(root,
    h("h1", { tabindex: "-1" }, "Sessions"),
    h("form", { class: "tools", role: "search", onsubmit: (event) => { event.preventDefault(); search(); } },
      h("label", { for: "search" }, "Search"), input,
      h("label", { class: "check" }, side, "side requests (titles, summaries)")),
    found, list);

  let data = null;
  let timer = null;
  let watched = new Watched("sessions");

  async function refresh() {
    const asked = watched;
    const answer = await asked.next();
    if (answer === null || asked !== watched) return; // the other list was wanted meanwhile
    data = answer;
    draw();
  }

  function draw() {
    const wanted = input.value.trim().toLowerCase();
    const fits = (row) => [row.name, row.title, row.model, row.client, row.upstream].some((v) => v.toLowerCase().includes(wanted));
    const rows = data.sessions.filter((row) => !wanted || fits(row));
    const more = data.total - data.sessions.length;
    fill(list, data.total === 0 ? nothing() : show(rows), more > 0 && h("p", { class: "quiet" }, `${plural(more, "older session")} not listed; search finds them`));
    tick();
  }

  async function search() {
    clearTimeout(timer);
    const wanted = input.value.trim();
    if (wanted.length < 2) return void fill(found);
    const answer = await get(`search?q=${encodeURIComponent(wanted)}`);
    if (wanted === input.value.trim()) fill(found, hits(wanted, answer));
  }

  const tick = () => coolDown(list, now());

  input.addEventListener("input", () => {
    draw();
    clearTimeout(timer);
    timer = setTimeout(() => search().catch(() => null), SEARCH_AFTER_MS);
  });
  side.addEventListener("change", () => {
    watched = new Watched(`sessions?side=${side.checked ? 1 : 0}`);
    refresh();
  });
  await refresh();
  return { refresh, tick, close: () => clearTimeout(timer) };
}

const nothing = () => h("div", { class: "card" },
  h("h2", {}, "No sessions yet"),
  h("p", {}, "Point an agent at this proxy and it appears here with its first request:"),
  h("pre", {}, `export OPENAI_BASE_URL=${location.origin}/v1`));

function show(rows) {
  return table("Sessions, the most recently active first", [
    { name: "session", cell: (row) => [
      h("a", { class: "title", href: `#/session/${path(row.name)}`, "data-key": row.name }, row.title || "(no text)"),
      h("span", { class: "quiet" }, ` ${row.name}${row.kind === "side" ? " · side request" : ""}${row.parent ? ` · from ${row.parent}` : ""}`)] },
    { name: "client", cell: (row) => [row.client, h("span", { class: "quiet below" }, row.model)] },
    { name: "upstream", cell: (row) => h("span", { class: "quiet" }, host(row.upstream)) },
    { name: "turns", right: true, cell: (row) => [number(row.turns), h("span", { class: "quiet below" }, plural(row.requests, "request"))] },
    { name: "sent of full", title: "tokens of the latest request, as sent and as the client sent it (o200k)", cell: (row) => sizes(row) },
    { name: "cached", right: true, title: "share of the input tokens that the provider's cache served", cell: (row) => share(row.cached_tokens, row.input_tokens) },
    { name: "cache", title: "whether the provider's cache is believed to hold the session still", cell: cache },
    { name: "state", cell: (row) => [row.problem && h("span", { class: "state bad", title: row.problem }, "failed", h("span", { class: "quiet below" }, short(row.problem))), row.state === "normal" ? !row.problem && "normal" : h("span", { class: "state bad", title: row.state_reason }, row.state, row.state_reason && h("span", { class: "quiet below" }, short(row.state_reason)))] },
    { name: "last active", cell: (row) => h("time", { datetime: new Date(1000 * row.last_active_at).toISOString() }, moment(row.last_active_at)) },
  ], rows, { step: 100, key: (row) => row.name, empty: "No session has this in its title, model or client; what was said is searched above." });
}

function hits(wanted, answer) {
  const name = answer.found.length ? `Said in sessions: ${wanted}` : `Nothing that was said contains “${wanted}”`;
  return h("div", { class: "card" }, h("h2", {}, name),
    !answer.complete && h("p", { class: "quiet" }, `Not everything was read: ${answer.sessions_read} of ${plural(answer.sessions, "session")}, the newest first.`),
    h("ul", { class: "hits" }, answer.found.map((hit) => h("li", {},
      h("a", { href: `#/session/${path(hit.session)}/block/${hit.ordinal}` }, `${hit.session} block ${hit.ordinal}`),
      h("span", { class: "quiet" }, ` ${hit.kind} · ${short(hit.title)} `), h("q", {}, hit.excerpt)))));
}

const host = (address) => { try { return new URL(address).host; } catch { return address; } };
const short = (text) => (text.length > 80 ? `${text.slice(0, 79)}…` : text);
