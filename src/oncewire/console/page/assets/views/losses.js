// What streams have lost, and that somebody has looked at it.

import { post } from "../api.js";
import { buttons, refuse, showDialog } from "../dialog.js";
import { h } from "../dom.js";
import { ago, plural, when } from "../format.js";
import { badge, link, mono, section, table, to } from "../parts.js";

/** A card when anything was ever lost, else nothing. */
export function losses(app) {
  const found = app.live.sections.overview?.losses ?? [];
  if (found.length === 0) return null;
  const columns = [
    { head: "Stream", cell: (row) => link(to("streams", row.stream), mono(row.stream)) },
    { head: "What is missing", cell: (row) => h("span", { class: "wrap" }, row.sentence) },
    { head: "Found", cell: (row) => h("span", { title: when(row.found_ms) }, ago(row.found_ms, app.live.now)) },
    { head: "State", cell: (row) => (row.is_open ? badge("bad", "open") : badge("off", "acknowledged")) },
    { head: "", kind: "acts", cell: (row) => row.is_open && act(app, found, row.stream) },
  ];
  return section({ id: "losses" }, "Losses", table("Losses", columns, found.slice(0, 20), (row) => row.id));
}

function act(app, found, stream) {
  if (!app.session.may_replay) return h("span", { class: "quiet", title: "the credential does not allow to acknowledge" }, "look only");
  const seen = found.filter((one) => one.stream === stream && one.is_open);
  return h("span", { class: "acts" }, h("button", { type: "button", class: "plain small", "data-act": "acknowledge", onclick: () => ask(app, stream, seen) }, "Acknowledge…"));
}

/** What is found while somebody reads the question is not meant. */
function ask(app, stream, seen) {
  const wanted = { stream, until_ms: Math.max(...seen.map((one) => one.found_ms)) };
  showDialog(app, (_, close) => [
    h("h2", { id: "dialog-title" }, `Acknowledge what ${stream} has lost?`),
    h("p", null, "Do this when you know why it is gone: a restore, a limit, a disk. Its readers go on from where the stream is now; what is missing stays missing, and the record of it stays."),
    h("ul", { class: "problems" }, seen.slice(0, 6).map((one) => h("li", { key: one.id }, one.sentence))),
    buttons(close, "Acknowledge", true, () => send(app, close, wanted)),
  ]);
}

async function send(app, close, wanted) {
  try {
    const told = await post("/api/losses/acknowledge", wanted);
    close();
    app.say(`${plural(told.acknowledged, "loss", "losses")} of ${told.stream} acknowledged`);
  } catch (error) {
    close();
    refuse(app, error);
  }
  app.draw();
}
