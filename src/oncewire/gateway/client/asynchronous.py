"""The async client of rooms and token streams.

    async with GatewayClient("http://127.0.0.1:3005") as client:
        async for message in client.room(conversation, resume=0):
            print(message.sequence, message.event.content)

A message is acknowledged when the loop asks for the next one: then its body has run without an exception.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Literal
from urllib.parse import quote, urlsplit, urlunsplit

import msgspec

from oncewire._ground.contracts.realtime import RealtimeEnvelope
from oncewire._ground.errors import (
    AuthenticationFailed,
    ContractViolation,
    NotConnected,
    OncewireError,
    PermissionDenied,
    Refused,
    Unavailable,
)
from oncewire.gateway.client import actions as act
from oncewire.gateway.client import fetch
from oncewire.gateway.client.rules import Rules
from oncewire.gateway.client.sse import Answers, EventParser, Lifecycle, Token
from oncewire.gateway.client.wire import NO_CLOSE_FRAME, Wire, open_wire

Resume = int | act.Position | Literal["acked"] | None
Credential = str | Callable[[], str | Awaitable[str]]

_log = logging.getLogger("oncewire.gateway.client")
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(dict).decode
_page = msgspec.json.Decoder(act.Page).decode


class Room:
    """The messages of one room, in order and once each, as an async iterator."""

    def __init__(
        self,
        client: GatewayClient,
        conversation_id: str,
        on_event: Callable[[RealtimeEnvelope], None] | None,
        on_gap: Callable[[act.Missing], None] | None,
    ) -> None:
        self.conversation_id = conversation_id
        self._client = client
        self._on_event = on_event
        self._on_gap = on_gap
        self._items: asyncio.Queue[act.Deliver | act.Gap | OncewireError | None] = asyncio.Queue()
        self._in_hand: act.Deliver | act.Gap | None = None
        self.is_joined = asyncio.Event()

    @property
    def position(self) -> act.Position | None:
        """How far this room is done: keep it to resume later."""
        return self._client.rules.position(self.conversation_id)

    def __aiter__(self) -> Room:
        return self

    async def __anext__(self) -> RealtimeEnvelope:
        """The next message; the one before counts as done. Raises what the gateway refused the room for; after the next
        connect it may be allowed, so the iteration may go on."""
        while True:
            self.done()
            item = await self._items.get()
            if item is None:
                self._items.put_nowait(None)  # for whoever asks again
                self._client.raise_refusal()
                raise StopAsyncIteration
            if isinstance(item, OncewireError):
                raise item
            self._in_hand = item
            if isinstance(item, act.Deliver):
                return _envelope(item.envelope)
            self._tell_gap(item.gap)

    def done(self) -> None:
        """The message in hand is done: for a loop that ends with it."""
        item, self._in_hand = self._in_hand, None
        if item is not None:
            self._client.processed(item)

    def presence(self, state: act.PresenceState, metadata: act.Frame | None = None) -> None:
        """Say how it is with this user. Said again after each reconnect."""
        self._client.say_presence(self.conversation_id, state, metadata)

    def leave(self) -> None:
        """Follow it no longer; the iteration ends, and what is in hand counts as not done."""
        self._in_hand = None
        self._client.leave(self)
        self.end()

    def put(self, item: act.Deliver | act.Gap) -> None:
        self._items.put_nowait(item)

    def end(self) -> None:
        self._items.put_nowait(None)

    def changed(self, state: act.RoomState) -> None:
        """The gateway has this client in the room, or has not."""
        if state.state == "joined":
            self.is_joined.set()
            return
        self.is_joined.clear()
        if state.state == "waiting":
            _log.info("%s is joined again in %s ms: %s", self.conversation_id, state.retry_ms, state.reason)
        else:
            kind = PermissionDenied if state.code == PermissionDenied.code else Refused
            self._items.put_nowait(kind(f"room {self.conversation_id}: {state.reason}"))

    def _tell_gap(self, gap: act.Missing) -> None:
        if self._on_gap is not None:
            self._on_gap(gap)
        else:
            _log.warning("messages %s to %s of %s are gone for good", gap.first, gap.last, self.conversation_id)

    def happened(self, envelope: act.Frame) -> None:
        if self._on_event is not None:
            self._on_event(_envelope(envelope))


class GatewayClient:
    """One connection to a gateway, kept up until the `async with` block ends. `url` may be http(s) or ws(s)."""

    def __init__(
        self, url: str = "http://127.0.0.1:3005", *, token: Credential = "", limits: act.Limits | None = None
    ) -> None:
        """`token` is an API key or a token. A function is asked for one before each connect and each request."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https", "ws", "wss") or not parts.hostname:
            raise Refused(f"this is no address of a gateway: {url}", hint="Such as http://127.0.0.1:3005.")
        is_secure = parts.scheme in ("https", "wss")
        prefix = parts.path.removesuffix("/ws").rstrip("/")
        self._http_url = urlunsplit(("https" if is_secure else "http", parts.netloc, prefix, "", ""))
        self._ws_url = urlunsplit(("wss" if is_secure else "ws", parts.netloc, f"{prefix}/ws", "", ""))
        self._token = token
        self.rules = Rules(limits)
        self.states: list[Callable[[act.State], None]] = []
        """Told of each change of the connection."""
        self._rooms: dict[str, Room] = {}
        self._wire: Wire | None = None
        self._attempt = 0
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._final_code = 0
        self._final_reason = ""

    async def __aenter__(self) -> GatewayClient:
        self._loop = asyncio.get_running_loop()
        self._epoch_s = time.time() - self._loop.time()
        self._perform(self.rules.start(self._now()))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._perform(self.rules.stop(self._now()))
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _now(self) -> int:
        """Milliseconds that look like the wall clock's and never go back."""
        return int((self._epoch_s + self._loop.time()) * 1000)

    # ---- rooms

    def room(
        self,
        conversation_id: str,
        *,
        resume: Resume = None,
        client_id: str | None = None,
        on_event: Callable[[RealtimeEnvelope], None] | None = None,
        on_gap: Callable[[act.Missing], None] | None = None,
    ) -> Room:
        """Follow a room. `resume`: 0 for its whole history, a position, "acked", or None for what comes from now on.

        `on_gap` is told of messages that are gone for good, in their place; without it they are logged. `on_event`
        gets presence, and answers that begin or end.
        """
        if conversation_id in self._rooms:
            raise Refused(f"room {conversation_id} is followed already", hint="One iteration per room and client.")
        room = self._rooms[conversation_id] = Room(self, conversation_id, on_event, on_gap)
        position = resume if isinstance(resume, act.Position) else None
        sequence = resume if isinstance(resume, int) else position.sequence if position else None
        self._perform(
            self.rules.join(
                conversation_id,
                self._now(),
                sequence=sequence,
                epoch=position.epoch if position else None,
                mode="acked" if resume == "acked" else "live",
                client_id=client_id,
            )
        )
        return room

    def leave(self, room: Room) -> None:
        self._perform(self.rules.leave(room.conversation_id, self._now()))
        self._rooms.pop(room.conversation_id, None)

    def processed(self, item: act.Deliver | act.Gap) -> None:
        """A room is done with an item."""
        self._perform(self.rules.processed(item.room, item.sequence, self._now()))

    def say_presence(self, conversation_id: str, state: act.PresenceState, metadata: act.Frame | None) -> None:
        self._perform(self.rules.presence(conversation_id, state, self._now(), metadata))

    def raise_refusal(self) -> None:
        """Why the gateway wants no more of this client, if it said so."""
        told = f": {self._final_reason}" if self._final_reason else ""
        if self._final_code == 4401:
            raise AuthenticationFailed(f"the gateway wants a credential, or another one{told}")
        if self._final_code == 4403:
            raise PermissionDenied(f"the gateway does not let this client in{told}")
        if self._final_code:
            raise Refused(f"the gateway closed the connection for good, with code {self._final_code}{told}")

    # ---- tokens

    async def tokens(self, conversation_id: str, *, last_event_id: str = "") -> AsyncIterator[Token | Lifecycle]:
        """The answers that are being written, piece by piece, from the running one on; a broken stream goes on exactly
        where it broke."""
        url = f"{self._http_url}/stream/{quote(conversation_id, safe='')}"
        parser, answers, failures = EventParser(last_event_id), Answers(), 0
        while True:
            parser = EventParser(parser.last_event_id)
            headers = {**await self._credentials(), "Accept": "text/event-stream"}
            if parser.last_event_id:
                headers["Last-Event-ID"] = parser.last_event_id
            try:
                silence_s = self.rules.limits.silence_ms / 1000
                async with fetch.streaming(url, headers=headers, silence_s=silence_s) as (status, pieces):
                    _check(status, b"")
                    async for piece in pieces:
                        failures = 0
                        for event in parser.feed(piece):
                            if event.name in ("token", "event"):
                                news = answers.take(msgspec.json.decode(event.data, type=RealtimeEnvelope))
                                if news is not None:
                                    yield news
            except Unavailable as error:
                _log.info("the token stream of %s broke, it is resumed: %s", conversation_id, error)
            first, most = self.rules.limits.backoff_first_ms, self.rules.limits.backoff_most_ms
            await asyncio.sleep(min(most, first * 2**failures) / 1000 * random.uniform(0.5, 1.0))  # noqa: S311
            failures = min(failures + 1, 20)

    async def stop_answer(self, conversation_id: str, *, message_id: str | None = None) -> None:
        """Ask that the running answer ends. Who listens sees its end."""
        url = f"{self._http_url}/stream/{quote(conversation_id, safe='')}/stop"
        body = _encode({} if message_id is None else {"messageId": message_id})
        _check(*await self._ask("POST", url, body))

    async def history(self, conversation_id: str, *, after: int = 0, limit: int = 200) -> act.Page:
        """A page of what was said."""
        url = f"{self._http_url}/conversations/{quote(conversation_id, safe='')}/messages?after={after}&limit={limit}"
        status, body = await self._ask("GET", url)
        _check(status, body)
        return _page(body)

    async def _ask(self, method: str, url: str, body: bytes = b"") -> tuple[int, bytes]:
        timeout_s = self.rules.limits.connect_ms / 1000
        return await fetch.ask(method, url, headers=await self._credentials(), body=body, timeout_s=timeout_s)

    async def _credentials(self) -> dict[str, str]:
        """The header that says who asks, with a credential that is good now."""
        token = self._token() if callable(self._token) else self._token
        token = await token if inspect.isawaitable(token) else token
        return {"Authorization": f"Bearer {token}"} if token else {}

    # ---- the rules' hands

    def _perform(self, actions: list[act.Action]) -> None:
        for action in actions:
            match action:
                case act.Send(frame):
                    if self._wire is not None:
                        self._wire.send(_encode(frame))
                case act.Deliver(room=name) | act.Gap(room=name):
                    self._rooms[name].put(action)
                case act.Event(name, envelope):
                    self._rooms[name].happened(envelope)
                case act.Connect():
                    self._attempt += 1
                    self._spawn(self._connect(self._attempt))
                case act.Close(code):
                    self._drop(code)
                case act.State():
                    self._changed(action)
                case act.RoomState():
                    self._rooms[action.room].changed(action)
                case act.Fetch():
                    self._spawn(self._fetch(action))
                case act.Problem(name, message):
                    _log.warning("%s: %s", name or "the gateway", message)
        self._set_timer()

    def _spawn(self, work: object) -> None:
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        wake_at = self.rules.wake_at
        self._timer = (
            None if wake_at is None else self._loop.call_at(wake_at / 1000 - self._epoch_s + 0.001, self._tick)
        )

    def _tick(self) -> None:
        self._perform(self.rules.tick(self._now(), _chance()))

    def _changed(self, state: act.State) -> None:
        for listener in self.states:
            listener(state)
        if state.state == "closed":
            self._final_code = state.code if isinstance(state.code, int) and state.code != 1000 else 0
            self._final_reason = state.reason or ""
            for room in self._rooms.values():
                room.end()

    async def _connect(self, attempt: int) -> None:
        """`attempt` tells the events of this connection from those of one that was dropped meanwhile."""

        def is_current() -> bool:
            return attempt == self._attempt

        def heard(text: bytes) -> None:
            if is_current():
                self._heard(text)

        def closed(code: int, reason: str) -> None:
            if is_current():
                self._wire = None
                self._perform(self.rules.closed(self._now(), _chance(), code, reason))

        try:
            headers = await self._credentials()
        except Exception as error:  # the application's own: it is asked again
            closed(NO_CLOSE_FRAME, f"no credential: {error}")
            return
        wire = await open_wire(self._ws_url, headers, on_text=heard, on_closed=closed)
        if wire is None:
            closed(NO_CLOSE_FRAME, "no connection")
        elif is_current():
            self._wire = wire
        else:
            wire.drop(1000)

    def _drop(self, code: int) -> None:
        self._attempt += 1
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.drop(code)

    def _heard(self, text: bytes) -> None:
        try:
            frame = _decode(text)
        except msgspec.DecodeError:
            _log.warning("the gateway sent what is no JSON object: %r", text[:80])
            return
        if frame.get("type") == "hello":
            self._perform(self.rules.opened(self._now()))
        else:
            self._perform(self.rules.frame(frame, self._now(), _chance()))

    async def _fetch(self, action: act.Fetch) -> None:
        try:
            page = await self.history(action.room, after=action.after, limit=action.limit)
        except (OncewireError, msgspec.DecodeError) as error:
            self._perform(
                self.rules.history_failed(action.room, action.repair, str(error), self._now(), _chance())
            )  # fmt: skip
        else:
            self._perform(self.rules.history(action.room, action.repair, page, self._now()))


def _chance() -> float:
    return random.random()  # noqa: S311


def _envelope(frame: act.Frame) -> RealtimeEnvelope:
    try:
        return msgspec.convert(frame, RealtimeEnvelope)
    except msgspec.ValidationError as wrong:
        raise ContractViolation(f"an envelope from the gateway: {wrong}") from None


def _check(status: int, body: bytes) -> None:
    if status < 300:
        return
    said = body.decode(errors="replace")[:200]
    if status == 401:
        raise AuthenticationFailed(f"the gateway wants a credential: {said}")
    if status == 403:
        raise PermissionDenied(f"the gateway does not allow it: {said}")
    if status in (429, 503):
        raise NotConnected(f"the gateway is not ready: {status} {said}")
    raise Refused(f"the gateway answered {status}: {said}")
