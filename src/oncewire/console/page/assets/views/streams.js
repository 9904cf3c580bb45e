// Streams and consumers: what is declared against what is there, and how far each is.

import { h } from "../dom.js";
import { ago, bytes, count, perSecond, plural, when } from "../format.js";
import { badge, command, empty, facts, heading, link, meter, mono, pending, section, table, to, trouble } from "../parts.js";
import { spark } from "../plots.js";
import { KINDS, isIdle } from "../words.js";

const GROUPS = [
  { kind: "stream", name: "Streams" },
  { kind: "queue", name: "Work queues" },
  { kind: "topic", name: "Behind topics of the broker" },
  { kind: "bucket", name: "Buckets" },
];

export function streams(app) {
  const rows = app.live.sections.streams;
  if (rows === undefined) return [heading("Streams"), h("p", { class: "quiet wait" }, "Looking …")];
  const drifted = rows.filter((one) => one.drift || one.consumers.some((each) => each.drift));
  const lead = `${plural(rows.length, "stream")}, ${plural(rows.reduce((sum, one) => sum + one.consumers.length, 0), "consumer")}; ${drifted.length ? `${drifted.length} not as declared` : "all as declared"}`;
  return [
    heading("Streams", lead),
    drifted.length > 0 && drift(drifted),
    GROUPS.map(({ kind, name }) => {
      const part = rows.filter((one) => one.kind === kind);
      return part.length > 0 && section({ id: kind, aside: h("span", { class: "quiet" }, count(part.length)) }, name, streamTable(app, part, name));
    }),
    rows.length === 0 && empty("No stream is declared", "The catalogs that ship with Oncewire declare some.", "oncewire topology plan", "oncewire topology apply"),
  ];
}

function drift(rows) {
  const items = rows.flatMap((one) => [
    ...(one.drift ? [{ name: one.name, href: to("streams", one.name), text: one.drift }] : []),
    ...one.consumers.filter((each) => each.drift).map((each) => ({ name: `${one.name} / ${each.name}`, href: to("streams", one.name), text: each.drift })),
  ]);
  return section(
    { id: "drift", tone: "attention" },
    "Not as declared",
    h("ul", { class: "notices" }, items.map((one) => h("li", { key: one.name }, badge("warn", "drift"), h("div", null, h("strong", null, link(one.href, one.name)), h("span", { class: "quiet" }, one.text))))),
    h("div", { class: "commands" }, command("oncewire topology plan"), command("oncewire topology apply")),
  );
}

function state(row) {
  if (!row.is_there) return badge("bad", "missing");
  if (row.drift || row.consumers.some((one) => one.drift)) return badge("warn", "drift", row.drift);
  return row.is_declared ? badge("good", "as declared") : badge("off", row.kind === "topic" ? "the broker's" : "not declared");
}

function streamTable(app, rows, label) {
  const columns = [
    { head: "Name", cell: (row) => [link(to("streams", row.name), mono(row.name)), h("span", { class: "under" }, row.description || row.subjects.slice(0, 2).join(", "))] },
    { head: "State", cell: state },
    { head: "Rate", kind: "n", cell: (row) => perSecond(row.rate) },
    { head: "Last minute", kind: "trend", cell: (row) => spark(app.live.points.map((one) => one.streams[row.name] ?? 0), { label: row.name, height: 22, tone: "one" }) },
    { head: "Messages", kind: "n", cell: (row) => count(row.messages) },
    { head: "Size", kind: "n", cell: (row) => [bytes(row.bytes), row.bytes_max > 0 && meter(row.bytes / row.bytes_max, `${bytes(row.bytes)} of ${bytes(row.bytes_max)}`, row.bytes >= 0.8 * row.bytes_max ? "warn" : "")] },
    { head: "First to last", kind: "n", cell: (row) => (row.last ? `${count(row.first)} … ${count(row.last)}` : "–") },
    { head: "Consumers", kind: "n", cell: (row) => (row.consumers.length ? consumerSum(row) : "–") },
  ];
  return table(label, columns, rows, (row) => row.name);
}

function consumerSum(row) {
  const lag = row.consumers.reduce((sum, one) => sum + one.pending, 0);
  return [`${row.consumers.length}`, lag > 0 && h("span", { class: "under" }, `${count(lag)} wait`)];
}

// ---- one stream

