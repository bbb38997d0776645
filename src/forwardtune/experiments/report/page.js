const read = id => JSON.parse(document.getElementById(id).textContent);
document.getElementById("json").closest("details").addEventListener("toggle", () => {
  document.getElementById("json").textContent = JSON.stringify(read("results"), null, 1);
}, { once: true });

// Where a value is in the picture.
const place = (axis, value) => {
  const [v, low, high] = [value, axis.low, axis.high].map(axis.log ? Math.log : Number);
  return axis.from + (axis.to - axis.from) * (v - low) / (high - low);
};
const element = (name, text, color) => {
  const made = document.createElement(name);
  made.textContent = text;
  if (color) made.style.color = color;
  return made;
};
const tip = document.body.appendChild(element("div", ""));
tip.className = "tip";
tip.hidden = true;

// Under the pointer: the values nearest to it, one for each series; the series that is nearest stands out.
const show = (svg, chart, event) => {
  const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
  const points = chart.series.flatMap((series, number) => series.y.flatMap((y, i) => {
    if (y === null) return [];
    const [dx, dy] = [place(chart.x, series.x[i]) - at.x, place(chart.y, y) - at.y];
    return [{ series, number, i, y, dx: Math.abs(dx), dy: Math.abs(dy) }];
  }));
  const closest = (among, by) => among.reduce((a, b) => (b[by] < a[by] ? b : a));
  const inside = ["x", "y"].every(name => (at[name] - chart[name].from) * (at[name] - chart[name].to) <= 0);
  if (!inside || !points.length) return hide(svg);
  const first = closest(points, "dx");
  const shown = chart.series.map((_, number) => points.filter(point => point.number === number && point.dx < first.dx + 9));
  const rows = shown.filter(own => own.length).map(own => closest(own, "dx"));
  const near = closest(rows, "dy");
  tip.replaceChildren(element("b", `${chart.label}: ${first.series.x[first.i].toLocaleString("en")}`), ...rows.map(row => {
    const note = row.series.notes ? ` (${row.series.notes[row.i]})` : "";
    return element(row === near ? "strong" : "span", `${row.series.name}: ${Number(row.y.toPrecision(4))}${note}`, row.series.color);
  }));
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const right = document.documentElement.clientWidth;
  tip.style.left = `${Math.max(0, event.clientX + 16 + width < right ? event.clientX + 16 : event.clientX - 16 - width)}px`;
  tip.style.top = `${Math.max(0, event.clientY - height - 12)}px`;
  for (const part of svg.querySelectorAll("[data-series]")) {
    part.classList.toggle("faint", Number(part.dataset.series) !== near.number);
  }
};
const hide = svg => {
  tip.hidden = true;
  for (const part of svg.querySelectorAll(".faint")) part.classList.remove("faint");
};
for (const [id, chart] of Object.entries(read("figures"))) {
  const svg = document.getElementById(id);
  for (const name of ["pointermove", "pointerdown"]) svg.addEventListener(name, event => show(svg, chart, event));
  svg.addEventListener("pointerleave", () => hide(svg));
}
