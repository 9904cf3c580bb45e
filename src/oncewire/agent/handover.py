"""How a message that was given up is handed to the dead-letter service: as an effect of its own. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oncewire._ground.contracts import ids, letters, subjects
from oncewire._ground.contracts.blocks import Outcome
from oncewire._ground.errors import TooLarge
from oncewire._ground.jetstream.protocol import parse_time_ns
from oncewire._ground.ledger.rules import Sending, Source

if TYPE_CHECKING:
    from oncewire.agent.batch import Item, Limits


def letter_request(item: Item, limits: Limits, source: Source, outcome: Outcome, reason: str) -> Sending:
    """The message as it came, with what the dead-letter service must know, as an effect of its own. One that is too
    large for a letter is named by its place alone."""
    delivery, ledger = item.delivery, limits.ledger
    told = {
        letters.STREAM: delivery.stream,
        letters.CREATED: str(created_ns(source)),
        letters.SEQUENCE: str(delivery.sequence),
        letters.TIMESTAMP: str(delivery.timestamp_ns),
        letters.CONSUMER: delivery.consumer,
        letters.DELIVERIES: str(delivery.deliveries),
        letters.SUBJECT: item.subject,
        letters.OUTCOME: outcome.value,
        letters.CAUSE: reason,
    }
    carried = letters.carry(item.carried, text_only=True)
    if carried.dropped:
        told[letters.HEADERS] = str(carried.dropped)
    identity = ids.joined("letter", item.at_key.hex())
    id_ = ids.effect_id(ledger.tenant, ledger.workspace, ledger.agent, identity, 0)
    subject = subjects.dlq_request(ledger.agent)
    sending = Sending(id_, subject, item.message.payload, told | carried.headers, limits.stream_of(subject))
    try:
        limits.check_size(sending)
    except TooLarge:
        told |= {letters.PAYLOAD: letters.POINTER, letters.BYTES: str(len(item.message.payload))}
        return Sending(id_, subject, b"", told | carried.headers, sending.stream)
    return sending


def created_ns(source: Source) -> int:
    """When the stream was made; the number of its incarnation stands behind."""
    return parse_time_ns(source.created.partition("#")[0])
