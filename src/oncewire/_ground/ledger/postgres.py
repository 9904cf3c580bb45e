"""The ledger in PostgreSQL: several processes on several machines share it, each through one session of its own.

Handlers get a `PostgresTx`, never the connection. What keeps their rows and the ledger together:

- `commit()`, `rollback()`, COMMIT and its like are refused there, before they reach the server;
- a COMMIT that hides in a function call or between two statements fails at the server, and with it the transaction: a
  deferred trigger looks for the mark that only the agent takes away (`ledger_open`);
- a transaction that ended in any other way is noticed by its missing savepoint, and nothing is written after it;
- one that is open where the agent has none is noticed before the next begins, and before anything is published.

Settings, roles, temporary tables and cursors of a handler end with it: its savepoint is released together with a reset
of the session.

Two processes with the same input: both insert its key, the second waits for the first and then finds it settled. Keys
are inserted in order, so that two batches which share several never wait for each other.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
import psycopg
from psycopg.pq import TransactionStatus

from oncewire._ground.contracts import blocks
from oncewire._ground.contracts.blocks import Confirmed, Ranges
from oncewire._ground.errors import PermissionDenied, Refused, Unavailable
from oncewire._ground.ledger import keys as key_rules
from oncewire._ground.ledger import rules
from oncewire._ground.ledger.keys import Place
from oncewire._ground.ledger.packed import pack, pack_sending
from oncewire._ground.ledger.postgres_session import DISCARD_TEMPORARY, PROCESS_LOCKS, PostgresSession
from oncewire._ground.ledger.postgres_tx import PostgresTx, went_on
from oncewire._ground.ledger.rules import Content, Delayed, Head, Ledger, Sources
from oncewire._ground.ledger.store import (
    FORMAT,
    Appended,
    Attempt,
    Block,
    Mark,
    RecentBlocks,
    check_format,
    head_at,
    identity_keys,
    old_blocks,
    read_block,
    read_delayed,
)
from oncewire._ground.ledger.tx import cut_off, ends_transaction

HANDLER_S: Final = 300.0

_encode_json = msgspec.json.Encoder().encode


class PostgresStore:
    """See the module's head; the protocol is `ledger.store.Store`."""

    def __init__(self, url: str, *, schema: str = "", handler_timeout_s: float = HANDLER_S) -> None:
        self.url = url
        self.ledger_id = ""
        self._session = PostgresSession(url, schema, handler_timeout_s)
        self._agent = ""
        self._chain = 0
        self._ledger: Ledger | None = None
        self._blocks = RecentBlocks()
        self._group = 0
        self._claimed: set[bytes] = set()
        self._transaction: psycopg.Transaction | None = None
        self._packed = bytearray()
        self._is_torn = self._is_own_open = False
        self._savepoint = f"oncewire_{secrets.token_hex(8)}"
        """No handler can name it: one of theirs could not be told from it."""
        self._lock = threading.RLock()
        self._tx: PostgresTx | None = None
        self._release = b""

    # ---- life

    def open(self, tenant: str, workspace: str, agent: str) -> Ledger:
        self.close()
        try:
            self._agent = blocks.agent_name(tenant, workspace, agent)
            self._session.connect()
            self._release = self._released(self._session.resets)
            self._prepare()
        except BaseException:
            self.close()
            raise
        self._ledger = Ledger(f"{self.ledger_id}-{self._chain}", tenant, workspace, agent)
        return self._ledger

    def _prepare(self) -> None:
        with self._own() as cursor:
            fresh = {"id": secrets.token_hex(8), "format": FORMAT}
            try:
                cursor.execute(self._session.sql["add_meta"], fresh)
            except psycopg.errors.UndefinedTable:
                raise Refused(
                    f"schema {self._session.schema} holds no ledger",
                    hint="Run `oncewire migrate`, with the same --schema.",
                ) from None
            meta = dict(cursor.execute(self._session.sql["meta"]).fetchall())
            check_format("the ledger", meta["format"])
            self.ledger_id = meta["id"]
            if cursor.execute(self._session.sql["chain"], (self._agent,)).fetchone() is None:
                # Only then: an insert would wait for a process that was stopped while it added a block.
                cursor.execute(self._session.sql["add_chain"], (self._agent, *rules.FIRST, *rules.FIRST))
            self._chain = self._one(cursor.execute(self._session.sql["chain"], (self._agent,)))[0]

    def close(self) -> None:
        self._transaction = None
        self._session.close()

    def identity(self) -> dict[str, str]:
        """What tells this ledger from every other: its id with the cluster, the database and the schema."""
        try:
            with self._own() as cursor:
                cluster, database = self._one(cursor.execute(self._session.sql["identity"]))
        except PermissionDenied:
            cluster, database = "", ""
        return {"ledger": self.ledger_id, "store": f"postgresql:{cluster}:{database}:{self._session.schema}"}

    @property
    def schema(self) -> str:
        """Where the ledger's tables stand, quoted."""
        return self._session.schema

    @property
    def connection(self) -> psycopg.Connection[Any]:
        return self._session.connection

    @staticmethod
    def _one(cursor: psycopg.Cursor[Any]) -> tuple[Any, ...]:
        row: tuple[Any, ...] | None = cursor.fetchone()
        assert row is not None
        return row

    # ---- a transaction

    def begin(self) -> None:
        self._session.ensure()
        with self._session.translated():
            self._is_torn = False
            self._claimed = set()
            self._transaction = psycopg.Transaction(self.connection)
            try:
                self._transaction.__enter__()
                self._group = self._one(self._session.cursor.execute(self._session.sql["open_group"]))[0]
            except BaseException:
                self.rollback()
                raise

    def _inside(self) -> psycopg.Cursor[Any]:
        """Our cursor, or an error when the transaction is over: what follows would be another one."""
        if self._is_torn or self._session.status == TransactionStatus.IDLE:
            self._is_torn = True
            raise ends_transaction()
        return self._session.cursor

    def claim(self, keys: Sequence[bytes], look: Sequence[bytes] = ()) -> dict[bytes, Place]:
        wanted = set(keys)
        with self._session.translated():
            cursor = self._inside()
            cursor.execute(self._session.sql["claim"], (self._group, sorted(wanted)))
            asked = [*look] if cursor.rowcount == len(wanted) else [*wanted, *look]
            found = self._settled(cursor, asked) if asked else {}
            self._claimed = wanted - found.keys()
            return self._places(found) if found else {}

    def _settled(self, cursor: psycopg.Cursor[Any], keys: list[bytes]) -> dict[bytes, int]:
        """Not prepared: a plan that was made for a small table would stay when it has grown."""
        return dict(cursor.execute(self._session.sql["settled"], (keys, self._group), prepare=False).fetchall())

    def _places(self, found: dict[bytes, int]) -> dict[bytes, Place]:
        rows = self._session.cursor.execute(self._session.sql["places"], (list(set(found.values())),)).fetchall()
        blocks = {group: key_rules.places_of(number, key_rules.split_keys(keys)) for group, number, keys in rows}
        known = {key: group for key, group in found.items() if group in blocks}  # the others were just forgotten
        return {key: key_rules.decode_place(blocks[group][key]) for key, group in known.items()}

    def savepoint(self) -> PostgresTx:
        with self._session.translated():
            self._inside()
            self._session.run(b"SAVEPOINT " + self._savepoint.encode())
        self._tx = tx = PostgresTx(self.connection, self._lock, self._session.run)
        return tx

    def keep(self) -> None:
        with self._session.translated():
            cursor = self._inside()
            failure = self._end_tx()
            if failure is None and self._session.status == TransactionStatus.INERROR:
                failure = went_on()
            if failure is not None:
                self._back_to_savepoint(cursor)
                raise failure
            try:
                self._session.run(self._release)
            except psycopg.errors.InvalidSavepointSpecification:
                self._is_torn = True
                raise ends_transaction() from None

    def spare_temporary_tables(self) -> None:
        """Those of a replay are not its handlers'."""
        self._release = self._released([one for one in self._session.resets if one != DISCARD_TEMPORARY])

    def _released(self, resets: Sequence[str]) -> bytes:
        return "; ".join((f"RELEASE {self._savepoint}", *resets)).encode()

    def undo(self) -> None:
        with self._session.translated():
            self._end_tx()
            self._back_to_savepoint(self._inside())

    def _end_tx(self) -> Refused | None:
        """The handler's statements are over; why they cannot be kept, if so."""
        tx, self._tx = self._tx, None
        if tx is None:
            return None
        is_whole = tx.end()
        if tx.unfinished:
            return Refused(
                f"{tx.unfinished} of ctx.tx was not finished when its handler ended",
                hint="Use it in a `with` block, or read it to its end.",
            )
        return None if is_whole else cut_off()

    def _back_to_savepoint(self, cursor: psycopg.Cursor[Any]) -> None:
        """What was set since goes back with the rows."""
        try:
            cursor.execute(f"ROLLBACK TO {self._savepoint}")
            cursor.execute(f"RELEASE {self._savepoint}")
        except psycopg.errors.InvalidSavepointSpecification:
            self._is_torn = True
            raise ends_transaction() from None

    def append(self, content: Content, sources: Sources, delayed: Sequence[Delayed]) -> Appended:
        assert self._ledger is not None
        with self._session.translated():
            cursor = self._inside()
            block = rules.summed(self._ledger, content, sources)
            packed = pack(content, self._packed)
            keys = [entry.key for entry in content.entries]
            self._settle(cursor, set(keys))
            if delayed:
                self._delay(cursor, delayed)
            number, hash_, state, *confirmed = self._lock_chain(cursor)
            after, announcement = rules.next_block(
                self._ledger, Head(number, hash_, state), block, Confirmed(*confirmed)
            )
            size = {"entries": len(content.entries), "effects": len(content.effects)}
            blobs = {"keys": b"".join(keys), "content": packed, "announcement": announcement}
            ends = {"chain": self._chain, "group_id": self._group, **after._asdict()}
            cursor.execute(self._session.sql["append"], ends | size | blobs)
            return Appended(after.number, announcement)

    def _settle(self, cursor: psycopg.Cursor[Any], keys: set[bytes]) -> None:
        """Claims that became entries stay; entries that were not claimed (an input that is given up) come in."""
        missing = sorted(keys - self._claimed)
        if missing:
            cursor.execute(self._session.sql["claim"], (self._group, missing))
            if cursor.rowcount != len(missing):
                raise Unavailable("an input was settled by another process meanwhile")
        self._claimed -= keys

    def _delay(self, cursor: psycopg.Cursor[Any], delayed: Sequence[Delayed]) -> None:
        rows = [(one.sending.id, one.due_ms, pack_sending(one.sending)) for one in delayed]
        cursor.execute(self._session.sql["delay"], (self._agent, *map(list, zip(*rows, strict=True))))

    def _lock_chain(self, cursor: psycopg.Cursor[Any]) -> tuple[Any, ...]:
        return self._one(cursor.execute(self._session.sql["lock_chain"], (self._chain,)))

    def mark(self, marks: Sequence[Mark]) -> None:
        if not marks:
            return
        with self._session.translated():
            cursor = self._inside()
            start, streams = self._lock_chain(cursor)[3:]
            cursor.execute(self._session.sql["mark"], (self._chain, *map(list, zip(*marks, strict=True))))
            rows = cursor.execute(self._session.sql["marks"], (self._chain,)).fetchall()
            at = rules.confirmed_up_to(start, self._blocks_after(cursor, start), _ranges(rows))
            if at == start:
                return
            for block, _, _, stream, sequence in rows:
                if block <= at:
                    streams[stream] = max(sequence, streams.get(stream, 0))
            confirmed = {"chain": self._chain, "block": at, "streams": _encode_json(streams).decode()}
            cursor.execute(self._session.sql["confirm"], confirmed)

    def _blocks_after(self, cursor: psycopg.Cursor[Any], number: int) -> list[tuple[int, int]]:
        return cursor.execute(self._session.sql["blocks_after"], (self._chain, number)).fetchall()

    def commit(self) -> None:
        with self._session.translated():
            cursor = self._inside()
            assert self._transaction is not None
            if self._claimed:
                cursor.execute(self._session.sql["give_back"], (list(self._claimed), self._group))
            cursor.execute(self._session.sql["close_group"], (self._group,))
            transaction, self._transaction = self._transaction, None
            try:
                transaction.__exit__(None, None, None)
                self._session.check_idle()
            except BaseException:
                self.connection.close()
                raise

    def rollback(self) -> None:
        """Back to what was committed last. A session in doubt is not used again."""
        self._end_tx()
        transaction, self._transaction = self._transaction, None
        self._blocks.clear()
        if transaction is None or self.connection.closed:
            return
        if self._is_torn:
            self.connection.close()
            return
        try:
            transaction.__exit__(psycopg.Rollback, psycopg.Rollback(), None)
        except psycopg.Error:
            self.connection.close()

    # ---- small facts

    @contextlib.contextmanager
    def _own(self) -> Iterator[psycopg.Cursor[Any]]:
        """In the open transaction, or in one of its own."""
        if self._transaction is not None:
            with self._session.translated():
                yield self._inside()
            return
        if self._is_own_open:
            yield self._session.cursor
            return
        self._session.ensure()
        with self._session.translated(), self.connection.transaction():
            self._is_own_open = True
            try:
                yield self._session.cursor
            finally:
                self._is_own_open = False

    def begun(self, attempts: Sequence[Attempt]) -> None:
        latest = {one.key: one for one in attempts}
        columns = [list(column) for column in zip(*(latest[key] for key in sorted(latest)), strict=True)]
        if columns:
            with self._own() as cursor:
                cursor.execute(self._session.sql["begun"], (self._agent, *columns))

    def renew_attempts(self, keys: Sequence[bytes], now_ms: int) -> None:
        with self._own() as cursor:
            cursor.execute(self._session.sql["renew_attempts"], (now_ms, list(keys)))

    def attempts(self) -> list[Attempt]:
        with self._own() as cursor:
            return [Attempt(*row) for row in cursor.execute(self._session.sql["attempts"], (self._agent,))]

    def forget_attempts(self, keys: Sequence[bytes]) -> None:
        with self._own() as cursor:
            cursor.execute(self._session.sql["forget_attempts"], (list(keys),))

    def call_result(self, key: bytes, name: str) -> bytes | None:
        with self._own() as cursor:
            row = cursor.execute(self._session.sql["call_result"], (key, name)).fetchone()
        return row[0] if row else None

    def keep_call(self, key: bytes, name: str, result: bytes) -> None:
        with self._own() as cursor:
            cursor.execute(self._session.sql["keep_call"], (key, name, result))

    def due(self, now_ms: int, limit: int) -> list[Delayed]:
        with self._own() as cursor:
            rows = cursor.execute(self._session.sql["due"], (self._agent, now_ms, limit)).fetchall()
        return [read_delayed(due_ms, sending) for due_ms, sending in rows]

    def next_due_ms(self) -> int | None:
        with self._own() as cursor:
            found: int | None = self._one(cursor.execute(self._session.sql["next_due"], (self._agent,)))[0]
        return found

    def drop_due(self, ids: Sequence[str]) -> set[str]:
        with self._own() as cursor:
            return {row[0] for row in cursor.execute(self._session.sql["drop_due"], (list(ids),))}

    def note(self, name: str, text: str) -> None:
        with self._own() as cursor:
            cursor.execute(self._session.sql["note"], (f"{self._agent} {name}", text))

    def noted(self, name: str) -> str | None:
        with self._own() as cursor:
            row = cursor.execute(self._session.sql["noted"], (f"{self._agent} {name}",)).fetchone()
        return row[0] if row else None

    def forget(self, before_ms: int, blocks_max: int) -> int:
        """The chain's row comes last: until then nobody waits for this. Keys go in order, as everywhere."""
        with self._own() as cursor:
            blocks = old_blocks(self, before_ms, blocks_max)
            if blocks:
                base = head_at(blocks[-1])
                keys = [entry.key for block in blocks for entry in block.content.entries]
                at = {"chain": self._chain, **base._asdict()}
                cursor.execute(self._session.sql["forget_keys"], at | {"keys": keys})
                cursor.execute(self._session.sql["forget_calls"], (identity_keys(self._agent, blocks),))
                cursor.execute(self._session.sql["forget"], at)
        self._blocks.clear()
        return len(blocks)

    # ---- reading

    def waiting(self) -> list[Delayed]:
        with self._own() as cursor:
            rows = cursor.execute(self._session.sql["waiting"], (self._agent,)).fetchall()
        return [read_delayed(due_ms, sending) for due_ms, sending in rows]

    def head(self) -> Head:
        with self._own() as cursor:
            return Head(*self._one(cursor.execute(self._session.sql["head"], (self._chain,))))

    def base(self) -> Head:
        with self._own() as cursor:
            return Head(*self._one(cursor.execute(self._session.sql["base"], (self._chain,))))

    def confirmed(self) -> Confirmed:
        with self._own() as cursor:
            return Confirmed(*self._one(cursor.execute(self._session.sql["confirmed"], (self._chain,))))

    def block(self, number: int) -> Block | None:
        if found := self._blocks.get(number):
            return found
        with self._own() as cursor:
            row = cursor.execute(self._session.sql["block"], (self._chain, number)).fetchone()
        return None if row is None else self._blocks.add(read_block(number, *row))

    def unconfirmed(self) -> list[tuple[int, Ranges]]:
        with self._own() as cursor:
            start = self._one(cursor.execute(self._session.sql["confirmed"], (self._chain,)))[0]
            blocks = self._blocks_after(cursor, start)
            marks = _ranges(cursor.execute(self._session.sql["marks"], (self._chain,)).fetchall())
        open_ = [(number, rules.holes(effects + 1, marks.get(number, []))) for number, effects in blocks]
        return [(number, missing) for number, missing in open_ if missing]

    # ---- processes

    def enter(self, process: str, now_ms: int) -> bool:
        with self._own() as cursor:
            self._session.hold_name(process)
            asked = (self._agent, process, PROCESS_LOCKS)
            gone = [row[0] for row in cursor.execute(self._session.sql["left_behind"], asked)]
            cursor.execute(self._session.sql["leave"], (gone,))
            cursor.execute(self._session.sql["enter"], (process, self._agent, now_ms))
        return bool(gone)

    def leave(self, process: str) -> None:
        with self._own() as cursor:
            cursor.execute(self._session.sql["leave"], ([process],))


def _ranges(marks: Sequence[tuple[int, int, int, str, int]]) -> dict[int, Ranges]:
    found: dict[int, Ranges] = {}
    for block, first, last, _, _ in marks:
        found.setdefault(block, []).append((first, last))
    return found
