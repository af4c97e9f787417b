"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
const COLOURS = [[68,1,84],[71,44,122],[59,81,139],[44,113,142],[33,144,141],[39,173,129],[92,200,99],[170,220,50],[253,231,37]];
function colour(x) {
  const index = Math.min(Math.max(x, 0), 1) * (COLOURS.length - 1), low = Math.min(Math.floor(index), COLOURS.length - 2), part = index - low;
  return COLOURS[low].map((c, i) => Math.round(c + (COLOURS[low + 1][i] - c) * part));
}
const show = x => Math.abs(x) >= 1000 || (x !== 0 && Math.abs(x) < 0.001) ? x.toExponential(1) : x.toPrecision(3);
// Spaces and line ends, to be seen.
const seen = text => text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "·");
// The token with the text of a character, of which token t may be a later byte, without text of its own.
const begin = (run, t) => { while (t > 0 && !run.tokens[t]) t--; return t; };
const make = (tag, parent, text) => { const e = document.createElement(tag); if (text !== undefined) e.textContent = text; parent.append(e); return e; };
const bytes = text => Uint8Array.from(atob(text), c => c.charCodeAt(0));

// Tiles are scripts, which a page that was opened from a disk may load as well.
const waiting = new Map(), tiles = new Map();
window.TILE = (key, text) => { waiting.get(key).resolve(text); };
function tile(image) {
  if (!tiles.has(image.key)) tiles.set(image.key, fetchTile(image));
  return tiles.get(image.key);
}
async function fetchTile(image) {
  const text = await new Promise((resolve, reject) => {
    waiting.set(image.key, {resolve});
    const script = make("script", document.head);
    script.onerror = () => reject(new Error(`tiles/${image.key}.js is not beside this page`));
    script.src = `tiles/${image.key}.js`;
  });
  const stream = new Blob([bytes(text)]).stream().pipeThrough(new DecompressionStream("deflate"));
  const raw = new Uint8Array(await new Response(stream).arrayBuffer());
  // n values in 3n/2 bytes, n = size (size + 1) / 2.
  const count = Math.floor(raw.length * 2 / 3), size = Math.floor((Math.sqrt(8 * count + 1) - 1) / 2);
  const values = new Float32Array(size * size).fill(NaN);
  for (let y = 0, p = 0; y < size; y++) for (let x = 0; x <= y; x++, p++) {
    const pair = raw[count + (p >> 1)], number = raw[p] * 16 + (p & 1 ? pair & 15 : pair >> 4);
    if (number) values[y * size + x] = image.low + (number - 1) / 4094 * (image.high - image.low);
  }
  return {size, values};
}

