/** The shell around the rules of rooms: a WebSocket, a timer, REST history, and the users' handlers. */

import { Rules } from "./rules.js";
import { Http } from "./http.js";
import { TokenStream } from "./tokens.js";

const NORMAL_CLOSE = 1000;
const NO_CLOSE_FRAME = 1006;

/** One connection to a gateway, kept up until `close`. See index.d.ts for what each option means. */
export class GatewayClient {
  #url;
  #Socket;
  #http;
  #rules;
  #socket = null;
  #attempt = 0; // tells what belongs to this connection from what belonged to one that was dropped
  #timer = null;
  #actions = [];
  #isActing = false;
  #handlers = new Map();
  #listeners = new Set();
  #wake = () => this.#handle({ type: "wake" });
  /** A page that is left may be kept for the way back, and its socket with it: others would go on seeing its user. */
  #hide = () => {
    if (this.#socket === null && this.state !== "connecting") return;
    this.#drop(NORMAL_CLOSE);
    this.#handle({ type: "closed", code: NORMAL_CLOSE });
  };

  constructor(url, options = {}) {
    const { WebSocket: Socket = globalThis.WebSocket, fetch: ask, headers, credentials, ...limits } = options;
    if (Socket === undefined) {
      throw new Error("there is no WebSocket here: use Node 22 or newer, or pass one as options.WebSocket");
    }
    this.#url = new URL(url, globalThis.location?.href);
    this.#Socket = Socket;
    this.#http = new Http(this.#url, { fetch: ask, headers, credentials });
    this.#rules = new Rules(limits);
  }

