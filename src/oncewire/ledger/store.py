"""What an agent needs from a store: one protocol, and the few values that go through it.

A store has one writer at a time in a process: `begin`, then look, run, write, then `commit` or `rollback`. It is
synchronous on purpose: handlers run inside the transaction, on the driver's own connection, and the agent runs it all
in one thread beside the event loop.

The order within a transaction:

    begin → claim(keys) → handlers, each in a savepoint from its first use of the connection → drop_claims of those that
    did not settle → append(block) as the last statement → commit
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from oncewire.ledger.keys import Place
from oncewire.ledger.rules import Confirmed, Content, Delayed, Head, Ledger, Source


class Mark(NamedTuple):
    """Effects `first` to `last` of a block stand in `stream`, the last of them at `sequence`. The announcement is the
    effect after the last one."""

    block: int
    first: int
    last: int
    stream: str
    sequence: int


class Attempt(NamedTuple):
    """An input that began or failed and is not settled."""

    key: bytes
    """Of the position, not of the identity."""
    stream: str
    sequence: int
    deliveries: int
    started_ms: int
    error: str


class Appended(NamedTuple):
    """A block that was written (and is durable after the commit)."""

    number: int
    announcement: bytes


class Block(NamedTuple):
    """A block as it was stored."""

    number: int
    content: Content
    announcement: bytes


class Store(Protocol):
    """See the module's head. Errors are from our tree, whatever the driver raises."""

    ledger_id: str
    url: str

    @property
    def connection(self) -> Any:
        """The driver's own connection, inside the open transaction."""

    def open(self, tenant: str, workspace: str, agent: str) -> Ledger: ...
    def close(self) -> None: ...
    def identity(self) -> dict[str, str]:
        """What tells this ledger from every other, copies of it included."""

    # ---- a transaction
    def begin(self) -> None: ...
    def claim(self, keys: Sequence[bytes]) -> dict[bytes, Place]:
        """Those of the keys that are settled already, with where. The others are this transaction's from now on."""

    def drop_claims(self, keys: Sequence[bytes]) -> None: ...
    def savepoint(self) -> None: ...
    def keep(self) -> None: ...
    def undo(self) -> None: ...
    def append(self, content: Content, sources: Mapping[str, Source], delayed: Sequence[Delayed]) -> Appended: ...
    def mark(self, marks: Sequence[Mark]) -> None: ...
    def commit(self) -> None: ...
    def rollback(self) -> None: ...

    # ---- small facts, each in the open transaction or in one of its own
    def begun(self, attempts: Sequence[Attempt]) -> None: ...
    def attempts(self) -> list[Attempt]: ...
    def forget_attempts(self, keys: Sequence[bytes]) -> None: ...
    def call_result(self, key: bytes, name: str) -> bytes | None: ...
    def keep_call(self, key: bytes, name: str, result: bytes) -> None: ...
    def due(self, now_ms: int, limit: int) -> list[Delayed]:
        """Inside a transaction: those that it then drops, so that no other process sends them too."""

    def next_due_ms(self) -> int | None: ...
    def drop_due(self, ids: Sequence[str]) -> None: ...

    # ---- reading
    def head(self) -> Head: ...
    def confirmed(self) -> Confirmed: ...
    def block(self, number: int) -> Block | None: ...
    def unconfirmed(self) -> list[tuple[int, list[tuple[int, int]]]]:
        """Blocks with effects that are not confirmed, and the closed ranges of those effects."""

    # ---- processes
    def enter(self, process: str, now_ms: int) -> bool:
        """Leave a running mark; True when another process did not remove its own: it did not stop cleanly."""

    def leave(self, process: str) -> None: ...
