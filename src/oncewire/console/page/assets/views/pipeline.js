// The lake: how far each stream is in it, what its tables hold, what the last audit said.

import { h } from "../dom.js";
import { ago, bytes, count, duration, plural, when } from "../format.js";
import { badge, command, empty, facts, heading, link, meter, mono, section, table, to } from "../parts.js";

const TONES = { reading: "good", running: "good", waiting: "off", stopped: "bad", retrying: "warn" };

export function pipeline(app) {
  const told = app.live.sections.pipeline;
  const backend = app.live.tick?.backends.lake;
  if (told === undefined) return [heading("Pipeline"), h("p", { class: "quiet wait" }, "Looking …")];
  if (told === null) return [heading("Pipeline", "Spark turns all that flowed through into tables, and proves it."), empty("No lake yet", backend?.text ?? "", "oncewire up --pipeline", "oncewire pipeline run --once")];
  return [
    heading("Pipeline", told.lake, h("a", { class: "button", href: "/report", target: "_blank", rel: "noopener" }, "Open the report")),
    section({ id: "verdict", tone: told.verdict ? (told.verdict.is_good ? "good" : "bad") : "" }, "Last audit", verdict(app, told.verdict)),
    h("div", { class: "pair" }, section({ id: "streams" }, "Streams", streamTable(told)), section({ id: "state" }, "State", state(told))),
    section({ id: "tables" }, "Tables", tables(told)),
  ];
}

function verdict(app, one) {
  if (!one) return empty("Nothing was audited yet", "An audit compares the agents' blocks with what the lake really holds.", "oncewire pipeline audit");
  return [
    h("p", { class: "verdict-line" }, badge(one.is_good ? "good" : "bad", one.is_good ? "good" : plural(one.errors, "finding")), ` ${when(one.at_ms)}, ${ago(one.at_ms, app.live.now)}; took ${duration(one.took_s * 1000)}; ${count(one.cut)} positions of ${plural(one.streams, "stream")}, ${plural(one.chains, "chain")} of blocks${one.pending ? `; ${count(one.pending)} pending` : ""}`),
    h("ul", { class: "checks" }, one.checks.map((each) => h("li", { key: each.promise, class: each.wrong ? "bad" : "good" }, h("span", { class: "sign", "aria-hidden": "true" }, each.wrong ? "✗" : "✓"), h("span", null, each.promise), each.wrong > 0 && badge("bad", plural(each.wrong, "finding"))))),
    one.findings.length > 0 && h("ul", { class: "problems" }, one.findings.map((each) => h("li", { key: each }, each))),
  ];
}

function streamTable(told) {
  const rows = told.streams.filter((one) => one.reached || one.last || one.error);
  if (!rows.length) return empty("No stream has a message yet", "");
  const columns = [
    { head: "Stream", cell: (row) => [link(to("streams", row.name), mono(row.name)), row.error && h("span", { class: "under bad" }, row.error)] },
    { head: "State", cell: (row) => badge(TONES[row.state] ?? "off", row.state) },
    { head: "In the lake", kind: "n", cell: (row) => count(row.reached) },
    { head: "Lag", kind: "n", cell: (row) => (row.last === null ? "?" : count(Math.max(0, row.last - row.reached))) },
    { head: "", cell: (row) => row.last > 0 && meter(row.reached / row.last, `${count(row.reached)} of ${count(row.last)}`) },
  ];
  return table("Streams in the lake", columns, rows, (row) => row.name);
}

function state(told) {
  const behind = told.bronze_version - told.silver_has;
  return [
    facts([
      ["held by", told.held_by],
      ["bronze", `version ${count(told.bronze_version)}`],
      ["silver", behind > 0 ? `${plural(behind, "version")} behind bronze` : "has all of bronze"],
      ["topics", topics(told.topics)],
      ["left out", told.left_out.length ? told.left_out.join(", ") : ""],
      ["latency p50", told.latency?.p50_ms != null ? duration(told.latency.p50_ms) : ""],
      ["latency p95", told.latency?.p95_ms != null ? duration(told.latency.p95_ms) : ""],
      ["latency p99", told.latency?.p99_ms != null ? duration(told.latency.p99_ms) : ""],
    ]),
    h("div", { class: "commands" }, command("oncewire pipeline status"), command("oncewire pipeline audit")),
  ];
}

function topics(told) {
  if (!told.read && !told.listed) return "";
  const stopped = Object.keys(told.stopped).length;
  return `${count(told.read)} read, ${plural(told.messages, "message")}${told.behind ? `; ${count(told.behind)} behind` : ""}${stopped ? `; ${count(stopped)} stopped` : ""}`;
}

function tables(told) {
  const columns = [
    { head: "Table", cell: (row) => mono(row.name) },
    { head: "Rows", kind: "n", cell: (row) => count(row.rows) },
    { head: "Files", kind: "n", cell: (row) => count(row.files) },
    { head: "Size", kind: "n", cell: (row) => bytes(row.size_bytes) },
    { head: "Version", kind: "n", cell: (row) => count(row.version) },
  ];
  return told.tables.length ? table("Tables", columns, told.tables, (row) => row.name) : empty("No table yet", "", "oncewire pipeline run --once");
}
