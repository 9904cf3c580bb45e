"""From messages to items: position, identity, handler, keys. No I/O; what cannot be read says why.

All messages of a batch are read before the transaction opens.
"""

from __future__ import annotations

from oncewire.agent.agent import Agent
from oncewire.agent.batch import Item
from oncewire.agent.handlers import Handler, find_handler
from oncewire.contracts import headers as names
from oncewire.contracts import ids
from oncewire.contracts.inputs import Input, read_closely, read_complete
from oncewire.errors import ContractViolation
from oncewire.jetstream.losses import INCARNATION
from oncewire.jetstream.protocol import Message, parse_time_ns
from oncewire.jetstream.pull import Delivery, parse_reply
from oncewire.ledger import rules
from oncewire.ledger.rules import Ledger, Source

SUBJECTS_MAX = 10_000
_REPLAY_FOR = names.REPLAY_FOR.encode()


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
        return [self._item(message) for message in messages]

    def _item(self, message: Message) -> Item:
        delivery = parse_reply(message.reply)
        subject, handler = self._known.get(message.subject_raw) or self._look_up(message)
        stream = delivery.stream
        at_key = rules.position_key(self._agent, stream, self._created[stream], delivery.sequence)
        if _REPLAY_FOR in message.header_raw:
            meant_for = message.headers.get(names.REPLAY_FOR)
            if meant_for and meant_for != delivery.consumer:
                return Item(message, delivery, subject, None, handler, b"", at_key, is_passed=True)
        try:
            found = read_complete(message.payload, subject) or self._read_closely(message, delivery, subject)
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
