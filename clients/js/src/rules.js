/**
 * The rules of a client of rooms: events in, actions out, in the order in which they are to be done.
 *
 * No clock, no socket and no chance in here: time and a random number come with each event. The same rules stand in
 * Python (`oncewire.gateway.client.rules`), and both are held to one set of scenarios.
 *
 * What they promise for each room: messages reach the handler in the order of their sequence, each once, one at a time;
 * a message is acknowledged only after its handler is done with it; after a lost connection it goes on behind the last
 * message that was done. What history no longer has is told as a gap, in its place, and the room goes on.
 */

/** Limits and times. Each can be set in the options of a client. */
export const DEFAULTS = Object.freeze({
  backoffFirstMs: 2_000,
  backoffMostMs: 30_000,
  connectMs: 10_000,
  heartbeatMs: 15_000,
  silenceMs: 35_000,
  ackMs: 50,
  ackCount: 64,
  queueMost: 1_000,
  seenMost: 1_000,
  historyLimit: 200,
});

/** Close codes after which coming back is pointless: the server would refuse again. */
const FINAL_CODES = new Set([1002, 1003, 1007, 1008, 1009, 4400, 4401, 4403, 4404]);

const MESSAGE = "chat.message.created";
const JOIN = "join_room";
const RESUME = "resume_from_seq";

/** What is known about one room. */
class Room {
  constructor(id, { sequence = null, epoch = null, mode = "live", clientId = null }) {
    this.id = id;
    this.mode = mode;
    this.clientId = clientId;
    this.epoch = epoch;
    this.received = sequence; // the last sequence that was taken in
    this.done = sequence; // the last sequence whose handler is done
    this.acked = null; // the last sequence that this connection acknowledged
    this.isJoined = false;
    this.isOpen = false; // it had no message when it was joined: the gateway says where it begins once it has one
    this.queue = []; // { sequence, envelope } or { sequence, gap }; the first one may be in the handler's hands
    this.isBusy = false;
    this.isBehind = false; // the queue was full: what came then is asked for again
    this.failures = 0;
    this.retryAt = null;
    this.refusals = 0; // joins in a row that the gateway refused for now,
    this.joinAt = null; // and when the next one is sent
    this.askedAfter = null; // the position at which a jump was already asked about,
    this.askedAt = null; // and when: what was on its way then may still come
    // { number, upTo, after, failures, retryAt }: history is being fetched; the number tells its answer from an answer
    // to an earlier one
    this.repair = null;
    this.unhelped = 0; // repairs in a row after which no message came: then the next one waits
    this.seen = new Set();
    this.newEpoch = null; // what the gateway said on joining
    this.presence = null;
  }
}

export class Rules {
  constructor(options = {}) {
    this.options = { ...DEFAULTS, ...options };
    this.phase = "idle";
    this.attempts = 0;
    this.repairs = 0;
    this.rooms = new Map();
    // Rooms that this connection was asked to leave, how often, and that it has not confirmed: what comes of them was
    // sent before.
    this.leaving = new Map();
    this.deadlines = { connect: null, reconnect: null, heartbeat: null, silence: null, ack: null };
  }

  /** When the next `tick` is due, null when nothing waits for time. */
  get wakeAt() {
    let earliest = null;
    const look = (at) => {
      if (at !== null && (earliest === null || at < earliest)) earliest = at;
    };
    for (const at of Object.values(this.deadlines)) look(at);
    for (const room of this.rooms.values()) {
      look(room.retryAt);
      look(room.joinAt);
      if (room.repair !== null) look(room.repair.retryAt);
    }
    return earliest;
  }

  /** How far a room is done: what a later client passes as `resume`. */
  position(id) {
    const room = this.rooms.get(id);
    return room === undefined || room.done === null ? null : { sequence: room.done, epoch: room.epoch };
  }

  /** Take one event in. `now` is in milliseconds, `random` in [0, 1). */
  handle(event, now, random = 0.5) {
    const actions = [];
    this.now = now;
    this.random = random;
    this[`_on_${event.type}`](event, actions);
    return actions;
  }

  // ---- the connection

  _on_start(_event, actions) {
    if (this.phase === "idle" || this.phase === "closed") this._connect(actions);
  }

  /** Somebody knows that the network may be back: do not wait for the rest of the delay. */
  _on_wake(_event, actions) {
    if (this.phase === "waiting") this._connect(actions);
  }

  _connect(actions) {
    this.deadlines.reconnect = null;
    this.deadlines.connect = this.now + this.options.connectMs;
    this._enter("connecting", actions);
    actions.push({ type: "connect" });
  }

  _enter(phase, actions, more = {}) {
    this.phase = phase;
    actions.push({ type: "state", state: phase, ...more });
  }

