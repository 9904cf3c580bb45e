// All at a glance: is it well, what flows, what waits, who is behind.

import { h } from "../dom.js";
import { bytes, count, duration, perSecond, plural, short, when } from "../format.js";
import { badge, command, heading, link, mono, section, table, to } from "../parts.js";
import { plot, spark } from "../plots.js";
import { PROMISES, isIdle } from "../words.js";
import { losses } from "./losses.js";

export function overview(app) {
  const { points, sections } = app.live;
  const now = points.at(-1);
  return [
    heading("Overview", "What flows through, live."),
    verdict(app),
    h("div", { class: "tiles" }, tiles(app, now, points)),
    losses(app),
    h(
      "div",
      { class: "pair" },
      section({ id: "flow" }, "Flow", plot(flow(points), { label: "Messages per second", points: Math.max(60, points.length), unit: "/s" })),
      section({ id: "promise" }, "Promises", promises(app)),
    ),
    h("div", { class: "pair" }, busiest(app), behind(sections.streams ?? [], sections.topics?.topics ?? [])),
    latency(app, now),
  ];
}

function flow(points) {
  return [
    { name: "published", tone: "one", values: points.map((one) => one.published) },
    { name: "delivered to consumers", tone: "two", values: points.map((one) => one.delivered) },
  ];
}

function verdict(app) {
  const notices = app.live.sections.overview?.notices;
  if (notices === undefined) return h("section", { class: "verdict waiting" }, h("p", { class: "verdict-title" }, "Looking …"));
  const broken = notices.filter((one) => one.level === "broken").length;
  const state = broken ? "bad" : notices.length ? "warn" : "good";
  const title = notices.length ? `${plural(notices.length, "thing")} to look at` : "All is well";
  const text = notices.length
    ? "Each with where to look and what to type."
    : "Streams and consumers are as declared, nothing was lost, no dead letter waits.";
  return h(
    "section",
    { class: `verdict ${state}`, id: "verdict", "aria-label": "Verdict" },
    h("p", { class: "verdict-title" }, h("span", { class: "sign", "aria-hidden": "true" }, state === "good" ? "✓" : "!"), title),
    h("p", { class: "verdict-text" }, text),
    notices.length > 0 && h("ul", { class: "notices" }, notices.slice(0, 8).map(notice), notices.length > 8 && h("li", { class: "quiet" }, `and ${count(notices.length - 8)} more`)),
  );
}

function notice(one) {
  return h(
    "li",
    { key: one.title, class: one.level },
    badge(one.level === "broken" ? "bad" : "warn", one.level),
    h("div", null, h("strong", null, one.link ? link(one.link, one.title) : one.title), h("span", { class: "quiet" }, one.text)),
    one.command && command(one.command),
  );
}

function tiles(app, now, points) {
  const values = (name) => points.map((one) => one[name]);
  const slowest = (app.live.sections.latency ?? []).filter((one) => one.p95_ms !== null).sort((one, other) => other.p95_ms - one.p95_ms)[0];
  const lag = now ? short(now.lag) : "–";
  return [
    tile("Published", now ? short(now.published) : "–", "messages/s", values("published"), "one", "/streams"),
    tile("Delivered", now ? short(now.delivered) : "–", "to consumers/s", values("delivered"), "two", "/streams"),
    tile("Lag", lag, "wait for a consumer", values("lag"), now?.lag > 1000 ? "warn" : "three", "/streams"),
    tile("In flight", now ? short(now.in_flight) : "–", "not settled yet", values("in_flight"), "three", "/topics"),
    tile("Dead letters", now ? short(now.letters) : "–", now?.letters ? "wait for a decision" : "none: good", values("letters"), now?.letters ? "bad" : "good", "/letters"),
    slowest
      ? tile("Latency", duration(slowest.p95_ms), `p95 ${slowest.name}`, values("latency_ms"), "two", "/pipeline")
      : tile("Latency", now ? duration(now.answer_ms) : "–", "JetStream's answer", values("answer_ms"), "two", "/pipeline"),
  ];
}

function tile(name, value, text, values, tone, href) {
  return h(
    "a",
    { class: `tile ${tone}`, href, key: name },
    h("span", { class: "tile-name" }, name),
    h("span", { class: "tile-value" }, value),
    h("span", { class: "tile-text" }, text),
    spark(values, { label: `${name} over the last minute`, tone }),
  );
}

/** What the parts beside the console have counted over the last minute, and what gold knows of the newest minutes. */
function ways(app) {
  const gold = app.live.sections.pipeline?.latency;
  const told = app.live.sections.latency ?? [];
  return gold ? [...told, { name: "event to stream, in the lake", p50_ms: null, p95_ms: null, p99_ms: null, ...gold, count: null }] : told;
}