class Panel {
  constructor(parent, index, run) {
    this.root = make("section", parent); this.root.className = "panel"; this.root.id = "panel" + index;
    const choices = make("div", this.root); choices.className = "choices";
    this.pick = {};
    for (const name of ["run", "map", "layer", "head"]) {
      const label = make("label", choices, name + " ");
      this.pick[name] = make("select", label);
      this.pick[name].name = name;
      this.pick[name].addEventListener("change", () => this.changed(name));
    }
    this.thumbs = make("div", this.root); this.thumbs.className = "thumbs";
    const view = make("div", this.root); view.className = "view";
    this.canvas = make("canvas", view);
    const scale = make("div", this.root); scale.className = "scale";
    this.low = make("span", scale); this.ramp = make("i", scale); this.high = make("span", scale);
    this.ramp.style.background = `linear-gradient(90deg, ${COLOURS.map(c => `rgb(${c})`).join(",")})`;
    this.note = make("output", this.root);
    this.numbers = make("p", this.root); this.numbers.className = "numbers";
    const details = make("details", this.root);
    make("summary", details, "What this layer's kernels learned");
    this.kernels = make("div", details);
    this.options("run", DATA.runs.map((run, i) => [i, run.title]));
    this.pick.run.value = run;
    this.listen();
  }
  options(name, pairs) {
    const before = this.pick[name].value;
    this.pick[name].replaceChildren(...pairs.map(([value, text]) => new Option(text, value)));
    if (pairs.some(([value]) => String(value) === before)) this.pick[name].value = before;
  }
  get run() { return DATA.runs[this.pick.run.value]; }
  get layer() { return this.run.layers[this.pick.layer.value]; }
  get image() { return this.layer.maps[this.pick.map.value][this.pick.head.value]; }
  get logarithmic() { return this.image.logarithmic; }
  // To a head and a map, those of the model by their numbers.
  go(layer, head, map) {
    this.options("layer", this.run.layers.map((l, i) => [i, l.layer]));
    this.pick.layer.value = Math.max(0, this.run.layers.findIndex(l => l.layer === layer));
    this.options("head", this.layer.heads.map((h, i) => [i, h]));
    this.pick.head.value = Math.max(0, this.layer.heads.indexOf(head));
    this.options("map", Object.keys(this.layer.maps).map(m => [m, this.title(m)]));
    this.pick.map.value = map in this.layer.maps ? map : "weights";
    return this.load();
  }
  // Without the terms that the method does not have.
  title(map) {
    const {bias, processed} = this.layer.maps, text = DATA.titles[map];
    const shown = processed ? text : text.replace(" + f(S, B)", "");
    return bias ? shown : shown.replace(/ \+ B\b/, "").replace("(S, B)", "(S)");
  }
  changed(name) {
    const head = this.layer.heads[this.pick.head.value];
    if (name === "run") return this.go(...this.run.first, this.pick.map.value);
    return this.go(this.layer.layer, head, this.pick.map.value);
  }
  // Both sides that show the same map have one scale; thumbnails have the panel's.
  limits() {
    const same = panels.filter(panel => panel.pick.map.value === this.pick.map.value && panel.logarithmic === this.logarithmic).map(panel => panel.image);
    return {dark: Math.min(...same.map(i => i.dark)), bright: Math.max(...same.map(i => i.bright))};
  }
  async load() {
    const image = this.image;
    let found;
    try { found = await tile(image); } catch (error) { this.note.textContent = error.message; return; }
    if (image !== this.image) return;
    this.values = found.values; this.size = found.size;
    if (this.shownSize !== this.size) { this.shownSize = this.size; this.window = {x: 0, y: 0, span: this.size}; }
    // The other side may show the same map, and then its scale has changed too.
    for (const panel of panels) if (panel.values) panel.paint();
    const i = this.pick.head.value, l = this.layer;
    const share = x => `${(100 * x).toFixed(1)} %`, copying = l.copying[i] === null ? "" : ` · on what the next token repeats ${share(l.copying[i])}`;
    this.numbers.textContent = `weight on the first token ${share(l.sink[i])} · entropy ${l.entropy[i].toFixed(2)} nats${l.maps.processed ? ` · moved by f ${share(l.change[i])}` : ""}${copying}`;
    this.learned();
    this.root.dataset.ready = [this.run.name, l.layer, l.heads[i], this.pick.map.value].join("/");
  }
  paint() {
    const {dark, bright} = this.limits(), span = bright - dark || 1, size = this.size;
    this.sheet = new OffscreenCanvas(size, size);
    const pen = this.sheet.getContext("2d"), pixels = pen.createImageData(size, size), raw = pixels.data;
    for (let p = 0; p < size * size; p++) {
      if (Number.isNaN(this.values[p])) continue;
      const [r, g, b] = colour((this.values[p] - dark) / span);
      raw[4 * p] = r; raw[4 * p + 1] = g; raw[4 * p + 2] = b; raw[4 * p + 3] = 255;
    }
    pen.putImageData(pixels, 0, 0);
    this.low.textContent = this.number(dark); this.high.textContent = this.number(bright);
    this.draw();
    this.preview(dark, span);
  }
  // Weights of the stages: a row an output, a column an input and tap; blue below zero, orange above.
  learned() {
    this.kernels.replaceChildren();
    // The last stage has a row for every head of the model, of which the page may show some.
    const stages = this.layer.kernels, heads = stages.at(-1)?.shape[0];
    if (!stages.length) make("p", this.kernels, "This method has none.");
    stages.forEach(({shape: [out, inputs, queries, keys], values}, i) => {
      const taps = queries * keys, known = i === 0 ? {[heads]: `scores of ${heads} heads`, [2 * heads]: `scores of ${heads} heads, then their bias`} : {};
      const reads = known[inputs] ?? `${inputs} channel${inputs > 1 ? "s" : ""}`;
      make("p", this.kernels, `Stage ${i + 1}: ${out} rows of outputs; columns: ${reads}, ${taps} tap${taps > 1 ? "s" : ""} each.`);
      const canvas = make("canvas", this.kernels), most = Math.max(...values.map(Math.abs)) || 1;
      canvas.className = "kernel"; canvas.width = inputs * taps; canvas.height = out;
      canvas.style.aspectRatio = `${Math.max(inputs * taps, out)} / ${out}`;
      canvas.title = `from ${show(-most)} to ${show(most)}`;
      const pen = canvas.getContext("2d"), pixels = pen.createImageData(canvas.width, out);
      values.forEach((value, p) => pixels.data.set([...(value < 0 ? [37, 99, 235] : [230, 120, 12]), Math.round(255 * Math.abs(value) / most)], 4 * p));
      pen.putImageData(pixels, 0, 0);
    });
  }
  // A row a layer, a column a head, all in the colours of the map that is shown.
  preview(dark, span) {
    const most = Math.max(...this.run.layers.map(l => l.heads.length));
    this.thumbs.style.gridTemplateColumns = `auto repeat(${most}, 48px)`;
    this.thumbs.replaceChildren();
    this.run.layers.forEach((l, row) => {
      make("span", this.thumbs, `layer ${l.layer}`).style.gridColumn = 1;
      l.heads.forEach((h, i) => {
        const image = l.maps[this.pick.map.value]?.[i], button = make("button", this.thumbs), canvas = make("canvas", button);
        button.style.gridColumn = i + 2;
        button.title = `layer ${l.layer}, head ${h}: f moves ${(100 * l.change[i]).toFixed(1)} % of the weight`;
        button.setAttribute("aria-label", button.title);
        if (l === this.layer && String(i) === this.pick.head.value) button.className = "now";
        button.addEventListener("click", () => this.go(l.layer, h, this.pick.map.value));
        if (!image) return;
        const raw = bytes(image.thumb), size = Math.sqrt(raw.length);
        canvas.width = canvas.height = size;
        const pen = canvas.getContext("2d"), pixels = pen.createImageData(size, size);
        raw.forEach((byte, p) => {
          if (!byte) return;
          const value = image.low + (byte - 1) / 254 * (image.high - image.low);
          pixels.data.set([...colour((value - dark) / span), 255], 4 * p);
        });
        pen.putImageData(pixels, 0, 0);
      });
    });
  }
  draw() {
    const side = Math.max(256, Math.round(this.canvas.clientWidth * devicePixelRatio));
    if (this.canvas.width !== side) this.canvas.width = this.canvas.height = side;
    const pen = this.canvas.getContext("2d"), w = this.window;
    pen.clearRect(0, 0, side, side);
    pen.imageSmoothingEnabled = false;
    pen.drawImage(this.sheet, w.x, w.y, w.span, w.span, 0, 0, side, side);
  }
  pixelAt(event) {
    const box = this.canvas.getBoundingClientRect(), w = this.window;
    return [w.x + (event.clientX - box.left) / box.width * w.span, w.y + (event.clientY - box.top) / box.height * w.span];
  }
  clamp() {
    const w = this.window;
    w.span = Math.min(Math.max(w.span, Math.min(8, this.size)), this.size);
    w.x = Math.min(Math.max(w.x, 0), this.size - w.span); w.y = Math.min(Math.max(w.y, 0), this.size - w.span);
  }
  zoom(event, factor) {
    const [x, y] = this.pixelAt(event), w = this.window, before = w.span;
    w.span *= factor; w.span = Math.min(Math.max(w.span, Math.min(8, this.size)), this.size);
    const ratio = w.span / before;
    w.x = x - (x - w.x) * ratio; w.y = y - (y - w.y) * ratio;
    this.moved();
  }
  // Weights are drawn by their logarithm, unless some are negative, and told as they are.
  number(value) { return show(this.logarithmic ? 10 ** value : value); }
  moved() {
    this.clamp(); this.draw();
    for (const other of this.followers()) {
      const scale = other.size / this.size, w = this.window;
      other.window = {x: w.x * scale, y: w.y * scale, span: w.span * scale};
      other.clamp(); other.draw();
    }
  }
  followers() { return document.getElementById("together").checked ? panels.filter(panel => panel !== this && panel.sheet) : []; }
  hover(event) {
    if (!this.values) return;
    const [x, y] = this.pixelAt(event).map(Math.floor);
    if (x < 0 || y < 0 || x >= this.size || y >= this.size) return;
    this.tell(x, y);
    read(this, x, y);
    // The pair of the same tokens, where the other panel has them.
    for (const other of this.followers()) {
      const pixel = t => other.run.edges.findLastIndex(edge => edge <= t);
      other.tell(pixel(this.run.edges[x]), pixel(this.run.edges[y]));
    }
  }
  tell(x, y) {
    if (!this.values || x < 0 || y < 0 || x >= this.size || y >= this.size) return;
    const edges = this.run.edges, value = this.values[y * this.size + x];
    const span = p => edges[p + 1] - edges[p] === 1 ? `${edges[p]}` : `${edges[p]}–${edges[p + 1] - 1}`;
    const text = p => this.run.tokens.slice(begin(this.run, edges[p]), Math.min(edges[p + 1], edges[p] + 12)).join("") + (edges[p + 1] - edges[p] > 12 ? "…" : "");
    this.note.replaceChildren();
    make("span", this.note, `query ${span(y)} `); make("code", this.note, seen(text(y)));
    make("span", this.note, ` · key ${span(x)} `); make("code", this.note, seen(text(x)));
    make("br", this.note);
    make("strong", this.note, Number.isNaN(value) ? "not visible" : `${this.logarithmic ? "weight" : "value"} ${this.number(value)}`);
  }
  listen() {
    const canvas = this.canvas, fingers = new Map();
    canvas.addEventListener("wheel", e => { e.preventDefault(); this.zoom(e, e.deltaY > 0 ? 1.25 : 0.8); }, {passive: false});
    canvas.addEventListener("dblclick", () => { this.window = {x: 0, y: 0, span: this.size}; this.moved(); });
    canvas.addEventListener("pointerdown", e => { fingers.set(e.pointerId, e); canvas.setPointerCapture(e.pointerId); });
    for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, e => fingers.delete(e.pointerId));
    canvas.addEventListener("pointermove", e => {
      this.hover(e);
      if (!fingers.has(e.pointerId) || !this.sheet) return;
      const before = fingers.get(e.pointerId), box = canvas.getBoundingClientRect(), w = this.window;
      if (fingers.size === 2) {
        const other = [...fingers.values()].find(f => f.pointerId !== e.pointerId);
        const gap = f => Math.hypot(f.clientX - other.clientX, f.clientY - other.clientY) || 1;
        this.zoom(e, gap(before) / gap(e));
      } else {
        w.x -= (e.clientX - before.clientX) / box.width * w.span; w.y -= (e.clientY - before.clientY) / box.height * w.span;
        this.moved();
      }
      fingers.set(e.pointerId, e);
    });
    addEventListener("resize", () => this.sheet && this.draw());
  }
}

