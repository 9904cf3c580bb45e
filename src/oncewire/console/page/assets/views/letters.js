// Dead letters: grouped by cause, one by one, and what a person decides about them.

import { post } from "../api.js";
import { buttons, refuse, showDialog } from "../dialog.js";
import { h } from "../dom.js";
import { ago, bytes, count, plural, when } from "../format.js";
import { badge, empty, facts, heading, link, mono, pending, section, table, to, trouble } from "../parts.js";

const FILTERS = ["cause", "consumer", "subject", "stream"];

export function letters(app, { query }) {
  const told = app.live.sections.letters;
  const chosen = Object.fromEntries(FILTERS.filter((name) => query[name]).map((name) => [name, query[name]]));
  const isChosen = Object.keys(chosen).length > 0;
  if (told === undefined) return [heading("Dead letters"), h("p", { class: "quiet wait" }, "Looking …")];
  if (told.total === 0) return [heading("Dead letters", "What could not be processed, kept with its cause."), jobs(app), empty("No dead letter", "Nothing failed for good. To try what happens then, write one by hand:", `oncewire dlq inject evt.default.demo.orders.placed '{"type": "OrderPlaced", "payload": {"order": 1}}' --testing`)];
  return [
    heading("Dead letters", `${plural(told.total, "letter")} in ${plural(told.groups.length, "group")}${told.indexed < told.total ? `; the newest ${count(told.indexed)} are shown` : ""}`),
    jobs(app),
    section({ id: "groups" }, "By cause", groups(app, told.groups)),
    list(app, chosen, isChosen, query),
  ];
}

function groups(app, rows) {
  const columns = [
    { head: "Letters", kind: "n", cell: (row) => h("strong", null, count(row.count)) },
    { head: "Cause", cell: (row) => [link(`/letters?${new URLSearchParams(meant(row))}`, h("span", { class: "cause" }, row.cause)), h("span", { class: "under clip" }, row.error)] },
    { head: "Consumer", cell: (row) => mono(row.consumer || "–") },
    { head: "Subject", cell: (row) => mono(row.subject || "–") },
    { head: "Last", cell: (row) => ago(row.last_ms, app.live.now) },
    { head: "", kind: "acts", cell: (row) => acts(app, meant(row), `${plural(row.count, "letter")} with cause ${row.cause}`) },
  ];
  return table("Dead letters by cause", columns, rows, (row) => `${row.cause} ${row.consumer} ${row.subject}`);
}

const meant = (row) => Object.fromEntries(["cause", "consumer", "subject"].filter((name) => row[name]).map((name) => [name, row[name]]));

function acts(app, wanted, what, more = []) {
  if (!app.session.may_replay) return h("span", { class: "quiet", title: "the credential does not allow to replay" }, "look only");
  return h(
    "span",
    { class: "acts" },
    h("button", { type: "button", class: "plain small", "data-act": "replay", onclick: () => askReplay(app, wanted, what) }, "Replay…"),
    more,
    h("button", { type: "button", class: "plain small danger", "data-act": "drop", onclick: () => askDrop(app, wanted, what) }, "Drop…"),
  );
}

function list(app, chosen, isChosen, query) {
  const before = /^\d{1,18}$/.test(query.before ?? "") ? query.before : "";
  const parameters = new URLSearchParams({ ...chosen, ...(before ? { before } : {}), limit: "50" });
  const asked = app.resources.use(`/api/letters?${parameters}`, app.live.versions.letters);
  const columns = [
    { head: "Number", kind: "n", cell: (row) => link(to("letters", row.sequence), count(row.sequence)) },
    { head: "Cause", cell: (row) => [h("span", { class: "cause" }, row.cause), row.is_injected && badge("off", "by hand"), h("span", { class: "under clip" }, row.error)] },
    { head: "Was on", cell: (row) => [mono(row.subject || "–"), h("span", { class: "under" }, `${row.stream} ${row.of_sequence ? count(row.of_sequence) : ""}`)] },
    { head: "Consumer", cell: (row) => mono(row.consumer || "–") },
    { head: "Deliveries", kind: "n", cell: (row) => count(row.deliveries) },
    { head: "When", cell: (row) => h("span", { title: when(row.at_ms) }, ago(row.at_ms, app.live.now)) },
  ];
  const rows = asked.data?.letters ?? [];
  const title = isChosen ? `Letters: ${Object.values(chosen).join(", ")}` : before ? "Older letters" : "Newest letters";
  const last = rows.at(-1)?.sequence;
  const older = asked.data?.is_more && h("p", { class: "more" }, link(`/letters?${new URLSearchParams({ ...chosen, before: last })}`, "Older letters"));
  const body = asked.data ? (rows.length ? [table("Letters", columns, rows, (row) => row.sequence), older] : empty("No letter fits", "")) : pending(asked, "the letters");
  return section({ id: "list", aside: (isChosen || before) && link("/letters", "show all") }, title, body);
}

