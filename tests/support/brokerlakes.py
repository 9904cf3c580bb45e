"""A topic in a lake made by hand: messages, and what its owner wrote down of them, by the broker's own formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from oncewire._ground.contracts.broker import DeadLetter, DeliveredEnvelope
from oncewire._ground.contracts.records import (
    Acked,
    Buried,
    GroupMade,
    Packed,
    Record,
    Retried,
    Trimmed,
    encode_document,
)
from oncewire._ground.contracts.topics import RECORDS, prefix_of, records_of, stream_of
from tests.support.lakes import CREATED_NS, Lake

GROUP = 1
TYPO = 2
"""A group that comes only where a test makes it."""


class FakeTopic:
    """One partition, one owner, one group `g`. Messages and settlements are named by offsets."""

    def __init__(self, lake: Lake, name: str = "orders", number: int = 1, tenant: str = "acme") -> None:
        self.lake, self.name, self.number, self.tenant = lake, name, number, tenant
        self.stream = stream_of(tenant, name, number)
        self._last = 0
        lake.topics.append(
            {
                "tenant": tenant, "stream": self.stream, "created_ns": CREATED_NS, "number": number, "topic": name,
                "partitions": 1, "found_at": lake.now,
            }
        )  # fmt: skip
        self.write(taken=True)
        self.write(GroupMade(number, GROUP, "g", self.now_ms))

    @property
    def now_ms(self) -> int:
        return int(self.lake.now.timestamp() * 1000)

    def produce(self, value: str = "v", **envelope: Any) -> int:
        body = encode_document(("", value, DeliveredEnvelope(**envelope) if envelope else None, None))
        return self.lake.add(self.stream, f"{prefix_of(self.tenant, self.name, self.number)}.0", body) - 1

    def write(self, *records: Record, taken: bool = False, owner: str = "n1", after: int | None = None) -> int:
        """A packed record; where it stands."""
        packed = Packed(
            owner, self._last if after is None else after, self.tenant, self.name, taken, self.now_ms,
            {str(GROUP): "g", str(TYPO): "typo"}, list(records),
        )  # fmt: skip
        self._last = self.lake.add(RECORDS, records_of(self.number, 0), msgspec.json.encode(packed))
        return self._last

    def ack(self, *offsets: int, attempts: int = 1) -> int:
        return self.write(*(self.acked(one, attempts) for one in offsets))

    def acked(self, offset: int, attempts: int = 1) -> Acked:
        return Acked(self.number, GROUP, 0, offset, self.now_ms, b"", attempts, "worker")

    def fail(self, offset: int, attempts: int = 1, error: str = "no") -> int:
        return self.write(Retried(self.number, GROUP, 0, offset, attempts, 0, error, self.now_ms, "worker"))

    def bury(self, offset: int, graves: FakeTopic | None, attempts: int = 2, error: str = "no") -> int:
        """With its letter, unless there is no grave for it."""
        if graves is not None:
            letter = DeadLetter(
                original_topic=self.name, original_partition=0, original_offset=offset, attempts=attempts,
                last_error=error, routed_at_ms=self.now_ms,
            )  # fmt: skip
            graves.produce("dead", dlq=letter)
        return self.write(Buried(self.number, GROUP, 0, offset, None, attempts, error, self.now_ms, "worker"))

    def trim(self, offset: int) -> int:
        return self.write(Trimmed(self.number, 0, offset))


def repack(lake: Lake, sequence: int, records: Sequence[Record]) -> None:
    """Change what a record says, in bronze alone or before silver is derived."""
    row = lake.row(RECORDS, sequence)
    told = msgspec.json.decode(row["payload"], type=Packed)
    row["payload"] = msgspec.json.encode(msgspec.structs.replace(told, records=list(records)))
