/** The demo chat: a page on the public client, with nothing between them. */

import { GatewayClient } from "/client/index.js";

const LOBBY = "00000000-0000-4000-8000-000000000001"; // two tabs on the bare address meet
const IDLE_MS = 60_000;
const TYPING_MS = 3_000;
const RESEND_MS = 2_000;

const $ = (id) => document.getElementById(id);
const parameters = new URLSearchParams(location.search);
const conversation = parameters.get("room") ?? LOBBY;
const gateway = parameters.get("gateway") ?? location.origin; // another node, to see that rooms span them
const name = sessionStorage.getItem("name") ?? nickname();
sessionStorage.setItem("name", name);
const tab = sessionStorage.getItem("tab") ?? crypto.randomUUID().slice(0, 8); // two tabs may have the same name
sessionStorage.setItem("tab", tab);

const client = new GatewayClient(gateway);
const log = $("log");
const facts = { connections: 0, replayed: 0 };

// ---- the log

/** A list item of the log. Text is only ever set as text. */
function entry(className, who, text) {
  const item = document.createElement("li");
  item.className = className;
  const author = document.createElement("span");
  author.className = "who";
  author.textContent = who;
  const bubble = document.createElement("div");
  bubble.className = "bubble";
  bubble.textContent = text;
  item.append(author, bubble);
  return item;
}

/** Change the log, and keep its end in view if it was. */
function changeLog(change) {
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  change();
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

/** What is numbered stands before what is still on its way. */
function addNumbered(item) {
  log.insertBefore(item, log.querySelector(".pending, .streaming"));
}

function onMessage(envelope) {
  const { sequence, event } = envelope;
  const { author = event.role, key, answer, stopped } = event.metadata ?? {};
  if (envelope.replay) facts.replayed += 1;
  const isMine = key?.startsWith(tab) ?? false;
  const item = entry(isMine ? "message mine" : "message", "", event.content);
  const who = event.role === "assistant" ? (stopped ? "Demo, stopped" : "Demo") : isMine ? "You" : author;
  const number = document.createElement("span");
  number.className = "number";
  number.textContent = ` · ${sequence}`;
  item.querySelector(".who").append(who, number);
  item.dataset.sequence = sequence;
  item.dataset.messageId = event.messageId;
  changeLog(() => {
    if (key !== undefined) log.querySelector(`[data-key="${CSS.escape(key)}"]`)?.remove();
    if (answer !== undefined) endAnswer(answer);
    addNumbered(item);
  });
  showFacts();
}

function onGap({ from, to }) {
  const item = document.createElement("li");
  item.className = "gap";
  item.textContent = from === to ? `Message ${from} is no longer kept` : `Messages ${from} to ${to} are no longer kept`;
  changeLog(() => addNumbered(item));
}

// ---- the answer that is being written

const finished = new Set();
let running = null; // { messageId, item }

function showAnswer(messageId, text) {
  if (finished.has(messageId)) return;
  changeLog(() => {
    if (running?.messageId !== messageId) {
      running?.item.remove(); // whoever wrote that one is gone, and begins anew
      const item = entry("message streaming", "Demo is answering", "");
      item.setAttribute("aria-busy", "true"); // read out when it is whole, not word by word
      log.append(item);
      running = { messageId, item };
    }
    running.item.querySelector(".bubble").textContent = text;
  });
  $("stop").hidden = false;
  showFacts();
}

function endAnswer(messageId) {
  finished.add(messageId);
  if (running?.messageId !== messageId) return;
  running.item.remove();
  running = null;
  $("stop").hidden = true;
}

const tokens = client.tokens(conversation, {
  onToken: ({ messageId, text }) => showAnswer(messageId, text),
  onLifecycle({ type, messageId, text }) {
    if (type === "started") showAnswer(messageId, "");
    else if (type === "errored" && running?.messageId === messageId) showBroken(messageId, text);
  },
});

function showBroken(messageId, text) {
  endAnswer(messageId);
  changeLog(() => log.append(entry("message broken", "Demo broke off", text)));
}

$("stop").addEventListener("click", async () => {
  $("stop").disabled = true;
  try {
    await tokens.stop(running?.messageId);
  } catch (error) {
    console.warn(error);
  } finally {
    $("stop").disabled = false;
  }
});

// ---- sending: until the server says that it is stored, under one key, so that it is stored once

async function send(content) {
  const key = `${tab}.${crypto.randomUUID()}`;
  const item = entry("message mine pending", "You · sending", content);
  item.dataset.key = key;
  changeLog(() => log.append(item));
  log.scrollTop = log.scrollHeight;
  const body = JSON.stringify({ conversationId: conversation, content, author: name, key });
  for (;;) {
    try {
      const answer = await fetch("/demo/messages", { method: "POST", body, headers: { "Content-Type": "application/json" } });
      if (answer.ok) return;
      if (answer.status < 500 && answer.status !== 429) {
        item.querySelector(".who").textContent = `Not sent: ${(await answer.json()).message}`;
        return;
      }
    } catch {
      // the server is away
    }
    item.querySelector(".who").textContent = "You · waiting for the server";
    await new Promise((resolve) => setTimeout(resolve, RESEND_MS));
  }
}

$("compose").addEventListener("submit", (event) => {
  event.preventDefault();
  const content = $("content").value.trim();
  if (content === "") return;
  $("content").value = "";
  fit();
  say("online");
  send(content);
});

$("content").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("compose").requestSubmit();
});

