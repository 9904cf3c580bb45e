"""The public client: one connection, and everything that rides on it.

async with oncewire.connect() as client:
    ack = await client.publish("evt.default.demo.orders.placed", b"…", msg_id="order-1")
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import ssl
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple

import msgspec

from oncewire._ground import settings, tracing
from oncewire._ground.arguments import check_secret, check_text, wrong
from oncewire._ground.contracts import publishing
from oncewire._ground.contracts.canonical import has_no_number
from oncewire._ground.contracts.headers import MSG_ID, TRACEPARENT
from oncewire._ground.contracts.message import MessageEnvelope, decode_message, encode_message
from oncewire._ground.contracts.runtime import RuntimeEnvelope, encode_runtime
from oncewire._ground.contracts.subjects import overlaps
from oncewire._ground.errors import (
    ContractViolation,
    NoResponders,
    OncewireError,
    PermissionDenied,
    ProtocolViolation,
    Refused,
    Unavailable,
)
from oncewire._ground.fields import columns
from oncewire._ground.jetstream import codes, protocol, stored
from oncewire._ground.jetstream.connection import Connection, Subscription, each
from oncewire._ground.jetstream.fast import Ingested, publish_fast
from oncewire._ground.jetstream.keyvalue import KeyValue
from oncewire._ground.jetstream.once import find_published
from oncewire._ground.jetstream.options import OnChange, Options, State, options_from
from oncewire._ground.jetstream.protocol import Message
from oncewire._ground.jetstream.publish import PUBLISH_TIMEOUT_S, Outcome, Outgoing, PubAck, Publisher
from oncewire._ground.jetstream.pull import Pull
from oncewire._ground.jetstream.reader import Reader, Start
from oncewire._ground.jetstream.requests import Requests
from oncewire._ground.jetstream.stored import StoredMessage
from oncewire._ground.jetstream.unwritable import wrong_message
from oncewire._ground.jetstream.wire import ServerInfo

log = logging.getLogger("oncewire.jetstream")

API_TIMEOUT_S = 5.0
QUERIES_PREFIX = "sr.queries."
ERROR_HEADER = "Oncewire-Error"
_NAME = re.compile(r"[^\s.*>/\\\x00-\x1f\x7f]+")
_SERVERS_OWN = ("$JS.>", "$SYS.>", "$KV.>", "$O.>", "_INBOX.>")
RESPONDING_MAX = 256
"""Requests that one responder works on at the same time; more are answered with 'busy'."""

Payload = bytes | bytearray | memoryview | Mapping[str, Any] | msgspec.Struct | MessageEnvelope | RuntimeEnvelope
Responder = Callable[[MessageEnvelope], Awaitable[MessageEnvelope]]


class Client:
    """Made by `connect`. Safe to share between the tasks of one event loop, not between loops or threads."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._connection: Connection | None = None
        self._publisher: Publisher | None = None
        self._requests: Requests | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_opening = False

    async def __aenter__(self) -> Client:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self) -> None:
        """Connect. Raises AuthenticationFailed or NotConnected when no server takes us."""
        if self._is_opening or (self._connection is not None and self._connection.state is not State.CLOSED):
            raise Refused("the client is open already", hint="Open it once, or make another with `oncewire.connect`.")
        self._is_opening = True
        try:
            connection = Connection(self._options)
            await connection.open()
        finally:
            self._is_opening = False
        self._connection = connection
        self._requests = Requests(connection)
        self._publisher = Publisher(connection, self.api)

    async def close(self) -> None:
        """Flush what was written and let go. Nothing is left behind: no task, no socket, no timer."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._connection is not None:
            if self._connection.state is State.CONNECTED:
                with contextlib.suppress(OncewireError):
                    await self._connection.flush(1.0)
            await self._connection.close()

    async def drain(self, timeout_s: float = 10.0) -> None:
        """Take no new work, wait for confirmations that are on their way, then close."""
        await self.connection.drain(timeout_s)
        await self.close()

    @property
    def connection(self) -> Connection:
        if self._connection is None:
            raise _not_open()
        return self._connection

    @property
    def requests(self) -> Requests:
        if self._requests is None:
            raise _not_open()
        return self._requests

    @property
    def state(self) -> State:
        return self._connection.state if self._connection is not None else State.CONNECTING

    @property
    def server(self) -> ServerInfo:
        """What the server that we are connected to says about itself."""
        return self.connection.server

    # ---- publishing

    async def publish(
        self,
        subject: str,
        payload: Payload,
        *,
        msg_id: str = "",
        headers: Mapping[str, str] | None = None,
        expected_last_sequence: int | None = None,
        expected_last_subject_sequence: int | None = None,
        once: bool | timedelta = False,
        timeout_s: float = PUBLISH_TIMEOUT_S,
        raw: bool = False,
    ) -> PubAck:
        """Publish to a stream; return when it is stored.

        With `msg_id` a repeat within the stream's duplicate window is dropped by the server, so it is also safe to
        call again after OutcomeUnknown. Bytes go out as they are; a mapping or Struct goes out as JSON. In a span of
        OpenTelemetry the message continues its trace.

        On a subject of the contracts the message is checked as its readers check it, and brings its own id: on `sr.`
        and the platform's subjects its idempotency key, on `evt.` and `cmd.` a hash of key, type and payload. `raw`
        turns both off.

        `once=True` first looks for the id in the stream, so a repeat after the window is not stored either.
        It costs about eight small requests and a scan of the headers on this subject, which grows with the subject.
        Raises Refused, and stores nothing, where a look cannot know: on work queues, with limits per subject or times
        to live, and once the stream has removed messages. `once=timedelta(hours=1)` says that the id is at most an hour
        old: then only messages that were removed within that hour matter, and the scan goes no further back.
        """
        _refuse_reserved((check_text("publish", "subject", subject),))
        body = encode_payload(payload)
        outgoing = Outgoing(
            subject,
            body,
            _agreed(subject, msg_id, headers, _own_id(subject, payload, body, raw=raw)),
            headers,
            expected_last_sequence=expected_last_sequence,
            expected_last_subject_sequence=expected_last_subject_sequence,
            traceparent=_continued(payload, headers),
        )
        if once is not False:
            ack = await find_published(self, outgoing, once, timeout_s)
            if ack is not None:
                return ack
        return await self.publisher.publish(outgoing, timeout_s)

    async def publish_one(
        self, message: Outgoing, timeout_s: float = PUBLISH_TIMEOUT_S, *, raw: bool = False
    ) -> PubAck:
        (checked,) = _all_checked([message], raw=raw)
        return await self.publisher.publish(checked, timeout_s)

    async def publish_many(
        self, messages: Sequence[Outgoing], timeout_s: float = PUBLISH_TIMEOUT_S, *, raw: bool = False
    ) -> list[Outcome]:
        """Publish in pipelined windows; one outcome per message, in order: a PubAck, or the error it met."""
        checked = _checked(messages, raw=raw)
        return checked.outcomes(await self.publisher.publish_many(checked.messages, timeout_s))

    async def publish_atomic(
        self, messages: Sequence[Outgoing], timeout_s: float = PUBLISH_TIMEOUT_S, *, raw: bool = False
    ) -> PubAck:
        """All or nothing, into one stream that allows it. See `Publisher.publish_atomic`."""
        return await self.publisher.publish_atomic(_all_checked(messages, raw=raw), timeout_s)

    async def publish_all(
        self, messages: Sequence[Outgoing], timeout_s: float = PUBLISH_TIMEOUT_S, *, raw: bool = False
    ) -> list[Outcome]:
        """Atomic batches where the server takes them, single publishes under the same ids where it does not."""
        checked = _checked(messages, raw=raw)
        return checked.outcomes(await self.publisher.publish_all(checked.messages, timeout_s))

    async def publish_fast(
        self, messages: Sequence[Outgoing], timeout_s: float = PUBLISH_TIMEOUT_S, *, raw: bool = False
    ) -> Ingested:
        """Fast ingest where the server has it, pipelined publishes where it does not; all stored when it returns."""
        return await publish_fast(self.publisher, _all_checked(messages, raw=raw), timeout_s)

    @property
    def publisher(self) -> Publisher:
        if self._publisher is None:
            raise _not_open()
        return self._publisher

    # ---- reading

    def pull(self, stream: str, consumer: str, **options: Any) -> Pull:
        """Pull from a durable consumer: `async with client.pull(…) as pull: messages = await pull.fetch()`."""
        for field, name in (("stream", stream), ("consumer", consumer)):
            if not _NAME.fullmatch(check_text("pull", field, name)):
                raise wrong("pull", field, name, "is not a name", "Names have no dots, wildcards, slashes or spaces.")
        return Pull(self.requests, stream, consumer, **options)

    def read(
        self,
        stream: str,
        *,
        subjects: Sequence[str] = (),
        start: Start | None = None,
        headers_only: bool = False,
        **options: Any,
    ) -> Reader:
        """Read a stream in order, without a durable: `async with client.read(…) as reader: …`."""
        return Reader(
            self.requests,
            self.api,
            stream,
            start=start or Start(),
            subjects=subjects,
            headers_only=headers_only,
            **options,
        )

    async def get(self, stream: str, sequence: int, *, is_exact: bool = False) -> StoredMessage:
        """The message at a sequence. NotFound when it is not there (any more). A replica that lags may answer, also the
        two below, unless it must be exact."""
        return await self._get(stream, {"seq": sequence}, is_exact)

    async def get_next(self, stream: str, sequence: int, subject: str, *, is_exact: bool = False) -> StoredMessage:
        """The first message at or after a sequence whose subject matches."""
        return await self._get(stream, {"seq": sequence, "next_by_subj": subject}, is_exact)

    async def get_last(self, stream: str, subject: str, *, is_exact: bool = False) -> StoredMessage:
        """The last message on a subject."""
        return await self._get(stream, {"last_by_subj": subject}, is_exact)

    async def _get(self, stream: str, request: dict[str, Any], is_exact: bool) -> StoredMessage:
        get = stored.get_from_leader if is_exact else stored.get_message
        return await get(self.requests, stream, request)

    async def get_batch(self, stream: str, **options: Any) -> list[StoredMessage]:
        """Many messages from a sequence or a time on. See `stored.get_batch`."""
        return await stored.get_batch(self.connection, stream, **options)

    async def get_last_of(
        self, stream: str, subjects: Sequence[str], *, up_to_sequence: int = 0
    ) -> list[StoredMessage]:
        """The last message of each matching subject, as one consistent picture."""
        return await stored.get_last_of(self.connection, stream, subjects, up_to_sequence=up_to_sequence)

    def kv(self, bucket: str) -> KeyValue:
        """A key-value bucket that the topology has declared."""
        return KeyValue(self, bucket)

    # ---- requests

    async def api(
        self,
        endpoint: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float = API_TIMEOUT_S,
        repeat: bool = True,
    ) -> dict[str, Any]:
        """A raw request to JetStream's control plane (`$JS.API.<endpoint>`), answered as the JSON that it is.

        An error in the answer is raised from our tree, with JetStream's number in `server_code`. `repeat=False` for
        requests that must not be sent twice when the connection breaks.
        """
        payload = msgspec.json.encode(body) if body else b""
        try:
            reply = await self.requests.call(f"$JS.API.{endpoint}", payload, timeout_s=timeout_s, repeat=repeat)
        except NoResponders:
            raise Unavailable(
                f"JetStream does not answer ({endpoint})", hint="Is JetStream on, and does this user have access to it?"
            ) from None
        try:
            answer = msgspec.json.decode(reply.payload, type=dict[str, Any])
        except msgspec.DecodeError:
            raise ProtocolViolation(f"{endpoint} was answered with {reply.payload[:80]!r}") from None
        problem = answer.get("error")
        if isinstance(problem, dict):
            raise codes.from_api(problem, endpoint)
        return answer

    async def call(
        self, subject: str, payload: bytes = b"", *, headers: Mapping[str, str] | None = None, timeout_s: float = 5.0
    ) -> Message:
        """One request in bytes, one reply. NoResponders at once when nobody listens."""
        publishing.refuse_reserved(subject)
        header = protocol.encode_headers(headers) if headers else b""
        return await self.requests.call(subject, payload, header=header, timeout_s=timeout_s)

    async def request(self, subject: str, envelope: MessageEnvelope, *, timeout_s: float = 5.0) -> MessageEnvelope:
        """Ask a service that `respond`s on the subject. NoResponders at once when there is none."""
        reply = await self.requests.call(subject, encode_message(envelope), timeout_s=timeout_s)
        if protocol.parse_headers(reply.header_raw).get(ERROR_HEADER):
            raise _told_error(subject, reply)
        try:
            return decode_message(reply.payload)
        except ContractViolation as wrong:
            raise ContractViolation(
                f"the answer on {subject} is no MessageEnvelope: {wrong.message}",
                field=wrong.field,
                hint="A stream answers in the service's place unless it is declared no_ack: `oncewire topology check`."
                if b'"seq"' in reply.payload
                else wrong.hint,
            ) from None

    def respond(self, subject: str, handler: Responder, *, queue: str = "oncewire") -> Subscription:
        """Answer `request`s; processes with the same `queue` share them. Our errors travel back to the asker."""

        async def answer(message: Message) -> bytes:
            return encode_message(await handler(decode_message(message.payload)))

        return self.serve(subject, answer, queue=queue)

    def subscribe(
        self,
        subject: str,
        deliver: Callable[[Message], None],
        *,
        queue: str = "",
        denied: Callable[[PermissionDenied], None] | None = None,
    ) -> Subscription:
        """Plain NATS: each message that is published from now on, not stored, at most once.

        The server refuses a subscription later than this returns: `denied` is told.
        """
        return self.connection.subscribe(subject, each(deliver), queue=queue, denied=denied)

    def unsubscribe(self, subscription: Subscription) -> None:
        self.connection.unsubscribe(subscription)

    def serve(
        self, subject: str, handler: Callable[[Message], Awaitable[bytes]], *, queue: str = "oncewire"
    ) -> Subscription:
        """Answer requests in bytes; processes with the same `queue` share them."""
        for reserved in _SERVERS_OWN:
            if overlaps(check_text("serve", "subject", subject), reserved):
                raise Refused(
                    f"serve({subject!r}) would answer what others send to {reserved}",
                    hint="Among it are the acks of other consumers. Serve subjects below a token of your own.",
                )

        def deliver(message: Message) -> None:
            if not message.reply:
                return
            if len(self._tasks) >= RESPONDING_MAX:
                self._answer(message, b"", {ERROR_HEADER: "overloaded"})
                return
            task = self.connection.loop.create_task(self._respond(handler, message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        return self.connection.subscribe(subject, each(deliver), queue=queue)

    async def _respond(self, handler: Callable[[Message], Awaitable[bytes]], message: Message) -> None:
        try:
            answer, headers = await handler(message), None
        except OncewireError as error:
            answer, headers = msgspec.json.encode({"error": error.to_dict()}), {ERROR_HEADER: error.code}
        except Exception:
            log.exception("a responder failed on %s", message.subject)
            answer, headers = b"", {ERROR_HEADER: "internal"}
        self._answer(message, answer, headers)

    def _answer(self, message: Message, answer: bytes, headers: dict[str, str] | None) -> None:
        header = protocol.encode_headers(headers) if headers else b""
        with contextlib.suppress(Unavailable):  # the asker has a deadline of its own
            self.connection.write(protocol.encode_pub(message.reply, b"", answer, header))


def _not_open() -> Refused:
    return Refused("the client is not open", hint="Use `async with oncewire.connect(…) as client:`.")


def encode_payload(payload: Payload) -> bytes:
    """Bytes as they are, everything else as JSON."""
    if isinstance(payload, bytes | bytearray | memoryview):
        return bytes(payload)
    if isinstance(payload, MessageEnvelope):
        return encode_message(payload)
    if isinstance(payload, RuntimeEnvelope):
        return encode_runtime(payload)
    try:
        written = msgspec.json.encode(payload)
        is_lost = b"null" in written and has_no_number(msgspec.to_builtins(payload))
    except (TypeError, ValueError, RecursionError) as error:
        raise ContractViolation(f"the payload cannot be written as JSON: {error}") from None
    if is_lost:
        raise ContractViolation("the payload has NaN or an infinite number, which JSON does not have", field="payload")
    return written


def _own_id(subject: str, payload: Payload, body: bytes, *, raw: bool) -> str:
    """The id that a message brings. What its readers would refuse is refused here, unless it is raw."""
    protocol.encode_subject(subject)
    if isinstance(payload, MessageEnvelope | RuntimeEnvelope):
        return publishing.id_of(subject, payload) if raw else publishing.envelope_id(subject, payload, body)
    return "" if raw or not publishing.has_contract(subject) else publishing.message_id(subject, body)


def _agreed(subject: str, msg_id: str, headers: Mapping[str, str] | None, own: str) -> str:
    """The id under which a message goes out: the caller's, else its own. On `sr.>` there is no choice."""
    passed = msg_id or (headers.get(MSG_ID, "") if isinstance(headers, Mapping) else "")
    if passed and own and passed != own and subject.startswith("sr."):
        raise ContractViolation(
            f"{subject}: the id of a message is its idempotency key there, not {passed[:80]!r}",
            field="msg_id",
            hint="Leave msg_id away, or publish it raw.",
        )
    return passed or own


