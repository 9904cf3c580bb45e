/** The gateway over HTTP, with a credential that is good now. */

const REFUSED = { 401: 4401, 403: 4403 };

/** What the gateway refused. `code` is that of a connection that would be refused for the same reason, if there is one. */
export class HttpError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
    this.code = REFUSED[status];
  }
}

export class Http {
  #base;
  #ask;
  #headers;
  #credentials;

  constructor(base, { fetch: ask = globalThis.fetch, headers = {}, credentials = () => null }) {
    this.#base = base;
    this.#ask = (...args) => ask(...args);
    this.#headers = headers;
    this.#credentials = credentials;
  }

  /** Where a path of the gateway is. */
  url(path) {
    const url = new URL(path, this.#base);
    url.protocol = this.#base.protocol.replace("ws", "http");
    return url;
  }

  /** A ticket for a WebSocket, which cannot carry a header: bought with the credential unless it is one. */
  async ticket() {
    const credential = await this.#credentials();
    if (credential === null || credential === undefined) return null;
    if (typeof credential !== "string") return credential.ticket;
    const answer = await this.#send("/tickets", { method: "POST" }, credential);
    return (await answer.json()).ticket;
  }

  /** An answer that is not an error; HttpError when it is one. */
  async ask(path, options = {}) {
    return this.#send(path, options, await this.#credentials());
  }

  async #send(path, options, credential) {
    const url = this.url(path);
    const headers = { ...this.#headers, ...options.headers };
    if (typeof credential === "string") headers.Authorization = `Bearer ${credential}`;
    else if (credential) url.searchParams.set("ticket", credential.ticket);
    const answer = await this.#ask(url, { ...options, headers });
    if (answer.ok) return answer;
    const { message = answer.statusText } = await answer.json().catch(() => ({}));
    throw new HttpError(answer.status, `${answer.status} ${message}`);
  }
}
