// The broker: topics, their partitions with owners, their groups with lag.

import { h } from "../dom.js";
import { bytes, count, plural, sum, when } from "../format.js";
import { badge, empty, facts, heading, link, mono, pending, section, table, to, trouble } from "../parts.js";
import { isIdle } from "../words.js";

export function topics(app) {
  const told = app.live.sections.topics;
  const backend = app.live.tick?.backends.broker;
  if (backend?.state === "off") return [heading("Topics"), empty("No broker is shown here", `${backend.text}. ${backend.hint}`, "oncewire broker run", "oncewire console run --console-broker-url http://127.0.0.1:8080")];
  if (told === undefined) return [heading("Topics"), backend?.state !== "broken" && h("p", { class: "quiet wait" }, "Looking …")];
  const rows = told.topics.filter((one) => !one.is_brief);
  const brief = told.topics.filter((one) => one.is_brief);
  const lag = lagOf(rows.flatMap((one) => one.groups));
  if (!told.count) return [heading("Topics", `Queues over HTTP, at ${told.url}`), empty("No topic yet", "Make one, put something in, take it out:", `curl -X POST '${told.url}/v1/topics?name=orders'`, `curl -X POST '${told.url}/v1/produce?topic=orders&value=hello'`, `curl -N '${told.url}/v1/consume?topic=orders&group=g1&owner=me'`)];
  return [
    heading("Topics", `${plural(told.count, "topic")} at ${told.url}, ${count(lag)} messages wait`),
    section({ id: "topics" }, "Topics", topicTable(rows)),
    section({ id: "groups" }, "Groups", groupTable(rows)),
    brief.length > 0 && section({ id: "more" }, "More topics", h("p", { class: "quiet" }, "Too many to look into all the time; each has its page."), h("ul", { class: "names" }, brief.map((one) => h("li", { key: one.name }, link(to("topics", one.name), mono(one.name)))))),
  ];
}

const isGraveyard = (row) => row.name.startsWith("dlq.");

function topicTable(rows) {
  const columns = [
    { head: "Topic", cell: (row) => [link(to("topics", row.name), mono(row.name)), isGraveyard(row) && badge("bad", "dead letters")] },
    { head: "Partitions", kind: "n", cell: (row) => count(row.partitions.length) },
    { head: "Groups", kind: "n", cell: (row) => count(row.groups.length) },
    { head: "Messages", kind: "n", cell: (row) => count(row.messages) },
    { head: "Size", kind: "n", cell: (row) => bytes(row.bytes) },
    { head: "Lag", kind: "n", cell: (row) => count(lagOf(row.groups)) },
    { head: "In flight", kind: "n", cell: (row) => count(sum(row.groups, (one) => one.in_flight)) },
    { head: "Owners", cell: (row) => owners(row) },
  ];
  return table("Topics", columns, rows, (row) => row.name);
}

const lagOf = (groups) => sum(groups, (one) => one.lag);

function owners(row) {
  const found = [...new Set(row.partitions.map((one) => one.owner).filter(Boolean))];
  return found.length ? h("span", { class: "mono quiet" }, found.length === 1 ? found[0] : `${found.length} nodes`) : "–";
}

function groupTable(rows) {
  const groups = rows.flatMap((topic) => topic.groups.map((group) => ({ ...group, topic: topic.name })));
  if (!groups.length) return empty("No group has read yet", "A group begins with its first reader.", "curl -N 'localhost:8080/v1/consume?topic=orders&group=g1&owner=me'");
  groups.sort((one, other) => other.lag - one.lag || one.topic.localeCompare(other.topic));
  return table("Groups", [{ head: "Topic", cell: (one) => link(to("topics", one.topic), mono(one.topic)) }, ...groupColumns()], groups, (one) => `${one.topic} ${one.name}`);
}

function groupColumns(topic = "") {
  return [
    { head: "Group", cell: (one) => [h("span", { class: "name" }, one.name), one.is_lapsed && badge("off", "lapsed")] },
    { head: "Lag", kind: "n", cell: (one) => count(one.lag) },
    { head: "In flight", kind: "n", cell: (one) => count(one.in_flight) },
    { head: "Credit", kind: "n", title: "how many its readers may hold in flight together", cell: (one) => count(one.credit) },
    { head: "Retries", kind: "n", title: "waiting for their next attempt", cell: (one) => count(one.retries) },
    { head: "Readers", kind: "n", cell: (one) => (one.consumers ? count(one.consumers) : isIdle(`${one.topic ?? topic} ${one.name}`, one.lag > 0 && one.in_flight === 0) ? badge("warn", "nobody") : "0") },
  ];
}

// ---- one topic

export function topic(app, { id }) {
  const known = app.live.sections.topics?.topics.find((one) => one.name === id && !one.is_brief);
  const asked = known ? { data: known } : app.resources.use(to("api", "topics", id), Math.floor(app.live.now / 3000));
  const crumbs = h("nav", { class: "crumbs", "aria-label": "Above" }, link("/topics", "Topics"));
  if (asked.error?.status === 404) return [crumbs, heading("No such topic", id), empty("The broker does not know it", "", `curl -X POST 'localhost:8080/v1/topics?name=${encodeURIComponent(id)}'`)];
  const row = asked.data;
  if (!row) return [crumbs, heading(id), pending(asked, "the topic")];
  return [
    crumbs,
    heading(row.name, `made ${when(row.created_at_ms)}`),
    asked.error && trouble(asked.error.message),
    section({ id: "facts" }, "As it stands", facts([["messages", count(row.messages)], ["size", bytes(row.bytes)], ["partitions", count(row.partitions.length)], ["groups", count(row.groups.length)]])),
    section({ id: "partitions" }, "Partitions", partitions(row)),
    section({ id: "groups" }, "Groups", row.groups.length ? [table("Groups", groupColumns(row.name), row.groups, (one) => one.name), lags(row)] : empty("No group has read yet", "A group begins with its first reader.", `curl -N 'localhost:8080/v1/consume?topic=${encodeURIComponent(row.name)}&group=g1&owner=me'`)),
  ];
}

function partitions(row) {
  return table(
    "Partitions",
    [
      { head: "Partition", kind: "n", cell: (one) => one.partition },
      { head: "Messages", kind: "n", cell: (one) => count(one.messages) },
      { head: "Size", kind: "n", cell: (one) => bytes(one.bytes) },
      { head: "Offsets", kind: "n", cell: (one) => (one.oldest_offset === null || one.oldest_offset < 0 ? "–" : `${count(one.oldest_offset)} … ${count(one.newest_offset)}`) },
      { head: "Owner", cell: (one) => (one.owner ? mono(one.owner) : "this broker") },
    ],
    row.partitions,
    (one) => one.partition,
  );
}

/** How far each group is in each partition. */
function lags(row) {
  const rows = row.groups.flatMap((group) => group.partitions.map((one) => ({ ...one, group: group.name })));
  return table(
    "Groups by partition",
    [
      { head: "Group", cell: (one) => one.group },
      { head: "Partition", kind: "n", cell: (one) => one.partition },
      { head: "Settled to", kind: "n", cell: (one) => (one.last_acked < 0 ? "–" : count(one.last_acked)) },
      { head: "Lag", kind: "n", cell: (one) => count(one.lag) },
      { head: "In flight", kind: "n", cell: (one) => count(one.in_flight) },
    ],
    rows,
    (one) => `${one.group} ${one.partition}`,
  );
}