function fit() {
  const area = $("content");
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight}px`;
}

// ---- who is there

const people = new Map(); // by userId: { name, state, isMe }
let said = "";
let quietTimer;
let introduction;
let idleTimer;

function say(state) {
  clearTimeout(idleTimer);
  idleTimer = setTimeout(() => say("idle"), IDLE_MS);
  if (state === said) return;
  said = state;
  room.presence(state, { name, tab });
}

$("content").addEventListener("input", () => {
  fit();
  say("typing");
  clearTimeout(quietTimer);
  quietTimer = setTimeout(() => say("online"), TYPING_MS);
});
addEventListener("focus", () => said === "idle" && say("online"));

function onPresence({ userId, state, metadata }) {
  if (state === "offline") people.delete(userId);
  else {
    if (!people.has(userId)) introduce();
    people.set(userId, { name: metadata?.name ?? "somebody", state, isMe: metadata?.tab === tab });
  }
  showPeople();
}

/** Who comes learns who is there: presence is told when it changes, not kept for newcomers. */
function introduce() {
  clearTimeout(introduction);
  introduction = setTimeout(() => room.presence(said, { name, tab }), Math.random() * 300);
}

function showPeople() {
  const shown = [...people.values()].sort((a, b) => b.isMe - a.isMe || a.name.localeCompare(b.name));
  $("people").replaceChildren(...shown.map(person));
  const typing = shown.filter((one) => one.state === "typing" && !one.isMe).map((one) => one.name);
  $("typing").textContent =
    typing.length === 0 ? "" : typing.length === 1 ? `${typing[0]} is typing…` : `${typing.join(", ")} are typing…`;
}

function person({ name: who, state, isMe }) {
  const item = document.createElement("li");
  item.dataset.state = state;
  const face = document.createElement("span");
  face.className = "face";
  face.setAttribute("aria-hidden", "true");
  face.style.setProperty("--hue", [...who].reduce((sum, letter) => sum * 31 + letter.codePointAt(0), 7) % 360);
  face.textContent = who[0];
  item.append(face, isMe ? `${who} (you)` : who);
  item.title = state;
  return item;
}

// ---- the connection

let countdown;

client.onState(({ state, retryMs }) => {
  clearInterval(countdown);
  if (state === "open") facts.connections += 1;
  if (state === "waiting") people.clear();
  $("connection").dataset.state = state;
  const words = { open: "connected", connecting: "connecting", closed: "closed: reload the page" };
  const until = Date.now() + (retryMs ?? 0);
  const show = () => {
    const seconds = Math.max(0, Math.ceil((until - Date.now()) / 1000));
    $("connection-text").textContent = words[state] ?? `reconnecting in ${seconds} s`;
  };
  show();
  if (state === "waiting") countdown = setInterval(show, 250);
  showPeople();
  showFacts();
});

function showFacts() {
  const { sequence = "–", epoch } = room?.position ?? {};
  $("fact-position").textContent = sequence;
  $("fact-epoch").textContent = epoch?.slice(0, 12) ?? "–";
  $("fact-connections").textContent = facts.connections;
  $("fact-replayed").textContent = facts.replayed;
  $("fact-stream").textContent = tokens.lastEventId || "–";
}

// ---- from here on

const room = client.join(conversation, {
  resume: 0,
  onMessage,
  onGap,
  onEvent: ({ event }) => event.type === "chat.presence" && onPresence(event),
  onError: (error) => console.warn(error.message),
});
setInterval(showFacts, 1_000);
$("fact-name").textContent = name;
$("fact-room").textContent = conversation === LOBBY ? "the lobby" : conversation;
$("fact-gateway").textContent = new URL(gateway).host;
$("second").addEventListener("click", () => open(location.href, "_blank", "noopener"));
$("fresh").addEventListener("click", () => {
  parameters.set("room", crypto.randomUUID());
  location.search = parameters;
});
say("online");
client.start();

function nickname() {
  const pick = (words) => words[Math.floor(Math.random() * words.length)];
  const colour = pick(["Amber", "Coral", "Indigo", "Jade", "Olive", "Ruby", "Sienna", "Teal"]);
  return `${colour} ${pick(["Badger", "Crane", "Finch", "Heron", "Lynx", "Otter", "Robin", "Wren"])}`;
}