  /** The gateway has greeted. A WebSocket may be opened only to be closed with a reason. */
  _on_opened(_event, actions) {
    if (this.phase !== "connecting") return;
    this.deadlines.connect = null;
    this.deadlines.heartbeat = this.now + this.options.heartbeatMs;
    this.deadlines.silence = this.now + this.options.silenceMs;
    this._enter("open", actions);
    for (const room of this.rooms.values()) this._join(room, actions);
  }

  _on_closed(event, actions) {
    if (this.phase === "closed" || this.phase === "idle" || this.phase === "waiting") return;
    this._disconnected(event.code ?? 1006, actions, event.reason);
  }

  _disconnected(code, actions, reason = "") {
    this._detach();
    const why = reason === "" ? {} : { reason };
    if (FINAL_CODES.has(code)) {
      this._enter("closed", actions, { code, ...why });
      return;
    }
    const delay = this._backoff(this.attempts);
    this.attempts += 1;
    this.deadlines.reconnect = this.now + delay;
    this._enter("waiting", actions, { retryMs: delay, ...why });
  }

  /** Nothing that belonged to this connection counts any more. */
  _detach() {
    for (const name of Object.keys(this.deadlines)) this.deadlines[name] = null;
    this.leaving.clear();
    for (const room of this.rooms.values()) this._out(room);
  }

  /** The gateway does not have this client in the room: it must be joined again. */
  _out(room) {
    room.isJoined = false;
    room.joinAt = null;
    room.acked = null;
    room.askedAfter = null;
    room.isBehind = false; // joining again asks for it
    room.repair = null;
  }

  /** Twice as long each time up to a cap, and the half of it by chance: clients that fell together come back apart. */
  _backoff(attempts) {
    const { backoffFirstMs, backoffMostMs } = this.options;
    return Math.round(Math.min(backoffMostMs, backoffFirstMs * 2 ** attempts) * (0.5 + this.random / 2));
  }

  _on_stop(_event, actions) {
    if (this.phase === "closed") return;
    if (this.phase === "open") {
      this._flush(actions);
      actions.push({ type: "close", code: 1000 });
    } else if (this.phase === "connecting") {
      actions.push({ type: "close", code: 1000 });
    }
    this._detach();
    this._enter("closed", actions, { code: 1000 });
  }

  _on_tick(_event, actions) {
    const { deadlines, now } = this;
    const isDue = (at) => at !== null && at <= now;
    if (isDue(deadlines.connect) || isDue(deadlines.silence)) {
      actions.push({ type: "close", code: 4000 });
      this._disconnected(4000, actions);
    } else if (isDue(deadlines.reconnect)) {
      this._connect(actions);
    }
    if (isDue(deadlines.heartbeat)) {
      deadlines.heartbeat = now + this.options.heartbeatMs;
      this._send({ type: "heartbeat", ts: now }, actions);
    }
    if (isDue(deadlines.ack)) this._flush(actions);
    for (const room of this.rooms.values()) {
      if (isDue(room.joinAt)) this._join(room, actions);
      if (isDue(room.retryAt)) {
        room.retryAt = null;
        this._pump(room, actions);
      }
      if (room.repair !== null && isDue(room.repair.retryAt)) this._fetch(room, actions);
    }
  }

  _send(frame, actions) {
    actions.push({ type: "send", frame });
  }

  // ---- rooms

  _on_join(event, actions) {
    if (this.rooms.has(event.room)) return;
    const room = new Room(event.room, event);
    this.rooms.set(room.id, room);
    if (this.phase === "open") this._join(room, actions);
  }

  _join(room, actions) {
    room.joinAt = null;
    const frame = { type: JOIN, conversationId: room.id };
    if (room.clientId !== null) frame.clientId = room.clientId;
    if (room.done !== null) {
      frame.resumeFromSeq = room.done;
      if (room.epoch !== null) frame.epoch = room.epoch;
    } else if (room.mode === "acked") {
      frame.resume = "acked";
    }
    this._send(frame, actions);
  }

  /** Its frames are ignored from now on, also when it is joined anew, until the gateway has confirmed. */
  _on_leave(event, actions) {
    const room = this.rooms.get(event.room);
    if (room === undefined) return;
    if (this.phase === "open") {
      this._ack(room, actions);
      this._send({ type: "leave_room", conversationId: room.id }, actions);
      this.leaving.set(room.id, (this.leaving.get(room.id) ?? 0) + 1);
    }
    this.rooms.delete(event.room);
  }

  _left(id) {
    const count = (this.leaving.get(id) ?? 1) - 1;
    if (count === 0) this.leaving.delete(id);
    else this.leaving.set(id, count);
  }

