// The console: which view an address means, and bringing the page to what it says whenever something came.

import { Failure, Resources, get, post } from "./api.js";
import { closeDialog, drawDialog, isDialogOpen } from "./dialog.js";
import { h, render } from "./dom.js";
import { ago, plural, when } from "./format.js";
import { Live } from "./live.js";
import { command } from "./parts.js";
import { letter, letters } from "./views/letters.js";
import { overview } from "./views/overview.js";
import { pipeline } from "./views/pipeline.js";
import { run, runs } from "./views/runs.js";
import { stream, streams } from "./views/streams.js";
import { topic, topics } from "./views/topics.js";

const NAV = [
  { path: "/", name: "Overview", icon: "M3 11l7-7 7 7v6h-5v-4H8v4H3z" },
  { path: "/streams", name: "Streams", icon: "M2 6h16M2 10h16M2 14h10" },
  { path: "/topics", name: "Topics", icon: "M3 4h14v5H3zM3 11h6v5H3zM11 11h6v5h-6z" },
  { path: "/letters", name: "Dead letters", icon: "M2 5h16v11H2zM2 5l8 6 8-6" },
  { path: "/runs", name: "Runs", icon: "M3 5h7M7 10h8M12 15h5M3 5v0M7 10v0" },
  { path: "/pipeline", name: "Pipeline", icon: "M10 3c4 0 7 1.2 7 2.6S14 8.2 10 8.2 3 7 3 5.6 6 3 10 3zM3 5.6v8.8C3 15.8 6 17 10 17s7-1.2 7-2.6V5.6M3 10c0 1.400 3 2.600 7 2.600s7-1.200 7-2.600" },
];
const VIEWS = { "": overview, streams, topics, letters, runs, pipeline };
const DETAILS = { streams: stream, topics: topic, letters: letter, runs: run };
const NAMES = { nats: "NATS", broker: "The broker", lake: "The lake" };

const app = {
  live: new Live(() => draw(), () => stillIn()),
  resources: new Resources(() => draw(), () => signedOut()),
  session: null,
  login: { error: "", isBusy: false },
  draw: () => draw(),
  say,
  navigate,
};

// ---- where we are

