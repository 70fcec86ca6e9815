// The session map (the paper's Figure 2, left) on a canvas: one row a turn, one segment a block.
// Only what is in sight is painted, and segments thinner than a pixel share one, so that ten thousand blocks stay quick.

const LABEL = 64; // pixels, of the turn's number
const BAND = 18;
const STRIP = 5;
const GAP = 9;
const REASON = 18; // above a turn that began at a cold boundary
const TOP = 6;
const ARC = 46; // how far an arc rises at most
const ZOOM_MAX = 4000;
const WIDTH_MAX = 8_000_000; // of what can be scrolled; browsers end near 33 million
const SHADES = 48;

/** [number, value] of runs of numbers and a list of values. */
function* pairs([runs, values]) {
  let next = 0;
  for (const [first, last] of runs) for (let n = first; n <= last; n += 1) yield [n, values[next++]];
}

/** Rows and blocks of api/sessions/NAME/map, made quick to draw. */
export class MapData {
  constructor(answer) {
    const { blocks } = answer;
    this.ordinals = blocks.ordinal;
    this.kinds = blocks.kind;
    this.labels = blocks.label;
    this.tokens = blocks.tokens;
    this.outlines = blocks.outline;
    this.marks = blocks.mark;
    this.indexOf = new Map(this.ordinals.map((ordinal, index) => [ordinal, index]));
    this.sums = new Float64Array(this.tokens.length + 1); // tokens of the first so many blocks
    this.tokens.forEach((tokens, i) => { this.sums[i + 1] = this.sums[i] + Math.max(1, tokens); });
    this.rows = answer.rows.map((row) => new MapRow(this, row));
    this.longest = Math.max(1, ...this.rows.map((row) => row.length));
    this.most = this.rows.reduce((most, row) => Math.max(most, row.most), 0);
  }

  /** First and last index of every run of numbers; blocks that are not known are left away. */
  *spans(runs) {
    for (const [first, last] of runs) {
      const [from, to] = [this.indexOf.get(first), this.indexOf.get(last)];
      if (from !== undefined && to !== undefined && to - from === last - first) yield [from, to];
      else for (let n = first; n <= last; n += 1) if (this.indexOf.has(n)) yield [this.indexOf.get(n), this.indexOf.get(n)];
    }
  }

  /** 0 to 1 on a cube-root scale, on which small densities can be told apart; null: not observed. */
  strength(row, index) {
    const value = row.density[index];
    return Number.isNaN(value) ? null : this.most > 0 ? Math.cbrt(value / this.most) : 0;
  }
}

/** One turn. What is needed to draw it is made when it is first drawn. */
class MapRow {
  #made = null;

  constructor(data, row) {
    this.data = data;
    this.raw = row;
    this.turn = row.turn;
    this.reason = row.reason;
    this.length = 0;
    for (const [from, to] of data.spans(row.blocks)) this.length += data.sums[to + 1] - data.sums[from];
    this.sizes = new Map(); // index -> tokens, where they were others
    for (const [ordinal, tokens] of pairs(row.sizes)) {
      const index = data.indexOf.get(ordinal);
      if (index === undefined) continue;
      this.sizes.set(index, tokens);
      this.length += Math.max(1, tokens) - Math.max(1, data.tokens[index]);
    }
    this.most = row.density[1].reduce((most, value) => Math.max(most, value), 0);
  }