  _on_presence(event, actions) {
    const room = this.rooms.get(event.room);
    if (room === undefined) return;
    room.presence = { state: event.state };
    if (event.metadata !== undefined) room.presence.metadata = event.metadata;
    if (room.isJoined) this._sendPresence(room, actions);
  }

  _sendPresence(room, actions) {
    this._send({ type: "presence", conversationId: room.id, ...room.presence }, actions);
  }

  // ---- frames

  _on_frame({ frame }, actions) {
    if (this.phase !== "open") return;
    this.deadlines.silence = this.now + this.options.silenceMs;
    const { conversationId } = frame.control ?? frame;
    if (frame.type === "left") return this._left(conversationId);
    if (this.leaving.has(conversationId)) return;
    if (frame.control !== undefined) this._control(frame.control, actions);
    else if (frame.event !== undefined) this._envelope(frame, actions);
    else if (frame.type === "joined") this._joined(frame, actions);
    else if (frame.type === "error") this._refused(frame, actions);
  }

  /**
   * A join or a resume that failed for now, for a limit or because NATS does not answer, is tried again later; one that
   * is not allowed is not.
   */
  _refused({ conversationId = null, frame, code, message, retryable }, actions) {
    const room = this.rooms.get(conversationId);
    if (room === undefined || (frame !== JOIN && frame !== RESUME)) {
      actions.push({ type: "error", room: conversationId, message });
      return;
    }
    this._out(room);
    if (retryable) {
      const retryMs = this._backoff(room.refusals);
      room.joinAt = this.now + retryMs;
      room.refusals += 1;
      actions.push({ type: "room", room: room.id, state: "waiting", retryMs, code, reason: message });
    } else {
      actions.push({ type: "room", room: room.id, state: "refused", code, reason: message });
    }
  }

  _joined(frame, actions) {
    this.attempts = 0;
    const room = this.rooms.get(frame.conversationId);
    if (room === undefined) return;
    room.isJoined = true;
    room.refusals = 0;
    // Another epoch than ours is settled by the control frame that follows it.
    if (room.epoch === null || room.done === null) room.epoch = frame.epoch ?? null;
    room.newEpoch = frame.epoch ?? null;
    // A room that is only followed has its position from the moment of joining: the next connection goes on from here.
    if (room.done === null || room.isOpen) {
      room.received = room.done = frame.after;
      room.isOpen = room.done === 0 && room.newEpoch === null;
    }
    if (room.presence !== null) this._sendPresence(room, actions);
    actions.push({ type: "room", room: room.id, state: "joined", epoch: room.newEpoch });
  }

  _envelope(envelope, actions) {
    const room = this.rooms.get(envelope.conversationId);
    if (room === undefined) return;
    if (envelope.event.type !== MESSAGE) {
      actions.push({ type: "event", room: room.id, envelope });
      return;
    }
    if (room.isBehind) return; // it comes again once the queue is empty
    if (room.received !== null && envelope.sequence > room.received + 1) {
      if (room.repair !== null) return; // it comes again once history is there
      if (room.askedAfter !== room.received) {
        this._resume(room, actions);
      } else if (this.now >= room.askedAt + this.options.connectMs) {
        // Not on its way any more: the gateway cannot resume, and has not said so.
        this._repair(room, envelope.sequence - 1, actions);
      }
      return;
    }
    room.unhelped = 0;
    this._takeMessage(room, envelope);
    this._pump(room, actions);
  }

  _resume(room, actions) {
    room.askedAfter = room.received;
    room.askedAt = this.now;
    const frame = { type: RESUME, conversationId: room.id, sequence: room.received };
    if (room.epoch !== null) frame.epoch = room.epoch;
    this._send(frame, actions);
  }

  _takeMessage(room, envelope) {
    if (room.received !== null && envelope.sequence <= room.received) return;
    if (room.queue.length >= this.options.queueMost) {
      room.isBehind = true;
      return;
    }
    const id = envelope.event.messageId;
    const isKnown = room.seen.has(id);
    if (!isKnown) {
      room.seen.add(id);
      if (room.seen.size > this.options.seenMost) room.seen.delete(room.seen.values().next().value);
    }
    this._take(room, isKnown ? { sequence: envelope.sequence } : { sequence: envelope.sequence, envelope });
  }

  _take(room, item) {
    room.isOpen = false;
    room.received = item.sequence;
    room.queue.push(item);
  }

  // ---- the handler

  _pump(room, actions) {
    while (!room.isBusy && room.retryAt === null && room.queue.length > 0) {
      const [item] = room.queue;
      if (item.envelope === undefined && item.gap === undefined) {
        this._done(room, actions);
        continue;
      }
      room.isBusy = true;
      actions.push(
        item.gap === undefined
          ? { type: "deliver", room: room.id, sequence: item.sequence, envelope: item.envelope }
          : { type: "gap", room: room.id, sequence: item.sequence, gap: item.gap },
      );
    }
  }

