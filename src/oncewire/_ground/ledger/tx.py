"""`ctx.tx`: the part of the ledger's transaction that belongs to one input. Statements, and nothing that outlives them.

The driver's connection is never handed out. So a handler cannot change what the ledger's own statements go through,
and a `Tx` can end: with its handler, or with its section. Whatever still holds it then (a thread, a task, a cursor, an
iterator half read) gets an error, where the connection would have run the statement in the next input's transaction
or outside of any.

    Tx          what both stores offer: blocks that roll back, refusals        SqliteTx, PostgresTx   their statements
    Block       `with ctx.tx.transaction():`, and `with ctx.tx:`
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any, NoReturn

from oncewire._ground.errors import Refused


def ended() -> Refused:
    return Refused(
        "ctx.tx was used after its transaction had ended",
        hint="Run statements before a `def` handler returns, or inside `async with ctx.tx as tx:`. Threads, background "
        "tasks and everything else that outlives the input need a connection of their own.",
    )


def not_allowed(what: str, hint: str = "") -> Refused:
    return Refused(f"a handler may not {what}", hint=hint)


def ends_transaction() -> Refused:
    return not_allowed(
        "end or begin the ledger's transaction",
        "The agent commits its rows with the input. To undo some of them raise inside `with ctx.tx.transaction():`, to "
        "undo all raise from the handler.",
    )


class Tx:
    """See the module's head. Made by a store's `savepoint`, ended by its `keep` or `undo`."""

    __slots__ = ("_blocks", "_has_traces", "_is_over", "_lock", "_row_factory")

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        """Held by each statement: a transaction does not end while a thread is inside one."""
        self._is_over = self._has_traces = False
        self._blocks: tuple[Block, ...] = ()
        self._row_factory: Any = None

    def __repr__(self) -> str:
        return f"<ctx.tx, {'ended' if self._is_over else 'open'}>"

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"ctx.tx has no {name!r}: it is the transaction of one input, not the driver's connection (docs/agents.md)"
        )

    @property
    def row_factory(self) -> Any:
        """What makes rows of the cursors from here on, for this input alone."""
        return self._row_factory

    @row_factory.setter
    def row_factory(self, factory: Any) -> None:
        self._row_factory = factory

    # ---- blocks that roll back

    def transaction(self) -> Block:
        """`with tx.transaction():` keeps all that its block wrote, or nothing when the block raises."""
        return Block(self)

    def __enter__(self) -> Tx:
        Block(self).__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return self._blocks[-1].__exit__(kind, error, trace)

    def open_block(self, block: Block) -> None:
        with self._lock:
            self._check()
            self._own(f"SAVEPOINT oncewire_block_{len(self._blocks)}")
            self._blocks += (block,)

    def close_block(self, block: Block, error: BaseException | None) -> None:
        with self._lock:
            if self._is_over and error is not None:
                return  # all of it was rolled back, and the error on its way says why
            self._check()
            if not self._blocks or self._blocks[-1] is not block:
                raise Refused("blocks of ctx.tx.transaction() must end in the reverse order of their beginnings")
            self._blocks = self._blocks[:-1]
            self._end_block(f"oncewire_block_{len(self._blocks)}", is_good=error is None)

    def _end_block(self, savepoint: str, *, is_good: bool) -> None:
        if not is_good:
            self._own(f"ROLLBACK TO {savepoint}")
        self._own(f"RELEASE {savepoint}")

    def asks_to_roll_back(self, error: BaseException, block: Block) -> bool:  # noqa: ARG002 - psycopg has such errors
        """Whether the error is only a word to the block, and goes no further."""
        return False

    # ---- what a handler may not do

    def commit(self) -> NoReturn:
        raise ends_transaction()

    def rollback(self) -> NoReturn:
        raise ends_transaction()

    def close(self) -> NoReturn:
        raise not_allowed("close the ledger's connection", "ctx.tx ends with the handler.")

    # ---- for whoever made it

    def leave(self) -> None:
        """No statement begins from here on; one that a thread is inside of goes on until `end`."""
        self._is_over = True

    def end(self) -> bool:
        """Nothing of it is left on the connection. False when a thread was inside a statement: it was cut off, and what
        the handler wrote may not all be there."""
        self._is_over = True
        lock = self._lock
        is_quiet = lock.acquire(False)
        if not is_quiet:
            self._interrupt()
            lock.acquire()
        try:
            if self._has_traces:
                self._clean_up()
        finally:
            lock.release()
        return is_quiet

    def _check(self) -> None:
        if self._is_over:
            raise ended()

    def _own(self, statement: str) -> None:
        """A statement of ours about savepoints, which handlers may not run by themselves."""
        raise NotImplementedError

    def _interrupt(self) -> None:
        raise NotImplementedError

    def _clean_up(self) -> None:
        """What statements left on the connection, if any `_has_traces`."""
        raise NotImplementedError


def cut_off() -> Refused:
    return Refused(
        "a thread was still running a statement of ctx.tx when its handler ended",
        hint="Wait for the thread before the handler returns.",
    )


class Block:
    """What stands between a savepoint and its end. Made by `Tx.transaction`."""

    __slots__ = ("_tx",)

    def __init__(self, tx: Tx) -> None:
        self._tx = tx

    def __enter__(self) -> Block:
        self._tx.open_block(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._tx.close_block(self, error)
        return error is not None and self._tx.asks_to_roll_back(error, self)
