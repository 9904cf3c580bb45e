"""A client's rules against a server that fails in every way it may: one seed, one story."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import msgspec

from oncewire.gateway.client.actions import Action, Limits, Page
from oncewire.gateway.client.rules import Rules

ROOM = "a"
LIMITS = {"queueMost": 8, "seenMost": 20, "historyLimit": 3, "ackCount": 4}


def envelope(sequence: int, *, message_id: str = "", replay: bool = False) -> dict[str, Any]:
    event = {"type": "chat.message.created", "messageId": message_id or f"m{sequence}", "content": str(sequence)}
    return {"conversationId": ROOM, "sequence": sequence, "event": event} | ({"replay": True} if replay else {})


def tell(rules: Rules, event: dict[str, Any], now: int, chance: float) -> list[Action]:
    """The event in the words of the JavaScript rules, as a call of ours."""
    kind, room = event["type"], event.get("room", "")
    match kind:
        case "start" | "wake" | "opened" | "stop":
            return list(getattr(rules, kind)(now))
        case "closed":
            return rules.closed(now, chance, event["code"], event.get("reason", ""))
        case "tick":
            return rules.tick(now, chance)
        case "join":
            return rules.join(
                room, now, sequence=event.get("sequence"), epoch=event.get("epoch"), mode=event.get("mode", "live"),
                client_id=event.get("clientId"),
            )  # fmt: skip
        case "leave":
            return rules.leave(room, now)
        case "presence":
            return rules.presence(room, event["state"], now, event.get("metadata"))
        case "frame":
            return rules.frame(event["frame"], now, chance)
        case "processed":
            return rules.processed(room, event["sequence"], now)
        case "failed":
            return rules.failed(room, event["sequence"], event["message"], now, chance)
        case "history":
            return rules.history(room, event["repair"], msgspec.convert(event["page"], Page), now)
        case "historyFailed":
            return rules.history_failed(room, event["repair"], event["message"], now, chance)
    raise AssertionError(kind)


def limits(options: dict[str, int]) -> Limits:
    return msgspec.convert(options, Limits)


@dataclass
class Story:
    """A room with numbered messages, of which the stream keeps the last ones and REST history all or fewer."""

    seed: int
    is_complete: bool = True
    is_live: bool = False
    """The room is joined while it has no message: for what comes from then on."""
    steps: list[dict[str, Any]] = field(default_factory=list)
    results: list[dict[str, Any]] = field(default_factory=list)
    handled: list[int] = field(default_factory=list)
    gaps: list[tuple[int, int]] = field(default_factory=list)
    acks: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.rules = Rules(limits(LIMITS))
        self.now = 1_000
        self.last = self.chance.randrange(0, 30)
        self.first_kept = 1
        self.first_known = 1
        self.is_empty = self.is_live
        if self.is_live:
            self.last = 0 if self.is_complete else self.chance.choice([0, 7])  # lost long ago, and nobody knows
            self.first_kept = self.first_known = self.last + 1
        self.began = self.last
        """Behind what the client follows the room: what it was told first, or where that room really began."""
        self.is_told = False
        self.is_up = False
        self.server_last: int | None = None
        self.outgoing: list[dict[str, Any]] = []
        self.in_hand: list[tuple[int, dict[str, Any] | None]] = []
        self.fetches: list[dict[str, Any]] = []
        self.refuses = 0.15
        """How often a join or a resume cannot be answered."""

    # ---- the client's side

    def tell(self, event: dict[str, Any]) -> None:
        chance = round(self.chance.random(), 3)
        if not self.is_told and event.get("frame", {}).get("type") == "joined":
            self.is_told, self.began = True, max(self.began, event["frame"]["after"])
        self.steps.append({"event": event, "now": self.now, "random": chance})
        actions = msgspec.to_builtins(tell(self.rules, event, self.now, chance))
        position = msgspec.to_builtins(self.rules.position(ROOM))
        self.results.append(
            {"actions": actions, "wakeAt": self.rules.wake_at, "phase": self.rules.phase, "position": position}
        )
        for action in actions:
            self.act(action)

    def act(self, action: dict[str, Any]) -> None:
        match action["type"]:
            case "connect":
                self.outgoing, self.server_last = [], None
            case "close":
                self.is_up = False
            case "send" if self.is_up:
                self.serve(action["frame"])
            case "deliver":
                self.in_hand.append((action["sequence"], action["envelope"]))
            case "gap":
                self.in_hand.append((action["sequence"], None))
                self.gaps.append((action["gap"]["from"], action["gap"]["to"]))
            case "fetch":
                self.fetches.append(action)

    def finish(self, *, fails: bool) -> None:
        sequence, message = self.in_hand.pop()
        if fails:
            self.tell({"type": "failed", "room": ROOM, "sequence": sequence, "message": "no"})
            if message is None:
                self.gaps.pop()
            return
        if message is not None:
            self.handled.append(sequence)
        self.tell({"type": "processed", "room": ROOM, "sequence": sequence})

    # ---- the gateway's side

    def serve(self, frame: dict[str, Any]) -> None:
        match frame["type"]:
            case "join_room" | "resume_from_seq" if self.chance.random() < self.refuses:
                self.server_last = None
                error = {"type": "error", "conversationId": ROOM, "frame": frame["type"], "code": "timed_out"}
                self.outgoing.append(error | {"message": "NATS is away", "retryable": True})
            case "join_room":
                after = frame.get("resumeFromSeq", 0 if self.is_empty else self.last)
                self.joined(None if self.is_empty else "e1", after)
                self.resume(after)
            case "resume_from_seq":
                self.resume(frame["sequence"])
            case "heartbeat":
                self.outgoing.append(frame)
            case "leave_room":
                self.server_last = None
                self.outgoing.append({"type": "left", "conversationId": ROOM})
            case "ack":
                self.acks.append((frame["sequence"], self.handled[-1] if self.handled else 0))

    def joined(self, epoch: str | None, after: int) -> None:
        self.outgoing.append({"type": "joined", "conversationId": ROOM, "epoch": epoch, "after": after})

    def resume(self, after: int) -> None:
        if self.is_empty:
            self.server_last = self.last
            return
        if after + 1 < self.first_kept:
            control = {"type": "chat.ack.requested", "conversationId": ROOM, "upToSequence": self.first_kept - 1}
            self.outgoing.append({"control": control})
            self.server_last = None
            return
        self.server_last = after
        self.forward(replay=True)

    def forward(self, *, replay: bool = False) -> None:
        while self.server_last is not None and self.server_last < self.last:
            self.server_last += 1
            self.outgoing.append(envelope(self.server_last, replay=replay))

    def say(self) -> None:
        """A message. The first of a room that was empty tells its members where they began."""
        if self.is_empty and self.server_last is not None:
            self.joined("e1", self.last)
        self.is_empty = False
        self.last += 1
        self.forward()

    def answer_fetch(self) -> None:
        asked = self.fetches.pop(0)
        first = max(asked["after"] + 1, 1 if self.is_complete else self.first_known)
        numbers = list(range(first, self.last + 1))[: asked["limit"]]
        following = numbers[-1] if numbers and numbers[-1] < self.last else None
        page = {"messages": [envelope(n) for n in numbers], "next": following, "complete": self.is_complete}
        self.tell({"type": "history", "room": ROOM, "repair": asked["repair"], "page": page})

    # ---- what happens, at random

    def step(self) -> None:
        self.now += self.chance.randrange(0, 400)
        choice = self.chance.random()
        if self.rules.wake_at is not None and self.rules.wake_at <= self.now:
            self.tell({"type": "tick"})
        elif not self.is_up:
            self.reconnect(choice)
        elif choice < 0.02:
            self.is_up = False
            self.tell({"type": "closed", "code": 4001, "reason": "the credential is no longer good"})
        elif choice < 0.3:
            self.say()
        elif choice < 0.33:
            self.first_kept = self.chance.randrange(self.first_kept, self.last + 2)
            self.first_known = self.chance.randrange(self.first_known, self.first_kept + 1)
        elif choice < 0.36 and self.outgoing:
            self.mangle()
        elif choice < 0.37:
            self.come_again()
        elif choice < 0.6 and self.in_hand:
            self.finish(fails=self.chance.random() < 0.1)
        elif choice < 0.65 and self.fetches:
            self.fail_or_answer()
        elif self.outgoing:
            self.tell({"type": "frame", "frame": self.outgoing.pop(0)})

    def come_again(self) -> None:
        """It leaves the room, and joins it again behind what is done, before the gateway has answered."""
        position = self.rules.position(ROOM)
        if position is None or not self.is_told:
            return
        self.tell({"type": "leave", "room": ROOM})
        self.in_hand.clear()  # the handler's word counts no more
        self.gaps = [gap for gap in self.gaps if gap[1] <= position.sequence]
        again = {"sequence": position.sequence, "epoch": position.epoch, "clientId": None, "mode": "live"}
        self.tell({"type": "join", "room": ROOM, **again})

    def reconnect(self, choice: float) -> None:
        phase = self.rules.phase
        if phase == "connecting" and choice < 0.8:
            self.is_up = True
            self.tell({"type": "opened"})
        elif phase == "connecting":
            self.tell({"type": "closed", "code": 1006})
        elif phase == "waiting" and choice < 0.1:
            self.tell({"type": "wake"})
        elif self.in_hand:
            self.finish(fails=False)
        elif self.rules.wake_at is not None:
            self.now = self.rules.wake_at

    def fail_or_answer(self) -> None:
        if self.chance.random() < 0.2:
            asked = self.fetches.pop(0)
            self.tell({"type": "historyFailed", "room": ROOM, "repair": asked["repair"], "message": "503"})
        else:
            self.answer_fetch()

    def mangle(self) -> None:
        """What a worse server, or a proxy, might do: send one twice, or again later, or events of other kinds."""
        frame = self.chance.choice(self.outgoing)
        if "event" in frame:
            self.outgoing.insert(self.chance.randrange(len(self.outgoing) + 1), frame)
        presence = {"type": "chat.presence", "userId": "u", "state": "online"}
        self.outgoing.append({"conversationId": ROOM, "sequence": self.last, "event": presence})

    def settle(self) -> None:
        """Nothing fails any more: everything that is known arrives."""
        self.refuses = 0.0
        quiet = 0
        while quiet < 8:  # so many heartbeats outlast every delay
            quiet += 1
            if self.in_hand:
                self.finish(fails=False)
            elif self.fetches:
                self.answer_fetch()
            elif self.rules.phase == "connecting":
                self.is_up = True
                self.tell({"type": "opened"})
            elif self.is_up and self.outgoing:
                frame = self.outgoing.pop(0)
                self.tell({"type": "frame", "frame": frame})
                if frame.get("type") == "heartbeat":
                    continue
            else:
                self.now = self.rules.wake_at or self.now
                self.tell({"type": "tick"})
                continue
            quiet = 0
            assert len(self.steps) < 5_000, f"seed {self.seed} does not come to rest"

    def run(self, steps: int = 250) -> Story:
        start = None if self.is_live else 0
        self.tell({"type": "join", "room": ROOM, "sequence": start, "clientId": None, "mode": "live"})
        self.tell({"type": "start"})
        for _ in range(steps):
            self.step()
        self.settle()
        return self