class _Checked(NamedTuple):
    """Messages under their ids, and by place those that break the contract of their subject."""

    messages: Sequence[Outgoing]
    wrong: dict[int, Refused]

    def outcomes(self, found: list[Outcome]) -> list[Outcome]:
        """Of all that were to be published."""
        if not self.wrong:
            return found
        rest = iter(found)
        return [self.wrong.get(at) or next(rest) for at in range(len(found) + len(self.wrong))]


def _checked(messages: Sequence[Outgoing], *, raw: bool) -> _Checked:
    wrong = _refusals(messages)
    if wrong:
        subjects = ["" if at in wrong else message.subject for at, message in enumerate(messages)]
    else:
        (subjects,) = columns(messages, Outgoing, "subject")
    contracted = set() if raw else set(filter(publishing.has_contract, dict.fromkeys(subjects)))
    if not contracted:
        return _Checked([one for at, one in enumerate(messages) if at not in wrong] if wrong else messages, wrong)
    for subject in contracted:
        protocol.encode_subject(subject)
    places = [at for at, subject in enumerate(subjects) if subject in contracted]
    own = publishing.message_ids([subjects[at] for at in places], [messages[at].payload for at in places])
    checked = {at: message for at, message in enumerate(messages) if at not in wrong}
    for at, id_ in zip(places, own, strict=True):
        message = checked.pop(at)
        if isinstance(id_, Refused):
            wrong[at] = id_
            continue
        try:
            agreed = _agreed(message.subject, message.msg_id, message.headers, id_)
        except ContractViolation as violation:
            wrong[at] = violation
        else:
            checked[at] = message if agreed == message.msg_id else msgspec.structs.replace(message, msg_id=agreed)
    return _Checked([checked[at] for at in sorted(checked)], wrong)


