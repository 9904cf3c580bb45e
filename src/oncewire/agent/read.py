"""From messages to items: position, identity, handler, keys. No I/O; what cannot be read says why.

All messages of a batch are read before the transaction opens.
"""

from __future__ import annotations

from oncewire.agent.agent import Agent
from oncewire.agent.batch import Item
from oncewire.agent.handlers import Handler, find_handler
from oncewire.contracts import headers as names
from oncewire.contracts import ids
from oncewire.contracts.inputs import Input, read_input
from oncewire.errors import ContractViolation
from oncewire.jetstream.losses import INCARNATION
from oncewire.jetstream.protocol import Message, parse_headers, parse_time_ns
from oncewire.jetstream.pull import parse_reply
from oncewire.ledger import rules
from oncewire.ledger.rules import Ledger, Source

SUBJECTS_MAX = 10_000


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
        carried = parse_headers(message.header_raw) if message.header_raw else {}
        meant_for = carried.get(names.REPLAY_FOR) if carried else None
        if meant_for and meant_for != delivery.consumer:
            return Item(message, delivery, subject, carried, None, handler, b"", at_key, "", True)
        origin = ids.Origin(stream, self._created_ns[stream], delivery.sequence, delivery.timestamp_ns)
        found: Input | None = None
        wrong = ""
        key = b""
        try:
            found = read_input(message.payload, subject=subject, origin=origin, carried=carried)
            key = rules.identity_key(self._agent, found.identity)
        except ContractViolation as violation:
            wrong = f"{violation.code}: {violation.message}"
        return Item(message, delivery, subject, carried, found, handler, key, at_key, wrong, False)

    def _look_up(self, message: Message) -> tuple[str, Handler | None]:
        subject = message.subject
        found = (subject, find_handler(self._handlers, subject))
        if len(self._known) < SUBJECTS_MAX:
            self._known[message.subject_raw] = found
        return found
