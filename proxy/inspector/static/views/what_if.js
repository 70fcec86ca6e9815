// What would be kept if this request came now? A dry run: nothing is sent and nothing stored.

import { path, post } from "../api.js";
import { fill, h } from "../dom.js";
import { selectionView } from "../selection_table.js";

const OUTCOMES = {
  sent: (reason) => `A selection would be made and sent: ${reason}.`,
  weighed: (reason) => `Mode auto: ${reason}, it would be sent only if it pays. That is weighed when the request comes, by what is known of the provider's cache then.`,
  recorded: (reason) => `The mode is off: it would be recorded and not sent (${reason}).`,
  nothing: (reason) => `Nothing would be left out: ${reason}. Below is what a selection would be if it were made.`,
};

export async function open(root, name) {
  const result = h("div", { "aria-live": "polite" });
  const query = h("textarea", { id: "query", rows: "4", maxlength: "200000", placeholder: "Fix the failing test in src/parser.py" });
  async function ask(event) {
    event.preventDefault();
    try {
      const answer = await post(`sessions/${path(name)}/what-if`, { query: query.value });
      fill(result, h("section", { class: "card" }, h("h2", {}, "What would be kept"), h("p", { class: answer.outcome === "sent" ? "quiet" : "notice" }, OUTCOMES[answer.outcome](answer.reason)), selectionView(name, answer.selection, `${answer.compared_with} that is sent at present`, false)));
    } catch (error) {
      fill(result, h("p", { class: "bad", role: "alert" }, error.message));
    }
  }
  query.addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) ask(event); });
  fill(root,
    h("p", { class: "crumbs" }, h("a", { href: "#/sessions" }, "Sessions"), " / ", h("a", { href: `#/session/${path(name)}` }, name), " / what if"),
    h("h1", { tabindex: "-1" }, "What if I asked …"),
    h("form", { class: "card", onsubmit: ask },
      h("label", { for: "query" }, "Request"), query,
      h("p", { class: "quiet" }, "As if it came now, after a pause, with the history and the last answer. Nothing is sent, nothing is stored."),
      h("button", { type: "submit" }, "Select")),
    result);
}
