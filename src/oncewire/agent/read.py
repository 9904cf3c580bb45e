"""From messages to items: position, identity, handler, keys. No I/O; what cannot be read says why.

All messages of a batch are read before the transaction opens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from oncewire._ground.contracts import headers as names
from oncewire._ground.contracts import ids
from oncewire._ground.contracts.inputs import Input, read_all_complete, read_closely
from oncewire._ground.contracts.subjects import check_subject
from oncewire._ground.errors import ContractViolation
from oncewire._ground.fields import columns
from oncewire._ground.jetstream.losses import INCARNATION
from oncewire._ground.jetstream.protocol import Message, parse_time_ns
from oncewire._ground.jetstream.pull import Delivery, parse_replies
from oncewire._ground.ledger import rules
from oncewire._ground.ledger.rules import Ledger, Source
from oncewire.agent.agent import Agent
from oncewire.agent.batch import Item
from oncewire.agent.handlers import Handler, find_handler

SUBJECTS_MAX = 10_000
_REPLAY_FOR = names.REPLAY_FOR.encode()


class Known(msgspec.Struct, frozen=True):
    """A subject that was seen before, and who handles it. `wrong` says why nobody can: the subject is then written as
    text that ledgers and headers can hold."""

    subject: str
    handler: Handler | None
    wrong: str = ""


class Reading:
    """Reads the messages of one agent's streams."""

    def __init__(self, agent: Agent, ledger: Ledger, sources: Iterable[Source]) -> None:
        self._handlers = agent.handlers
        self._agent = ledger.name
        self._created = {source.stream: source.created for source in sources}
        self._created_ns = {
            stream: parse_time_ns(created.partition(INCARNATION)[0]) for stream, created in self._created.items()
        }
        self._known: dict[bytes, Known] = {}

    def read(self, messages: list[Message]) -> list[Item]:
        return self.read_delivered(messages, parse_replies([message.reply for message in messages]))

    def read_delivered(self, messages: list[Message], deliveries: Sequence[Delivery]) -> list[Item]:
        """One step after the other, each over all messages: that is a third cheaper than message by message."""
        if not messages:
            return []
        names_, bodies, headers = columns(messages, Message, "subject_raw", "payload", "header_raw")
        known = [self._known.get(name) or self._look_up(one) for name, one in zip(names_, messages, strict=True)]
        subjects, handlers = columns(known, Known, "subject", "handler")
        whole = read_all_complete(bodies, subjects)
        if any(columns(known, Known, "wrong")[0]):
            whole = [None if one.wrong else found for one, found in zip(known, whole, strict=True)]
        at_keys = self._position_keys(deliveries)
        keys = self._identity_keys(whole)
        if all(whole) and _REPLAY_FOR not in b"\n".join(headers):
            return list(map(Item, messages, deliveries, subjects, whole, handlers, keys, at_keys))
        return [
            Item(message, delivery, subject, found, handler, key, at_key)
            if found is not None and _REPLAY_FOR not in message.header_raw
            else self._closer(message, delivery, one, found, at_key)
            for message, delivery, subject, handler, one, found, key, at_key in zip(
                messages, deliveries, subjects, handlers, known, whole, keys, at_keys, strict=True
            )
        ]

    def _position_keys(self, deliveries: Sequence[Delivery]) -> list[bytes]:
        streams, sequences = columns(deliveries, Delivery, "stream", "sequence")
        if len(set(streams)) == 1:  # a pull brings those of one stream
            return rules.keys_of_positions(self._agent, streams[0], self._created[streams[0]], sequences)
        return [
            rules.position_key(self._agent, stream, self._created[stream], sequence)
            for stream, sequence in zip(streams, sequences, strict=True)
        ]

    def _identity_keys(self, whole: Sequence[Input | None]) -> list[bytes]:
        """Empty for those that must be looked at closely."""
        if all(whole):
            return rules.keys_of_identities(self._agent, columns(whole, Input, "identity")[0])
        left = iter(rules.keys_of_identities(self._agent, [one.identity for one in whole if one is not None]))
        return [next(left) if one is not None else b"" for one in whole]

    def _closer(self, message: Message, delivery: Delivery, known: Known, found: Input | None, at_key: bytes) -> Item:
        """A message that leaves something out, breaks its contract, or is a replay."""
        subject, handler = known.subject, known.handler
        if _REPLAY_FOR in message.header_raw:
            meant_for = message.headers.get(names.REPLAY_FOR)
            if meant_for and meant_for != delivery.consumer:
                return Item(message, delivery, subject, None, handler, b"", at_key, is_passed=True)
        if known.wrong:
            return Item(message, delivery, subject, None, None, b"", at_key, known.wrong)
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

    def _look_up(self, message: Message) -> Known:
        subject = message.subject
        try:
            found = Known(check_subject(subject), find_handler(self._handlers, subject))
        except ContractViolation as violation:
            found = Known(repr(subject)[1:-1], None, f"{violation.code}: {violation.message}")
        if len(self._known) < SUBJECTS_MAX:
            self._known[message.subject_raw] = found
        return found
