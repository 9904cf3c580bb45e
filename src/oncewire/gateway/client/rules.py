"""The rules of a client of rooms: events in, actions out, in the order in which they are to be done.

The same rules stand in JavaScript (clients/js/src/rules.js); a test runs both on the same events and compares.

What they promise for each room: messages reach the handler in the order of their sequence, each once, one at a time; a
message is acknowledged only after its handler is done with it; after a lost connection it goes on behind the last
message that was done. What history no longer has is told as a gap, in its place, and the room goes on.
"""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET

from oncewire.gateway.client.actions import (
    Action,
    Close,
    Connect,
    Deliver,
    Event,
    Fetch,
    Frame,
    Gap,
    Limits,
    Missing,
    Page,
    Phase,
    Position,
    PresenceState,
    Problem,
    RoomState,
    Send,
    State,
)
from oncewire.gateway.client.followed import Followed, Item, Repair

MESSAGE = "chat.message.created"
JOIN = "join_room"
RESUME = "resume_from_seq"
FINAL_CODES = frozenset({1002, 1003, 1007, 1008, 1009, 4400, 4401, 4403, 4404})
"""Close codes after which coming back is pointless: the server would refuse again."""
DEAD = 4000
"""The close code for a connection on which nothing is heard any more."""


class Rules:
    """Each event is a method. `now` is in milliseconds; `random` in [0, 1) spreads what would come together."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.phase: Phase = "idle"
        self._attempts = 0
        self._rooms: dict[str, Followed] = {}
        self._leaving: dict[str, int] = {}
        """Rooms that this connection was asked to leave, how often, and that it has not confirmed: what comes of them
        was sent before."""
        self._repairs = 0
        self._actions: list[Action] = []
        self._now = 0
        self._random = 0.5
        self._clear_deadlines()

    def _clear_deadlines(self) -> None:
        self._connect_by: int | None = None
        self._reconnect_at: int | None = None
        self._heartbeat_at: int | None = None
        self._silent_at: int | None = None
        self._ack_at: int | None = None

    @property
    def wake_at(self) -> int | None:
        """When the next `tick` is due, None when nothing waits for time."""
        waiting = [self._connect_by, self._reconnect_at, self._heartbeat_at, self._silent_at, self._ack_at]
        for room in self._rooms.values():
            waiting += [room.retry_at, room.join_at, room.repair.retry_at if room.repair else None]
        return min((at for at in waiting if at is not None), default=None)

    def position(self, name: str) -> Position | None:
        room = self._rooms.get(name)
        return None if room is None or room.done is None else Position(room.done, room.epoch)

    def _begin(self, now: int, random: float = 0.5) -> list[Action]:
        """Every event starts here: its time, its chance, and the list of what it leads to."""
        self._now, self._random, self._actions = now, random, []
        return self._actions

    # ---- the connection

    def start(self, now: int) -> list[Action]:
        actions = self._begin(now)
        if self.phase in ("idle", "closed"):
            self._connect()
        return actions

    def wake(self, now: int) -> list[Action]:
        """Somebody knows that the network may be back: do not wait for the rest of the delay."""
        actions = self._begin(now)
        if self.phase == "waiting":
            self._connect()
        return actions

    def _connect(self) -> None:
        self._reconnect_at = None
        self._connect_by = self._now + self.limits.connect_ms
        self._enter(State("connecting"))
        self._actions.append(Connect())

    def _enter(self, state: State) -> None:
        self.phase = state.state
        self._actions.append(state)

    def opened(self, now: int) -> list[Action]:
        """The gateway has greeted. A WebSocket may be opened only to be closed with a reason."""
        actions = self._begin(now)
        if self.phase == "connecting":
            self._connect_by = None
            self._heartbeat_at = now + self.limits.heartbeat_ms
            self._silent_at = now + self.limits.silence_ms
            self._enter(State("open"))
            for room in self._rooms.values():
                self._join(room)
        return actions

    def closed(self, now: int, random: float, code: int = 1006, reason: str = "") -> list[Action]:
        actions = self._begin(now, random)
        if self.phase in ("connecting", "open"):
            self._disconnected(code, reason)
        return actions

    def _detach(self) -> None:
        """Nothing that belonged to this connection counts any more."""
        self._clear_deadlines()
        self._leaving.clear()
        for room in self._rooms.values():
            self._out(room)

    def _out(self, room: Followed) -> None:
        """The gateway does not have this client in the room: it must be joined again."""
        room.is_joined = False
        room.join_at = None
        room.acked = None
        room.asked_after = None
        room.is_behind = False  # joining again asks for it
        room.repair = None

    def _disconnected(self, code: int, reason: str = "") -> None:
        self._detach()
        why = reason or UNSET
        if code in FINAL_CODES:
            self._enter(State("closed", code=code, reason=why))
            return
        delay = self._backoff(self._attempts)
        self._attempts += 1
        self._reconnect_at = self._now + delay
        self._enter(State("waiting", retry_ms=delay, reason=why))

    def _backoff(self, attempts: int) -> int:
        """Twice as long each time up to a cap, and the half of it by chance: who fell together comes back apart."""
        ceiling = min(self.limits.backoff_most_ms, self.limits.backoff_first_ms * 2 ** min(attempts, 30))
        return int(ceiling * (0.5 + self._random / 2) + 0.5)

    def stop(self, now: int) -> list[Action]:
        actions = self._begin(now)
        if self.phase == "closed":
            return actions
        if self.phase == "open":
            self._flush()
        if self.phase in ("open", "connecting"):
            actions.append(Close(1000))
        self._detach()
        self._enter(State("closed", code=1000))
        return actions

    def tick(self, now: int, random: float) -> list[Action]:
        """Time has passed: whatever is due."""
        actions = self._begin(now, random)
        if self._is_due(self._connect_by) or self._is_due(self._silent_at):
            actions.append(Close(DEAD))
            self._disconnected(DEAD)
        elif self._is_due(self._reconnect_at):
            self._connect()
        if self._is_due(self._heartbeat_at):
            self._heartbeat_at = now + self.limits.heartbeat_ms
            self._send({"type": "heartbeat", "ts": now})
        if self._is_due(self._ack_at):
            self._flush()
        for room in self._rooms.values():
            if self._is_due(room.join_at):
                self._join(room)
            if self._is_due(room.retry_at):
                room.retry_at = None
                self._pump(room)
            if room.repair is not None and self._is_due(room.repair.retry_at):
                self._fetch(room, room.repair)
        return actions

    def _is_due(self, at: int | None) -> bool:
        return at is not None and at <= self._now

    def _send(self, frame: Frame) -> None:
        self._actions.append(Send(frame))

    # ---- rooms

    def join(
        self,
        name: str,
        now: int,
        *,
        sequence: int | None = None,
        epoch: str | None = None,
        mode: Literal["live", "acked"] = "live",
        client_id: str | None = None,
    ) -> list[Action]:
        """Follow a room: behind `sequence`, behind what was acknowledged (`acked`), or from now on."""
        actions = self._begin(now)
        if name not in self._rooms:
            self._rooms[name] = Followed(name, sequence, epoch, mode, client_id)
            if self.phase == "open":
                self._join(self._rooms[name])
        return actions

    def _join(self, room: Followed) -> None:
        room.join_at = None
        frame: Frame = {"type": JOIN, "conversationId": room.name}
        if room.client_id is not None:
            frame["clientId"] = room.client_id
        if room.done is not None:
            frame["resumeFromSeq"] = room.done
            if room.epoch is not None:
                frame["epoch"] = room.epoch
        elif room.mode == "acked":
            frame["resume"] = "acked"
        self._send(frame)

    def leave(self, name: str, now: int) -> list[Action]:
        """Its frames are ignored from now on, also when it is joined anew, until the gateway has confirmed."""
        actions = self._begin(now)
        room = self._rooms.get(name)
        if room is not None:
            if self.phase == "open":
                self._ack(room)
                self._send({"type": "leave_room", "conversationId": name})
                self._leaving[name] = self._leaving.get(name, 0) + 1
            del self._rooms[name]
        return actions

    def _left(self, name: str) -> None:
        self._leaving[name] = self._leaving.get(name, 1) - 1
        if self._leaving[name] == 0:
            del self._leaving[name]

    def presence(self, name: str, state: PresenceState, now: int, metadata: Frame | None = None) -> list[Action]:
        """Said now, and again after each reconnect."""
        actions = self._begin(now)
        room = self._rooms.get(name)
        if room is not None:
            room.presence = {"state": state} | ({} if metadata is None else {"metadata": metadata})
            if room.is_joined:
                self._send_presence(room, room.presence)
        return actions

    def _send_presence(self, room: Followed, presence: Frame) -> None:
        self._send({"type": "presence", "conversationId": room.name, **presence})

    # ---- frames

    def frame(self, frame: Frame, now: int, random: float) -> list[Action]:
        actions = self._begin(now, random)
        if self.phase != "open":
            return actions
        self._silent_at = now + self.limits.silence_ms
        name = frame.get("control", frame).get("conversationId", "")
        if frame.get("type") == "left":
            self._left(name)
        elif name in self._leaving:
            return actions
        elif "control" in frame:
            self._control(frame["control"])
        elif "event" in frame:
            self._envelope(frame)
        elif frame.get("type") == "joined":
            self._joined(frame)
        elif frame.get("type") == "error":
            self._refused(frame)
        return actions

    def _refused(self, error: Frame) -> None:
        """A join or a resume that failed for now, for a limit or because NATS does not answer, is tried again later;
        one that is not allowed is not."""
        room = self._rooms.get(error.get("conversationId", ""))
        if room is None or error.get("frame") not in (JOIN, RESUME):
            self._actions.append(Problem(error.get("conversationId"), error["message"]))
            return
        self._out(room)
        why = {"code": error["code"], "reason": error["message"]}
        if error["retryable"]:
            delay = self._backoff(room.refusals)
            room.join_at = self._now + delay
            room.refusals += 1
            self._actions.append(RoomState(room.name, "waiting", retry_ms=delay, **why))
        else:
            self._actions.append(RoomState(room.name, "refused", **why))

    def _joined(self, frame: Frame) -> None:
        self._attempts = 0
        room = self._rooms.get(frame["conversationId"])
        if room is None:
            return
        room.is_joined = True
        room.refusals = 0
        room.new_epoch = frame.get("epoch")
        if room.epoch is None or room.done is None:  # another one than ours is settled by the control frame after it
            room.epoch = room.new_epoch
        if room.done is None or room.is_open:
            # A room that is only followed has its position from here: the next connection goes on behind it.
            room.received = room.done = frame["after"]
            room.is_open = room.done == 0 and room.new_epoch is None
        if room.presence is not None:
            self._send_presence(room, room.presence)
        self._actions.append(RoomState(room.name, "joined", epoch=room.new_epoch))

    def _envelope(self, envelope: Frame) -> None:
        room = self._rooms.get(envelope["conversationId"])
        if room is None:
            return
        if envelope["event"]["type"] != MESSAGE:
            self._actions.append(Event(room.name, envelope))
            return
        if room.is_behind:
            return  # it comes again once the queue is empty
        sequence: int = envelope["sequence"]
        if room.received is not None and sequence > room.received + 1:
            if room.repair is not None:
                return  # it comes again once history is there
            if room.asked_after != room.received:
                self._resume(room)
            elif self._now >= room.asked_at + self.limits.connect_ms:
                # Not on its way any more: the gateway cannot resume, and has not said so.
                self._repair(room, sequence - 1)
            return
        room.unhelped = 0
        self._take_message(room, envelope)
        self._pump(room)

    def _resume(self, room: Followed) -> None:
        room.asked_after, room.asked_at = room.received, self._now
        frame: Frame = {"type": RESUME, "conversationId": room.name, "sequence": room.received}
        if room.epoch is not None:
            frame["epoch"] = room.epoch
        self._send(frame)

    def _take_message(self, room: Followed, envelope: Frame) -> None:
        sequence: int = envelope["sequence"]
        if room.received is not None and sequence <= room.received:
            return
        if len(room.queue) >= self.limits.queue_most:
            room.is_behind = True
            return
        message_id: str = envelope["event"]["messageId"]
        is_known = message_id in room.seen
        if not is_known:
            room.seen[message_id] = None
            if len(room.seen) > self.limits.seen_most:
                del room.seen[next(iter(room.seen))]
        self._take(room, Item(sequence, None if is_known else envelope))

    def _take(self, room: Followed, item: Item) -> None:
        room.is_open = False
        room.received = item.sequence
        room.queue.append(item)

    # ---- the handler

    def _pump(self, room: Followed) -> None:
        while not room.is_busy and room.retry_at is None and room.queue:
            item = room.queue[0]
            if item.envelope is not None:
                self._actions.append(Deliver(room.name, item.sequence, item.envelope))
            elif item.gap is not None:
                self._actions.append(Gap(room.name, item.sequence, item.gap))
            else:
                self._done(room)
                continue
            room.is_busy = True

    def _done(self, room: Followed) -> None:
        room.done = room.queue.popleft().sequence
        room.failures = 0
        if room.is_joined:
            if room.acked is not None and room.done - room.acked >= self.limits.ack_count:
                self._ack(room)
            elif self._ack_at is None:
                self._ack_at = self._now + self.limits.ack_ms
        if room.is_behind and not room.queue:
            room.is_behind = False
            if self.phase == "open" and room.repair is None:
                self._resume(room)

    def processed(self, name: str, sequence: int, now: int) -> list[Action]:
        """The handler is done with a message, or with a gap."""
        actions = self._begin(now)
        room = self._busy(name, sequence)
        if room is not None:
            room.is_busy = False
            self._done(room)
            self._pump(room)
        return actions

    def failed(self, name: str, sequence: int, message: str, now: int, random: float) -> list[Action]:
        """The handler failed: the same message again, later. It is not acknowledged, and nothing passes it."""
        actions = self._begin(now, random)
        room = self._busy(name, sequence)
        if room is not None:
            room.is_busy = False
            room.retry_at = now + self._backoff(room.failures)
            room.failures += 1
            actions.append(Problem(name, message))
        return actions

    def _busy(self, name: str, sequence: int) -> Followed | None:
        room = self._rooms.get(name)
        return room if room is not None and room.is_busy and room.queue[0].sequence == sequence else None

    def _flush(self) -> None:
        self._ack_at = None
        for room in self._rooms.values():
            self._ack(room)

    def _ack(self, room: Followed) -> None:
        if room.is_joined and room.done and room.done != room.acked:
            room.acked = room.done
            self._send({"type": "ack", "conversationId": room.name, "sequence": room.done})

    # ---- history: what the gateway cannot replay is fetched, and then the room is resumed

    def _control(self, control: Frame) -> None:
        if control.get("type") != "chat.ack.requested":
            return
        for room in self._rooms.values():
            meant = control.get("conversationId")
            if room.repair is not None or (len(self._rooms) != 1 if meant is None else meant != room.name):
                continue
            self._repair(room, control["upToSequence"])

    def _repair(self, room: Followed, up_to: int) -> None:
        room.received = room.received or 0
        room.done = room.done or 0
        self._repairs += 1
        room.repair = Repair(self._repairs, up_to, room.received, room.unhelped)
        if room.unhelped > 0:
            room.repair.retry_at = self._now + self._backoff(room.unhelped - 1)
        else:
            self._fetch(room, room.repair)
        room.unhelped += 1

    def _fetch(self, room: Followed, repair: Repair) -> None:
        repair.retry_at = None
        self._actions.append(Fetch(room.name, repair.after, self.limits.history_limit, repair.number))

    def history(self, name: str, repair: int, page: Page, now: int) -> list[Action]:
        """A page of history has come."""
        actions = self._begin(now)
        room = self._rooms.get(name)
        if room is None or room.repair is None or room.repair.number != repair:
            return actions
        for envelope in page.messages:
            sequence: int = envelope["sequence"]
            received = room.received or 0
            if sequence <= received:
                continue
            if not page.complete and sequence > received + 1:
                self._take(room, Item(sequence - 1, gap=Missing(received + 1, sequence - 1)))
            self._take_message(room, envelope)
        if page.next is not None and page.next > room.repair.after and not room.is_behind:
            room.repair.after = page.next
            self._fetch(room, room.repair)
        else:
            self._repaired(room, room.repair.up_to, page.complete)
        self._pump(room)
        return actions

    def _repaired(self, room: Followed, up_to: int, is_complete: bool) -> None:
        room.repair = None
        if room.new_epoch is not None:
            room.epoch = room.new_epoch
        if room.is_behind:
            return  # resumed when the queue is empty; the gateway then asks for a fetch again
        received = room.received or 0
        if received < up_to:
            # Nobody has it. A complete history has nothing there either: numbers that a restored database gave up.
            self._take(room, Item(up_to, gap=None if is_complete else Missing(received + 1, up_to)))
        self._resume(room)

    def history_failed(self, name: str, repair: int, message: str, now: int, random: float) -> list[Action]:
        """History did not come: again, later."""
        actions = self._begin(now, random)
        room = self._rooms.get(name)
        if room is not None and room.repair is not None and room.repair.number == repair:
            room.repair.retry_at = now + self._backoff(room.repair.failures)
            room.repair.failures += 1
            actions.append(Problem(name, message))
        return actions
