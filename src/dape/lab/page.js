"use strict";
const shown = JSON.parse(document.getElementById("curves").textContent);
const choice = { view: shown.views[0], quantity: "perplexity" };

function add(parent, name, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}

// Some five round numbers in the range.
function ticks(low, high, logarithmic) {
  const step = (high - low) / 5 || 1;
  const size = 10 ** Math.floor(Math.log10(step));
  const even = [1, 2, 5, 10].map(factor => factor * size).find(width => width >= step);
  if (!logarithmic || high / low < 3) {
    const first = Math.ceil(low / even);
    return Array.from({ length: Math.floor(high / even) - first + 1 }, (_, index) => Number(((first + index) * even).toPrecision(6)));
  }
  const found = [];
  const digits = high / low < 40 ? [1, 2, 3, 5, 7] : high / low < 4000 ? [1, 3] : [1];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
    for (const digit of digits) found.push(Number((digit * 10 ** power).toPrecision(6)));
  return found.filter(value => value >= low && value <= high);
}

// series: name, colour, dashed, points [[x, value, low, high]]; x and y: label, logarithmic, ticks [[value, text]].
function draw(place, series, x, y) {
  place.replaceChildren();
  const width = place.clientWidth, height = place.clientHeight, left = 64, right = 14, top = 12, bottom = 56;
  const finite = series.flatMap(one => one.points.flatMap(([, ...values]) => values)).filter(Number.isFinite);
  const places = series.flatMap(one => one.points.map(point => point[0]));
  if (!finite.length || width < 2 * left) return;
  const scale = (axis, low, high, from, to) => {
    const of = axis.logarithmic ? Math.log : value => value;
    const span = of(high) - of(low) || 1;
    return value => from + (to - from) * (of(value) - of(low)) / span;
  };
  let low = Math.min(...finite), high = Math.max(...finite);
  if (y.logarithmic) { low /= 1.02; high *= 1.02; } else { const pad = (high - low) * 0.05 || 0.1; low -= pad; high += pad; }
  const across = scale(x, Math.min(...places), Math.max(...places), left + 10, width - right - 10);
  const up = scale(y, low, high, height - bottom, top);
  const svg = add(place, "svg", { width, height, viewBox: `0 0 ${width} ${height}` });
  for (const value of ticks(low, high, y.logarithmic)) {
    add(svg, "line", { x1: left, x2: width - right, y1: up(value), y2: up(value), class: "grid" });
    add(svg, "text", { x: left - 6, y: up(value) + 4, "text-anchor": "end" }, String(value));
  }
  for (const [value, text] of x.ticks || ticks(Math.min(...places), Math.max(...places), false).map(one => [one, String(one)]))
    text.split("\n").forEach((part, row) =>
      add(svg, "text", { x: across(value), y: height - bottom + 16 + 13 * row, "text-anchor": "middle" }, part));
  add(svg, "text", { x: (left + width) / 2, y: height - 8, "text-anchor": "middle" }, x.label);
  add(svg, "text", { x: 0, y: 0, "text-anchor": "middle", transform: `translate(13 ${height / 2}) rotate(-90)` }, y.label);
  if (x.mark) add(svg, "line", { x1: across(x.mark), x2: across(x.mark), y1: top, y2: height - bottom, class: "mark" });
  for (const one of series) {
    const points = one.points.filter(point => Number.isFinite(point[1]));
    const paint = { stroke: one.colour, fill: "none", "stroke-width": one.dashed ? 1.4 : 2.2, "stroke-dasharray": one.dashed ? "6 4" : "none" };
    add(svg, "polyline", { ...paint, points: points.map(point => `${across(point[0])},${up(point[1])}`).join(" ") });
    if (one.dots === false) continue;
    for (const [at, value, from, to] of points) {
      const known = Number.isFinite(from) && Number.isFinite(to);
      if (known) add(svg, "line", { x1: across(at), x2: across(at), y1: up(from), y2: up(to), stroke: one.colour });
      const dot = add(svg, "circle", { cx: across(at), cy: up(value), r: 4, fill: one.colour });
      const interval = known ? ` [${from.toPrecision(4)}, ${to.toPrecision(4)}]` : "";
      add(dot, "title", {}, `${one.name} at ${at}: ${value.toPrecision(4)}${interval}`);
    }
  }
  const key = document.createElement("div");
  key.className = "key";
  for (const one of series) {
    const entry = document.createElement("span");
    const line = add(entry, "svg", { width: 26, height: 10 });
    add(line, "line", { x1: 0, x2: 26, y1: 5, y2: 5, stroke: one.colour, "stroke-width": 2, "stroke-dasharray": one.dashed ? "6 4" : "none" });
    entry.append(one.name);
    key.append(entry);
  }
  place.append(key);
}