function place() {
  const [first, second, ...rest] = location.pathname.slice(1).split("/").map(decoded);
  const query = Object.fromEntries(new URLSearchParams(location.search));
  if (rest.length) return { view: null, query };
  if (second !== undefined) return { view: DETAILS[first] ?? null, id: second, nav: `/${first}`, query };
  return { view: VIEWS[first] ?? null, nav: `/${first}`, query };
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function navigate(href) {
  history.pushState(null, "", href);
  arrive();
}

/** A new view: its title is where the focus goes, so that a screen reader begins there. */
function arrive() {
  closeDialog();
  drawNow();
  document.getElementById("title")?.focus({ preventScroll: true });
  scrollTo(0, 0);
  showWhere();
}

/** In a narrow window the views are a line that scrolls. */
function showWhere() {
  document.querySelector("#nav [aria-current]")?.scrollIntoView({ inline: "center", block: "nearest" });
}

addEventListener("popstate", arrive);
document.addEventListener("click", (event) => {
  const anchor = event.target.closest?.("a[href]");
  if (!anchor || event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey) return;
  if (anchor.origin !== location.origin || anchor.target || anchor.hash || anchor.pathname === "/report") return;
  event.preventDefault();
  navigate(anchor.pathname + anchor.search);
});

let said = 0;

/** For who cannot see it. */
function say(text) {
  document.getElementById("said").textContent = text;
  clearTimeout(said);
  said = setTimeout(() => (document.getElementById("said").textContent = ""), 5_000);
}

// ---- drawing

let isWaiting = false;

function draw() {
  if (isWaiting) return;
  isWaiting = true;
  setTimeout(() => {
    isWaiting = false;
    drawNow();
  }, 0);
}

function drawNow() {
  const here = place();
  render(document.getElementById("nav"), h("ul", null, NAV.map((one) => navItem(one, here))));
  render(document.getElementById("foot"), foot());
  render(document.getElementById("bar"), bar());
  const main = document.getElementById("main");
  if (app.session === null) {
    render(main, h("p", { class: "quiet wait" }, "Connecting …"));
    return;
  }
  if (app.session.needs_login) {
    document.title = "Log in · Oncewire console";
    render(document.getElementById("alerts"));
    render(main, loginForm());
    return;
  }
  render(document.getElementById("alerts"), alerts());
  const view = here.view ?? missing;
  main.dataset.stale = String(isStale(view));
  render(main, h("div", { key: location.pathname, class: "view" }, view(app, here)));
  const title = document.getElementById("title")?.textContent ?? "";
  document.title = title ? `${title} · Oncewire console` : "Oncewire console";
  drawDialog(app);
  announce();
}

function navItem(one, here) {
  const isHere = here.view !== null && here.nav === one.path;
  const letters = one.path === "/letters" ? (app.live.sections.letters?.total ?? 0) : 0;
  const icon = h("svg:svg", { viewBox: "0 0 20 20", "aria-hidden": "true" }, h("svg:path", { d: one.icon }));
  const badge = letters > 0 && h("span", { class: "number", "aria-label": plural(letters, "letter") }, letters > 999 ? "999+" : letters);
  return h("li", { key: one.path }, h("a", { href: one.path, "aria-current": isHere ? "page" : undefined }, icon, h("span", null, one.name), badge));
}

function bar() {
  return [connection(), themeButton()];
}

function connection() {
  const { live } = app;
  const seconds = Math.max(0, Math.ceil((live.retryAt - Date.now()) / 1000));
  const broken = Object.entries(live.tick?.backends ?? {}).filter(([, one]) => one.state === "broken");
  const texts = {
    live: broken.length ? `live, but ${broken.map(([name]) => NAMES[name]).join(" and ")} ${broken.length > 1 ? "do" : "does"} not answer` : "live",
    connecting: "connecting",
    waiting: `connection lost, again in ${seconds} s`,
    closed: "not connected",
  };
  const state = live.state === "live" && broken.length ? "partly" : live.state;
  return h(
    "p",
    { class: "pill", id: "connection", "data-state": state },
    h("span", { class: "dot", "aria-hidden": "true" }),
    h("span", null, texts[live.state]),
    live.state === "waiting" && h("button", { type: "button", class: "plain small", onclick: () => live.again() }, "Now"),
  );
}

function theme() {
  return document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
}

function themeButton() {
  const other = theme() === "dark" ? "light" : "dark";
  const turn = () => {
    document.documentElement.dataset.theme = other;
    try {
      localStorage.setItem("theme", other);
    } catch {
      // It holds for this page then.
    }
    draw();
  };
  return h("button", { type: "button", id: "theme", class: "plain small", "aria-label": `Use the ${other} colours`, title: `Use the ${other} colours`, onclick: turn }, other === "dark" ? "☾" : "☀");
}

function foot() {
  const { session, live } = app;
  if (!session) return [];
  const server = live.sections.overview?.server;
  return [
    h("p", { class: "quiet" }, `oncewire ${session.version}`),
    server && h("p", { class: "quiet" }, `nats-server ${server.version}`),
    session.has_login && !session.needs_login && h("button", { type: "button", class: "plain small", onclick: logout }, "Log out"),
  ];
}

// ---- what is broken

/** Whether the figures of a view are old: the stream is gone, or what they come from. */
function isStale(view) {
  const { live } = app;
  if (live.state === "waiting" || live.state === "closed") return true;
  const source = view === topics || view === topic ? "broker" : view === pipeline ? "lake" : "nats";
  return live.tick?.backends[source]?.state === "broken";
}

function alerts() {
  const { live } = app;
  if (live.state === "waiting" && live.waits > 1) {
    const text = live.ended || "The console's own server does not answer. What you see is from before.";
    return [alert("connection", text, "", live.ended ? "" : "oncewire up")];
  }
  return Object.entries(live.tick?.backends ?? {})
    .filter(([, one]) => one.state === "broken")
    .map(([name, one]) => {
      const since = one.ok_ms ? ` What you see is from ${when(one.ok_ms)}, ${ago(one.ok_ms, live.now)}.` : "";
      return alert(name, `${NAMES[name]} does not answer: ${one.text}.${since}`, one.hint, "");
    });
}

function alert(key, text, hint, typed) {
  return h("div", { class: "alert", key, "data-backend": key }, h("p", null, h("strong", null, text)), hint && h("p", null, ...marked(hint)), typed && h("p", null, command(typed)));
}

/** A hint with its `commands` set apart. */
function marked(text) {
  return text.split("`").map((part, at) => (at % 2 ? command(part) : part));
}

let told = "";

/** Once per change, not every second. */
function announce() {
  const backends = app.live.tick?.backends ?? {};
  const broken = Object.keys(backends).filter((name) => backends[name].state === "broken");
  const now = app.live.state === "waiting" ? "connection lost" : broken.length ? `${broken.map((one) => NAMES[one]).join(", ")} not answering` : app.live.state;
  if (now !== told && told && (now === "live" || now === "connection lost")) say(now === "live" ? "Live again" : "Connection lost");
  told = now;
}

function missing() {
  return [h("div", { class: "heading" }, h("h1", { id: "title", tabindex: "-1" }, "No such page")), h("p", null, "The address means nothing here. ", h("a", { href: "/" }, "To the overview"))];
}

// ---- who is there

const isIn = () => app.session !== null && !app.session.needs_login;

function loginForm() {
  const submit = async (event) => {
    event.preventDefault();
    const key = new FormData(event.target).get("key");
    app.login = { error: "", isBusy: true };
    draw();
    try {
      await post("/api/login", { key });
      await begin();
    } catch (error) {
      app.login = { error: error instanceof Failure ? error.message : String(error), isBusy: false };
      document.getElementById("key")?.focus();
    }
    draw();
  };
  return h(
    "form",
    { class: "card login", onsubmit: submit },
    h("h1", { id: "title", tabindex: "-1" }, "Log in"),
    h("p", null, "This console asks who you are. Your API key is sent once and not kept; you stay logged in for eight hours at most."),
    h("label", { for: "key" }, "API key"),
    h("input", { id: "key", name: "key", type: "password", autocomplete: "current-password", required: true, "aria-describedby": "login-error", placeholder: "ow_…" }),
    h("p", { id: "login-error", class: "bad", role: "alert" }, app.login.error),
    h("button", { type: "submit", class: "primary", disabled: app.login.isBusy }, "Log in"),
    h("p", { class: "quiet" }, "A key of the operators' tenant that may read: ", command("oncewire keys create --tenant ops --name me --allow read --allow replay")),
  );
}

async function logout() {
  await post("/api/logout", {}).catch(() => {});
  signedOut();
}

/** A stream that ended may have ended because the credential did, which an EventSource is not told. */
async function stillIn() {
  if (!app.session?.has_login) return;
  const told = await get("/api/session").catch(() => null);
  if (told?.needs_login) signedOut();
}

function signedOut() {
  if (app.session?.has_login && !app.session.needs_login) {
    app.session = { ...app.session, needs_login: true };
    app.live.close();
    draw();
  }
}

async function begin() {
  try {
    app.session = await get("/api/session");
  } catch {
    setTimeout(begin, 2_000);
    return;
  }
  app.login = { error: "", isBusy: false };
  if (isIn() && !document.hidden) app.live.again();
  drawNow();
  showWhere();
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
addEventListener("pagehide", () => app.live.close());
addEventListener("pageshow", (event) => event.persisted && isIn() && app.live.again());
document.addEventListener("visibilitychange", () => isIn() && app.live.seen(!document.hidden));
document.getElementById("dialog").addEventListener("close", () => isDialogOpen() || draw());
begin();