  _done(room, actions) {
    room.done = room.queue.shift().sequence;
    room.failures = 0;
    if (room.isJoined) {
      const unsent = room.done - (room.acked ?? 0);
      if (unsent >= this.options.ackCount && room.acked !== null) this._ack(room, actions);
      else if (this.deadlines.ack === null) this.deadlines.ack = this.now + this.options.ackMs;
    }
    if (room.isBehind && room.queue.length === 0) {
      room.isBehind = false;
      if (this.phase === "open" && room.repair === null) this._resume(room, actions);
    }
  }

  _on_processed(event, actions) {
    const room = this.rooms.get(event.room);
    if (room === undefined || !room.isBusy || room.queue[0].sequence !== event.sequence) return;
    room.isBusy = false;
    this._done(room, actions);
    this._pump(room, actions);
  }

  /** The handler failed: the same message again, later. It is not acknowledged, and nothing passes it. */
  _on_failed(event, actions) {
    const room = this.rooms.get(event.room);
    if (room === undefined || !room.isBusy || room.queue[0].sequence !== event.sequence) return;
    room.isBusy = false;
    room.retryAt = this.now + this._backoff(room.failures);
    room.failures += 1;
    actions.push({ type: "error", room: room.id, message: event.message });
  }

  _flush(actions) {
    this.deadlines.ack = null;
    for (const room of this.rooms.values()) this._ack(room, actions);
  }

  _ack(room, actions) {
    if (!room.isJoined || room.done === null || room.done === 0 || room.done === room.acked) return;
    room.acked = room.done;
    this._send({ type: "ack", conversationId: room.id, sequence: room.done }, actions);
  }

  // ---- history: what the gateway cannot replay is fetched, and then the room is resumed

  _control(control, actions) {
    if (control.type !== "chat.ack.requested") return;
    for (const room of this.rooms.values()) {
      const isMeant = control.conversationId === undefined ? this.rooms.size === 1 : control.conversationId === room.id;
      if (!isMeant || room.repair !== null) continue;
      this._repair(room, control.upToSequence, actions);
    }
  }

  _repair(room, upTo, actions) {
    room.received ??= 0;
    room.done ??= 0;
    this.repairs += 1;
    room.repair = { number: this.repairs, upTo, after: room.received, failures: room.unhelped, retryAt: null };
    if (room.unhelped > 0) room.repair.retryAt = this.now + this._backoff(room.unhelped - 1);
    else this._fetch(room, actions);
    room.unhelped += 1;
  }

  _fetch(room, actions) {
    room.repair.retryAt = null;
    const { historyLimit: limit } = this.options;
    actions.push({ type: "fetch", room: room.id, after: room.repair.after, limit, repair: room.repair.number });
  }

  _on_history(event, actions) {
    const room = this._repaired(event);
    if (room === undefined) return;
    const { messages, next, complete } = event.page;
    for (const envelope of messages) {
      if (envelope.sequence <= room.received) continue;
      if (!complete && envelope.sequence > room.received + 1) {
        this._take(room, { sequence: envelope.sequence - 1, gap: gap(room.received, envelope.sequence) });
      }
      this._takeMessage(room, envelope);
    }
    if (next !== null && next !== undefined && next > room.repair.after && !room.isBehind) {
      room.repair.after = next;
      this._fetch(room, actions);
    } else {
      this._repairedUpTo(room, complete, actions);
    }
    this._pump(room, actions);
  }

  _repairedUpTo(room, complete, actions) {
    const { upTo } = room.repair;
    room.repair = null;
    room.epoch = room.newEpoch ?? room.epoch;
    if (room.isBehind) return; // resumed when the queue is empty; the gateway then asks for a fetch again
    if (room.received < upTo) {
      // Nobody has it. A complete history has nothing there either (numbers that a restored database gave up).
      const item = { sequence: upTo };
      if (!complete) item.gap = gap(room.received, upTo + 1);
      this._take(room, item);
    }
    this._resume(room, actions);
  }

  _on_historyFailed(event, actions) {
    const room = this._repaired(event);
    if (room === undefined) return;
    room.repair.retryAt = this.now + this._backoff(room.repair.failures);
    room.repair.failures += 1;
    actions.push({ type: "error", room: room.id, message: event.message });
  }

  _repaired(event) {
    const room = this.rooms.get(event.room);
    return room !== undefined && room.repair?.number === event.repair ? room : undefined;
  }
}

/** Sequences that nobody has any more: from..to, both missing. */
function gap(after, before) {
  return { from: after + 1, to: before - 1 };
}
