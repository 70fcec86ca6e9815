// Numbers and times for people.

const whole = new Intl.NumberFormat("en-US");

export const number = (value) => (value === null || value === undefined ? "–" : whole.format(Math.round(value)));
export const share = (part, all) => (part === null || part === undefined || !all ? "–" : `${Math.round((100 * part) / all)} %`);
export const plural = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
export const score = (value) => (value === null || value === undefined ? "–" : `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(2)}`);
export const small = (value) => (value === null || value === undefined ? "–" : value !== 0 && Math.abs(value) < 0.001 ? value.toExponential(1) : Number(value.toPrecision(3)).toString());
export const money = (value) => (value === null || value === undefined ? "–" : value.toFixed(Math.abs(value) < 1 ? 4 : 2));

/** What some requests saved, of their sums. */
export function saved(sums) {
  if (!sums.rewritten) return "nothing, for nothing was left out";
  if (!sums.with_usage) return "not known: the provider reported no usage";
  const cost = sums.saved_cost === null ? "" : `, in money ${money(sums.saved_cost)}`;
  return `about ${number(sums.saved_tokens)} input tokens in ${plural(sums.rewritten, "rewritten request")} (${share(sums.saved_tokens, sums.untouched_input_tokens)})${cost}`;
}

export function bytes(value) {
  for (const unit of ["B", "kB", "MB"]) {
    if (value < 1000) return `${unit === "B" ? value : value.toFixed(1)} ${unit}`;
    value /= 1000;
  }
  return `${value.toFixed(1)} GB`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.9995) return `${Math.round(1000 * seconds)} ms`;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  return seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${Math.round(seconds / 86400)} days`;
}

export function moment(seconds) {
  const at = new Date(1000 * seconds);
  const two = (value) => String(value).padStart(2, "0");
  const day = `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
  return `${day} ${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
}

/** [[1, 3], [7, 7]] -> "1–3, 7" */
export const ranges = (runs) => runs.map(([first, last]) => (first === last ? `${first}` : `${first}–${last}`)).join(", ");