function look(name) {
  const [colour, dashed] = shown.looks[name] || ["#8a8a8a", false];
  return { name, colour, dashed };
}

function update() {
  const place = document.getElementById("plot");
  if (place) {
    const [label, logarithmic] = shown.quantities[choice.quantity];
    const series = shown.curves[choice.view].filter(one => one.x.length).map(one => ({
      ...look(one.name), points: one.x.map((at, index) => [at, ...one.values[choice.quantity][index]]),
    }));
    const marks = shown.lengths.map(length => [length, shown.unit ? `${length}\n${Number((length / shown.unit).toPrecision(4))}×` : `${length}`]);
    draw(place, series, { label: "evaluation length" + (shown.unit ? " (training length dotted)" : ""), logarithmic: true, ticks: marks, mark: shown.unit }, { label, logarithmic });
  }
  for (const section of document.querySelectorAll("section[data-view]")) section.hidden = section.dataset.view !== choice.view;
  const training = document.getElementById("training");
  if (!training) return;
  const series = Object.entries(shown.training).map(([name, steps]) => {
    let last = steps[0][1];
    return { ...look(name), dots: false, points: steps.map(([step, loss]) => [step, last += 0.2 * (loss - last)]) };
  });
  draw(training, series, { label: "step", logarithmic: false }, { label: "training loss, smoothed", logarithmic: false });
}

for (const button of document.querySelectorAll(".choice button")) {
  button.addEventListener("click", () => {
    choice[button.dataset.axis] = button.dataset.value;
    for (const other of button.parentElement.children) other.setAttribute("aria-pressed", String(other === button));
    update();
  });
}

function sortBy(header) {
  const body = header.closest("table").tBodies[0];
  const column = header.cellIndex;
  const upward = header.getAttribute("aria-sort") !== "ascending";
  for (const other of header.parentElement.children) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", upward ? "ascending" : "descending");
  const key = row => row.cells[column].dataset.value;
  const compare = (a, b) => {
    const [x, y] = [key(a), key(b)];
    const numbers = [parseFloat(x), parseFloat(y)];
    // What has no number stays at the end, whichever way the rest is sorted.
    if (column > 0 && numbers.some(Number.isNaN)) return Number.isNaN(numbers[0]) - Number.isNaN(numbers[1]);
    const order = column > 0 ? numbers[0] - numbers[1] : x.localeCompare(y);
    return upward ? order : -order;
  };
  body.append(...[...body.rows].sort(compare));
}

for (const header of document.querySelectorAll("thead th")) {
  header.tabIndex = 0;
  header.addEventListener("click", () => sortBy(header));
  header.addEventListener("keydown", event => { if (event.key === "Enter") sortBy(header); });
}

document.getElementById("save-latex").addEventListener("click", () => {
  const text = JSON.parse(document.getElementById("latex").textContent);
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "application/x-tex" }));
  link.download = "table.tex";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
});

document.getElementById("copy").addEventListener("click", async event => {
  await navigator.clipboard.writeText(document.getElementById("command").textContent);
  event.target.textContent = "copied";
});

let drawnWidth = 0;
new ResizeObserver(() => {
  if (document.body.clientWidth !== drawnWidth) { drawnWidth = document.body.clientWidth; update(); }
}).observe(document.body);
update();