function latency(app, now) {
  const rows = ways(app);
  if (rows.length === 0) return null;
  const time = (value) => (value == null ? "–" : duration(value));
  const columns = [
    { head: "From and to", cell: (row) => row.name },
    { head: "p50", kind: "n", cell: (row) => time(row.p50_ms) },
    { head: "p95", kind: "n", cell: (row) => time(row.p95_ms) },
    { head: "p99", kind: "n", cell: (row) => time(row.p99_ms) },
    { head: "Counted", kind: "n", cell: (row) => (row.count === null ? `until ${when(row.at_ms)}` : row.count ? count(row.count) : "–") },
  ];
  const aside = now && h("span", { class: "quiet" }, `last minute · JetStream answers in ${duration(now.answer_ms)}`);
  return section({ id: "latency", aside }, "Latency", table("Latency", columns, rows, (row) => row.name));
}

function promises(app) {
  const told = app.live.sections.overview;
  const pipeline = app.live.sections.pipeline;
  if (!told) return h("p", { class: "quiet wait" }, "Looking …");
  const open = told.losses.filter((one) => one.is_open);
  const drift = (app.live.sections.streams ?? []).reduce((sum, one) => sum + Boolean(one.drift) + one.consumers.filter((each) => each.drift).length, 0);
  const verdict = pipeline?.verdict;
  const kind = PROMISES[told.durability.promise];
  return h(
    "ul",
    { class: "promises" },
    promise(kind.tone, "Durability", kind.name, told.durability.text),
    promise(open.length ? "bad" : "good", "Losses", open.length ? plural(open.length, "loss", "losses") : "none", open.length ? open[0].sentence : "no reader found anything missing"),
    promise(drift ? "warn" : "good", "Topology", drift ? `${drift} drifted` : "as declared", drift ? "see Streams for what differs" : "every declared stream and consumer is there"),
    promise(
      verdict ? (verdict.is_good ? "good" : "bad") : "off",
      "Last audit",
      verdict ? (verdict.is_good ? "good" : plural(verdict.errors, "finding")) : "none yet",
      verdict ? `at ${when(verdict.at_ms)}, ${count(verdict.cut)} positions proven` : "the lake proves what happened: oncewire pipeline audit",
    ),
  );
}

function promise(tone, name, word, text) {
  return h("li", { key: name, class: tone }, h("span", { class: "promise-name" }, name), badge(tone, word), h("span", { class: "quiet" }, text));
}

function busiest(app) {
  const rows = (app.live.sections.streams ?? []).filter((one) => one.messages > 0 && (one.kind === "topic" || !one.is_internal));
  rows.sort((one, other) => other.rate - one.rate || other.messages - one.messages);
  const columns = [
    { head: "Stream", cell: (row) => (row.kind === "topic" ? mono(row.name) : link(to("streams", row.name), mono(row.name))) },
    { head: "Now", kind: "n", cell: (row) => perSecond(row.rate) },
    { head: "Last minute", kind: "trend", cell: (row) => spark(app.live.points.map((one) => one.streams[row.name] ?? 0), { label: row.name, height: 22, tone: "one" }) },
    { head: "Holds", kind: "n", cell: (row) => count(row.messages) },
    { head: "Size", kind: "n", cell: (row) => bytes(row.bytes) },
  ];
  const body = rows.length
    ? table("Busiest streams", columns, rows.slice(0, 6), (row) => row.name)
    : h("div", { class: "empty" }, h("p", { class: "empty-title" }, "No stream holds a message yet"), command(`oncewire publish evt.default.demo.orders.placed '{"type": "OrderPlaced", "payload": {"order": 1}}'`));
  return section({ id: "busiest", aside: link("/streams", "all streams") }, "Busiest streams", body);
}

/** Consumers of streams and groups of topics, in one list. */
function behind(streams, topics) {
  const rows = [
    ...streams.filter((one) => one.name !== "DLQ").flatMap((one) => one.consumers.filter((each) => !each.is_unread).map((each) => ({ name: each.name, of: one.name, href: to("streams", one.name), lag: each.pending, flight: each.unacked, isIdle: each.waiting + each.unacked === 0 }))),
    ...topics.flatMap((one) => (one.groups ?? []).map((each) => ({ name: each.name, of: one.name, href: to("topics", one.name), lag: each.lag, flight: each.in_flight, isIdle: each.consumers + each.in_flight === 0 }))),
  ].filter((one) => one.lag + one.flight > 0);
  rows.sort((one, other) => other.lag - one.lag || other.flight - one.flight);
  const columns = [
    { head: "Who", cell: (row) => [h("span", { class: "name" }, row.name), isIdle(`${row.of} ${row.name}`, row.isIdle && row.lag > 0) && badge("warn", "nobody reads"), h("span", { class: "under" }, "of ", link(row.href, mono(row.of)))] },
    { head: "Lag", kind: "n", cell: (row) => count(row.lag) },
    { head: "In flight", kind: "n", cell: (row) => count(row.flight) },
  ];
  const body = rows.length
    ? table("Consumers and groups that are behind", columns, rows.slice(0, 6), (row) => `${row.of} ${row.name}`)
    : h("div", { class: "empty" }, h("p", { class: "empty-title" }, "Nobody is behind"), h("p", null, "Every consumer and every group has settled what it was given."));
  return section({ id: "behind" }, "Behind", body);
}
