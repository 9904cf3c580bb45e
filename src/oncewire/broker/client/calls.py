"""What the client asks and how it reads the answers, for both of its twins. No I/O.

A call says whether it may be sent again when its answer was lost. A produce with an idempotency key may; one without
must not, or it could stand twice: then the caller gets OutcomeUnknown.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from urllib.parse import quote, urlsplit

import msgspec

from oncewire._ground.arguments import check_secret, check_text
from oncewire._ground.contracts.broker import (
    BrokerEnvelope,
    Delivery,
    ProduceBody,
    decode_delivery,
    encode_produce,
)
from oncewire._ground.contracts.codec import ENCODE
from oncewire._ground.errors import (
    AuthenticationFailed,
    Conflict,
    ContractViolation,
    InvalidSetting,
    NotConnected,
    NotFound,
    OncewireError,
    OutcomeUnknown,
    Overloaded,
    PermissionDenied,
    ProtocolViolation,
    Refused,
    TooLarge,
)
from oncewire._ground.masking import mask_url
from oncewire.broker.engine import IdempotencyStatus, TopicCreated, TopicShown

T = TypeVar("T")
NDJSON = "application/x-ndjson"
JSON = "application/json"


@dataclass(frozen=True)
class Call(Generic[T]):
    """One request, and how its answer becomes a value."""

    method: str
    path: str
    body: bytes
    read: Callable[[bytes], T]
    is_repeatable: bool
    content_type: str = JSON
    wait_s: float = 0.0
    """How long the broker may take by itself, on top of the client's own patience."""


@dataclass(frozen=True)
class Message:
    """A message to be produced. With an idempotency key it is stored once, however often it is sent."""

    topic: str
    value: str
    key: str = ""
    envelope: BrokerEnvelope = field(default_factory=BrokerEnvelope)

    @property
    def body(self) -> ProduceBody:
        envelope = self.envelope if self.envelope != BrokerEnvelope() else None
        return ProduceBody(topic=self.topic, value=self.value, key=self.key, envelope=envelope)


class Result(msgspec.Struct, frozen=True):
    """What became of one line of a batch."""

    status: str | int = ""
    topic: str = ""
    partition: int = -1
    offset: int = -1
    duplicate: bool = False
    error: str = ""
    message: str = ""
    reason: str = ""
    retry_after_ms: int = 0

    @property
    def problem(self) -> OncewireError | None:
        """Why the line was refused, None when it was not."""
        if not self.error:
            return None
        return error_of(self.status if isinstance(self.status, int) else 400, ENCODE(self))


_RESULT = msgspec.json.Decoder(Result)
_TOPICS = msgspec.json.Decoder(dict[str, list[str]])
_CREATED = msgspec.json.Decoder(TopicCreated)
_SHOWN = msgspec.json.Decoder(TopicShown)
_STATUS = msgspec.json.Decoder(IdempotencyStatus)
_ANY = msgspec.json.Decoder(dict[str, Any])


def _nothing(body: bytes) -> None:  # noqa: ARG001
    return None


def _results(body: bytes) -> list[Result]:
    return [_RESULT.decode(line) for line in body.splitlines()]


def deliveries(body: bytes) -> list[Delivery]:
    """The lines of a poll or of a piece of a stream."""
    return [decode_delivery(line) for line in body.splitlines() if line]


def body_of(fields: dict[str, Any]) -> bytes:
    """The body of a request, of texts and numbers that callers hand in."""
    try:
        return ENCODE(fields)
    except (TypeError, ValueError, OverflowError) as error:
        raise ContractViolation(f"the call cannot be written as JSON: {error}") from None


def _produced(message: Message) -> bytes:
    try:
        return encode_produce(message.body)
    except (TypeError, UnicodeEncodeError) as error:
        raise ContractViolation(f"the message cannot be written as JSON: {error}") from None


def _quoted(name: str) -> str:
    return quote(check_text("topic", "name", name), safe="")


def create_topic(name: str, partitions: int) -> Call[TopicCreated]:
    return Call("POST", "/v1/topics", body_of({"name": name, "partitions": partitions}), _CREATED.decode, True)


def list_topics() -> Call[list[str]]:
    return Call("GET", "/v1/topics", b"", lambda body: _TOPICS.decode(body)["topics"], True)


def show_topic(name: str) -> Call[TopicShown]:
    return Call("GET", f"/v1/topics/{_quoted(name)}", b"", _SHOWN.decode, True)


def delete_topic(name: str) -> Call[None]:
    return Call("DELETE", f"/v1/topics/{_quoted(name)}", b"", _nothing, False)


def version() -> Call[dict[str, Any]]:
    return Call("GET", "/v1/version", b"", _ANY.decode, True)


def produce(message: Message) -> Call[None]:
    is_repeatable = message.envelope.idempotency_key != ""
    return Call("POST", "/v1/produce", _produced(message), _nothing, is_repeatable)


def produce_many(messages: Iterable[Message]) -> Call[list[Result]]:
    messages = list(messages)
    body = b"\n".join(_produced(message) for message in messages)
    is_repeatable = all(message.envelope.idempotency_key for message in messages)
    return Call("POST", "/v1/produce", body, _results, is_repeatable, NDJSON)


