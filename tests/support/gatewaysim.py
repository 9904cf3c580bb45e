"""Rooms simulated from a seed: a stream that is published to, trimmed, made anew and put back; nodes that lag and are
killed; clients that join, fall behind, lose their connection and resume. All orders; a failing seed replays exactly.

What must hold, for every client and whatever happens:
    each numbered message follows on the one before it, the first on the position that `joined` names
    an unnumbered envelope comes once, and not before the message whose sequence it carries
    when everything has calmed down, nobody is left in silence: all have the last message
"""

from __future__ import annotations

import json
import random
from collections import deque
from typing import Any

from oncewire.gateway.frames import Conversation, Envelope, read_envelope
from oncewire.gateway.rooms import NOTHING_ARCHIVED, Act, Archived, Fetch, Load, Member, Phase, Pump, Room, Say
from oncewire.gateway.slabs import Slabs
from tests.support.gateway import reads_as_envelope

CONVERSATION = "c"


def stored(place: int, sequence: int, epoch: str | None, name: str, *, is_numbered: bool) -> Envelope:
    kind = "chat.message.created" if is_numbered else "chat.stream.lifecycle"
    told = {"version": "2024-12-01", "conversationId": CONVERSATION, "sequence": sequence}
    body = json.dumps(told | {"event": {"type": kind, "messageId": name}}).encode()
    envelope = read_envelope(CONVERSATION, place, body, epoch)
    assert envelope is not None
    return envelope


def unframed(data: bytes) -> list[dict[str, Any]]:
    """The messages in what was written, by the letter of RFC 6455."""
    found = []
    while data:
        assert 0x81 == data[0]
        size, at = data[1], 2
        if size == 126:
            size, at = int.from_bytes(data[2:4], "big"), 4
        elif size == 127:
            size, at = int.from_bytes(data[2:10], "big"), 10
        found.append(json.loads(data[at : at + size]))
        data = data[at + size :]
    return found


class Log:
    """The conversation's subject, and the database behind it."""

    def __init__(self) -> None:
        self.places = 0
        self.stored: list[Envelope] = []
        self.made = 0
        self.database_last = 0
        self.epochs = 0
        self.epoch = "000"
        """They grow here, so that a newer one is known."""
        self.names = 0
        self.epoch_of: dict[str, str | None] = {}
        self.lost: set[str] = set()
        """Envelopes that went when the stream was made anew or went back."""

    def _name(self) -> str:
        self.names += 1
        return str(self.names)

    @property
    def last(self) -> int:
        return max((one.sequence for one in self.stored if one.is_numbered), default=0)

    def publish(self, sequence: int, epoch: str | None, *, is_numbered: bool = True) -> None:
        self.places += 1
        name = self._name()
        self.epoch_of[name] = epoch
        self.stored.append(stored(self.places, sequence, epoch, name, is_numbered=is_numbered))

    def lose(self, first: int) -> None:
        self.lost |= {one.message_id for one in self.stored[first:]}
        del self.stored[first:]

    def message(self) -> None:
        """As the relay does: the next number; above the stream's, under a new epoch, when the two disagree."""
        following = self.database_last + 1
        if any(one.is_numbered and one.sequence >= following for one in self.stored):
            self.epochs += 1
            self.epoch = f"{self.epochs:03}"
            following = self.last + 1
        self.database_last = following
        self.publish(following, self.epoch)


class Client:
    """One browser. It knows only what it was told."""

    def __init__(self, name: int) -> None:
        self.name = name
        self.node: Node | None = None
        self.member: Member | None = None
        self.connection = 0
        self.last: int | None = None
        """None until a live-only join is answered."""
        self.is_open = False
        """It joined a room without messages: a second `joined` says where it begins."""
        self.epoch: str | None = None
        self.asked_to_resume: int | None = None
        self.seen: set[str] = set()
        self.is_joined = False


class Node:
    """One gateway node: its reader, its room, and the readings that are under way."""

    def __init__(self, log: Log, backlog: int) -> None:
        self.made = log.made
        self.place = log.places
        self.room: Room | None = None
        self.backlog = backlog
        self.pumps: deque[Member] = deque()
        self.work: list[Load | Fetch] = []
        self.read: dict[Load | Fetch, tuple[list[Envelope], int]] = {}
        """What a reading has found, and has not told yet."""


