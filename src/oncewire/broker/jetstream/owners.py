"""What the parts of a node need from it to reach owners of partitions. Types only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from oncewire.broker.jetstream import ops
from oncewire.broker.jetstream.catalog import Listed
from oncewire.broker.jetstream.cell import Cell

Done = Callable[[Any], None]
Local = Callable[[Cell, Done], None]


class Owners(Protocol):
    """The node, as far as all parts need it."""

    on_step: Callable[[str], None]

    def clock(self) -> int: ...
    def at_owner(
        self, topic: Listed, partition: int, request: Callable[[], ops.Placed], local: Local, done: Done
    ) -> None:
        """Ask the owner: here by `local`, elsewhere by `request`."""
