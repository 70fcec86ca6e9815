// One session: how it stands, its map, its turns.

import { Watched, now, path } from "../api.js";
import { cache, coolDown, facts, fill, h, sizes, table } from "../dom.js";
import { moment, number, plural, saved, share, small } from "../format.js";
import { MapData, SessionMap } from "../map.js";

const RETRY_MS = 5000;

export async function open(root, name) {
  const at = path(name);
  const head = h("div");
  const told = h("p", { class: "told", "aria-live": "polite" }, "Point at a block, or walk with the arrow keys.");
  const trouble = h("p", { class: "notice bad", role: "alert", hidden: true });
  const turns = h("section");
  let graph = { u: new Map(), stale: new Set() };
  let data = null;

  const map = new SessionMap({
    told: (place) => {
      const said = h("p", {}, place ? describe(name, data, graph, place, map) : "Point at a block, or walk with the arrow keys.");
      if (said.textContent !== told.textContent) fill(told, ...said.childNodes); // nothing is read out twice
    },
    opened: (ordinal) => { location.hash = `#/session/${at}/block/${ordinal}`; },
  });
  const button = (text, label, press) => h("button", { type: "button", "aria-label": label, onclick: press }, text);
  fill(root, head,
    h("section", { class: "card" },
      h("div", { class: "row" }, h("h2", {}, "Map"), legend(),
        h("span", { class: "buttons" },
          button("+", "Zoom in", () => map.zoomBy(1.6)), button("−", "Zoom out", () => map.zoomBy(1 / 1.6)), button("fit", "Zoom to fit", () => map.fit()))),
      trouble, map.element, told,
      h("p", { id: "map-keys", class: "quiet" }, "Arrow keys walk through blocks and turns, Enter opens a block, + and − zoom, 0 fits. Ctrl with the wheel zooms.")),
    turns);

  const [summary, picture, knowledge] = ["", "/map", "/graph"].map((part) => new Watched(`sessions/${at}${part}`));

  let behind = true; // the map is older than the summary
  let retry = null;
  let closed = false;

  async function refresh() {
    const answer = await summary.next();
    if (answer !== null) {
      fill(head, top(answer.session));
      fill(turns, h("h2", {}, "Turns"), lines(name, answer.turns));
      tick();
    }
    if (answer !== null || behind) await look();
  }

  /** What can be had of map and graph is shown; what cannot is tried again. */
  async function look() {
    const asked = await Promise.allSettled([picture.next(), knowledge.next()]);
    const [blocks, known] = asked.map((one) => one.value ?? null);
    const failed = asked.find((one) => one.status === "rejected");
    behind = Boolean(failed);
    trouble.hidden = !behind;
    trouble.textContent = behind ? `Not all of the map can be shown: ${failed.reason.message}` : "";
    clearTimeout(retry);
    if (behind && !closed) retry = setTimeout(look, RETRY_MS);
    if (known !== null) {
      graph = {
        u: new Map(known.nodes.ordinal.map((ordinal, i) => [ordinal, known.nodes.u[i]])),
        stale: new Set(known.nodes.stale),
      };
      map.connect(known.edges);
    }
    if (blocks !== null) {
      data = new MapData(blocks);
      map.show(data);
    }
  }

  const tick = () => coolDown(head, now());

  await refresh();
  return { refresh, tick, close: () => { closed = true; clearTimeout(retry); map.close(); }, shown: () => map.layout() };
}

function top(session) {
  const removed = session.reasoning_removed;
  return [
    h("p", { class: "crumbs" }, h("a", { href: "#/sessions" }, "Sessions"), " / ", session.name),
    h("h1", { tabindex: "-1" }, session.title || session.name),
    session.state !== "normal" && h("p", { class: "notice bad" }, `${session.state}: ${session.state_reason ?? "the mode is off: selections are recorded and not sent"}`),
    session.problem && h("p", { class: "notice bad" }, `The last request failed: ${session.problem}`),
    session.cache_fall && h("p", { class: "notice bad" }, session.cache_fall),
    removed > 0 && h("p", { class: "notice" }, `The provider removed ${plural(removed, "reasoning item")} whose history had changed.`),
    facts([
      ["client", session.client], ["model", session.model], ["upstream", session.upstream],
      ["turns", `${number(session.turns)}, ${plural(session.requests, "request")}`],
      ["last active", moment(session.last_active_at)],
      ["provider's cache", cache(session)],
      ["latest request", `${number(session.tokens_sent)} of ${number(session.tokens_full)} tokens sent`],
      ["cached share", share(session.cached_tokens, session.input_tokens)],
      ["saved by the provider's count", saved(session.savings)],
      ["branch of", session.parent && h("a", { href: `#/session/${path(session.parent)}` }, session.parent)],
    ]),
    h("p", { class: "quiet" }, session.attention),
    h("p", {}, h("a", { class: "button", href: `#/session/${path(session.name)}/what-if` }, "What would be sent if I asked …?")),
  ];
}

