// Asking before something is done. One dialog at a time; the focus goes back to where it was.

import { h, render } from "./dom.js";
import { trouble } from "./parts.js";

let open = null;

const element = () => document.getElementById("dialog");

export const isDialogOpen = () => open !== null;

/** `view(app, close)` says what stands in it, again whenever the page is drawn. */
export function showDialog(app, view) {
  open = { view, opener: document.activeElement };
  drawDialog(app);
  const shown = element();
  if (!shown.open) shown.showModal();
  shown.oncancel = (event) => {
    event.preventDefault();
    closeDialog();
  };
  shown.onclick = (event) => event.target === shown && closeDialog();
  shown.querySelector("[autofocus]")?.focus();
}

export function closeDialog() {
  const { opener } = open ?? {};
  open = null;
  const shown = element();
  if (shown.open) shown.close();
  render(shown);
  if (opener?.isConnected) opener.focus();
}

/** Cancel, and the one that does it. */
export function buttons(close, text, isDanger, go, isDisabled = false) {
  return h(
    "div",
    { class: "buttons" },
    h("button", { type: "button", class: "plain cancel", onclick: close }, "Cancel"),
    h("button", { type: "button", class: isDanger ? "primary danger" : "primary", id: "confirm", disabled: isDisabled, onclick: go }, text),
  );
}

/** What was asked for was not done, and why. */
export function refuse(app, error) {
  app.say(`Refused: ${error.message}`);
  showDialog(app, (_, close) => [
    h("h2", { id: "dialog-title" }, "That was refused"),
    trouble(error.message),
    h("div", { class: "buttons" }, h("button", { type: "button", class: "primary", autofocus: true, onclick: close }, "Close")),
  ]);
}

export function drawDialog(app) {
  if (open !== null) render(element(), h("div", { class: "dialog" }, open.view(app, closeDialog)));
}
