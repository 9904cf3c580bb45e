/**
 * Reading a token stream: bytes to events (by the WHATWG rules of event streams), events to answers. Pure.
 */

const ENDED_MOST = 100;

/** Text in, events out: `{ id, event, data }`. Lines may be cut anywhere. */
export class EventParser {
  lastEventId = "";
  #left = "";
  #data = [];
  #event = "";
  #id = null;

  /** For a new connection: only the last id is carried over, not half an event of the old one. */
  fresh() {
    const parser = new EventParser();
    parser.lastEventId = this.lastEventId;
    return parser;
  }

  /** The events that this piece of text completes. */
  feed(text) {
    // A CR at the very end may be half of a CRLF: it waits for the next piece.
    const lines = (this.#left + text).split(/\r\n|\n|\r(?!$)/);
    this.#left = lines.pop();
    return lines.map((line) => this.#line(line)).filter((event) => event !== null);
  }

  #line(line) {
    if (line === "") return this.#dispatch();
    if (line.startsWith(":")) return null;
    const colon = line.indexOf(":");
    const name = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (name === "data") this.#data.push(value);
    else if (name === "event") this.#event = value;
    else if (name === "id" && !value.includes("\0")) this.#id = value;
    return null;
  }

  #dispatch() {
    if (this.#id !== null) this.lastEventId = this.#id;
    const event = { id: this.lastEventId, event: this.#event || "message", data: this.#data.join("\n") };
    const isEmpty = this.#data.length === 0;
    this.#data = [];
    this.#event = "";
    this.#id = null;
    return isEmpty ? null : event;
  }
}

/** Puts chunks together until the final one. Chunks that were seen before change nothing. */
export class Answers {
  #open = new Map();
  #ended = new Map(); // the text of each, so that a chunk that comes late does not open it again

  /** What an envelope of the stream means: null when nothing new, else `{ type, messageId, … }`. */
  take(envelope) {
    const { event } = envelope;
    if (event.type === "chat.token.chunk") return this.#chunk(event);
    if (event.type === "chat.stream.lifecycle") return this.#lifecycle(event);
    return null;
  }

  #answer(messageId) {
    let answer = this.#open.get(messageId);
    if (answer === undefined) this.#open.set(messageId, (answer = { text: "", seen: new Set() }));
    return answer;
  }

  #chunk({ messageId, chunkId, token, isFinal = false }) {
    if (this.#ended.has(messageId)) return null;
    const answer = this.#answer(messageId);
    if (answer.seen.has(chunkId)) return null;
    answer.seen.add(chunkId);
    answer.text += token;
    if (isFinal) this.#end(messageId);
    return { type: "token", messageId, token, text: answer.text, isFinal };
  }

  #lifecycle({ messageId, status, detail }) {
    if (status === "started") {
      // Also when somebody else begins an answer anew: what there was of it counts no more.
      this.#open.set(messageId, { text: "", seen: new Set() });
      this.#ended.delete(messageId);
      return { type: status, messageId, text: "", detail };
    }
    this.#end(messageId);
    return { type: status, messageId, text: this.#ended.get(messageId), detail };
  }

  #end(messageId) {
    if (this.#ended.has(messageId)) return;
    this.#ended.set(messageId, this.#open.get(messageId)?.text ?? "");
    this.#open.delete(messageId);
    if (this.#ended.size > ENDED_MOST) this.#ended.delete(this.#ended.keys().next().value);
  }
}
