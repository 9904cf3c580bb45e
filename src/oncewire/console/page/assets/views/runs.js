// Runs and their steps: who caused whom, and what the end had to wait for.

import { h } from "../dom.js";
import { ago, count, duration, plural, when } from "../format.js";
import { badge, empty, facts, heading, link, mono, pending, section, table, to, trouble } from "../parts.js";

const REFRESH_MS = 3_000;

export function runs(app, { query }) {
  const wanted = query.source === "live" || query.source === "lake" ? query.source : "";
  const asked = app.resources.use(`/api/runs${wanted ? `?source=${wanted}` : ""}`, Math.floor(app.live.now / REFRESH_MS));
  if (!asked.data) return [heading("Runs"), pending(asked, "the runs")];
  const { source, has_lake: hasLake, runs: rows } = asked.data;
  const lead = source === "lake" ? "From the lake's lineage, as of its last refresh." : "From the newest messages of the streams and topics.";
  const other = source === "lake" ? link("/runs?source=live", "the newest messages instead") : hasLake && link("/runs?source=lake", "the lake's lineage instead");
  return [
    heading("Runs", [lead, " ", other]),
    asked.error && trouble(asked.error.message),
    rows.length
      ? section({ id: "runs" }, plural(rows.length, "run"), runTable(app, rows, source))
      : empty("No run yet", "A run is all messages with one correlation id (in topics: one run_id). Send one message, and another that it caused:", `oncewire publish evt.default.demo.orders.placed '{"type": "OrderPlaced", "id": "o-1", "payload": {"order": 1}}'`, `oncewire publish evt.default.demo.orders.paid '{"type": "OrderPaid", "correlation_id": "o-1", "causation_id": "o-1", "payload": {"order": 1}}'`),
  ];
}

function runTable(app, rows, source) {
  const longest = Math.max(...rows.map((one) => one.duration_ms), 1);
  const columns = [
    { head: "Run", cell: (row) => [link(`${to("runs", row.run)}?${new URLSearchParams({ tenant: row.tenant, source })}`, mono(row.run)), row.tenant && h("span", { class: "under" }, row.tenant)] },
    { head: "Steps", kind: "n", cell: (row) => [count(row.steps), row.is_cut && "+"] },
    { head: "Deep", kind: "n", title: "the longest chain of causes", cell: (row) => count(row.depth + 1) },
    { head: "Took", kind: "n", cell: (row) => duration(row.duration_ms) },
    { head: "", kind: "wide", cell: (row) => h("span", { class: "length", "aria-hidden": "true" }, h("span", { style: { width: `${((row.duration_ms / longest) * 100).toFixed(1)}%` } })) },
    { head: "Retries", kind: "n", cell: (row) => (row.retries ? badge("warn", count(row.retries)) : "0") },
    { head: "Began", cell: (row) => h("span", { title: when(row.started_ms) }, ago(row.started_ms, app.live.now)) },
  ];
  return table("Runs", columns, rows, (row) => `${row.tenant} ${row.run}`);
}

// ---- one run

export function run(app, { id, query }) {
  const parameters = new URLSearchParams(Object.fromEntries(["tenant", "source"].filter((name) => query[name]).map((name) => [name, query[name]])));
  const asked = app.resources.use(`${to("api", "runs", id)}?${parameters}`, Math.floor(app.live.now / REFRESH_MS));
  const crumbs = h("nav", { class: "crumbs", "aria-label": "Above" }, link("/runs", "Runs"));
  if (asked.error?.status === 404 && !asked.data) return [crumbs, heading("No such run", id), empty("It is not among the newest messages", "Older runs are in the lake, once the pipeline has run.", "oncewire pipeline run --once")];
  if (!asked.data) return [crumbs, heading(id), pending(asked, "the run")];
  const { run: row, steps, source } = asked.data;
  return [
    crumbs,
    heading(row.run, source === "lake" ? "from the lake's lineage" : "from the newest messages"),
    section({ id: "facts" }, "As a whole", facts([["tenant", row.tenant], ["steps", `${count(row.steps)}${row.is_cut ? " and more" : ""}`], ["began", when(row.started_ms)], ["took", duration(row.duration_ms)], ["critical path", `${duration(row.critical_ms)} of it`], ["retries", row.retries ? count(row.retries) : ""]])),
    section({ id: "timeline", aside: h("span", { class: "quiet" }, h("span", { class: "swatch critical" }), " what the end waited for") }, "Timeline", steps.length ? timeline(row, steps) : empty("Its steps are not in the lake yet", "Gold writes runs before their steps: look again when the pipeline has gone on.")),
  ];
}

/** Each step below the one that caused it; its bar spans from then until it was there. */
function timeline(row, steps) {
  const whole = Math.max(row.duration_ms, 0.001);
  const at = (ms) => ((ms - row.started_ms) / whole) * 100;
  const ticks = [0, 0.25, 0.5, 0.75, 1];
  return h(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": "Timeline" },
    h(
      "table",
      { class: "timeline" },
      h("thead", null, h("tr", null, h("th", { scope: "col" }, "Step"), h("th", { scope: "col", class: "axis" }, h("span", { class: "ticks" }, ticks.map((one) => h("span", { style: { left: `${one * 100}%` } }, duration(one * whole))))), h("th", { scope: "col", class: "n" }, "After"))),
      h("tbody", null, ordered(steps).map((step) => stepRow(step, at))),
    ),
  );
}

function stepRow(step, at) {
  const end = Math.min(100, Math.max(0, at(step.at_ms)));
  const begin = Math.min(end, Math.max(0, at(step.at_ms - step.wait_ms)));
  const style = { left: `${Math.min(begin, 99.2).toFixed(2)}%`, width: `${Math.max(0.8, end - begin).toFixed(2)}%` };
  return h(
    "tr",
    { key: `${step.stream} ${step.sequence} ${step.step}`, class: step.is_critical ? "critical" : "" },
    h("th", { scope: "row" }, h("span", { class: "indent", style: { "padding-left": `${Math.min(step.depth, 12) * 1.1}rem` } }, step.depth > 0 && h("span", { class: "branch", "aria-hidden": "true" }, "└"), h("span", null, h("span", { class: "name" }, step.type || step.step), step.retries > 0 && badge("warn", `${step.retries} retries`), h("span", { class: "under mono" }, step.subject.startsWith("owb.") ? step.step : step.subject)))),
    h("td", { class: "axis" }, h("span", { class: "track" }, h("span", { class: "span", style, title: `${step.step}, ${step.stream} ${step.sequence}` }))),
    h("td", { class: "n" }, step.depth ? duration(step.wait_ms) : "begins"),
  );
}

/** Causes before what they caused, in the order of time. */
function ordered(steps) {
  const known = new Set(steps.map((one) => one.step));
  const children = new Map();
  for (const one of [...steps].sort((a, b) => a.at_ms - b.at_ms)) {
    const parent = known.has(one.parent) && one.parent !== one.step ? one.parent : "";
    children.set(parent, [...(children.get(parent) ?? []), one]);
  }
  const found = [];
  const seen = new Set();
  const walk = (name) => {
    const next = children.get(name) ?? [];
    children.delete(name);
    for (const one of next) {
      if (seen.has(one)) continue;
      seen.add(one);
      found.push(one);
      walk(one.step);
    }
  };
  walk("");
  return [...found, ...steps.filter((one) => !seen.has(one))];
}
