// What several views share: headings, badges, tables, commands to copy, empty states.

import { h } from "./dom.js";

/** The head of a view. */
export function heading(title, lead, ...actions) {
  return h(
    "div",
    { class: "heading" },
    h("div", null, h("h1", { tabindex: "-1", id: "title" }, title), lead && h("p", { class: "lead" }, lead)),
    actions.length > 0 && h("div", { class: "actions" }, actions),
  );
}

export function card(title, ...children) {
  return section({}, title, ...children);
}

export function section({ aside, id, tone = "" }, title, ...children) {
  return h(
    "section",
    { class: `card ${tone}`, "aria-label": title, key: id },
    h("div", { class: "card-head" }, h("h2", null, title), aside),
    children,
  );
}

export const badge = (tone, text, title) => h("span", { class: `badge ${tone}`, title }, text);

/** A command, with a button that copies it. */
export function command(text) {
  return h(
    "span",
    { class: "command" },
    h("code", null, text),
    h("button", { type: "button", class: "copy", "aria-label": `Copy: ${text}`, title: "Copy", onclick: (event) => copy(event, text) }, h("svg:svg", { viewBox: "0 0 16 16", "aria-hidden": "true" }, h("svg:path", { d: "M5 5V2h9v9h-3M2 5h9v9H2z" }))),
  );
}

async function copy(event, text) {
  const button = event.currentTarget;
  try {
    await navigator.clipboard.writeText(text);
    button.dataset.done = "1";
    setTimeout(() => delete button.dataset.done, 1_200);
  } catch {
    const range = document.createRange();
    range.selectNodeContents(button.previousSibling);
    getSelection().removeAllRanges();
    getSelection().addRange(range);
  }
}

/** Nothing here: why, and what to do about it. */
export function empty(title, text, ...commands) {
  return h(
    "div",
    { class: "empty" },
    h("p", { class: "empty-title" }, title),
    text && h("p", null, text),
    commands.length > 0 && h("div", { class: "commands" }, commands.map((one) => command(one))),
  );
}

/** Waiting for the first answer, or why there is none. */
export function pending(resource, what) {
  if (resource.error) return trouble(resource.error.message);
  return h("p", { class: "quiet wait", role: "status" }, `Reading ${what} …`);
}

export const trouble = (text) => h("div", { class: "trouble", role: "alert" }, h("p", null, text));

/** A table that scrolls by itself in a narrow window. Columns are {head, kind, cell, title}; rows have a `key`. */
export function table(label, columns, rows, keyOf, attributes = () => ({})) {
  return h(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": label },
    h(
      "table",
      null,
      h("thead", null, h("tr", null, columns.map((one) => h("th", { scope: "col", class: one.kind ?? "", title: one.title }, one.head)))),
      h(
        "tbody",
        null,
        rows.map((row) =>
          h("tr", { key: keyOf(row), ...attributes(row) }, columns.map((one) => h("td", { class: one.kind ?? "" }, one.cell(row)))),
        ),
      ),
    ),
  );
}

/** Facts side by side: [[name, value], …]. */
export function facts(pairs) {
  return h(
    "dl",
    { class: "facts" },
    pairs
      .filter(([, value]) => value !== "" && value !== null && value !== undefined)
      .map(([name, value]) => h("div", { key: name }, h("dt", null, name), h("dd", null, value))),
  );
}

/** How full something is, 0 to 1; `tone` warn when that is bad. */
export function meter(share, label, tone = "") {
  return h("span", { class: `meter ${tone}`, role: "img", "aria-label": label, title: label }, h("span", { style: { width: `${Math.min(100, share * 100).toFixed(1)}%` } }));
}

export const to = (...parts) => `/${parts.map(encodeURIComponent).join("/")}`;

export const link = (href, ...children) => h("a", { href }, children);

export const mono = (text) => h("span", { class: "mono" }, text);