function lines(name, turns) {
  const newest = [...turns].reverse();
  return table("Turns, the newest first", [
    { name: "turn", cell: (row) => h("a", { href: `#/session/${path(name)}/turn/${row.turn}`, "data-key": `turn ${row.turn}` }, `turn ${row.turn}`) },
    { name: "asked", cell: (row) => h("span", { class: "label" }, row.asked ? (row.asked.length > 140 ? `${row.asked.slice(0, 139)}…` : row.asked) : "–") },
    { name: "began", cell: (row) => moment(row.started_at) },
    { name: "boundary", cell: (row) => [row.running && h("span", { class: "state running" }, "running"), row.boundary === "cold" ? h("span", { class: "state cold" }, "cold") : row.boundary === "warm" ? "warm" : "left alone", h("span", { class: "quiet below" }, row.reason)] },
    { name: "sent", title: "tokens of the turn's last request, as sent and as the client sent it (o200k)", cell: sizes },
    { name: "left out", right: true, cell: (row) => (row.blocks_left_out ? `${number(row.blocks_left_out)} of ${plural(row.blocks, "block")}` : "nothing") },
    { name: "requests", right: true, cell: (row) => [number(row.requests), " ", row.errors > 0 && h("span", { class: "state bad" }, plural(row.errors, "error"))] },
    { name: "input", right: true, title: "input tokens by the provider", cell: (row) => number(row.input_tokens) },
    { name: "cached", right: true, cell: (row) => share(row.cached_tokens, row.input_tokens) },
    { name: "saved", right: true, title: "input tokens by the provider's count, about: what was left out of the turn's requests", cell: (row) => number(row.saved_tokens) },
    { name: "attention", cell: (row) => h("span", { class: "quiet" }, row.replay ?? "–") },
  ], newest, { step: 100, key: (row) => row.turn });
}

function legend() {
  const item = (tone, text) => h("span", { class: "legend" }, h("i", { class: tone }), text);
  return h("p", { class: "legends" }, "width: tokens ", h("span", { class: "legend" }, h("i", { class: "ramp" }), "attention a token"),
    item("unseen", "not observed"), item("line-user", "user"), item("line-edit", "edit"), item("line-pin", "pinned"), item("line-mute", "muted"),
    item("sent", "sent"), item("out", "left out"), item("arc", "it uses"), item("arc-back", "uses it"));
}

function describe(name, data, graph, place, map) {
  const row = data.rows[place.row];
  const index = row.indexes[place.place];
  const ordinal = data.ordinals[index];
  const density = row.density[index];
  const u = graph.u.get(ordinal);
  const uses = map.edges.supports.get(ordinal) ?? [];
  const used = map.edges.dependents.get(ordinal) ?? [];
  const listed = (ordinals) => ordinals.slice(0, 6).join(", ") + (ordinals.length > 6 ? " …" : "");
  return [
    h("a", { href: `#/session/${path(name)}/block/${ordinal}` }, `Block ${ordinal}`),
    ` in turn ${row.turn} · ${data.kinds[index]} · ${plural(row.tokens(index), "token")} · `,
    Number.isNaN(density) ? "not observed in this turn" : `density ${small(density)}`,
    u === undefined ? "" : ` · u ${small(u)}${graph.stale.has(ordinal) ? ", stale" : ""}`,
    ` · ${row.isOut(index) ? "left out" : "sent"}`,
    data.marks[index] ? ` · ${data.marks[index] === "pin" ? "pinned" : "muted"}` : "",
    uses.length ? ` · uses ${listed(uses)}` : "", used.length ? ` · used by ${listed(used)}` : "",
    h("span", { class: "below label" }, data.labels[index]),
  ];
}