export function stream(app, { id }) {
  const asked = app.resources.use(to("api", "streams", id), Math.floor(app.live.now / 3000));
  const row = app.live.sections.streams?.find((one) => one.name === id) ?? asked.data?.stream;
  const crumbs = h("nav", { class: "crumbs", "aria-label": "Above" }, link("/streams", "Streams"));
  if (asked.error?.status === 404) return [crumbs, heading("No such stream", id), empty("It is neither declared nor there", "", "oncewire topology plan")];
  if (!row) return [crumbs, heading(id), pending(asked, "the stream")];
  return [
    crumbs,
    heading(row.name, row.description || "not declared", state(row)),
    asked.error && trouble(asked.error.message),
    section(
      { id: "facts" },
      "As it stands",
      facts([
        ["kind", KINDS[row.kind]],
        ["subjects", row.subjects.length ? h("span", { class: "mono" }, row.subjects.join(", ")) : ""],
        ["messages", count(row.messages)],
        ["size", row.bytes_max > 0 ? `${bytes(row.bytes)} of ${bytes(row.bytes_max)}` : bytes(row.bytes)],
        ["sequences", row.last ? `${count(row.first)} to ${count(row.last)}` : "none yet"],
        ["last message", row.last_at ? `${when(Date.parse(row.last_at))}, ${ago(Date.parse(row.last_at), app.live.now)}` : "never"],
        ["copies", row.replicas],
        ["rate", perSecond(row.rate)],
      ]),
      spark(app.live.points.map((one) => one.streams[row.name] ?? 0), { label: "Messages per second, last three minutes", tone: "one", points: 180, height: 60 }),
    ),
    (asked.data?.steps ?? []).length > 0 && differences(asked.data.steps),
    consumers(row),
    row.kind !== "bucket" && newest(app, asked, row),
  ];
}

function differences(steps) {
  return section(
    { id: "differences", tone: "attention" },
    "Not as declared",
    steps.map((step) =>
      h(
        "div",
        { class: "step", key: step.item },
        h("h3", null, mono(step.item)),
        step.act === "create" ? h("p", null, "It is missing.") : table(`Differences of ${step.item}`, [
          { head: "Key", cell: (one) => mono(one.key) },
          { head: "Found", cell: (one) => h("del", null, one.found) },
          { head: "Declared", cell: (one) => h("ins", null, one.declared) },
          { head: "Costs", cell: (one) => one.cost || "nothing" },
        ], step.changes, (one) => one.key),
        step.cost && h("p", { class: "warn-text" }, step.cost),
        h("div", { class: "commands" }, command(step.command)),
      ),
    ),
  );
}

function consumers(row) {
  const columns = [
    { head: "Consumer", cell: (one) => [h("span", { class: "name" }, mono(one.name)), h("span", { class: "under mono" }, one.filters.join(", ") || "everything")] },
    { head: "State", cell: (one) => (one.drift ? badge("warn", "drift", one.drift) : one.is_declared ? badge("good", "as declared") : badge("off", "not declared")) },
    { head: "Pending", kind: "n", title: "not delivered yet", cell: (one) => count(one.pending) },
    { head: "Unacked", kind: "n", title: "delivered, not acknowledged", cell: (one) => count(one.unacked) },
    { head: "Redelivered", kind: "n", cell: (one) => count(one.redelivered) },
    { head: "Delivered", kind: "n", title: "the last sequence that went out", cell: (one) => count(one.delivered) },
    { head: "Settled to", kind: "n", cell: (one) => count(one.acked) },
    { head: "Rate", kind: "n", cell: (one) => perSecond(one.rate) },
    { head: "Pulls", kind: "n", title: "requests that wait for messages; none: nobody works", cell: (one) => (one.waiting ? count(one.waiting) : isIdle(`${row.name} ${one.name}`, one.pending > 0 && one.unacked === 0) ? badge("warn", "nobody") : "0") },
  ];
  const body = row.consumers.length
    ? table("Consumers", columns, row.consumers, (one) => one.name)
    : empty("No consumer", "An agent makes its own when it starts; services' are declared.", "oncewire agent run examples.biller:agent");
  return section({ id: "consumers" }, "Consumers", body);
}

function newest(app, asked, row) {
  const columns = [
    { head: "Sequence", kind: "n", cell: (one) => count(one.sequence) },
    { head: "Subject", cell: (one) => mono(one.subject) },
    { head: "Id", cell: (one) => h("span", { class: "mono quiet clip" }, one.id || "–") },
    { head: "Size", kind: "n", cell: (one) => bytes(one.bytes) },
    { head: "Came", cell: (one) => ago(Date.parse(one.at), app.live.now) },
  ];
  const rows = asked.data?.newest ?? [];
  let body = table("Newest messages", columns, rows, (one) => one.sequence);
  if (!asked.data) body = pending(asked, "the newest messages");
  else if (!rows.length) {
    const isForAll = row.subjects.includes("evt.>");
    body = isForAll ? empty("It holds no message", "Publish one:", `oncewire publish evt.default.demo.orders.placed '{"type": "OrderPlaced", "payload": {"order": 1}}'`) : empty("It holds no message", "Whoever publishes on its subjects fills it.");
  }
  return section({ id: "newest" }, "Newest messages", body);
}
