/**
 * The answers that are being written in a conversation, over SSE, with exact resume.
 *
 * One way for browser and Node: `fetch` and its body as a stream. The browser's own EventSource cannot be told where to
 * begin, keeps silent about why it failed, and does not notice a connection that is dead.
 */

import { DEFAULTS } from "./rules.js";
import { Answers, EventParser } from "./sse.js";

export class TokenStream {
  #http;
  #path;
  #options;
  #parser = new EventParser();
  #answers = new Answers();
  #attempts = 0;
  #abort = null;
  #timer = null;
  #isOpen = true;

  constructor(http, path, options = {}) {
    this.#http = http;
    this.#path = path;
    this.#options = { ...DEFAULTS, ...options };
    this.#parser.lastEventId = options.lastEventId ?? "";
  }

  start() {
    this.#run();
    return this;
  }

  /** The place behind which the next connection begins: keep it to resume later. */
  get lastEventId() {
    return this.#parser.lastEventId;
  }

  /** Stop listening. The answer goes on being written. */
  close() {
    this.#isOpen = false;
    clearTimeout(this.#timer);
    this.#abort?.abort();
    this.#say({ state: "closed" });
  }

  /** Ask that the running answer ends. Listening goes on, and sees its end. */
  async stop(messageId) {
    const body = JSON.stringify(messageId === undefined ? {} : { messageId });
    await this.#http.ask(`${this.#path}/stop`, { method: "POST", headers: { "Content-Type": "application/json" }, body });
  }

  async #run() {
    try {
      await this.#read();
    } catch (error) {
      if (!this.#isOpen) return;
      this.#options.onError?.(error);
      if (error.code !== undefined) return this.#refused(error);
    }
    if (this.#isOpen) this.#again();
  }

  /** A credential that is refused now would be refused again. */
  #refused({ code, message }) {
    this.#isOpen = false;
    this.#say({ state: "closed", code, reason: message });
  }

  #again() {
    const { backoffFirstMs, backoffMostMs } = this.#options;
    const delay = Math.min(backoffMostMs, backoffFirstMs * 2 ** this.#attempts) * (0.5 + Math.random() / 2);
    this.#attempts += 1;
    this.#say({ state: "waiting", retryMs: delay });
    this.#timer = setTimeout(() => this.#run(), delay);
  }

  async #read() {
    this.#abort = new AbortController();
    const watch = this.#watch();
    try {
      this.#say({ state: "connecting" });
      const headers = { Accept: "text/event-stream" };
      if (this.lastEventId) headers["Last-Event-ID"] = this.lastEventId;
      const answer = await this.#http.ask(this.#path, { headers, signal: this.#abort.signal, cache: "no-store" });
      this.#say({ state: "open" });
      this.#attempts = 0;
      const parser = this.#parser.fresh();
      this.#parser = parser;
      const decoder = new TextDecoder();
      for (const reader = answer.body.getReader(); ; ) {
        const { done, value } = await reader.read();
        if (done) return;
        watch.heard();
        for (const event of parser.feed(decoder.decode(value, { stream: true }))) this.#take(event);
      }
    } finally {
      watch.end();
      this.#abort.abort();
    }
  }

  /** A connection on which nothing comes, not even the server's comments, is dead. */
  #watch() {
    const abort = this.#abort;
    let timer;
    const heard = () => {
      clearTimeout(timer);
      timer = setTimeout(() => abort.abort(new Error("nothing was heard from the gateway")), this.#options.silenceMs);
    };
    heard();
    return { heard, end: () => clearTimeout(timer) };
  }

  #take({ event, data }) {
    if (event === "token" || event === "event") {
      const news = this.#answers.take(JSON.parse(data));
      if (news?.type === "token") this.#options.onToken?.(news);
      else if (news !== null) this.#options.onLifecycle?.(news);
    } else if (event === "error") {
      this.#options.onError?.(new Error(JSON.parse(data).message));
    }
  }

  #say(state) {
    this.#options.onState?.(state);
  }
}
