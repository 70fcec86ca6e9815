// What was saved, in the provider's tokens and, with prices, in money.

import { Watched, path } from "../api.js";
import { bar, fill, h, table } from "../dom.js";
import { duration, money, number, plural, share } from "../format.js";

export async function open(root) {
  const watched = new Watched("savings");
  async function refresh() {
    const answer = await watched.next();
    if (answer !== null) fill(root, page(answer));
  }
  await refresh();
  return { refresh, everyMs: 5000 }; // it sums over every exchange
}

function page(answer) {
  const { total, priced } = answer;
  const card = (name, value, below) => h("div", { class: "card figure" }, h("h2", {}, name), h("p", { class: "big" }, value), h("p", { class: "quiet" }, below));
  return [
    h("h1", { tabindex: "-1" }, "Savings"),
    h("div", { class: "columns" },
      card("Input tokens saved", number(total.saved_tokens), `${share(total.saved_tokens, total.untouched_input_tokens)} of what the untouched histories would have been`),
      card("Served from the cache", share(total.cached_tokens, total.input_tokens), `${number(total.cached_tokens)} of ${number(total.input_tokens)} input tokens`),
      priced && card("Money saved", money(total.saved_cost), total.cost === null ? "no request of a model with a price yet" : `${money(total.cost)} spent, ${money(total.untouched_cost)} untouched`),
      card("Requests", number(total.requests), `${number(total.rewritten)} rewritten, ${number(total.resent)} made again after a refusal, ${plural(total.reasoning_removed, "reasoning item")} dropped by the upstream`)),
    h("details", { class: "card" }, h("summary", {}, "How these numbers come about"),
      h("p", {}, "Input, cached and output tokens are the provider's, summed over the stored exchanges that report them. Days and totals count requests of no session too: those that refer to state at the provider or were not understood."),
      h("p", {}, `“Untouched” is an estimate. Its size: what was left out, counted with our tokenizer and scaled by what this provider counts for the session's untouched requests. Its cache: the share that the cache serves of this session's warm requests, as often as a cache is still warm after such a pause, by the provider's profile and by what this session saw. A rewrite of a warm cache therefore shows as a loss.`),
      h("p", {}, priced ? "Money follows from the setting prices." : "Money is shown when the setting prices is there (docs/configuration.md).",
        priced && answer.models_without_price.length ? ` Without a price, and so not in it: ${answer.models_without_price.join(", ")}.` : "")),
    h("section", {}, h("h2", {}, "By day"), table("Savings by day", [{ name: "day", cell: (row) => row.day }, ...columns(priced)], answer.days, { key: (row) => row.day, empty: "No exchange yet." })),
    h("section", {}, h("h2", {}, "By session"), table("Savings by session", [
      { name: "session", cell: (row) => [h("a", { href: `#/session/${path(row.session)}` }, row.title || row.session), h("span", { class: "quiet" }, ` ${row.session}${row.kind === "side" ? " · side" : ""}`)] }, ...columns(priced)], answer.sessions, { step: 100, key: (row) => row.session, empty: "No session yet." })),
  ];
}

const columns = (priced) => [
  { name: "requests", right: true, cell: (row) => [number(row.requests), row.with_usage < row.requests && h("span", { class: "quiet below" }, `${number(row.with_usage)} with usage`)] },
  { name: "input", right: true, title: "by the provider", cell: (row) => number(row.input_tokens) },
  { name: "untouched", right: true, title: "estimate of the input without the proxy", cell: (row) => number(row.untouched_input_tokens) },
  { name: "saved", cell: (row) => [`${number(row.saved_tokens)} (${share(row.saved_tokens, row.untouched_input_tokens)})`, bar("input", [
    { name: "saved", value: Math.max(0, row.saved_tokens), text: number(row.saved_tokens), tone: "sent" }, { name: "paid", value: row.input_tokens, text: number(row.input_tokens), tone: "out" }], row.untouched_input_tokens)] },
  { name: "cached", right: true, cell: (row) => share(row.cached_tokens, row.input_tokens) },
  { name: "output", right: true, cell: (row) => number(row.output_tokens) },
  ...(priced ? [
    { name: "cost", right: true, cell: (row) => money(row.cost) },
    { name: "money saved", right: true, cell: (row) => money(row.saved_cost) },
  ] : []),
  { name: "made again", right: true, title: "the rewritten request was refused and the original sent", cell: (row) => number(row.resent) },
  { name: "reasoning dropped", right: true, title: "items that the upstream removed because their history had changed", cell: (row) => number(row.reasoning_removed) },
];