// ---- what was set going

function jobs(app) {
  const rows = app.live.sections.jobs ?? [];
  const shown = rows.filter((one) => one.state === "running" || app.live.now - one.ended_ms < 60_000).slice(0, 4);
  if (!shown.length) return null;
  return h("ul", { class: "jobs", "aria-label": "Jobs", key: "jobs" }, shown.map(job));
}

const TONES = { running: "one", done: "good", partly: "warn", failed: "bad" };

function job(one) {
  const verb = one.kind === "replay" ? "Replay" : "Drop";
  const share = one.total ? Math.min(1, one.done / one.total) : one.state === "running" ? 0 : 1;
  return h(
    "li",
    { key: one.id, class: `job ${TONES[one.state]}`, "data-job": one.state, role: "status" },
    h("div", { class: "job-head" }, badge(TONES[one.state], one.state), h("strong", null, `${verb}: ${one.what}`), h("span", { class: "quiet" }, one.text || `${count(one.done)} of ${count(one.total)}`)),
    h("progress", { max: 1, value: share, "aria-label": `${verb} progress` }),
    one.hint && h("p", { class: "quiet" }, one.hint),
    one.problems.length > 0 && h("ul", { class: "problems" }, one.problems.slice(0, 5).map((each) => h("li", { key: each.sequence }, `letter ${each.sequence}: ${each.reason}`))),
  );
}

// ---- one letter

export function letter(app, { id }) {
  const asked = app.resources.use(to("api", "letters", id), app.live.versions.letters ?? 0);
  const crumbs = h("nav", { class: "crumbs", "aria-label": "Above" }, link("/letters", "Dead letters"));
  const running = jobs(app);
  if (asked.error?.status === 404) return [crumbs, heading("No such letter", id), running, empty("It was replayed or dropped, or never there", "What became of it stands in DLQ_REPLAYS.", "oncewire dlq ls --letters")];
  if (!asked.data) return [crumbs, heading(`Letter ${id}`), pending(asked, "the letter")];
  const { letter: row, headers, story, payload, record } = asked.data;
  const name = `letter ${row.sequence}`;
  const wanted = { ids: [String(row.sequence)] };
  const edit = app.session.may_replay && payload.whole !== null && asked.data.can_edit && h("button", { type: "button", class: "plain small", "data-act": "edit", onclick: () => askEdit(app, row, payload) }, "Edit and replay…");
  return [
    crumbs,
    heading(`Letter ${row.sequence}`, row.error || row.cause, acts(app, wanted, name, edit ? [edit] : [])),
    running,
    asked.data.is_withdrawn && h("p", { class: "note" }, badge("good", "withdrawn"), " Its input was done after all: dropping it is safe."),
    section(
      { id: "story" },
      "Story",
      facts([
        ["cause", h("span", { class: "cause" }, row.cause)],
        ["error", row.error],
        ["consumer", row.consumer && mono(row.consumer)],
        ["subject", row.subject && mono(row.subject)],
        ["origin", row.stream && h("span", null, link(to("streams", row.stream), mono(row.stream)), row.of_sequence ? ` ${count(row.of_sequence)}` : "")],
        ["deliveries", row.deliveries ? count(row.deliveries) : ""],
        ["outcome", row.outcome],
        ["tenant", row.tenant],
        ["dead since", `${when(row.at_ms)}, ${ago(row.at_ms, app.live.now)}`],
        ["trace", row.trace && mono(row.trace)],
        ["id", mono(row.id)],
        ["replay", record ? `${record.state}${record.reason ? `: ${record.reason}` : ""}` : ""],
      ]),
    ),
    section({ id: "payload", aside: h("span", { class: "quiet" }, `${payload.kind}, ${bytes(payload.bytes)}${payload.is_cut ? ", cut" : ""}`) }, "Payload", body(row, payload)),
    pairs("headers", "Its own headers", headers, "It had none."),
    pairs("told", "What the dead-letter service wrote", story, "Nothing."),
  ];
}

