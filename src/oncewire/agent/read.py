"""From messages to items: position, identity, handler, keys. No I/O; what cannot be read says why.

All messages of a batch are read before the transaction opens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter

from oncewire.agent.agent import Agent
from oncewire.agent.batch import Item
from oncewire.agent.handlers import Handler, find_handler
from oncewire.contracts import headers as names
from oncewire.contracts import ids
from oncewire.contracts.inputs import Input, read_all_complete, read_closely
from oncewire.errors import ContractViolation
from oncewire.jetstream.losses import INCARNATION
from oncewire.jetstream.protocol import Message, parse_time_ns
from oncewire.jetstream.pull import Delivery, parse_replies
from oncewire.ledger import rules
from oncewire.ledger.rules import Ledger, Source

SUBJECTS_MAX = 10_000
_REPLAY_FOR = names.REPLAY_FOR.encode()
_stream_of = attrgetter("stream")


class Reading:
    """Reads the messages of one agent's streams."""

    def __init__(self, agent: Agent, ledger: Ledger, sources: dict[str, Source]) -> None:
        self._handlers = agent.handlers
        self._agent = ledger.name
        self._created = {stream: source.created for stream, source in sources.items()}
        self._created_ns = {
            stream: parse_time_ns(source.created.partition(INCARNATION)[0]) for stream, source in sources.items()
        }
        self._known: dict[bytes, tuple[str, Handler | None]] = {}

    def read(self, messages: list[Message]) -> list[Item]:
        return self.read_delivered(messages, parse_replies([message.reply for message in messages]))

    def read_delivered(self, messages: list[Message], deliveries: Sequence[Delivery]) -> list[Item]:
        """One step after the other, each over all messages: that is a third cheaper than message by message."""
        known = [self._known.get(message.subject_raw) or self._look_up(message) for message in messages]
        whole = read_all_complete([message.payload for message in messages], [subject for subject, _ in known])
        at_keys = self._position_keys(deliveries)
        keys = self._identity_keys(whole)
        return [
            Item(message, delivery, subject, found, handler, key, at_key)
            if found is not None and _REPLAY_FOR not in message.header_raw
            else self._closer(message, delivery, subject, found, handler, at_key)
            for message, delivery, (subject, handler), found, key, at_key in zip(
                messages, deliveries, known, whole, keys, at_keys, strict=True
            )
        ]

    def _position_keys(self, deliveries: Sequence[Delivery]) -> list[bytes]:
        """A pull brings those of one stream."""
        found: list[bytes] = []
        for stream, part in groupby(deliveries, key=_stream_of):
            sequences = [at.sequence for at in part]
            found += rules.keys_of_positions(self._agent, stream, self._created[stream], sequences)
        return found

    def _identity_keys(self, whole: Sequence[Input | None]) -> list[bytes]:
        """Empty for those that must be looked at closely."""
        there = [one.identity for one in whole if one is not None]
        keys = rules.keys_of_identities(self._agent, there)
        if len(keys) == len(whole):
            return keys
        left = iter(keys)
        return [next(left) if one is not None else b"" for one in whole]

    def _closer(
        self,
        message: Message,
        delivery: Delivery,
        subject: str,
        found: Input | None,
        handler: Handler | None,
        at_key: bytes,
    ) -> Item:
        """A message that leaves something out, breaks its contract, or is a replay."""
        if _REPLAY_FOR in message.header_raw:
            meant_for = message.headers.get(names.REPLAY_FOR)
            if meant_for and meant_for != delivery.consumer:
                return Item(message, delivery, subject, None, handler, b"", at_key, is_passed=True)
        try:
            found = found or self._read_closely(message, delivery, subject)
        except ContractViolation as violation:
            wrong = f"{violation.code}: {violation.message}"
            return Item(message, delivery, subject, None, handler, b"", at_key, wrong)
        return Item(message, delivery, subject, found, handler, rules.identity_key(self._agent, found.identity), at_key)

    def _read_closely(self, message: Message, delivery: Delivery, subject: str) -> Input:
        stream = delivery.stream
        origin = ids.Origin(stream, self._created_ns[stream], delivery.sequence, delivery.timestamp_ns)
        return read_closely(message.payload, subject=subject, origin=origin, carried=message.headers)

    def _look_up(self, message: Message) -> tuple[str, Handler | None]:
        subject = message.subject
        found = (subject, find_handler(self._handlers, subject))
        if len(self._known) < SUBJECTS_MAX:
            self._known[message.subject_raw] = found
        return found