class Simulation:
    """Runs a number of random steps; `problems` says what was wrong."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.chance = random.Random(seed)
        self.log = Log()
        self.backlog = self.chance.choice([0, 1, 3, 8])
        self.nodes = [Node(self.log, self.backlog) for _ in range(2)]
        self.clients = [Client(n) for n in range(4)]
        self.problems: list[str] = []
        self.has_archive = self.chance.random() < 0.5
        """Whether the nodes can ask the database."""
        self.slab_bytes = self.chance.choice([1, 600, 100_000])
        """What the nodes keep of what they have sent: sometimes next to nothing."""
        self.rare = self.chance.random() < 0.5
        """Whether streams are made anew, put back and databases restored in this run."""

    def run(self, steps: int) -> list[str]:
        for _ in range(steps):
            self._step()
            if self.problems:
                return self.problems
        self._calm_down()
        return self.problems

    def _wrong(self, what: str) -> None:
        self.problems.append(f"seed {self.seed}: {what}")

    # ---- what may happen

    def _step(self) -> None:
        common = [self._publish] * 6 + [self._deliver] * 8 + [self._answer] * 6 + [self._client_acts] * 5
        common += [self._pump] * 10
        rare = [
            self._trim,
            self._kill_one,
            self._buffer,
            self._buffer,
            self._unnumbered,
            self._unnumbered,
            self._repeat,
            self._fail,
        ]
        if self.rare and self.chance.random() < 0.03:
            self.chance.choice([self._make_anew, self._put_back, self._restore_database, self._skip])()
            return
        self.chance.choice(common + rare)()

    def _publish(self) -> None:
        for _ in range(self.chance.choice([1, 1, 1, 4])):
            self.log.message()

    def _unnumbered(self) -> None:
        """A producer may know of a message before the stream has it."""
        self.log.publish(max(0, self.log.database_last + self.chance.choice([-2, 0, 0, 1])), None, is_numbered=False)

    def _repeat(self) -> None:
        """At least once: a foreign publisher stores a message a second time."""
        if self.log.last:
            self.log.publish(self.log.last, self.log.epoch)

    def _skip(self) -> None:
        """A number that never reaches the stream."""
        self.log.database_last += 1

    def _trim(self) -> None:
        del self.log.stored[: self.chance.randrange(len(self.log.stored) + 1)]

    def _make_anew(self) -> None:
        self.log.lose(0)
        self.log.places = 0
        self.log.made += 1

    def _put_back(self) -> None:
        """Restored, or after a power cut: the end is gone, and its places are used again."""
        lost = self.chance.randrange(1, 4)
        for one in self.log.stored[-lost:]:
            self.log.places = min(self.log.places, one.place - 1)
        self.log.lose(max(0, len(self.log.stored) - lost))
        self.log.made += 1

    def _restore_database(self) -> None:
        self.log.database_last = max(0, self.log.database_last - self.chance.randrange(1, 4))

    def _kill_one(self) -> None:
        self._kill(self.chance.randrange(len(self.nodes)))

    def _kill(self, at: int) -> None:
        for client in self.clients:
            if client.node is self.nodes[at]:
                client.node = client.member = None
        self.nodes[at] = Node(self.log, self.backlog)

    # ---- a node

    def _deliver(self) -> None:
        """The reader of a node brings the next few."""
        node = self.chance.choice(self.nodes)
        if node.made != self.log.made:  # what the reader raises Corrupt for
            node.made, node.place = self.log.made, self.log.places
            if node.room is not None:
                self._perform(node, node.room.restart())
            return
        waiting = [one for one in self.log.stored if one.place > node.place]
        batch = waiting[: self.chance.randint(1, 5)]
        if batch:
            node.place = batch[-1].place
            if node.room is not None:
                self._perform(node, node.room.arrived(batch))

    def _answer(self) -> None:
        """The stream is read, or what was read earlier comes back."""
        node = self.chance.choice(self.nodes)
        if not node.work or node.room is None:
            return
        work = self.chance.choice(node.work)
        if work not in node.read:
            if node.made != self.log.made:
                return
            node.read[work] = self._read(work)
            if self.chance.random() < 0.5:
                return
        node.work.remove(work)
        found, end = node.read.pop(work)
        if isinstance(work, Fetch):
            self._perform(node, node.room.fetched(work, found))
        elif node.room.is_waiting_for(work):
            self._perform(node, node.room.loaded(found, end, self._archived(work, found)))

    def _fail(self) -> None:
        """The stream cannot be read: who waits for that is told, and comes again."""
        node = self.chance.choice(self.nodes)
        if node.room is None or not any(isinstance(work, Load) for work in node.work):
            return
        refused = [joining.member for joining in node.room.refuse_joining()]
        for client in self.clients:
            if client.member in refused:
                client.node = client.member = None
        if node.room.is_empty:
            node.room, node.work, node.read = None, [], {}
            node.pumps.clear()

    def _archived(self, load: Load, found: list[Envelope]) -> Archived:
        """Asked for after the stream was found empty: messages may have come in between."""
        is_asked = self.has_archive and load.after is None and not any(one.is_numbered for one in found)
        return Archived(self.log.database_last, self.log.epoch) if is_asked else NOTHING_ARCHIVED

    def _read(self, work: Load | Fetch) -> tuple[list[Envelope], int]:
        log = self.log.stored
        if isinstance(work, Fetch):
            above = [one for one in log if one.is_numbered and one.sequence > work.after and work.place < one.place]
            return above[: self.chance.randint(1, 6)], 0  # it may reach beyond what the room has
        end = max(work.up_to, log[-1].place if log else 0)
        if work.after is not None:
            return [one for one in log if one.place > work.after], end
        numbered = [one.place for one in log if one.is_numbered][-max(1, self.backlog) :]
        return [one for one in log if numbered and one.place >= numbered[0]], end

    def _perform(self, node: Node, acts: list[Act]) -> None:
        for act in acts:
            if isinstance(act, Say):
                for write in act.writes:
                    write(act.data)
            elif isinstance(act, Pump):
                node.pumps.append(act.member)
            else:
                node.work.append(act)

    def _pump(self) -> None:
        """A step for a few members, in turn."""
        node = self.chance.choice(self.nodes)
        for _ in range(min(len(node.pumps), self.chance.randint(1, 8))):
            member = node.pumps.popleft()
            step = node.room.step(member) if node.room is not None else None
            if step is not None:
                self._perform(node, [step])
                node.pumps.append(member)

    # ---- a client

    def _client_acts(self) -> None:
        client = self.chance.choice(self.clients)
        if client.node is None:
            self._connect(client)
        elif client.asked_to_resume is not None:
            self._resume(client)
        elif self.chance.random() < 0.2:
            self._disconnect(client)
        elif client.last is not None and self.chance.random() < 0.2:
            client.asked_to_resume = max(0, client.last - self.chance.choice([0, 0, 1, 6]))
            self._resume(client)  # it wants some messages again

    def _connect(self, client: Client) -> None:
        node = self.chance.choice(self.nodes)
        client.node = node
        client.connection += 1
        client.seen = set()
        client.asked_to_resume = None
        client.is_joined = False
        number = client.connection

        def write(data: bytes) -> None:
            if client.connection == number and client.node is node:
                self._receive(client, data)
            else:
                self._wrong(f"client {client.name} was written to after it had left")

        client.member = Member(client, write)
        if node.room is None:
            node.room = Room(Conversation(CONVERSATION), self.backlog, Slabs(self.slab_bytes))
            self._perform(node, node.room.open())
        is_live_only = client.last is None or self.chance.random() < 0.1
        if is_live_only:
            client.last = client.epoch = None
            client.is_open = True
        epoch = client.epoch if self.chance.random() < 0.9 and not is_live_only else None
        self._perform(node, node.room.join(client.member, client.last, epoch))

    def _disconnect(self, client: Client) -> None:
        assert client.node is not None
        assert client.node.room is not None
        assert client.member is not None
        client.node.room.leave(client.member)
        client.node = client.member = None

    def _resume(self, client: Client) -> None:
        """After REST: the history up to there is known from elsewhere."""
        assert client.node is not None
        assert client.node.room is not None
        assert client.member is not None
        client.last, client.asked_to_resume, client.is_open = client.asked_to_resume, None, False
        acts = client.node.room.join(client.member, client.last, client.epoch, is_resume=True)
        self._perform(client.node, acts)

    def _buffer(self) -> None:
        """A client's buffer is full, or has been taken."""
        client = self.chance.choice(self.clients)
        if client.node is None or client.node.room is None or client.member is None:
            return
        if client.member.is_full:
            self._perform(client.node, client.node.room.drained(client.member))
        else:
            client.node.room.full(client.member)

    def _receive(self, client: Client, data: bytes) -> None:
        for frame in unframed(data):
            if reads_as_envelope(frame) and "event" not in frame:
                self._wrong(f"the reference client takes {frame} for an envelope")
            if "control" in frame:
                self._check_control(client)
                client.asked_to_resume = frame["control"]["upToSequence"]
                client.epoch = frame["control"]["epoch"]
            elif frame.get("type") == "joined":
                client.epoch = frame["epoch"] or client.epoch
                client.is_joined = True
                if client.last is None or client.is_open:
                    client.last = frame["after"]
                    client.is_open = (0, None) == (frame["after"], frame["epoch"])
            elif client.asked_to_resume is not None:
                self._wrong(f"client {client.name} got {frame['sequence']} while it was asked to resume")
            elif not client.is_joined:
                self._wrong(f"client {client.name} got {frame['sequence']} before it was in the room")
            elif frame["event"]["type"] == "chat.message.created":
                self._numbered(client, frame)
            else:
                self._other(client, frame)

    def _check_control(self, client: Client) -> None:
        """Nobody is sent elsewhere for what the stream has."""
        kept = {one.sequence for one in self.log.stored if one.is_numbered}
        lacks = set(range((client.last or 0) + 1, self.log.database_last + 1))
        if not self.rare and client.last is not None and lacks and kept >= lacks:
            self._wrong(f"client {client.name} is to fetch what the stream has behind {client.last}")

    def _numbered(self, client: Client, frame: dict[str, Any]) -> None:
        assert client.node is not None
        if frame["event"]["messageId"] in self.log.lost and client.node.made == self.log.made:
            self._wrong(f"client {client.name} got {frame['sequence']} of a stream that is no more")
        if client.last is None or frame["sequence"] != client.last + 1:
            self._wrong(f"client {client.name} got {frame['sequence']} after {client.last}")
        epoch = self.log.epoch_of[frame["event"]["messageId"]]
        if epoch is not None and client.epoch is not None and epoch > client.epoch:
            self._wrong(f"client {client.name} got {frame['sequence']} of a history that it was not told of")
        client.last, client.is_open = frame["sequence"], False

    def _other(self, client: Client, frame: dict[str, Any]) -> None:
        name = frame["event"]["messageId"]
        if name in client.seen:
            self._wrong(f"client {client.name} got envelope {name} twice")
        client.seen.add(name)
        if client.last is not None and frame["sequence"] > client.last:
            self._wrong(f"client {client.name} got an envelope of {frame['sequence']} before that message")

    # ---- the end

    def _calm_down(self) -> None:
        """Nothing more happens but what was begun: then everybody must have the last message. Nodes with an archive
        know it from there too, when it was said long ago and is gone from the stream."""
        if self.rare or not self.has_archive or self.chance.random() < 0.5:
            self.log.message()
            self.log.message()
        else:
            for at in range(len(self.nodes)):
                self._kill(at)
            del self.log.stored[: self.chance.choice([0, len(self.log.stored)])]
        for _ in range(300):
            for _ in range(10):
                self._deliver()
                self._answer()
                self._pump()
            for client in self.clients:
                if client.node is None:
                    self._connect(client)
                elif client.asked_to_resume is not None:
                    self._resume(client)
                elif client.member is not None and client.member.is_full:
                    assert client.node.room is not None
                    self._perform(client.node, client.node.room.drained(client.member))
            if self.problems or self._is_calm():
                break
        for client in self.clients:
            member = client.member
            if not self.problems and not self._has_all(client):
                phase = member.phase if member else None
                self._wrong(f"client {client.name} is left at {client.last} of {self.log.database_last}, {phase}")

    def _has_all(self, client: Client) -> bool:
        is_live = client.member is not None and client.member.phase is Phase.LIVE
        return is_live and client.last == self.log.database_last

    def _is_calm(self) -> bool:
        is_read = all(node.made == self.log.made and node.place >= self.log.places for node in self.nodes)
        is_read = is_read and not any(node.pumps for node in self.nodes)
        return is_read and not any(node.work for node in self.nodes) and all(map(self._has_all, self.clients))