function body(row, payload) {
  if (row.payload_is === "gone") return h("p", { class: "quiet" }, "The stream no longer had the message when it was given up: its payload is gone.");
  if (row.payload_is === "pointer") return h("p", { class: "quiet" }, `Larger than a letter may be: it stands in ${row.stream} at ${row.of_sequence}.`);
  if (payload.kind === "empty") return h("p", { class: "quiet" }, "It has no body.");
  return h("pre", { class: `payload ${payload.kind}`, tabindex: "0", "aria-label": "Payload" }, visible(payload.text));
}

const HIDDEN = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;

/** Signs that change how the rest is read (direction, width) are shown by their numbers. */
function visible(text) {
  return text.replace(HIDDEN, (sign) => `⟨U+${sign.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
}

function pairs(id, title, found, none) {
  const rows = Object.entries(found);
  const columns = [
    { head: "Name", cell: ([name]) => mono(name) },
    { head: "Value", cell: ([, value]) => h("span", { class: "mono wrap" }, visible(value)) },
  ];
  return section({ id }, title, rows.length ? table(title, columns, rows, ([name]) => name) : h("p", { class: "quiet" }, none));
}

// ---- asking first

/** Letters that come while somebody reads the question are not meant. */
const upToNow = (app, wanted) => (wanted.ids ? wanted : { ...wanted, until_ms: Math.round(app.live.now) + 1 });

function askReplay(app, filter, what) {
  const wanted = upToNow(app, filter);
  const asked = { report: null, error: "" };
  post("/api/letters/replay", { ...wanted, is_dry_run: true })
    .then((report) => (asked.report = report))
    .catch((error) => (asked.error = error.message))
    .finally(() => app.draw());
  showDialog(app, (_, close) => [
    h("h2", { id: "dialog-title" }, `Replay ${what}?`),
    h("p", null, "Each is published again on its subject, once, for the consumer that failed, and its letter is cleared."),
    h("div", { role: "status", class: "dry" }, asked.error ? trouble(asked.error) : asked.report ? [h("p", null, h("strong", null, asked.report.text)), problems(asked.report.problems)] : h("p", { class: "quiet" }, "Looking what would happen …")),
    buttons(close, "Replay", false, () => act(app, close, "/api/letters/replay", wanted), asked.report === null || asked.report.replayed === 0),
  ]);
}

function problems(found) {
  return found.length > 0 && h("ul", { class: "problems" }, found.slice(0, 6).map((one) => h("li", { key: one.sequence }, `letter ${one.sequence}: ${one.reason}`)));
}

function askDrop(app, filter, what) {
  const wanted = upToNow(app, filter);
  showDialog(app, (_, close) => [
    h("h2", { id: "dialog-title" }, `Drop ${what}?`),
    h("p", null, "They are deleted for good. What became of each is recorded with your reason."),
    h("label", { for: "reason" }, "Reason"),
    h("input", { id: "reason", type: "text", maxlength: "200", autocomplete: "off", autofocus: true, placeholder: "why nobody needs them" }),
    buttons(close, "Drop for good", true, () => act(app, close, "/api/letters/drop", { ...wanted, reason: document.getElementById("reason").value })),
  ]);
}

function askEdit(app, row, payload) {
  const state = { error: "" };
  const send = async (close) => {
    try {
      await begin(app, "/api/letters/replay", { ids: [String(row.sequence)], body: document.getElementById("edited").value });
      close();
    } catch (error) {
      state.error = error.message;
    }
    app.draw();
  };
  showDialog(app, (_, close) => [
    h("h2", { id: "dialog-title" }, `Edit and replay letter ${row.sequence}`),
    h("p", null, "The copy goes out with this body. It must stay the same input: what makes it so may not change. The letter stays beside it until it is dropped."),
    h("label", { for: "edited" }, "Body"),
    h("textarea", { id: "edited", rows: "14", spellcheck: "false", autofocus: true, initial: payload.kind === "json" && !payload.is_cut ? payload.text : payload.whole }),
    state.error && trouble(state.error),
    buttons(close, "Replay the edited copy", false, () => send(close)),
  ]);
}

async function begin(app, path, wanted) {
  const job = await post(path, wanted);
  const known = app.live.sections.jobs ?? [];
  if (!known.some((one) => one.id === job.id)) app.live.sections.jobs = [job, ...known]; // its end may have come before
  app.say(`${job.kind === "replay" ? "Replay" : "Drop"} of ${job.what} has begun`);
}

async function act(app, close, path, wanted) {
  try {
    await begin(app, path, wanted);
    close();
  } catch (error) {
    close();
    refuse(app, error);
  }
  app.draw();
}