def _all_checked(messages: Sequence[Outgoing], *, raw: bool) -> Sequence[Outgoing]:
    """All of them, or the first error."""
    checked = _checked(messages, raw=raw)
    for refused in checked.wrong.values():
        raise refused
    return checked.messages


def _continued(payload: Payload, headers: Mapping[str, str] | None) -> str:
    """The caller's own span, where it has one and the message has none."""
    context = tracing.current()
    if context is None or isinstance(payload, RuntimeEnvelope) or (headers is not None and TRACEPARENT in headers):
        return ""
    return context.traceparent


def _told_error(subject: str, reply: Message) -> OncewireError:
    """The error of the service that answered, on the branch that it chose."""
    try:
        told = msgspec.json.decode(reply.payload, type=dict[str, dict[str, Any]])["error"]
    except (msgspec.DecodeError, KeyError):
        told = {"message": reply.headers[ERROR_HEADER], "retryable": True}
    branch = Unavailable if told.get("retryable") else Refused
    return branch(f"{subject} answered: {told.get('message')}", hint=str(told.get("hint") or ""))


def _refuse_reserved(subjects: Iterable[str]) -> None:
    for subject in subjects:
        publishing.refuse_reserved(subject)
        if subject.startswith(QUERIES_PREFIX):
            raise _unconfirmed(subject)


