// The proxy's own routes (docs/api.md). Every address is relative to the page: nothing is asked of anybody else.

const KEY = "recap-key";
let about = null; // what GET api/self said

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const path = (...parts) => parts.map(encodeURIComponent).join("/");

export async function get(address) {
  return (await ask(address)).json();
}

/** One route that is asked again and again: `next()` is its answer, or null when it is the same as before. */
export class Watched {
  #text = "";

  constructor(address) {
    this.address = address;
  }

  async next() {
    const text = await (await ask(this.address)).text();
    if (text === this.#text) return null;
    this.#text = text;
    return JSON.parse(text);
  }
}

/** A change, or a question too long for an address; carries the token that only this origin can read. */
export async function post(address, value) {
  const { token, token_header: header } = await self();
  const headers = { "content-type": "application/json", [header]: token };
  return (await ask(address, { method: "POST", headers, body: JSON.stringify(value) })).json();
}

export async function self({ again = false } = {}) {
  if (!about || again) {
    about = await get("self");
    about.behind = about.now - Date.now() / 1000; // the proxy's clock counts
  }
  return about;
}

/** Seconds by the proxy's clock, as far as it is known. */
export const now = () => Date.now() / 1000 + (about?.behind ?? 0);

async function ask(address, options = {}) {
  let response;
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    if (withheld) throw new Refused(401, "The proxy wants its key. Load the page again to enter it.");
    const headers = { ...options.headers, ...(key === null ? {} : { "x-recap-key": key }) };
    try {
      response = await fetch(`api/${address}`, { ...options, headers });
    } catch {
      throw new Refused(0, "The proxy does not answer. Is it running?");
    }
    if (response.status !== 401) break;
    await askForKey(key !== null);
  }
  if (response.ok) return response;
  const said = await response.json().catch(() => null);
  throw new Refused(response.status, said?.error?.message ?? `The proxy answered ${response.status}.`);
}

let asking = null;
let withheld = false; // the dialog was closed without a key

function askForKey(wrong) {
  asking ??= new Promise((resolve) => {
    const dialog = document.getElementById("ask-key");
    const field = document.getElementById("key");
    dialog.returnValue = "";
    document.getElementById("key-wrong").hidden = !wrong;
    dialog.addEventListener("close", () => {
      withheld = dialog.returnValue === "";
      if (isHeader(field.value)) sessionStorage.setItem(KEY, field.value);
      asking = null;
      resolve();
    }, { once: true });
    field.oninput = () => field.setCustomValidity(isHeader(field.value) ? "" : "A key is ASCII, without spaces around it.");
    dialog.showModal();
  });
  return asking;
}

const isHeader = (text) => /^[\x20-\x7e]+$/.test(text) && text === text.trim();

const shown = () => new Promise((resolve) => {
  const look = () => {
    if (document.hidden) return;
    document.removeEventListener("visibilitychange", look);
    resolve();
  };
  document.addEventListener("visibilitychange", look);
  look();
});

/**
 * Calls `onChange` whenever the archive changes and `onState` with "live" or "lost". Comes back by itself.
 * A page that nobody sees listens to nothing: browsers open six connections to one server, for all tabs together.
 * Read with fetch rather than EventSource, which cannot send the proxy's key.
 */
export async function follow(onChange, onState) {
  for (let wait = 500; ; wait = Math.min(2 * wait, 10_000)) {
    await shown();
    const unseen = new AbortController();
    const look = () => document.hidden && unseen.abort();
    document.addEventListener("visibilitychange", look);
    try {
      const reader = (await ask("events", { signal: unseen.signal })).body.pipeThrough(new TextDecoderStream()).getReader();
      let text = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done) break;
        text += value;
        const events = text.split("\n\n");
        text = events.pop();
        for (const event of events) {
          if (event.startsWith("event: hello")) {
            wait = 500;
            await self({ again: true }); // the proxy may be another one now
            onState("live");
            onChange();
          } else if (event.startsWith("event: change")) onChange();
        }
      }
    } catch { /* the proxy is gone, or not yet there, or nobody looks */ }
    document.removeEventListener("visibilitychange", look);
    if (unseen.signal.aborted) continue;
    onState("lost");
    await new Promise((resolve) => setTimeout(resolve, wait));
  }
}
