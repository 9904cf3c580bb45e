// Small plots as SVG, of our own: a line over the last minutes. What they show is also said in words.

import { h } from "./dom.js";
import { short } from "./format.js";

const WIDTH = 300;

function place(values, height, top, points) {
  const step = WIDTH / Math.max(1, points - 1);
  const from = WIDTH - step * (values.length - 1);
  return values.map((value, at) => [from + at * step, height - 2 - (value / top) * (height - 6)]);
}

const path = (points) => points.map(([x, y], at) => `${at ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

function area(points, height) {
  if (!points.length) return "";
  return `${path(points)}L${WIDTH} ${height}L${points[0][0].toFixed(1)} ${height}Z`;
}

/** A line with its area; `tone` is a class that colours it. */
export function spark(values, { label, tone = "", height = 44, points = 60 }) {
  const shown = values.slice(-points);
  const top = Math.max(...shown, 1e-9);
  const line = place(shown, height, top, points);
  const told = shown.length ? `${label}: now ${short(shown.at(-1))}, at most ${short(top < 1e-6 ? 0 : top)}` : label;
  return h(
    "svg:svg",
    { class: `spark ${tone}`, viewBox: `0 0 ${WIDTH} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": told },
    h("svg:path", { class: "area", d: area(line, height) }),
    h("svg:path", { class: "line", d: path(line), "vector-effect": "non-scaling-stroke" }),
  );
}

/** Several lines with a scale: `series` are {name, tone, values}. */
export function plot(series, { label, points, unit = "" }) {
  const height = 160;
  const most = Math.max(...series.flatMap((one) => one.values.slice(-points)), 0);
  const top = nice(most);
  const lines = series.map((one) => ({ ...one, line: place(one.values.slice(-points), height, top, points) }));
  return h(
    "figure",
    { class: "plot" },
    h(
      "div",
      { class: "canvas" },
      h("span", { class: "y top" }, `${short(top)}${unit}`),
      h("span", { class: "y middle" }, `${short(top / 2)}${unit}`),
      h("span", { class: "y bottom" }, "0"),
      h(
        "svg:svg",
        { viewBox: `0 0 ${WIDTH} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": `${label}: ${said(series, unit)}` },
        [6, 80, 158].map((y) => h("svg:path", { class: "grid", d: `M0 ${y}H${WIDTH}`, "vector-effect": "non-scaling-stroke" })),
        lines.map((one) => h("svg:path", { class: `area ${one.tone}`, d: area(one.line, height) })),
        lines.map((one) => h("svg:path", { class: `line ${one.tone}`, d: path(one.line), "vector-effect": "non-scaling-stroke" })),
      ),
    ),
    h(
      "figcaption",
      null,
      series.map((one) => h("span", { class: `legend ${one.tone}` }, one.name, " ", h("b", null, `${short(one.values.at(-1) ?? 0)}${unit}`))),
      h("span", { class: "span" }, `last ${points < 90 ? "minute" : `${Math.round(points / 60)} minutes`}`),
    ),
  );
}

const said = (series, unit) => series.map((one) => `${one.name} ${short(one.values.at(-1) ?? 0)}${unit}`).join(", ");

/** The next round number. */
function nice(value) {
  if (value <= 0) return 10;
  const size = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((one) => one * size).find((one) => one >= value);
}
