// Which view is open, and that it stays true: a view is shown anew when the address changes and when the archive does.

import { follow, self } from "./api.js";
import { fill, h, say } from "./dom.js";
import * as block from "./views/block.js";
import * as health from "./views/health.js";
import * as savings from "./views/savings.js";
import * as session from "./views/session.js";
import * as sessions from "./views/sessions.js";
import * as turn from "./views/turn.js";
import * as whatIf from "./views/what_if.js";

const RETRY_MS = 5000; // after the proxy or its archive failed; nothing that happens may say that they are back
const WARN_MS = 10_000; // a look at the archive
const REFRESH_MS = 1000; // at most one look a second, however busy the agents are; a view may ask for fewer (everyMs)

// Address -> view. A view exports open(root, parameters) and may return { refresh, close }.
const ROUTES = [
  [/^#\/sessions$/, sessions],
  [/^#\/session\/([^/]+)$/, session],
  [/^#\/session\/([^/]+)\/turn\/(\d+)$/, turn],
  [/^#\/session\/([^/]+)\/block\/(\d+)$/, block],
  [/^#\/session\/([^/]+)\/what-if$/, whatIf],
  [/^#\/savings$/, savings],
  [/^#\/health$/, health],
];

const content = document.getElementById("content");
let opened = null;
let failed = false; // the view could not be opened; it is tried again at the next change
let visit = 0;

/** `again`: the same address as before, after it failed. */
async function go({ again = false } = {}) {
  const mine = ++visit;
  const address = location.hash || "#/sessions";
  if (address === "#content") return;
  const [pattern, view] = ROUTES.find(([pattern]) => pattern.test(address)) ?? [];
  opened?.close?.();
  opened = null;
  for (const link of document.querySelectorAll("nav a")) {
    const here = link.getAttribute("href") === address || (view && link.hash === "#/sessions" && address.startsWith("#/session/"));
    if (here) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const root = h("div", { class: "view" });
  try {
    if (!view) throw new Error(`There is no view ${address}. The list of sessions is a good place to start.`);
    const parameters = pattern.exec(address).slice(1).map(decodeURIComponent);
    const made = await view.open(root, ...parameters);
    if (mine !== visit) { // somebody went on meanwhile
      made?.close?.();
      return;
    }
    opened = made ?? null;
    failed = false;
  } catch (error) {
    if (mine !== visit) return;
    retry(error);
    if (again && error.message === content.querySelector("[role=alert]")?.textContent) return;
    failed = Boolean(view);
    fill(root, h("h1", { tabindex: "-1" }, "Not to be shown"), h("p", { class: "bad", role: "alert" }, error.message),
      h("p", {}, h("a", { href: "#/sessions" }, "All sessions")));
  }
  content.replaceChildren(root); // another view: nothing of the old one goes over
  content.dataset.address = address;
  opened?.shown?.();
  const title = root.querySelector("h1");
  document.title = `${title?.textContent ?? "ReCAP"} · ReCAP inspector`;
  if (again) return;
  window.scrollTo(0, 0);
  if (visit > 1) title?.focus({ preventScroll: true });
}

let timer = null;
let refreshing = false;
let again = false;

async function refresh() {
  timer = null;
  if (document.hidden || refreshing) {
    again = true;
    return;
  }
  again = false;
  refreshing = true;
  try {
    if (failed) await go({ again: true });
    else await opened?.refresh?.();
  } catch (error) {
    say(error.message);
    retry(error);
  } finally {
    refreshing = false;
    if (again) changed();
  }
}

function retry(error) {
  if (error.status === 0 || error.status >= 500) setTimeout(changed, RETRY_MS);
}

function changed() {
  timer ??= setTimeout(refresh, opened?.everyMs ?? REFRESH_MS);
}

/** What is wrong with the archive stands above every view. */
async function warn({ again = true } = {}) {
  const known = await self({ again }).catch(() => null);
  if (known === null) return;
  const said = document.getElementById("problem");
  const text = known.problem === null ? "" : `This proxy is not well: ${known.problem}.`;
  said.hidden = !text;
  if (said.textContent !== text) said.textContent = text;
}

window.addEventListener("hashchange", () => go());
document.addEventListener("visibilitychange", () => again && changed());
setInterval(() => opened?.tick?.(), 1000);

await warn({ again: false }); // and the clock of the proxy, before anything is dated
setInterval(() => document.hidden || warn(), WARN_MS);
await go();
follow(changed, (state) => {
  const live = document.getElementById("live");
  live.textContent = state === "live" ? "live" : "proxy not reached";
  live.classList.toggle("lost", state !== "live");
});