  get indexes() { return this.#parts.indexes; }
  get starts() { return this.#parts.starts; }
  get density() { return this.#parts.density; }

  tokens(index) { return this.sizes.get(index) ?? this.data.tokens[index]; }

  isOut(index) { return this.#parts.out[index] === 1; }

  /** Where a block stands in the row; undefined: it does not. */
  placeOf(index) {
    const place = index === undefined ? -1 : this.#parts.places[index];
    return place < 0 ? undefined : place;
  }

  get #parts() {
    return (this.#made ??= this.#make());
  }

  #make() {
    const { data, raw } = this;
    const count = data.tokens.length;
    const indexes = [];
    for (const [from, to] of data.spans(raw.blocks)) for (let i = from; i <= to; i += 1) indexes.push(i);
    const starts = new Float64Array(indexes.length + 1);
    const places = new Int32Array(count).fill(-1);
    indexes.forEach((index, i) => {
      starts[i + 1] = starts[i] + Math.max(1, this.tokens(index));
      places[index] = i;
    });
    const density = new Float32Array(count).fill(NaN);
    for (const [ordinal, value] of pairs(raw.density)) {
      const index = data.indexOf.get(ordinal);
      if (index !== undefined) density[index] = value;
    }
    const out = new Uint8Array(count);
    for (const [from, to] of data.spans(raw.left_out)) out.fill(1, from, to + 1);
    return { indexes, starts, places, density, out };
  }
}

export class SessionMap {
  /** `told(block)` is called with what has the focus or the pointer; `opened(ordinal)` when it is to be opened. */
  constructor({ told, opened }) {
    this.told = told;
    this.opened = opened;
    this.zoom = 1;
    this.focus = null; // { row, place }
    this.edges = { supports: new Map(), dependents: new Map() };
    this.element = document.createElement("div");
    this.element.className = "map";
    this.spacer = document.createElement("div");
    this.canvas = document.createElement("canvas");
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "application");
    this.canvas.setAttribute("aria-describedby", "map-keys");
    this.element.append(this.canvas, this.spacer);
    this.element.addEventListener("scroll", () => this.paint(), { passive: true });
    this.element.addEventListener("wheel", (event) => this.#wheel(event), { passive: false });
    this.canvas.addEventListener("pointermove", (event) => this.#hover(event));
    this.canvas.addEventListener("pointerleave", () => this.told(this.focus));
    this.canvas.addEventListener("click", (event) => this.#click(event));
    this.canvas.addEventListener("dblclick", (event) => { const at = this.#at(event); if (at) this.opened(this.ordinal(at)); });
    this.canvas.addEventListener("keydown", (event) => this.#key(event));
    this.observer = new ResizeObserver(() => this.layout());
    this.observer.observe(this.element);
    this.scheme = matchMedia("(prefers-color-scheme: dark)");
    this.repaint = () => { this.colours = null; this.paint(); };
    this.scheme.addEventListener("change", this.repaint);
  }

  close() {
    this.observer.disconnect();
    this.scheme.removeEventListener("change", this.repaint);
  }

  /** Put new data in; the focus stays on its turn and block. */
  show(data) {
    const kept = this.focus && this.data && { turn: this.data.rows[this.focus.row].turn, ordinal: this.ordinal(this.focus) };
    this.data = data;
    this.focus = kept ? this.#find(kept.turn, kept.ordinal) : null;
    if (this.focus) this.told(this.focus);
    this.canvas.setAttribute("aria-label", `Session map: ${data.rows.length} turns, ${data.ordinals.length} blocks`);
    this.layout();
  }

  /** [support, dependent, weight] of every edge. */
  connect(edges) {
    this.edges = { supports: new Map(), dependents: new Map() };
    for (const [support, dependent] of edges) {
      put(this.edges.supports, dependent, support);
      put(this.edges.dependents, support, dependent);
    }
    this.paint();
  }

  layout() {
    if (!this.data || !this.element.clientWidth) return;
    let y = TOP;
    this.tops = this.data.rows.map((row) => {
      const top = y + (row.reason === null ? 0 : REASON);
      y = top + BAND + STRIP + GAP;
      return top;
    });
    this.height = y;
    const width = this.element.clientWidth;
    const height = Math.min(this.height, Math.max(240, window.innerHeight * 0.6));
    this.base = Math.max(20, width - LABEL - 2) / this.data.longest;
    this.zoom = Math.min(this.zoom, ZOOM_MAX, WIDTH_MAX / Math.max(1, this.base * this.data.longest));
    this.element.style.height = `${height}px`;
    this.size = { width, height };
    const ratio = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    this.spacer.style.width = `${LABEL + this.data.longest * this.base * this.zoom}px`;
    this.spacer.style.height = `${Math.max(0, this.height - height)}px`;
    this.paint();
  }

  /** About a place in the view: the pointer's, else the block that has the focus, else the middle. */
  zoomBy(factor, x = this.#middle()) {
    const before = (this.element.scrollLeft + x - LABEL) / this.zoom;
    this.zoom = Math.max(1, this.zoom * factor);
    this.layout();
    this.element.scrollLeft = before * this.zoom - x + LABEL;
    this.paint();
  }

  #middle() {
    if (this.focus) {
      const { starts } = this.data.rows[this.focus.row];
      const x = LABEL + starts[this.focus.place] * this.base * this.zoom - this.element.scrollLeft;
      if (x >= LABEL && x <= this.size.width) return x;
    }
    return this.size.width / 2;
  }

  fit() {
    this.zoom = 1;
    this.layout();
  }

  ordinal(at) {
    return this.data.ordinals[this.data.rows[at.row].indexes[at.place]];
  }

  // -- painting --------------------------------------------------------------------------------------------------

  paint() {
    if (!this.data || !this.tops) return;
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this.#paint();
    });
  }

  #paint() {
    const pen = this.canvas.getContext("2d");
    const ratio = window.devicePixelRatio || 1;
    this.colours ??= palette(this.canvas, pen);
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, this.size.width, this.size.height);
    const top = this.element.scrollTop;
    this.painted = 0;
    this.data.rows.forEach((row, i) => {
      const y = this.tops[i] - top;
      if (y > -BAND - STRIP - REASON && y < this.size.height + REASON) this.#row(pen, row, y);
    });
    this.#focused(pen, top);
    this.canvas.dataset.painted = String(this.painted);
  }

  #row(pen, row, y) {
    const { colours, data } = this;
    const scale = this.base * this.zoom;
    const left = this.element.scrollLeft;
    const from = left / scale;
    const to = (left + this.size.width - LABEL) / scale;
    let i = Math.max(0, upper(row.starts, from) - 1);
    const x = (place) => LABEL + row.starts[place] * scale - left;
    pen.save();
    pen.beginPath();
    pen.rect(LABEL, y - REASON, this.size.width - LABEL, REASON + BAND + STRIP + 2);
    pen.clip();
    while (i < row.indexes.length && row.starts[i] < to) {
      const start = x(i);
      const pixel = Math.floor(start) + 1;
      let end = x(i + 1);
      let last = i;
      while (last + 1 < row.indexes.length && x(last + 2) <= pixel) { // all of them within one pixel
        last += 1;
        end = x(last + 1);
      }
      let best = null;
      let sent = false;
      let outline = null;
      for (let k = i; k <= last; k += 1) {
        const index = row.indexes[k];
        const value = data.strength(row, index);
        if (value !== null && (best === null || value > best)) best = value;
        sent ||= !row.isOut(index);
        outline ??= data.outlines[index];
      }
      const width = Math.max(1, end - start - (end - start > 4 ? 1 : 0));
      pen.fillStyle = best === null ? colours.unseen : colours.ramp[Math.min(SHADES - 1, Math.floor(best * SHADES))];
      pen.fillRect(start, y, width, BAND);
      if (outline !== null) {
        pen.strokeStyle = pen.fillStyle = colours[outline];
        pen.setLineDash(outline === "mute" ? [3, 2] : []);
        pen.lineWidth = 1.5;
        if (width > 3) pen.strokeRect(start + 0.75, y + 0.75, width - 1.5, BAND - 1.5);
        else pen.fillRect(start, y, width, 2);
        pen.setLineDash([]);
      }
      pen.fillStyle = sent ? colours.sent : colours.out;
      pen.fillRect(start, y + BAND + 1, width, STRIP);
      this.painted += 1;
      i = last + 1;
    }
    pen.restore();
    pen.fillStyle = colours.text;
    pen.font = colours.font;
    pen.fillText(`turn ${row.turn}`, 4, y + BAND - 5);
    if (row.reason !== null) this.#boundary(pen, row.reason, y);
  }

  #boundary(pen, reason, y) {
    pen.strokeStyle = this.colours.cold;
    pen.fillStyle = this.colours.cold;
    pen.lineWidth = 1;
    pen.setLineDash([5, 4]);
    pen.beginPath();
    pen.moveTo(0, y - REASON + 3.5);
    pen.lineTo(this.size.width, y - REASON + 3.5);
    pen.stroke();
    pen.setLineDash([]);
    pen.fillText(`cold: ${reason}`, LABEL, y - 4, this.size.width - LABEL);
  }

  #focused(pen, top) {
    if (!this.focus) return;
    const { row: i, place } = this.focus;
    const row = this.data.rows[i];
    const scale = this.base * this.zoom;
    const left = this.element.scrollLeft;
    const middle = (p) => LABEL + ((row.starts[p] + row.starts[p + 1]) / 2) * scale - left;
    const y = this.tops[i] - top;
    const ordinal = this.ordinal(this.focus);
    pen.save();
    pen.beginPath();
    pen.rect(LABEL, 0, this.size.width, this.size.height);
    pen.clip();
    pen.lineWidth = 1.5;
    this.arcs = 0;
    for (const [ends, colour, dash] of [[this.edges.supports, this.colours.support, []], [this.edges.dependents, this.colours.dependent, [4, 3]]]) {
      pen.strokeStyle = colour;
      pen.setLineDash(dash);
      for (const other of ends.get(ordinal) ?? []) {
        const end = row.placeOf(this.data.indexOf.get(other));
        if (end === undefined) continue;
        const [a, b] = [middle(place), middle(end)];
        const rise = Math.min(ARC, 12 + Math.abs(a - b) / 6);
        pen.beginPath();
        pen.moveTo(a, y);
        pen.bezierCurveTo(a, y - rise, b, y - rise, b, y);
        pen.stroke();
        this.arcs += 1;
      }
    }
    pen.setLineDash([]);
    pen.strokeStyle = this.colours.focus;
    pen.lineWidth = 2.5;
    const x = LABEL + row.starts[place] * scale - left;
    pen.strokeRect(x - 1, y - 1, Math.max(3, (row.starts[place + 1] - row.starts[place]) * scale) + 1, BAND + STRIP + 3);
    pen.restore();
    this.canvas.dataset.arcs = String(this.arcs);
  }