// The text of a panel's run, a span a token; long texts as far as they are near the pair.
const page = document.getElementById("text");
const NEAR = 400;
const shade = document.getElementById("shade"), told = document.getElementById("told");
let shown = {}, last = null;
const alike = (a, b) => a.tokens.length === b.tokens.length && a.tokens.every((token, t) => token === b.tokens[t]);
shade.addEventListener("change", () => last && read(...last));
page.addEventListener("pointerover", e => {
  const place = [...page.children].indexOf(e.target);
  if (place >= 0) tellToken(shown.run, shown.from + place);
});
// The loss of a token under both models, and where it occurred before after the same tokens.
function tellToken(run, t, words = "") {
  for (const span of page.querySelectorAll(".source")) span.classList.remove("source");
  told.replaceChildren();
  make("span", told, words); make("code", told, seen(run.tokens[t]));
  const runs = [...new Set(panels.map(panel => panel.run))].filter(other => other === run || alike(other, run));
  make("span", told, t === 0 ? " is the first token" : " has loss " + runs.map(other => `${other.losses[t].toFixed(2)} (${other.title})`).join(", "));
  const source = run.copied[t];
  make("span", told, source < 0 ? "; nothing before repeats here" : `; repeats token ${source}, ${t - source} back`);
  if (source >= shown.from) page.children[source - shown.from]?.classList.add("source");
}
// Background of a token of the text.
function tint(run, t, strength) {
  if (shade.value === "loss") strength = Math.min(1, (panels[0].run.losses[t] ?? 0) / 6);
  if (shade.value !== "gain") return strength > 0.02 ? `rgba(var(--heat), ${(0.75 * strength).toFixed(3)})` : "";
  const gain = (panels[0].run.losses[t] ?? 0) - (panels[1].run.losses[t] ?? 0), much = Math.min(1, Math.abs(gain) / 3);
  return much > 0.02 ? `rgba(${gain > 0 ? "var(--heat)" : "37, 99, 235"}, ${(0.75 * much).toFixed(3)})` : "";
}
function read(panel, x, y) {
  last = [panel, x, y];
  const comparable = alike(panels[0].run, panels[1].run);
  shade.options[2].disabled = !comparable || panels[0].run === panels[1].run;
  if (shade.options[2].disabled && shade.value === "gain") shade.value = "row";
  const run = panel.run, edges = run.edges, query = begin(run, edges[y]), key = begin(run, edges[x]);
  const from = run.tokens.length > 2 * NEAR ? Math.max(0, Math.min(key, query) - NEAR) : 0;
  const to = run.tokens.length > 2 * NEAR ? Math.min(run.tokens.length, query + NEAR) : run.tokens.length;
  if (shown.run !== run || shown.from !== from || shown.to !== to) {
    page.replaceChildren(...run.tokens.slice(from, to).map(token => { const span = document.createElement("span"); span.textContent = token; return span; }));
    shown = {run, from, to};
  }
  const row = panel.values.subarray(y * panel.size, (y + 1) * panel.size).map(v => panel.logarithmic ? 10 ** v : v);
  const visible = row.filter(v => !Number.isNaN(v)), low = Math.min(...visible), high = Math.max(...visible);
  const spans = page.children;
  for (let pixel = 0; pixel < panel.size; pixel++) {
    const strength = Number.isNaN(row[pixel]) ? 0 : (row[pixel] - low) / (high - low || 1);
    for (let token = Math.max(edges[pixel], from); token < Math.min(edges[pixel + 1], to); token++) {
      const span = spans[token - from];
      span.style.background = tint(run, token, strength);
      span.className = (token >= query && token < edges[y + 1] ? "query " : "") + (token >= key && token < edges[x + 1] ? "key" : "");
    }
  }
  // A row predicts the token after its query.
  if (query + 1 < run.tokens.length) tellToken(run, query + 1, "next ");
  const at = spans[query - from];
  if (at) page.scrollTop = at.offsetTop - page.offsetTop - page.clientHeight / 2;
}