def take(topic: str, group: str, owner: str, most: int, wait_ms: int, lease_ms: int | None) -> Call[list[Delivery]]:
    wanted: dict[str, Any] = {"topic": topic, "group": group, "owner": owner, "max": most, "wait_ms": wait_ms}
    if lease_ms is not None:
        wanted["lease_ms"] = lease_ms
    # What a lost answer held is leased to nobody who knows of it, and comes again: asking again loses nothing.
    return Call("GET", "/v1/consume", body_of(wanted), deliveries, True, wait_s=wait_ms / 1000)


@dataclass(frozen=True)
class Lease:
    """A delivery in somebody's hands: what every settlement names."""

    topic: str
    group: str
    owner: str
    partition: int
    offset: int

    def settle(self, act: str, **more: Any) -> Call[None]:
        return Call("POST", f"/v1/{act}", body_of(self._fields() | more), _nothing, act == "extend")

    def idempotency(self, act: str, tenant_id: str, key: str, error: str = "") -> Call[IdempotencyStatus]:
        fields = self._fields() | {"tenant_id": tenant_id, "idempotency_key": key}
        if error:
            fields["error"] = error
        return Call("POST", f"/v1/idempotency/{act}", body_of(fields), _STATUS.decode, True)

    def _fields(self) -> dict[str, Any]:
        return {
            "topic": self.topic, "group": self.group, "owner": self.owner, "partition": self.partition,
            "offset": self.offset,
        }  # fmt: skip


def settle_many(act: str, leases: Sequence[Lease]) -> Call[list[Result]]:
    body = b"\n".join(body_of(lease._fields()) for lease in leases)
    return Call("POST", f"/v1/{act}", body, _results, act == "extend", NDJSON)


def answer(call: Call[T], status: int, body: bytes) -> T:
    """The value of an answer, or the error that it tells."""
    if status not in (200, 201, 204):
        raise error_of(status, body)
    try:
        return call.read(body)
    except msgspec.DecodeError as error:
        raise ProtocolViolation(f"the broker's answer to {call.method} {call.path} cannot be read: {error}") from None


_ERRORS: dict[int, type[OncewireError]] = {
    401: AuthenticationFailed, 403: PermissionDenied, 404: NotFound, 409: Conflict, 413: TooLarge,
}  # fmt: skip


def error_of(status: int, body: bytes) -> OncewireError:
    """Our error for an answer that is one. A 5xx says nothing about what happened: unknown."""
    try:
        told = _ANY.decode(body)
    except msgspec.DecodeError:
        told = {}
    message = str(told.get("message") or f"the broker answered {status}")
    if status == 429:
        return Overloaded(message, retry_after_s=float(told.get("retry_after_ms") or 1000) / 1000)
    if status >= 500:
        return OutcomeUnknown(message, retry_after_s=1.0)
    return _ERRORS.get(status, Refused)(message)


@dataclass(frozen=True)
class Address:
    """Where a broker listens."""

    host: str
    port: int
    prefix: str
    is_secure: bool = False

    @property
    def authority(self) -> str:
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


def address_of(url: str) -> Address:
    """The parts of `http://host:port` or `https://…`; a path before `/v1` is kept, for a proxy that has one."""
    check_secret("BrokerClient", "url", url)
    parts = urlsplit(url)
    is_secure = parts.scheme == "https"
    try:
        port = parts.port or (443 if is_secure else 80)
    except ValueError:
        port = 0
    if parts.scheme not in ("http", "https") or not parts.hostname or not port:
        raise InvalidSetting(
            f"{mask_url(url)!r} is not an address", hint="Write it as http://host:port, or with https."
        )
    return Address(parts.hostname, port, parts.path.rstrip("/"), is_secure)


class UntrustedCertificate(AuthenticationFailed):
    """The broker's certificate is of an authority that this client does not trust."""


def not_connected(address: Address, error: OSError | TimeoutError) -> OncewireError:
    """Why no connection came about: nobody is there, or it is not who it should be."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return UntrustedCertificate(
            f"the certificate of {address.authority} is not trusted: {error.verify_message}",
            hint="Trust its authority: tls=lambda: ssl.create_default_context(cafile=…).",
        )
    return NotConnected(f"no broker at {address.authority}: {error}", hint="Start one: oncewire broker run.")


def headers_of(token: str) -> list[tuple[str, str]]:
    """What says who is asking. A line break would begin a header of its own."""
    if not check_secret("BrokerClient", "token", token).isprintable():
        raise ContractViolation("BrokerClient: token has a control character", field="token")
    return [("Authorization", f"Bearer {token}")] if token else []


def encode_call(address: Address, call: Call[Any], headers: Iterable[tuple[str, str]]) -> bytes:
    """The bytes of a request."""
    lines = [f"{call.method} {address.prefix}{call.path} HTTP/1.1", f"Host: {address.authority}"]
    lines += [f"{name}: {value}" for name, value in headers]
    if call.body:
        lines += [f"Content-Type: {call.content_type}"]
    lines += [f"Content-Length: {len(call.body)}", "", ""]
    return "\r\n".join(lines).encode() + call.body
