/**
 * Reading a token stream: bytes to events (by the WHATWG rules of event streams), events to answers. Pure.
 */

const ENDED_MOST = 100;

/** The attempt at an answer and the chunk's number there: so producers of ours name theirs. */
const CHUNK_ID = /^([0-9a-f]{8})-([0-9]{1,9})$/;

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

/** One answer, as far as it is known. */
class Answer {
  text = "";
  seen = new Set();
  isWhole = true; // no chunk before the last one is missing: the stream keeps only so many
  #attempt = "";
  #number = 0;

  take({ chunkId, token }) {
    this.seen.add(chunkId);
    this.text += token;
    const [, attempt, digits] = CHUNK_ID.exec(chunkId) ?? [];
    if (attempt === undefined) return;
    const number = Number(digits);
    if (number !== (attempt === this.#attempt ? this.#number + 1 : 1)) this.isWhole = false;
    this.#attempt = attempt;
    this.#number = number;
  }
}

/** Puts chunks together until the final one. Chunks that were seen before change nothing. */
export class Answers {
  #open = new Map();
  #ended = new Map(); // so that a chunk that comes late does not open one again

  /** What an envelope of the stream means: null when nothing new, else `{ type, messageId, … }`. */
  take(envelope) {
    const { event } = envelope;
    if (event.type === "chat.token.chunk") return this.#chunk(event);
    if (event.type === "chat.stream.lifecycle") return this.#lifecycle(event);
    return null;
  }

  #answer(messageId) {
    let answer = this.#open.get(messageId);
    if (answer === undefined) this.#open.set(messageId, (answer = new Answer()));
    return answer;
  }

  #chunk({ messageId, chunkId, token, metadata = null, isFinal = false }) {
    if (this.#ended.has(messageId)) return null;
    const answer = this.#answer(messageId);
    if (answer.seen.has(chunkId)) return null;
    answer.take({ chunkId, token });
    if (isFinal) this.#end(messageId);
    return { type: "token", messageId, token, text: answer.text, isFinal, metadata, isWhole: answer.isWhole };
  }

  #lifecycle({ messageId, status, detail }) {
    if (status === "started") {
      // Also when somebody else begins an answer anew: what there was of it counts no more.
      this.#open.set(messageId, new Answer());
      this.#ended.delete(messageId);
      return { type: status, messageId, text: "", detail, isWhole: true };
    }
    this.#end(messageId);
    const { text, isWhole } = this.#ended.get(messageId);
    return { type: status, messageId, text, detail, isWhole };
  }

  #end(messageId) {
    if (this.#ended.has(messageId)) return;
    const { text, isWhole } = this.#open.get(messageId) ?? new Answer();
    this.#ended.set(messageId, { text, isWhole });
    this.#open.delete(messageId);
    if (this.#ended.size > ENDED_MOST) this.#ended.delete(this.#ended.keys().next().value);
  }
}