// The run whose processor changes most, and another of the same length, if there is one; the same head on both sides.
const change = run => Math.max(...run.layers.flatMap(l => l.change));
const strongest = DATA.runs.reduce((best, run) => change(run) > change(best) ? run : best);
const others = DATA.runs.filter(run => run !== strongest);
const other = others.find(run => run.tokens.length === strongest.tokens.length) ?? others[0] ?? strongest;
const panels = [], start = strongest.first;
[strongest, other].map(run => DATA.runs.indexOf(run)).sort((a, b) => a - b)
  .forEach((run, index) => panels.push(new Panel(document.getElementById("panels"), index, run)));
// Until the cursor is over a map: the row before the repeated token that the right model predicts better by most, or the
// last row, and the key that it weighs most.
const opened = panels.at(-1);
function surprising(run, before) {
  const gains = run.copied.map((source, t) => source < 0 || !t || !alike(run, before) ? 0 : before.losses[t] - run.losses[t]);
  const t = gains.indexOf(Math.max(...gains));
  return gains[t] > 0 ? t - 1 : run.tokens.length - 1;
}
Promise.all([panels[0].go(...start, "weights"), opened.go(...start, DATA.runs.length === 1 ? "processed" : "weights")]).then(() => {
  if (!opened.values || shown.run) return;
  const t = surprising(opened.run, panels[0].run), y = opened.run.edges.findLastIndex(edge => edge <= t && edge < opened.run.tokens.length);
  const row = [...opened.values.subarray(y * opened.size, (y + 1) * opened.size)].map(value => Number.isNaN(value) ? -Infinity : value);
  for (const panel of panels) panel.tell(row.indexOf(Math.max(...row)), y);
  read(opened, row.indexOf(Math.max(...row)), y);
});
