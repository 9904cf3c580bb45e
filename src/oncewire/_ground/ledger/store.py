"""What an agent needs from a store: one protocol, and the few values that go through it.

A store has one writer at a time in a process: `begin`, then look, run, write, then `commit` or `rollback`. It is
synchronous on purpose: handlers run inside the transaction, through a `Tx`, and the agent runs it all in one thread
beside the event loop.

The order within a transaction:

    begin → claim(keys) → handlers, each in a savepoint from its first use of `ctx.tx` → append(block), which takes the
    chain's lock, as late as can be → commit

A claim whose input is not in the appended block is given back at the commit.

Errors: `NotConnected` means that the store is away (begin again later), any other `Unavailable` that this transaction
could not go through (a deadlock, a lock that took too long, a full disk): roll back, then run its inputs one by one.
`Refused` out of a transaction means that a handler ended it: nothing of it was kept; alone, it is that input's failure.
`Corrupt` from `begin` or `commit` means that somebody else works on the session: whether what it wrote was committed is
not known, so nothing of it may be published.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

from oncewire._ground.contracts.blocks import Confirmed, Ranges, announcement_hash, read_announcement
from oncewire._ground.errors import ContractViolation, Corrupt, Refused
from oncewire._ground.ledger.keys import Place
from oncewire._ground.ledger.packed import unpack, unpack_sending
from oncewire._ground.ledger.rules import Content, Delayed, Durable, Head, Ledger, Sources, identity_key
from oncewire._ground.ledger.tx import Tx
from oncewire._ground.masking import mask_url

FORMAT: Final = "1"
"""Of a ledger: its tables, and the bytes in them."""
RECENT_BLOCKS: Final = 4


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
    consumer: str
    sequence: int
    deliveries: int
    started_ms: int
    error: str

    @property
    def durable(self) -> Durable:
        return self.stream, self.consumer


class Appended(NamedTuple):
    """A block that was written (and is durable after the commit)."""

    number: int
    announcement: bytes


class Block(NamedTuple):
    """A block as it was stored."""

    number: int
    content: Content
    announcement: bytes


def read_block(number: int, content: bytes, announcement: bytes) -> Block:
    """A block from its columns; bytes that are no block are damage."""
    try:
        return Block(number, unpack(content), announcement)
    except ContractViolation as violation:
        raise _damaged(f"block {number} of the ledger", violation) from violation


def read_delayed(due_ms: int, sending: bytes) -> Delayed:
    """An effect that waits for its time, from its columns."""
    try:
        return Delayed(due_ms, unpack_sending(sending))
    except ContractViolation as violation:
        raise _damaged("a delayed effect of the ledger", violation) from violation


def _damaged(what: str, violation: ContractViolation) -> Corrupt:
    return Corrupt(
        f"{what} cannot be read: {violation.message}",
        hint="Its disk or memory is failing, or somebody wrote to it. Stop the agent, keep a copy of the ledger as it "
        "is, and go on from a backup: docs/how-to/backup.md.",
    )


def not_idle(url: str) -> Corrupt:
    """A transaction is open that the agent did not begin: what it commits now would only be a part of that one."""
    return Corrupt(
        f"the session of the ledger {mask_url(url)} is inside a transaction that the agent did not begin",
        hint="Something besides the agent uses the ledger's connection. Find it, then start the agent again: it has "
        "published nothing that is not committed.",
    )


def check_format(ledger: str, stored: str) -> None:
    """A ledger of another format is neither read nor written."""
    if stored != FORMAT:
        raise Refused(
            f"{ledger} has format {stored}, this version reads format {FORMAT}",
            hint="Use the version of oncewire that wrote it.",
        )


def old_blocks(store: Store, before_ms: int, blocks_max: int) -> list[Block]:
    """The blocks at the beginning of the chain that may be forgotten: sent before that time, all effects confirmed.
    The newest block always stays."""
    base, end = store.base().number, min(store.confirmed().block, store.head().number - 1)
    found: list[Block] = []
    for number in range(base + 1, min(end, base + blocks_max) + 1):
        block = store.block(number)
        if block is None or block.content.sent_ms >= before_ms:
            break
        found.append(block)
    return found


def head_at(block: Block) -> Head:
    """The end of the chain as it was when this block was written: the snapshot that stands for all before."""
    told = read_announcement(block.announcement)
    return Head(block.number, announcement_hash(block.announcement), bytes.fromhex(told.state))


def identity_keys(agent: str, blocks: Sequence[Block]) -> list[bytes]:
    """By these keys results of calls are kept."""
    entries = [entry for block in blocks for entry in block.content.entries if entry.identity]
    return sorted({identity_key(agent, entry.identity) for entry in entries})


class RecentBlocks:
    """The blocks that were read last: a batch that comes again asks for the same few a thousand times."""

    def __init__(self) -> None:
        self._blocks: dict[int, Block] = {}

    def get(self, number: int) -> Block | None:
        return self._blocks.get(number)

    def add(self, block: Block) -> Block:
        if len(self._blocks) >= RECENT_BLOCKS:
            self._blocks.pop(next(iter(self._blocks)))
        self._blocks[block.number] = block
        return block

    def clear(self) -> None:
        """After a rollback: a number may be given to another block."""
        self._blocks.clear()


class Store(Protocol):
    """See the module's head. Errors are from our tree, whatever the driver raises."""

    ledger_id: str
    url: str

    @property
    def connection(self) -> Any:
        """The driver's own connection. Handlers never get it: what they did to it would last."""

    def open(self, tenant: str, workspace: str, agent: str) -> Ledger: ...
    def close(self) -> None: ...
    def identity(self) -> dict[str, str]:
        """What tells this ledger from every other, copies of it included."""

    # ---- a transaction
    def begin(self) -> None: ...
    def claim(self, keys: Sequence[bytes], look: Sequence[bytes] = ()) -> dict[bytes, Place]:
        """Those of all these keys that are settled already, with where. The others of `keys` are this transaction's
        from now on: whoever else claims one waits for its end. Once per transaction."""

    def savepoint(self) -> Tx:
        """For one handler; `keep` or `undo` ends it. Nothing that it set for its session is left then."""

    def keep(self) -> None: ...
    def undo(self) -> None: ...
    def append(self, content: Content, sources: Sources, delayed: Sequence[Delayed]) -> Appended: ...
    def mark(self, marks: Sequence[Mark]) -> None: ...
    def commit(self) -> None: ...
    def rollback(self) -> None: ...

    # ---- small facts, each in the open transaction or in one of its own
    def begun(self, attempts: Sequence[Attempt]) -> None: ...
    def renew_attempts(self, keys: Sequence[bytes], now_ms: int) -> None:
        """Those of them that are there are still at it. The others have ended: they do not begin again by this."""

    def attempts(self) -> list[Attempt]: ...
    def forget_attempts(self, keys: Sequence[bytes]) -> None: ...
    def call_result(self, key: bytes, name: str) -> bytes | None: ...
    def keep_call(self, key: bytes, name: str, result: bytes) -> None: ...
    def due(self, now_ms: int, limit: int) -> list[Delayed]:
        """Inside a transaction: those that it then drops, so that no other process sends them too."""

    def next_due_ms(self) -> int | None: ...
    def drop_due(self, ids: Sequence[str]) -> set[str]:
        """Remove delayed effects; returns those that were still there: the others are somebody else's."""

    def note(self, name: str, text: str) -> None:
        """Keep a small text of this agent under a name, instead of what stood there."""

    def noted(self, name: str) -> str | None: ...
    def forget(self, before_ms: int, blocks_max: int) -> int:
        """Forget blocks from the beginning of the chain (`old_blocks`), with their keys and the results of their calls,
        in one transaction of its own; returns how many. `base` stands for them."""

    # ---- reading
    def waiting(self) -> list[Delayed]:
        """All delayed effects, for those who only look."""

    def head(self) -> Head: ...
    def base(self) -> Head:
        """Where the kept part of the chain begins: all blocks up to it were forgotten."""

    def confirmed(self) -> Confirmed: ...
    def block(self, number: int) -> Block | None: ...
    def unconfirmed(self) -> list[tuple[int, Ranges]]:
        """Blocks with effects that are not confirmed, and the closed ranges of those effects."""

    # ---- processes
    def enter(self, process: str, now_ms: int) -> bool:
        """Leave a running mark; True when another process did not remove its own: it did not stop cleanly."""

    def leave(self, process: str) -> None: ...