def _unconfirmed(subject: str) -> Refused:
    return Refused(
        f"{subject} is for requests: its stream confirms nothing", hint="Use `client.request` instead of `publish`."
    )


def _refusals(messages: Sequence[Outgoing]) -> dict[int, Refused]:
    """By index what can never be published. Whether there is any is seen at once."""
    with contextlib.suppress(AttributeError, TypeError, Refused):
        _refuse_reserved(dict.fromkeys(columns(messages, Outgoing, "subject")[0]))
        return {}
    refused: dict[int, Refused] = {}
    for index, message in enumerate(messages):
        problem: Refused | None = wrong_message(message, Outgoing)
        if problem is None:
            try:
                _refuse_reserved((message.subject,))
            except Refused as reserved:
                problem = reserved
        if problem is not None:
            refused[index] = problem
    return refused


def connect(
    url: str | Sequence[str] | None = None,
    *,
    name: str = "oncewire",
    user: str | None = None,
    password: str | None = None,
    token: str | None = None,
    creds: str | None = None,
    nkey: str | None = None,
    inbox_prefix: str | None = None,
    tls: ssl.SSLContext | None = None,
    connect_timeout_s: float = 5.0,
    ping_interval_s: float = 20.0,
    on_change: OnChange | None = None,
) -> Client:
    """A client for `async with`. `url` may name several servers; the rest of a cluster is learned from them.

    What is not passed comes from the settings of this process: NATS_URL, NATS_CREDS, NATS_CA and the others that
    `oncewire config` lists. Credentials count together: with one of them passed, those of the settings are not used.
    """
    for server in [url] if isinstance(url, str) else url or ():
        check_secret("connect", "url", server)
    check_text("connect", "name", name)
    secrets = {"user": user, "password": password, "token": token, "creds": creds, "nkey": nkey}
    for field, value in secrets.items():
        if value is not None:
            check_secret("connect", field, value)
    chosen = settings.load().settings
    if any(one is not None for one in (user, password, token, creds, nkey)):
        chosen = replace(
            chosen,
            nats_user=user or "",
            nats_password=password or "",
            nats_token=token or "",
            nats_creds=creds or "",
            nats_nkey=nkey or "",
        )
    if tls is not None:
        chosen = replace(chosen, nats_ca="", nats_cert="", nats_key="")
    if inbox_prefix is not None:
        chosen = replace(chosen, nats_inbox_prefix=inbox_prefix)
    if url is not None:
        chosen = replace(chosen, nats_url=url if isinstance(url, str) else ",".join(url))
    options = options_from(chosen, name=name, on_change=on_change)
    return Client(
        replace(
            options,
            tls=tls or options.tls,
            connect_timeout_s=connect_timeout_s,
            ping_interval_s=ping_interval_s,
        )
    )