  // -- pointing --------------------------------------------------------------------------------------------------

  #at(event) {
    const box = this.canvas.getBoundingClientRect();
    const x = event.clientX - box.left;
    const y = event.clientY - box.top + this.element.scrollTop;
    const i = upper(this.tops, y) - 1;
    if (i < 0 || x < LABEL || y > this.tops[i] + BAND + STRIP + 2) return null;
    const row = this.data.rows[i];
    const place = upper(row.starts, (x - LABEL + this.element.scrollLeft) / (this.base * this.zoom)) - 1;
    return place >= 0 && place < row.indexes.length ? { row: i, place } : null;
  }

  #hover(event) {
    const at = this.#at(event);
    this.canvas.style.cursor = at ? "pointer" : "default";
    this.told(at ?? this.focus);
  }

  #click(event) {
    const at = this.#at(event);
    if (at) this.#to(at);
  }

  #wheel(event) {
    if (!event.ctrlKey && !event.metaKey) return; // the page scrolls
    event.preventDefault();
    this.zoomBy(Math.exp(-event.deltaY / 300), event.clientX - this.canvas.getBoundingClientRect().left);
  }

  #key(event) {
    const { rows } = this.data;
    if (event.ctrlKey || event.metaKey || event.altKey || !rows.length) return;
    const at = this.focus ?? { row: rows.length - 1, place: 0 };
    const moves = {
      ArrowLeft: () => this.#to({ ...at, place: at.place - (this.focus ? 1 : 0) }),
      ArrowRight: () => this.#to({ ...at, place: at.place + (this.focus ? 1 : 0) }),
      ArrowUp: () => this.#to({ ...at, row: at.row - 1 }),
      ArrowDown: () => this.#to({ ...at, row: at.row + 1 }),
      PageUp: () => this.#to({ ...at, row: at.row - 10 }),
      PageDown: () => this.#to({ ...at, row: at.row + 10 }),
      Home: () => this.#to({ ...at, place: 0 }),
      End: () => this.#to({ ...at, place: Infinity }),
      Enter: () => this.focus && this.opened(this.ordinal(this.focus)),
      "+": () => this.zoomBy(1.5),
      "-": () => this.zoomBy(1 / 1.5),
      0: () => this.fit(),
      Escape: () => { this.focus = null; this.told(null); this.paint(); },
    };
    const move = moves[event.key];
    if (!move) return;
    event.preventDefault();
    move();
  }

  #to({ row, place }) {
    const i = Math.max(0, Math.min(this.data.rows.length - 1, row));
    const count = this.data.rows[i].indexes.length;
    if (!count) return;
    this.focus = { row: i, place: Math.max(0, Math.min(count - 1, place)) };
    this.#reveal();
    this.told(this.focus);
    this.paint();
  }

  #reveal() {
    const { row: i, place } = this.focus;
    const { starts } = this.data.rows[i];
    const scale = this.base * this.zoom;
    const [y, x] = [this.tops[i], starts[place] * scale];
    const box = this.element;
    if (y - REASON - ARC < box.scrollTop) box.scrollTop = Math.max(0, y - REASON - ARC);
    if (y + BAND + STRIP + GAP > box.scrollTop + this.size.height) box.scrollTop = y + BAND + STRIP + GAP - this.size.height;
    if (x < box.scrollLeft) box.scrollLeft = Math.max(0, x - 40);
    const end = Math.min(x + 40, starts[place + 1] * scale);
    if (end > box.scrollLeft + this.size.width - LABEL) box.scrollLeft = end - this.size.width + LABEL + 40;
  }

  #find(turn, ordinal) {
    const row = this.data.rows.findIndex((candidate) => candidate.turn === turn);
    const place = row < 0 ? undefined : this.data.rows[row].placeOf(this.data.indexOf.get(ordinal));
    return place === undefined ? null : { row, place };
  }
}

