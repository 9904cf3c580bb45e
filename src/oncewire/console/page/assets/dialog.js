// Asking before something is done. One dialog at a time; the focus goes back to where it was.

import { h, render } from "./dom.js";

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

export function drawDialog(app) {
  if (open !== null) render(element(), h("div", { class: "dialog" }, open.view(app, closeDialog)));
}