  /** Connect, and stay connected. */
  start() {
    globalThis.addEventListener?.("online", this.#wake);
    globalThis.addEventListener?.("pagehide", this.#hide);
    globalThis.addEventListener?.("pageshow", this.#wake);
    this.#handle({ type: "start" });
    return this;
  }

  /** Acknowledge what is done, and go. */
  close() {
    globalThis.removeEventListener?.("online", this.#wake);
    globalThis.removeEventListener?.("pagehide", this.#hide);
    globalThis.removeEventListener?.("pageshow", this.#wake);
    this.#handle({ type: "stop" });
  }

  get state() {
    return this.#rules.phase;
  }

  /** Told of each change of the connection: `{ state, retryMs?, code?, reason? }`. Returns a function that ends it. */
  onState(listener) {
    this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  }

  /** Follow a room. `resume`: 0 for its whole history, a position, "acked", or nothing for what comes from now on. */
  join(conversationId, { resume, clientId = null, onMessage, onEvent, onGap, onState, onError } = {}) {
    const position = typeof resume === "number" ? { sequence: resume } : typeof resume === "object" ? (resume ?? {}) : {};
    const mode = resume === "acked" ? "acked" : "live";
    this.#handlers.set(conversationId, { onMessage, onEvent, onGap, onState, onError });
    this.#handle({ type: "join", room: conversationId, clientId, mode, ...position });
    return new Room(this, conversationId, {
      position: () => this.#rules.position(conversationId),
      presence: (state, metadata) => this.#handle({ type: "presence", room: conversationId, state, metadata }),
      leave: () => {
        this.#handle({ type: "leave", room: conversationId });
        this.#handlers.delete(conversationId);
      },
    });
  }

  /** The answers that are being written in a conversation, token by token. */
  tokens(conversationId, options = {}) {
    return new TokenStream(this.#http, `/stream/${encodeURIComponent(conversationId)}`, options).start();
  }

  /** Where a path of the gateway is over HTTP. */
  httpUrl(path) {
    return this.#http.url(path);
  }

  #handle(event) {
    this.#actions.push(...this.#rules.handle(event, now(), Math.random()));
    if (this.#isActing) return; // a handler called us: its actions come after those that were decided before
    this.#isActing = true;
    try {
      for (let action; (action = this.#actions.shift()) !== undefined; ) this.#act(action);
    } finally {
      this.#isActing = false;
    }
    this.#setTimer();
  }

  #act(action) {
    switch (action.type) {
      case "connect":
        return this.#connect();
      case "send":
        return this.#socket?.readyState === 1 && this.#socket.send(JSON.stringify(action.frame));
      case "close":
        return this.#drop(action.code);
      case "state":
        return this.#listeners.forEach((listener) => call(listener, action));
      case "fetch":
        return this.#fetch(action);
      case "deliver":
        return this.#deliver(action, (handlers) => handlers.onMessage?.(action.envelope));
      case "gap":
        return this.#deliver(action, (handlers) => handlers.onGap?.(action.gap));
      case "event":
        return call(this.#handlers.get(action.room)?.onEvent, action.envelope);
      case "room":
        return call(this.#handlers.get(action.room)?.onState, action);
      case "error":
        return call(this.#handlers.get(action.room)?.onError, new Error(action.message));
    }
  }

  async #connect() {
    const attempt = ++this.#attempt;
    const isCurrent = () => this.#attempt === attempt;
    const closed = (code, reason) => {
      if (!isCurrent()) return;
      this.#drop(NORMAL_CLOSE);
      this.#handle({ type: "closed", code, reason });
    };
    let ticket;
    try {
      ticket = await this.#http.ticket();
    } catch (error) {
      closed(error.code ?? NO_CLOSE_FRAME, String(error?.message ?? error));
      return;
    }
    if (!isCurrent()) return;
    const url = new URL(this.#url);
    url.protocol = url.protocol.replace("http", "ws");
    if (url.pathname === "/") url.pathname = "/ws";
    if (ticket !== null) url.searchParams.set("ticket", ticket);
    const socket = (this.#socket = new this.#Socket(url.href));
    socket.addEventListener("message", ({ data }) => isCurrent() && this.#frame(data));
    socket.addEventListener("close", ({ code, reason }) => closed(code, reason));
    // Browsers tell the close right behind the error; Node 20 forgets it when nobody listens at the address.
    socket.addEventListener("error", () => setTimeout(() => closed(NO_CLOSE_FRAME)));
  }

  /** Let go of a socket whose end is not waited for: a dead one may take minutes to say that it is closed. */
  #drop(code) {
    this.#attempt += 1;
    const socket = this.#socket;
    this.#socket = null;
    socket?.close(code);
  }

  #frame(data) {
    let frame;
    try {
      frame = JSON.parse(data);
    } catch {
      return; // not ours: a gateway speaks JSON
    }
    if (frame === null || typeof frame !== "object") return;
    this.#handle(frame.type === "hello" ? { type: "opened" } : { type: "frame", frame });
  }

  async #deliver({ room, sequence }, handle) {
    try {
      await handle(this.#handlers.get(room) ?? {});
    } catch (error) {
      this.#handle({ type: "failed", room, sequence, message: String(error?.message ?? error) });
      return;
    }
    this.#handle({ type: "processed", room, sequence });
  }

  async #fetch({ room, after, limit, repair }) {
    try {
      const path = `/conversations/${encodeURIComponent(room)}/messages?after=${after}&limit=${limit}`;
      const answer = await this.#http.ask(path);
      const page = await answer.json();
      this.#handle({ type: "history", room, repair, page });
    } catch (error) {
      this.#handle({ type: "historyFailed", room, repair, message: String(error?.message ?? error) });
    }
  }

  #setTimer() {
    clearTimeout(this.#timer);
    const { wakeAt } = this.#rules;
    if (wakeAt === null) return;
    this.#timer = setTimeout(() => this.#handle({ type: "tick" }), Math.max(0, wakeAt - now()));
  }
}

/** Milliseconds that look like the wall clock's and never go back. */
function now() {
  return Math.round(performance.timeOrigin + performance.now());
}

/** A listener that throws must not stop what was decided together with its call. */
function call(listener, value) {
  try {
    listener?.(value);
  } catch (error) {
    console.error(error);
  }
}

/** One followed room. */
export class Room {
  #acts;

  constructor(client, conversationId, acts) {
    this.client = client;
    this.conversationId = conversationId;
    this.#acts = acts;
  }

  /** `{ sequence, epoch }` of the last message that is done, null when there is none: keep it to resume later. */
  get position() {
    return this.#acts.position();
  }

  /** Say how it is with this user: "online", "typing", "idle" or "offline". Said again after each reconnect. */
  presence(state, metadata) {
    this.#acts.presence(state, metadata);
  }

  leave() {
    this.#acts.leave();
  }
}