/** First place whose value is greater. */
function upper(values, wanted) {
  let [low, high] = [0, values.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] > wanted) high = middle;
    else low = middle + 1;
  }
  return low;
}

function put(map, key, value) {
  if (map.has(key)) map.get(key).push(value);
  else map.set(key, [value]);
}

function palette(canvas, pen) {
  const style = getComputedStyle(canvas);
  const of = (name) => style.getPropertyValue(name).trim();
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const ramp = Array.from({ length: SHADES }, (_, i) => {
    const t = i / (SHADES - 1);
    return dark ? `hsl(${215 - 30 * t} ${35 + 50 * t}% ${20 + 52 * t}%)` : `hsl(${215 + 10 * t} ${60 + 15 * t}% ${94 - 64 * t}%)`;
  });
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const hatch = tile.getContext("2d");
  hatch.fillStyle = of("--unseen");
  hatch.fillRect(0, 0, 6, 6);
  hatch.strokeStyle = of("--hatch");
  for (const shift of [-6, 0, 6]) {
    hatch.beginPath();
    hatch.moveTo(shift, 6);
    hatch.lineTo(shift + 6, 0);
    hatch.stroke();
  }
  return {
    ramp,
    unseen: pen.createPattern(tile, "repeat"),
    font: `12px ${style.fontFamily}`,
    ...Object.fromEntries(["text", "sent", "out", "cold", "user", "edit", "pin", "mute", "focus", "support", "dependent"].map((name) => [name, of(`--${name}`)])),
  };
}
