"""One gateway node: follows the stream, and does what the rules of rooms and channels say.

A node keeps nothing that another needs: any number of them serve the same conversations, each with one ordered reader
over everything that flows on `chat.>`. What nobody here listens to is dropped at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, Final

from oncewire._ground.contracts.headers import EPOCH, NODE, TENANT
from oncewire._ground.contracts.subjects import CHAT_PRESENCE_PREFIX
from oncewire._ground.errors import Corrupt, NotFound, OncewireError, Overloaded, Unavailable
from oncewire._ground.jetstream import Client, Message, Reader, Start, parse_reply
from oncewire._ground.jetstream.protocol import parse_headers
from oncewire._ground.metrics import Histogram
from oncewire._ground.tracing import Tracer
from oncewire.gateway import traces
from oncewire.gateway.channels import Channel, Event, Listener, Look
from oncewire.gateway.frames import LIFECYCLE, Conversation, Envelope, read_envelope
from oncewire.gateway.history import Archive, History
from oncewire.gateway.limits import Limits
from oncewire.gateway.rooms import Act, Fetch, Load, Member, Pump, Room, Say
from oncewire.gateway.slabs import Slabs
from oncewire.gateway.tokens import Tokens, producer_lost, sse

BUSY_WRITES: Final = 500
"""Writes in one turn from which on the next turn waits a little, so that more goes into each write."""
COALESCE_S: Final = 0.005
HEARTBEAT_S: Final = 2.0
"""How often the server says that it has nothing new: two are missed, and this node is not ready."""
RETRY_S: Final = 0.25
RETRY_S_MAX: Final = 2.0
READS_AT_ONCE_MAX: Final = 8
"""Readings of the stream for rooms; the others wait for their turn."""
PUMP_STEPS: Final = 32
"""Writes to members that are behind before everybody else has a turn."""
LINGER_S: Final = 30.0
"""How long a room without members keeps its backlog: clients that lost their connection come back."""

LOOK_S: Final = 1.0
STORED_IDS_MAX: Final = 1_000
EVENT_ID: Final = re.compile(r"([0-9]{1,19})-([0-9]{1,18})")
"""When the stream stored an event, and at which place."""

_EPOCH_LINE: Final = b"\r\n" + EPOCH.encode() + b":"

log = logging.getLogger("oncewire.gateway")


class Node:
    """See the module's head."""

    def __init__(
        self,
        client: Client,
        limits: Limits,
        *,
        events_prefix: str,
        tokens_prefix: str,
        archive: Archive | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.client = client
        self._archive = archive
        self._tracer = tracer
        self.limits = limits
        self.id = secrets.token_hex(8)
        self.rooms: dict[Conversation, Room] = {}
        self.channels: dict[Conversation, Channel] = {}
        self.counts: Counter[str] = Counter()
        self.delivery = Histogram()
        self._listened: Counter[str] = Counter()
        """Rooms and channels by the id of their conversation."""
        self._knows_tenants = False
        self._problem = "has not begun to read"
        self._reader: Reader | None = None
        self.stream = ""
        self._life = 0
        """How often the stream was begun anew: what was read before counts no more."""
        self._stored: dict[str, bool] = {}
        """Ids of events, by whether the stream has them."""
        self.place = 0
        """The stream sequence up to which everything has been handed to rooms and channels."""
        self._place_ns = 0
        self._events = events_prefix
        self._tokens = tokens_prefix
        self._prefixes = {f"{events_prefix}.".encode(): 0, f"{tokens_prefix}.".encode(): 1}
        self._prefixes[f"{CHAT_PRESENCE_PREFIX}.".encode()] = 2
        self.on_presence: Callable[[Conversation, str, str, str], None] = lambda *_: None
        """Told of each presence in a room: by which node, of whom, and how they are there."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._reading: asyncio.Task[None] | None = None
        self._is_begun = asyncio.Event()
        self._lingering: dict[Conversation, float] = {}
        self._turns = asyncio.Semaphore(READS_AT_ONCE_MAX)
        self._slabs = Slabs()
        self._pumps: deque[tuple[Room, Member]] = deque()
        self._is_pumping = False

    # ---- from start to stop

    async def start(self) -> None:
        """Begin to follow the stream; returns when it does. NotFound when there is none."""
        await self._find_stream()
        self._reading = asyncio.create_task(self._read(), name="oncewire-gateway")
        begun = asyncio.create_task(self._is_begun.wait())
        done, _ = await asyncio.wait({self._reading, begun}, return_when=asyncio.FIRST_COMPLETED)
        if self._reading in done:
            begun.cancel()
            await self._reading

    @property
    def problem(self) -> str:
        """Why this node does not follow the stream, '' when it does."""
        if not self._problem and self._reader is not None and not self._reader.is_following:
            return f"nothing is heard of stream {self.stream}: NATS is away, or JetStream does not answer"
        return self._problem

    async def stop(self) -> None:
        tasks = [*self._tasks, *([self._reading] if self._reading else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run beside the rest, until the node stops."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task of the gateway failed", exc_info=error)

    async def _find_stream(self) -> None:
        subject = f"{self._events}.*"
        names = (await self.client.api("STREAM.NAMES", {"subject": subject})).get("streams") or []
        if not names:
            raise NotFound(f"no stream holds {subject}", hint="Run `oncewire topology apply --service gateway`.")
        self.stream = names[0]
        self.history = History(self.client, self.stream, self._events, self._archive)
        self.tokens = Tokens(self.client, self.history, self._tokens)

    # ---- following the stream

    async def _read(self) -> None:
        """For as long as the node lives. A stream that was made anew or went back is begun anew; clients are told."""
        delay = RETRY_S
        subjects = [f"{prefix}.*" for prefix in (self._events, self._tokens, CHAT_PRESENCE_PREFIX)]
        while True:
            try:
                start = Start(is_new_only=True)
                reading = self.client.read(self.stream, subjects=subjects, start=start, heartbeat_s=HEARTBEAT_S)
                async with reading as reader:
                    self._begin(reader)
                    delay = RETRY_S
                    await self._follow(reader)
            except (Corrupt, NotFound) as error:
                self._problem = error.message
                log.warning("%s: rooms begin anew", error.message)
            except Unavailable as error:
                self._problem = error.message
            await asyncio.sleep(delay)
            delay = min(delay * 2, RETRY_S_MAX)

    def _begin(self, reader: Reader) -> None:
        self._life += 1
        self._stored.clear()
        self.place, self._place_ns = reader.sequence, 0
        self._problem, self._reader = "", reader
        for channel in list(self.channels.values()):
            self._end_channel(channel)
        for room in list(self.rooms.values()):
            self.perform(room, room.restart())
        self._is_begun.set()

    async def _follow(self, reader: Reader) -> None:
        restarts = reader.restarts
        while True:
            messages = await reader.fetch()
            if reader.restarts != restarts:
                restarts = reader.restarts
                await self._check_same()
            if messages and self._hand_out(messages) > BUSY_WRITES:
                await asyncio.sleep(COALESCE_S)

    async def _check_same(self) -> None:
        """After an outage: is what we read last still what stands there? A restored stream uses sequences again."""
        if not self._place_ns:
            return
        with contextlib.suppress(NotFound):
            found = await self.client.get(self.stream, self.place)
            if found.timestamp_ns != self._place_ns:
                raise Corrupt(f"stream {self.stream} holds another message at {self.place} than it did: it went back")

    def _hand_out(self, messages: Sequence[Message]) -> int:
        """Give each room and channel what is theirs, in order; how many writes that took."""
        rooms: dict[Conversation, list[Envelope]] = {}
        channels: dict[Conversation, list[Event]] = {}
        began_ns = time.time_ns() if self._tracer is not None else 0
        for message in messages:
            subject = message.subject_raw
            cut = subject.rfind(b".") + 1
            kind = self._prefixes.get(subject[:cut])
            if kind is None:
                continue
            for conversation in self._heard(subject[cut:].decode("utf-8", "replace"), message):
                self._sort(conversation, kind, message, rooms, channels)
        last = parse_reply(messages[-1].reply)
        self.place, self._place_ns = last.sequence, last.timestamp_ns
        before = self.counts["writes"]
        for conversation, envelopes in rooms.items():
            room = self.rooms[conversation]
            self.perform(room, room.arrived(envelopes))
        for conversation, events in channels.items():
            self._tell(self.channels[conversation], events)
        self.counts["handed_out"] += len(messages)
        now_ns = time.time_ns()
        self.delivery.observe((now_ns - last.timestamp_ns) / 1e9, len(messages))
        if self._tracer is not None:
            traces.tell(self._tracer, self.id, [one for one in messages if self._is_heard(one)], (began_ns, now_ns))
        return self.counts["writes"] - before

    def _is_heard(self, message: Message) -> bool:
        return message.subject.rpartition(".")[2] in self._listened

    def _heard(self, conversation_id: str, message: Message) -> Sequence[Conversation]:
        """As what it may be heard here: a front that knows its clients lets each hear their tenant's alone."""
        if conversation_id not in self._listened:
            return ()
        if not self._knows_tenants:
            return (Conversation(conversation_id),)
        tenant = parse_headers(message.header_raw).get(TENANT, "") if message.header_raw else ""
        return (Conversation(conversation_id, tenant),)

    def _listen_to(self, conversation: Conversation) -> None:
        self._listened[conversation.id] += 1
        self._knows_tenants = conversation.tenant is not None

    def _no_longer(self, conversation: Conversation) -> None:
        self._listened[conversation.id] -= 1
        if not self._listened[conversation.id]:
            del self._listened[conversation.id]

    def _sort(
        self,
        conversation: Conversation,
        kind: int,
        message: Message,
        rooms: dict[Conversation, list[Envelope]],
        channels: dict[Conversation, list[Event]],
    ) -> None:
        is_wanted = conversation in (self.channels if kind == 1 else self.rooms)
        if not is_wanted and not (kind == 0 and conversation in self.channels):
            return
        envelope = self._envelope(conversation.id, message)
        if envelope is None:
            self.counts["refused_bodies"] += 1
            return
        if kind != 1 and conversation in self.rooms:
            rooms.setdefault(conversation, []).append(envelope)
        if kind == 2:
            node_id = parse_headers(message.header_raw).get(NODE, "")
            self.on_presence(conversation, node_id, envelope.user_id, envelope.state)
        if kind == 1 or (kind == 0 and envelope.kind == LIFECYCLE and conversation in self.channels):
            channels.setdefault(conversation, []).append(self.tokens.event(envelope))
            channel, now = self.channels[conversation], asyncio.get_running_loop().time()
            if kind == 0:
                channel.learn([envelope], now)
            else:
                channel.heard(envelope.message_id, now)

    def _envelope(self, conversation_id: str, message: Message) -> Envelope | None:
        epoch = None
        if _EPOCH_LINE in message.header_raw:
            epoch = parse_headers(message.header_raw).get(EPOCH) or None
        delivery = parse_reply(message.reply)
        return read_envelope(conversation_id, delivery.sequence, message.payload, epoch, delivery.timestamp_ns)

    # ---- rooms

    def room(self, conversation: Conversation) -> Room:
        """The room of a conversation, which begins to be read when it is new."""
        room = self.rooms.get(conversation)
        if room is None:
            room = self.rooms[conversation] = Room(conversation, self.limits.backlog_size, self._slabs)
            self._listen_to(conversation)
            self.perform(room, room.open())
        return room

    def join(
        self,
        conversation: Conversation,
        member: Member,
        after: int | None,
        epoch: str | None,
        *,
        is_resume: bool = False,
    ) -> None:
        room = self.room(conversation)
        if member not in room.members and len(room.members) >= self.limits.clients_per_room_max:
            raise Overloaded("the room is full")
        self.perform(room, room.join(member, after, epoch, is_resume=is_resume))

    def leave(self, conversation: Conversation, member: Member) -> None:
        room = self.rooms.get(conversation)
        if room is not None:
            room.leave(member)
            if room.is_empty:
                self._close_later(conversation)

    def _close_later(self, conversation: Conversation) -> None:
        loop = asyncio.get_running_loop()
        self._lingering[conversation] = loop.time() + LINGER_S
        loop.call_later(LINGER_S + 0.1, self._close, conversation)

    def _close(self, conversation: Conversation) -> None:
        room = self.rooms.get(conversation)
        due = self._lingering.get(conversation)
        if room is not None and room.is_empty and due is not None and asyncio.get_running_loop().time() >= due:
            self._discard(conversation)

    def _discard(self, conversation: Conversation) -> None:
        self._slabs.forget(self.rooms.pop(conversation))
        self._no_longer(conversation)
        self._lingering.pop(conversation, None)

    def tell(self, conversation: Conversation, envelopes: Sequence[Envelope]) -> None:
        """Envelopes that this node itself has to say to a room."""
        room = self.rooms.get(conversation)
        if room is not None:
            self.perform(room, room.arrived(envelopes))

    def perform(self, room: Room, acts: Sequence[Act]) -> None:
        """Do what the rules say, in order."""
        for act in acts:
            if isinstance(act, Say):
                self._say(act)
            elif isinstance(act, Pump):
                self._pump_later(room, act.member)
            elif isinstance(act, Fetch):
                self.spawn(self._fetch(room, act))
            else:
                self.spawn(self._load(room, act))

    def _say(self, act: Say) -> None:
        data = act.data
        self.counts["writes"] += len(act.writes)
        for write in act.writes:
            write(data)

    def _pump_later(self, room: Room, member: Member) -> None:
        self._pumps.append((room, member))
        if not self._is_pumping:
            self._is_pumping = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        """A step for each member in turn, and not too many at a time: a crowd that comes back holds nobody else up."""
        try:
            for _ in range(min(PUMP_STEPS, len(self._pumps))):
                room, member = self._pumps.popleft()
                act = room.step(member)
                if act is not None:
                    self.perform(room, [act])
                    self._pumps.append((room, member))
        finally:
            self._is_pumping = bool(self._pumps)
            if self._pumps:
                asyncio.get_running_loop().call_soon(self._pump)

    async def _load(self, room: Room, act: Load) -> None:
        delay = RETRY_S
        while self.rooms.get(room.conversation) is room:
            life = self._life
            try:
                async with self._turn():
                    if act.after is None:
                        tail = await self.history.tail(room.conversation, self.limits.backlog_size, act.up_to)
                    else:
                        tail = await self.history.behind(room.conversation, act.after, act.up_to)
            except OncewireError as error:
                log.warning("room %s cannot be read: %s", room.conversation.id, error.message)
                for joining in room.refuse_joining():
                    joining.member.owner.refused(room.conversation.id, joining.frame, error)
                if room.is_empty:
                    self._discard(room.conversation)
                    return
                await asyncio.sleep(delay)
                delay = min(delay * 2, RETRY_S_MAX)
                continue
            if life == self._life and room.is_waiting_for(act):
                self.perform(room, room.loaded(*tail))
            return

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """The right to read, of a few at a time. Who waits for it is told at once that NATS is away."""
        async with self._turns:
            if self.problem:
                raise Unavailable(self.problem)
            yield

    async def _fetch(self, room: Room, act: Fetch) -> None:
        delay = RETRY_S
        while self.rooms.get(room.conversation) is room and room.is_waiting_for(act):
            try:
                async with self._turn():
                    self.counts["pages"] += 1
                    page = await self.history.page(room.conversation, act.after, act.place, act.end)
            except OncewireError as error:
                log.warning("room %s cannot be read: %s", room.conversation.id, error.message)
                await asyncio.sleep(delay)
                delay = min(delay * 2, RETRY_S_MAX)
                continue
            self.perform(room, room.fetched(act, page))
            return

    # ---- channels

    async def listen(self, conversation: Conversation, listener: Listener, last_event_id: str) -> None:
        """Begin at an event id, or, without one that the stream has, at the running answer."""
        channel = self.channels.get(conversation)
        if channel is None:
            channel = self.channels[conversation] = Channel(conversation, self.place)
            self._listen_to(conversation)
        channel.join(listener)
        place = await self._place_of(channel, last_event_id) if last_event_id else None
        if place is None:
            if last_event_id:
                listener.owner.missed("the stream does not have the last event any more: this is the running answer")
            async with self._turn():
                if not channel.is_scanned:
                    found = await self.tokens.lifecycles(conversation)
                    channel.learn(found, asyncio.get_running_loop().time())
                    channel.is_scanned = True
            place = channel.begin
        channel.ready(listener, place)
        self._step(channel, listener)

    async def _place_of(self, channel: Channel, event_id: str) -> int | None:
        """Where an event is that a client has; None when the stream has none of that id, or not any more."""
        found = EVENT_ID.fullmatch(event_id)
        if found is None:
            return None
        stored_ns, place = int(found[1]), int(found[2])
        if any(one.place == place and one.stored_ns == stored_ns for one in channel.recent):
            return place
        if event_id not in self._stored:
            async with self._turn():
                if event_id not in self._stored:  # a crowd comes back with the same one
                    self._stored[event_id] = await self.tokens.is_stored(stored_ns, place)
        while len(self._stored) > STORED_IDS_MAX:
            del self._stored[next(iter(self._stored))]
        return place if self._stored.get(event_id) else None

    def stop_listening(self, conversation: Conversation, listener: Listener) -> None:
        channel = self.channels.get(conversation)
        if channel is not None:
            channel.leave(listener)
            if not channel.listeners:
                del self.channels[conversation]
                self._no_longer(conversation)

    def _tell(self, channel: Channel, events: Sequence[Event]) -> None:
        act = channel.arrived(events)
        if act is not None:
            self._say(act)
        for listener in channel.behind:
            self._step(channel, listener)

    def step(self, conversation: Conversation, listener: Listener) -> None:
        channel = self.channels.get(conversation)
        if channel is not None:
            self._step(channel, listener)

    def full(self, conversation: Conversation, listener: Listener) -> None:
        channel = self.channels.get(conversation)
        if channel is not None:
            channel.full(listener)

    def _step(self, channel: Channel, listener: Listener) -> None:
        while (act := channel.step(listener)) is not None:
            self._perform(channel, [act])

    def _perform(self, channel: Channel, acts: Sequence[Say | Look]) -> None:
        for act in acts:
            if isinstance(act, Say):
                self._say(act)
            else:
                self.spawn(self._look(channel, act))

    async def _look(self, channel: Channel, act: Look) -> None:
        delay = RETRY_S
        while self.channels.get(channel.conversation) is channel and channel.is_waiting_for(act):
            try:
                async with self._turn():
                    found, up_to = await self.tokens.page(channel.conversation, act.after, act.up_to)
            except OncewireError as error:
                log.warning("channel %s cannot be read: %s", channel.conversation.id, error.message)
                await asyncio.sleep(delay)
                delay = min(delay * 2, RETRY_S_MAX)
                continue
            self._perform(channel, channel.found(act, found, up_to))
            for listener in channel.behind:
                self._step(channel, listener)
            return

    async def watch_answers(self) -> None:
        """Ask the producers of answers that have fallen silent whether they live."""
        while True:
            await asyncio.sleep(LOOK_S)
            if not self.problem:
                for channel in self.channels.values():
                    for message_id in channel.silent(asyncio.get_running_loop().time()):
                        self.spawn(self._ask_after(channel, message_id))

    async def _ask_after(self, channel: Channel, message_id: str) -> None:
        try:
            is_alive = await self.tokens.has_producer(channel.conversation, message_id)
        except OncewireError as error:  # nobody knows: it is asked again
            log.info("whether answer %s is still written is not known: %s", message_id, error.message)
            return
        if is_alive:
            channel.heard(message_id, asyncio.get_running_loop().time())
        elif channel.unheard(message_id):
            room = self.rooms.get(channel.conversation)
            envelope = producer_lost(channel.conversation, message_id, room.last if room is not None else 0)
            said = channel.lose(message_id, sse(b"event", envelope.body))
            if said is not None:
                self._say(said)
            self.tell(channel.conversation, [envelope])

    def _end_channel(self, channel: Channel) -> None:
        """The stream is another: places mean nothing any more. Clients come back and begin anew."""
        if self.channels.pop(channel.conversation, None) is not None:
            self._no_longer(channel.conversation)
        for listener in list(channel.listeners):
            listener.owner.lost("the stream was made anew: begin again")
