"use strict";
const shown = JSON.parse(document.getElementById("curves").textContent);
const plot = document.getElementById("plot");
const choice = { view: shown.views[0], quantity: "ppl" };

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// plotly draws tags and formulas within text.
const literal = text => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll("$", "&#36;");

function traces() {
  return shown.curves[choice.view].filter(curve => curve.lengths.length).map(curve => {
    const bars = curve[choice.quantity];
    return {
      name: literal(curve.method), x: curve.lengths, y: bars.map(bar => bar[0]), mode: "lines+markers",
      error_y: {
        type: "data", symmetric: false, array: bars.map(bar => bar[1]), arrayminus: bars.map(bar => bar[2]),
        thickness: 1.2, width: 4,
      },
      line: { color: curve.colour, width: curve.width, dash: curve.dashed ? "dash" : "solid" },
      marker: { symbol: curve.symbol, size: 8 },
      customdata: curve.hover[choice.quantity],
      hovertemplate: "<b>%{fullData.name}</b> at %{x}<br>%{customdata}<extra></extra>",
    };
  });
}

function layout() {
  const quantity = shown.quantities[choice.quantity];
  const narrow = plot.clientWidth < 560;
  const axis = { gridcolor: colour("grid"), linecolor: colour("line"), zeroline: false, automargin: true };
  return {
    width: plot.clientWidth, height: plot.clientHeight,
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "closest", dragmode: narrow ? false : "zoom",
    font: { family: getComputedStyle(document.body).fontFamily, size: narrow ? 11 : 13, color: colour("ink") },
    margin: { l: narrow ? 44 : 60, r: narrow ? 8 : 16, t: narrow ? 12 : 34, b: 50 },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("faint"), activecolor: colour("accent") },
    xaxis: {
      ...axis, type: "log", dtick: null, tickmode: "array", tickvals: shown.lengths, ticktext: shown.ticks,
      title: { text: narrow ? "length" : "evaluation length, and as a multiple of the training length", standoff: 8, font: { size: narrow ? 11 : 13 } },
    },
    yaxis: {
      ...axis, type: quantity.logarithmic ? "log" : "linear",
      ...(quantity.logarithmic ? { tickmode: "array", tickvals: quantity.ticks, ticktext: quantity.ticks.map(String) } : {}),
      title: { text: quantity.label, standoff: 6, font: { size: narrow ? 11 : 13 } }, zeroline: !quantity.logarithmic, zerolinecolor: colour("line"),
    },
    legend: narrow ? { orientation: "h", y: -0.28, x: 0 } : { x: 1.01, y: 1 },
    hoverlabel: { bgcolor: colour("raised"), bordercolor: colour("line"), font: { color: colour("ink") }, align: "left" },
    shapes: [{
      type: "line", x0: shown.train_length, x1: shown.train_length, y0: 0, y1: 1, yref: "paper",
      line: { color: colour("faint"), width: 1, dash: "dot" }, layer: "below",
    }],
    annotations: [{
      x: Math.log10(shown.train_length), y: 1, yref: "paper", text: "trained at this length", showarrow: false,
      xanchor: "left", yanchor: "top", xshift: 5, font: { size: 11, color: colour("faint") },
    }],
  };
}

function draw() {
  if (!shown.views.length) return;
  const options = {
    displaylogo: false,
    // Named one by one, because the usual set has a button that sends the data to a server.
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
    displayModeBar: plot.clientWidth < 560 ? false : "hover",
    toImageButtonOptions: { format: "svg", filename: `dape-${choice.quantity}-${choice.view}` },
  };
  // Not `react`: going from a linear axis back to a logarithmic one, it never returns.
  Plotly.newPlot(plot, traces(), layout(), options);
  for (const section of document.querySelectorAll("[data-view]")) section.hidden = section.dataset.view !== choice.view;
}

for (const button of document.querySelectorAll(".choice button")) {
  button.addEventListener("click", () => {
    choice[button.dataset.axis] = button.dataset.value;
    for (const other of button.parentElement.children) other.setAttribute("aria-pressed", String(other === button));
    draw();
  });
}

function sortBy(header) {
  const body = header.closest("table").tBodies[0];
  const column = header.cellIndex;
  const upward = header.getAttribute("aria-sort") !== "ascending";
  for (const other of header.parentElement.children) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", upward ? "ascending" : "descending");
  const key = row => row.cells[Math.min(column, row.cells.length - 1)].dataset.value;
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

function download(id, name, type) {
  const link = document.createElement("a"), source = document.getElementById(id);
  link.href = URL.createObjectURL(new Blob([(source.content ?? source).textContent], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

document.getElementById("save-json").addEventListener("click", () => download("results", "results.json", "application/json"));
document.getElementById("save-latex").addEventListener("click", () => download("latex", "table.tex", "text/plain"));
document.getElementById("copy").addEventListener("click", async event => {
  await navigator.clipboard.writeText(document.getElementById("command").textContent);
  event.target.textContent = "copied";
});

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
let drawnWidth = 0;
new ResizeObserver(() => {
  // Narrow and wide pages have different layouts, so a new width is more than a new scale.
  if (plot.clientWidth !== drawnWidth) { drawnWidth = plot.clientWidth; draw(); }
}).observe(plot);
draw();
