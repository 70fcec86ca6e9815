// Is it well, and if not, what can a person do?

import { Watched, now, path } from "../api.js";
import { facts, fill, h, table } from "../dom.js";
import { bytes, duration, moment, number, plural } from "../format.js";

export async function open(root) {
  const watched = new Watched("health");
  async function refresh() {
    const answer = await watched.next();
    if (answer !== null) fill(root, page(answer));
  }
  await refresh();
  return { refresh };
}

function page(answer) {
  const { health, database } = answer;
  const archive = health.archive ?? { state: "none", problem: "no archive is open" };
  const attention = archive.attention ?? null;
  const state = (text, well) => h("span", { class: `state ${text === "off" ? "out" : well ? "kept" : "bad"}` }, text);
  const trouble = (problem, remedy) => problem && h("p", { class: "notice bad" }, problem, remedy && h("span", { class: "below" }, `Remedy: ${remedy}.`));
  const falls = Object.entries(archive.cache_falls ?? {});
  return [
    h("h1", { tabindex: "-1" }, "Health"),
    h("div", { class: "columns" },
      h("section", { class: "card" }, h("h2", {}, "Proxy ", state(health.status, health.status === "ok")),
        answer.upstream_problem && h("p", { class: "notice bad" }, `The last request failed: ${answer.upstream_problem}`), facts([
        ["version", health.version], ["upstream", health.upstream], ["mode", health.mode], ["running for", duration(now() - answer.started_at)]])),
      h("section", { class: "card" }, h("h2", {}, "Archive ", state(archive.state, archive.state === "ok")),
        trouble(archive.problem),
        database.problem && database.problem !== archive.problem && h("p", { class: "notice bad" }, `It cannot be read: ${database.problem}`),
        facts([["file", database.path], ["size", bytes(database.bytes)], ["sessions", number(database.sessions)], ["retention", database.retention],
          ["waiting to be written", plural(archive.batches_waiting ?? 0, "batch").replace("batchs", "batches")], ["lost", archive.batches_lost ? `${archive.batches_lost} batches` : null],
          ["sessions found by their history", number(archive.matches_without_client_id)]])),
      attention && h("section", { class: "card" }, h("h2", {}, "Replay worker ", state(attention.state, ["idle", "replaying", "loading", "starting", "waiting"].includes(attention.state))),
        attention.state === "off" ? h("p", { class: "quiet" }, "Switched off: selections go by what the last turn named and by words.") : trouble(attention.problem, attention.remedy),
        facts([["model", attention.model], ["device", attention.device], ["evidence", attention.evidence],
          ["queue", `${plural(attention.queued ?? 0, "turn")} waiting`], ["replayed", plural(attention.done ?? 0, "turn")], ["failed", plural(attention.failed ?? 0, "turn")],
          ["last failure", attention.last_error]]))),
    falls.length > 0 && h("section", {}, h("h2", {}, "The provider's cache fell"), falls.map(([session, text]) => h("p", { class: "notice bad" }, h("a", { href: `#/session/${path(session)}` }, session), ` ${text}`))),
    answer.pass_through.length > 0 && h("section", {}, h("h2", {}, "Sessions that are left alone"), answer.pass_through.map((row) =>
      h("p", { class: "notice" }, h("a", { href: `#/session/${path(row.session)}` }, row.session), ` ${row.reason}`))),
    h("section", {}, h("h2", {}, "Last errors"), table("Last errors, the newest first", [
      { name: "when", cell: (row) => moment(row.at) },
      { name: "session", cell: (row) => row.session ? h("a", { href: `#/session/${path(row.session)}/turn/${row.turn}` }, `${row.session} turn ${row.turn}`) : "–" },
      { name: "status", cell: (row) => row.status ?? "–" },
      { name: "what happened", cell: (row) => row.problem },
      { name: "what to do", cell: (row) => row.remedy },
    ], answer.errors, { empty: "None." })),
  ];
}
