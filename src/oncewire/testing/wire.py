"""In the place of a server: streams that take what is published once per id, and settlements that are remembered."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from oncewire._ground.contracts import subjects
from oncewire._ground.errors import ContractViolation, TooLarge
from oncewire._ground.jetstream.protocol import Message
from oncewire._ground.jetstream.pull import Delivery
from oncewire._ground.ledger.rules import Sending
from oncewire._ground.ledger.store import Block, Mark
from oncewire._ground.topology import Topology, load
from oncewire.agent.effects import no_confirmation

PAYLOAD_BYTES_MAX: Final = 1_048_576 - 16_384
"""What a server with its default settings takes, less the room for a dead letter."""
REQUESTS: Final = "dlq_requests."
DLQ: Final = "Oncewire-Dlq-"


class Published(msgspec.Struct, frozen=True):
    """A message that stands in a stream. `payload` is what the effect had; `envelope` is the whole body."""

    subject: str
    payload: Any
    type: str
    id: str
    headers: dict[str, str]
    envelope: Any


class DeadLetter(msgspec.Struct, frozen=True):
    """An input that was handed to the dead-letter service."""

    subject: str
    cause: str
    outcome: str
    deliveries: int
    body: bytes


class Streams:
    """The declared streams: which takes what."""

    def __init__(self, topology: Topology | None = None) -> None:
        self._streams = (topology or load()).streams
        self._bytes_max = {stream.name: stream.max_msg_bytes for stream in self._streams if stream.max_msg_bytes >= 0}
        self.last: dict[str, int] = {}

    def stream_of(self, subject: str) -> str:
        subjects.check_subject(subject)
        for stream in self._streams:
            if any(subjects.matches(subject, pattern) for pattern in stream.subjects):
                if stream.no_ack:
                    raise no_confirmation(subject, stream.name)
                return stream.name
        raise ContractViolation(
            f"an effect goes to {subject}, which no stream captures",
            field="subject",
            hint="Declare a stream for it, and give AgentTest the topology.",
        )

    async def resolve(self, subject: str) -> str:
        return self.stream_of(subject)

    def check_size(self, sending: Sending) -> None:
        bytes_max = min(PAYLOAD_BYTES_MAX, self._bytes_max.get(sending.stream, PAYLOAD_BYTES_MAX))
        if len(sending.payload) > bytes_max:
            raise TooLarge(f"the message has {len(sending.payload)} bytes, {bytes_max} are allowed")


class Wire:
    """Takes effects, once per id, and remembers how inputs were settled."""

    def __init__(self) -> None:
        self.effects: list[Published] = []
        self.dead_letters: list[DeadLetter] = []
        self._ids: set[str] = set()
        self.acked: set[bytes] = set()
        self.nakked: dict[bytes, float] = {}

    # ---- publishing

    async def publish(self, block: int, sendings: Sequence[Sending], announcement: bytes) -> tuple[list[Mark], str]:  # noqa: ARG002
        for sending in sendings:
            self._take(sending)
        return [Mark(block, 0, len(sendings), "LEDGER", block)], ""

    async def resend(self, block: Block, holes: Sequence[tuple[int, int]]) -> tuple[list[Mark], str]:  # noqa: ARG002
        return await self.publish(block.number, block.content.effects, block.announcement)

    def _take(self, sending: Sending) -> None:
        if sending.id in self._ids:
            return
        self._ids.add(sending.id)
        headers = dict(sending.headers or {})
        if sending.subject.startswith(REQUESTS):
            self.dead_letters.append(_letter(sending.payload, headers))
            return
        if sending.trace:
            headers["traceparent"] = sending.trace
        self.effects.append(_published(sending, headers))

    # ---- settling

    def ack(self, messages: Iterable[Message]) -> None:
        self.acked |= {message.reply for message in messages}

    def nak(self, messages: Iterable[Message], delay_s: float = 0.0) -> None:
        self.nakked |= {message.reply: delay_s for message in messages}

    def term(self, messages: Iterable[Message], reason: str = "") -> None:  # noqa: ARG002 - the shape of a pull
        self.ack(messages)

    # ---- nobody takes long here

    def watch(self, replies: list[bytes]) -> int:  # noqa: ARG002
        return 0

    def watch_all(self, replies: list[bytes], deliveries: Sequence[Delivery]) -> int:  # noqa: ARG002
        return 0

    def release(self, token: int) -> None:
        pass


def _letter(body: bytes, headers: dict[str, str]) -> DeadLetter:
    return DeadLetter(
        headers[f"{DLQ}Subject"],
        headers[f"{DLQ}Cause"],
        headers[f"{DLQ}Outcome"],
        int(headers[f"{DLQ}Deliveries"]),
        body,
    )


def _published(sending: Sending, headers: dict[str, str]) -> Published:
    try:
        envelope = msgspec.json.decode(sending.payload)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Published(sending.subject, sending.payload, "", sending.id, headers, sending.payload)
    told = envelope if isinstance(envelope, dict) and "payload" in envelope else {"payload": envelope}
    type_ = told.get("type") or told.get("message_type") or ""
    return Published(sending.subject, told["payload"], type_, sending.id, headers, envelope)
