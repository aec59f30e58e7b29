"use strict";
// The pointer: shows the numbers of a chart at the nearest x. Without it the page is whole; only this is missing.
const pointer = document.getElementById("pointer");

function cell(row, text) {
  row.appendChild(document.createElement("td")).textContent = text;
}

function show(svg, data, event) {
  const box = svg.getBoundingClientRect();
  const at = (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
  let nearest = 0;
  data.at.forEach((x, index) => { if (Math.abs(x - at) < Math.abs(data.at[nearest] - at)) nearest = index; });
  const cursor = svg.querySelector(".cursor");
  cursor.setAttribute("x1", data.at[nearest]);
  cursor.setAttribute("x2", data.at[nearest]);
  cursor.style.visibility = "visible";
  const table = document.createElement("table");
  for (const series of data.series) {
    if (series.values[nearest] === "-") continue;
    const row = table.insertRow();
    cell(row, series.name);
    cell(row, series.values[nearest] + (data.unit ? " " + data.unit : ""));
    row.cells[0].className = "key " + series.colour;
  }
  pointer.replaceChildren(document.createTextNode(data.x_name + " " + data.x[nearest]), table);
  pointer.style.display = "block";
  const left = event.clientX + 14 + pointer.offsetWidth > innerWidth ? event.clientX - 14 - pointer.offsetWidth : event.clientX + 14;
  pointer.style.left = Math.max(4, left) + "px";
  pointer.style.top = Math.min(event.clientY + 12, innerHeight - pointer.offsetHeight - 4) + "px";
}

for (const svg of document.querySelectorAll("svg.chart")) {
  const data = JSON.parse(svg.dataset.points);
  if (!data.at.length) continue;
  svg.addEventListener("pointermove", (event) => show(svg, data, event));
  svg.addEventListener("pointerleave", () => {
    svg.querySelector(".cursor").style.visibility = "hidden";
    pointer.style.display = "none";
  });
}
