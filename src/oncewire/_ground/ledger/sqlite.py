"""The ledger in a SQLite file: WAL, synchronous FULL, one writer at a time over all processes of the machine.

Handlers get a `SqliteTx`, never the connection. COMMIT, ROLLBACK, ATTACH and what would change the connection for those
who come later (a PRAGMA with a value) are refused by SQLite's authorizer inside a handler; temporary tables go with the
input that made them. Our own statements carry a secret comment, so that the statement cache can never hand one of ours
to a handler. A transaction that SQLite itself ended (a full disk, OR ROLLBACK in a statement) is noticed before
anything is written outside of it, and so is one that is open where the agent has none.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Final

import msgspec

from oncewire._ground.contracts import blocks
from oncewire._ground.contracts.blocks import Confirmed, Ranges
from oncewire._ground.errors import Refused, Unavailable
from oncewire._ground.fields import columns
from oncewire._ground.files import close_off, open_private
from oncewire._ground.ledger import rules
from oncewire._ground.ledger.keys import Place
from oncewire._ground.ledger.packed import pack, pack_sending
from oncewire._ground.ledger.processes import is_alive, machine
from oncewire._ground.ledger.rules import Content, Delayed, Entry, Head, Ledger, Sources
from oncewire._ground.ledger.sqlite_checkpoints import Checkpoints
from oncewire._ground.ledger.sqlite_errors import MAY_PASS, translate, translated
from oncewire._ground.ledger.sqlite_keys import SqliteKeys
from oncewire._ground.ledger.sqlite_tx import SqliteTx
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
    not_idle,
    old_blocks,
    read_block,
    read_delayed,
)
from oncewire._ground.ledger.tx import cut_off, ends_transaction, not_allowed

FAR_MS: Final = 2**62
MEMORY: Final = ":memory:"
BUSY_MS: Final = 5_000
"""So long a transaction waits for another process before it says so; whoever asks tries again."""
PAGE_BYTES: Final = 16_384
"""Of a new file. A block of a thousand inputs takes some twenty, and SQLite writes page by page, three times each."""
_ENDS_TRANSACTION: Final = {sqlite3.SQLITE_TRANSACTION, sqlite3.SQLITE_SAVEPOINT}
_REFUSED_IN_HANDLERS: Final = _ENDS_TRANSACTION | {sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH}
_MAKES_TEMPORARY: Final = {
    sqlite3.SQLITE_CREATE_TEMP_TABLE,
    sqlite3.SQLITE_CREATE_TEMP_TRIGGER,
    sqlite3.SQLITE_CREATE_TEMP_VIEW,
    sqlite3.SQLITE_CREATE_VTABLE,
}
_PRAGMAS_IN_HANDLERS: Final = {
    "table_info", "table_xinfo", "table_list", "index_list", "index_info", "index_xinfo", "foreign_key_list",
    "foreign_key_check", "integrity_check", "quick_check", "user_version", "application_id",
}  # fmt: skip
"""With a value these ask, or write what a rollback takes back. Others change the connection for all later inputs."""

_encode_json = msgspec.json.Encoder().encode
_decode_streams = msgspec.json.Decoder(dict[str, int]).decode


def _schema() -> str:
    return files("oncewire._ground.ledger").joinpath("sql", "sqlite.sql").read_text()


class SqliteStore:
    """See the module's head; the protocol is `ledger.store.Store`."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.url = f"sqlite:///{path}"
        self.ledger_id = ""
        self._agent = ""
        self._chain = 0
        self._ledger: Ledger | None = None
        self._db: sqlite3.Connection | None = None
        self._keys: SqliteKeys | None = None
        self._secret = secrets.token_hex(8)
        self._savepoint = f"SAVEPOINT handler -- {self._secret}"
        self._release = f"RELEASE handler -- {self._secret}"
        self._back = f"ROLLBACK TO handler -- {self._secret}"
        self._blocks = RecentBlocks()
        self._checkpoints: Checkpoints | None = None
        self._bytes = 0
        self._packed = bytearray()
        self._is_ours = True
        self._is_open = False
        self._lock = threading.RLock()
        self._tx: SqliteTx | None = None
        self._refused = 0
        """The last thing that a handler asked SQLite for in vain."""
        self._has_temporary = False

    # ---- life

    def open(self, tenant: str, workspace: str, agent: str) -> Ledger:
        self.close()
        self._check_path()
        try:
            with translated(self.path):
                self._make_file()
                self._db = sqlite3.connect(
                    self.path, isolation_level=None, check_same_thread=False, timeout=BUSY_MS / 1000
                )
                self._steps = self._db.cursor()
                self._set_up()
                self._prepare(blocks.agent_name(tenant, workspace, agent))
                self._keys = SqliteKeys(self._db, self._chain)
                self._keys.take_in()
        except BaseException:
            self.close()
            raise
        self._ledger = Ledger(f"{self.ledger_id}-{self._chain}", tenant, workspace, agent)
        return self._ledger

    def _check_path(self) -> None:
        path = Path(self.path).absolute()
        if self.path != MEMORY and (path.is_dir() or not path.parent.is_dir()):
            what = f"{path} is a folder" if path.is_dir() else f"the folder of the ledger does not exist: {path.parent}"
            raise Refused(what, hint="Make the folder, and name a file in it: --store sqlite:///folder/ledger.db")

    def _make_file(self) -> None:
        """For its owner alone: SQLite gives the WAL and the shared memory beside it the mode of the file."""
        if self.path == MEMORY:
            return
        with contextlib.suppress(OSError):  # SQLite says what is wrong
            os.close(open_private(Path(self.path), os.O_RDWR | os.O_CREAT))
        for ending in ("", "-wal", "-shm"):
            close_off(Path(f"{self.path}{ending}"))

    def _set_up(self) -> None:
        db = self.connection
        db.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        mode = db.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if mode != ("memory" if self.path == MEMORY else "wal"):
            raise Refused(f"the ledger {self.path} cannot have a WAL", hint="Put it on a local disk.")
        db.execute("PRAGMA synchronous = FULL")
        self._checkpoints = Checkpoints(self.path, db) if self.path != MEMORY else None
        db.set_authorizer(self.authorize)

    def _prepare(self, agent: str) -> None:
        """Tables, the ledger's id, and the chain of this agent. What is there already is only read: whoever looks need
        not wait for a process that writes."""
        self._agent = agent
        if not self._is_prepared():
            self._make()
        self._check_format()
        query = "SELECT value, chain FROM ledger_meta, ledger_chains WHERE name = 'id' AND agent = ?"
        self.ledger_id, self._chain = self.connection.execute(query, (agent,)).fetchone()

    def _check_format(self) -> None:
        stored = self.connection.execute("SELECT value FROM ledger_meta WHERE name = 'format'").fetchone()[0]
        check_format(f"the ledger {self.path}", stored)

    def _is_prepared(self) -> bool:
        """All tables are made in one transaction: where one is, all are."""
        if self.connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'ledger_chains'").fetchone() is None:
            return False
        query = "SELECT 1 FROM ledger_chains WHERE agent = ?"
        return self.connection.execute(query, (self._agent,)).fetchone() is not None

    def _make(self) -> None:
        with self._own() as db:
            for statement in _schema().split(";\n"):
                db.execute(statement)
            fresh = (secrets.token_hex(8), FORMAT)
            db.execute("INSERT OR IGNORE INTO ledger_meta VALUES ('id', ?), ('format', ?)", fresh)
            self._check_format()
            db.execute(
                "INSERT OR IGNORE INTO ledger_chains (agent, number, hash, state, base, base_hash, base_state)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                (self._agent, *rules.FIRST, *rules.FIRST),
            )

    def close(self) -> None:
        db, self._db = self._db, None
        if self._checkpoints is not None:
            self._checkpoints.close()
        if db is not None:
            db.close()

    def identity(self) -> dict[str, str]:
        """What tells this file from every other: the ledger's id with machine, device and inode."""
        found = Path(self.path).stat() if self.path != MEMORY else None
        return {
            "ledger": self.ledger_id,
            "store": f"sqlite:{machine()}:{found.st_dev}:{found.st_ino}" if found else f"memory:{id(self)}",
        }

    @property
    def connection(self) -> sqlite3.Connection:
        if self._db is None:
            raise Unavailable("the ledger is closed")
        return self._db

    @property
    def keys(self) -> SqliteKeys:
        if self._keys is None:
            raise Unavailable("the ledger is closed")
        return self._keys

    def authorize(self, action: int, name: str | None = None, value: str | None = None, *_: object) -> int:
        """What SQLite asks before it prepares a statement."""
        if self._is_ours:
            return sqlite3.SQLITE_OK
        if action in _MAKES_TEMPORARY:
            self._has_temporary = True
        is_setting = action == sqlite3.SQLITE_PRAGMA and value and (name or "").lower() not in _PRAGMAS_IN_HANDLERS
        if not is_setting and action not in _REFUSED_IN_HANDLERS:
            return sqlite3.SQLITE_OK
        self._refused = action
        return sqlite3.SQLITE_DENY

    def refusal(self) -> Refused:
        """In place of SQLite's "not authorized"."""
        if self._refused in _ENDS_TRANSACTION:
            return ends_transaction()
        if self._refused == sqlite3.SQLITE_PRAGMA:
            return not_allowed("change the ledger's connection by PRAGMA", "It would stay so for all inputs after it.")
        return not_allowed("attach another database", "Open a connection of your own to it, outside the transaction.")

    # ---- a transaction

    def begin(self) -> None:
        with translated(self.path):
            self._check_idle()
            self._command("BEGIN IMMEDIATE")
            self._is_open = True
            try:
                self.keys.take_in()
            except BaseException:
                self.rollback()
                raise

    def _check_idle(self) -> None:
        if self.connection.in_transaction:
            raise not_idle(self.url)

    def _command(self, statement: str) -> None:
        self._is_ours = True
        self.connection.execute(f"{statement} -- {self._secret}")

    def run_for_handler(self, statement: str) -> None:
        """A statement about savepoints on behalf of the handler that is running."""
        try:
            self._command(statement)
        finally:
            self._is_ours = False

    def _inside(self) -> sqlite3.Connection:
        """The connection, or an error when its transaction is over: what follows would commit by itself."""
        self._is_ours = True
        db = self.connection
        if not db.in_transaction:
            raise self._ended()
        return db

    def _ended(self) -> Refused | Unavailable:
        """SQLite ended the transaction inside a handler's statement: for want of space, or because it said so."""
        text = f"the ledger {self.path}: SQLite has rolled the transaction back"
        if getattr(sys.exc_info()[1], "sqlite_errorcode", 0) & 0xFF in MAY_PASS:
            return Unavailable(text, hint="Free disk space.")
        return Refused(text, hint="A handler uses OR ROLLBACK, or goes on after the disk was full: let it raise.")

    def claim(self, keys: Sequence[bytes], look: Sequence[bytes] = ()) -> dict[bytes, Place]:
        """The write lock of `begin` is the claim."""
        with translated(self.path):
            return self.keys.find([*keys, *look])

    def savepoint(self) -> SqliteTx:
        self._run_inside(self._savepoint)
        self._is_ours = False
        self._tx = tx = SqliteTx(self, self._db, self._lock)  # type: ignore[arg-type]  # it is open: the line above
        return tx

    def keep(self) -> None:
        tx, self._tx = self._tx, None
        if tx is not None and not tx.end():
            self.undo()
            raise cut_off()
        if self._has_temporary:
            self._drop_temporary()
        self._run_inside(self._release)

    def undo(self) -> None:
        self._drop_tx()
        self._has_temporary = False
        self._run_inside(self._back)
        self._run_inside(self._release)

    def _drop_tx(self) -> None:
        tx, self._tx = self._tx, None
        if tx is not None:
            tx.end()

    def _drop_temporary(self) -> None:
        """SQLite keeps temporary tables for as long as the connection lives: the next input would find them."""
        self._has_temporary = False
        query = (
            "SELECT type, name FROM temp.sqlite_master WHERE type <> 'index' AND name NOT LIKE 'sqlite!_%' ESCAPE '!'"
        )
        with translated(self.path):
            db = self._inside()
            for kind, name in db.execute(query).fetchall():
                quoted = name.replace('"', '""')
                db.execute(f'DROP {kind} IF EXISTS temp."{quoted}"')

    def _run_inside(self, statement: str) -> None:
        """Twice per input that writes: no context manager, no formatting, no fresh cursor."""
        self._is_ours = True
        db = self._db
        if db is None or not db.in_transaction:
            self._inside()
        try:
            self._steps.execute(statement)
        except sqlite3.Error as error:
            raise translate(self.path, error) from error

    def append(self, content: Content, sources: Sources, delayed: Sequence[Delayed]) -> Appended:
        assert self._ledger is not None
        with translated(self.path):
            db = self._inside()
            block = rules.summed(self._ledger, content, sources)
            after, announcement = rules.next_block(self._ledger, self.head(), block, self.confirmed())
            (keys,) = columns(content.entries, Entry, "key")
            size = (len(content.entries), len(content.effects))
            row = (b"".join(keys), pack(content, self._packed), announcement)
            db.execute(
                "INSERT INTO ledger_blocks (chain, number, entries, effects, keys, content, announcement)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                (self._chain, after.number, *size, *row),
            )
            self._bytes += sum(map(len, row))
            db.execute(
                "UPDATE ledger_chains SET number = ?, hash = ?, state = ? WHERE chain = ?", (*after, self._chain)
            )
            if delayed:
                rows = [(one.sending.id, self._agent, one.due_ms, pack_sending(one.sending)) for one in delayed]
                db.executemany("INSERT OR IGNORE INTO ledger_delayed VALUES (?, ?, ?, ?)", rows)
            self.keys.add(after.number, keys)
            return Appended(after.number, announcement)

    def mark(self, marks: Sequence[Mark]) -> None:
        with translated(self.path):
            self._inside().executemany(
                "INSERT INTO ledger_marks VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (chain, block, first) DO UPDATE"
                " SET last = max(last, excluded.last), sequence = max(sequence, excluded.sequence)",
                [(self._chain, *mark) for mark in marks],
            )
            self._advance()

    def _advance(self) -> None:
        """Move `confirmed` over blocks that are covered by marks, whoever wrote them; old marks go."""
        db = self.connection
        confirmed = self.confirmed()
        start, streams = confirmed.block, confirmed.streams
        at = rules.confirmed_up_to(start, self._blocks_after(start), self._marks())
        if at == start:
            return
        highest = "SELECT stream, max(sequence) FROM ledger_marks WHERE chain = ? AND block <= ? GROUP BY stream"
        for stream, sequence in db.execute(highest, (self._chain, at)):
            streams[stream] = max(sequence, streams.get(stream, 0))
        db.execute(
            "UPDATE ledger_chains SET confirmed = ?, confirmed_streams = ? WHERE chain = ?",
            (at, _encode_json(streams).decode(), self._chain),
        )
        db.execute("DELETE FROM ledger_marks WHERE chain = ? AND block <= ?", (self._chain, at))

    def _blocks_after(self, number: int) -> Iterator[tuple[int, int]]:
        query = "SELECT number, effects FROM ledger_blocks WHERE chain = ? AND number > ? ORDER BY number"
        return self.connection.execute(query, (self._chain, number))

    def _marks(self) -> dict[int, Ranges]:
        marks: dict[int, Ranges] = {}
        query = "SELECT block, first, last FROM ledger_marks WHERE chain = ?"
        for block, first, last in self.connection.execute(query, (self._chain,)):
            marks.setdefault(block, []).append((first, last))
        return marks

    def commit(self) -> None:
        with translated(self.path):
            self._inside()
            self.keys.spill_if_full()
            self._command("COMMIT")
            self._is_open = False
            self._check_idle()
            self.keys.committed()
        size, self._bytes = self._bytes, 0
        if self._checkpoints is not None:
            self._checkpoints.committed(size)

    def rollback(self) -> None:
        """Back to what was committed last, in memory too."""
        self._drop_tx()
        self._is_open = False
        self._bytes = 0
        self._blocks.clear()
        self.keys.rolled_back()
        with translated(self.path):
            if self.connection.in_transaction:
                self._command("ROLLBACK")

    # ---- small facts

    @contextlib.contextmanager
    def _own(self) -> Iterator[sqlite3.Connection]:
        """In the open transaction, or in one of its own."""
        with translated(self.path):
            if self._is_open:
                yield self._inside()
                return
            self._check_idle()
            self._command("BEGIN IMMEDIATE")
            try:
                yield self.connection
                self._command("COMMIT")
            except BaseException:
                if self.connection.in_transaction:
                    self._command("ROLLBACK")
                raise

    def begun(self, attempts: Sequence[Attempt]) -> None:
        rows = [
            (one.key, self._agent, one.stream, one.consumer, one.sequence, one.deliveries, one.started_ms, one.error)
            for one in attempts
        ]
        with self._own() as db:
            db.executemany("INSERT OR REPLACE INTO ledger_attempts VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)

    def renew_attempts(self, keys: Sequence[bytes], now_ms: int) -> None:
        with self._own() as db:
            db.executemany("UPDATE ledger_attempts SET started_ms = ? WHERE key = ?", [(now_ms, key) for key in keys])

    def attempts(self) -> list[Attempt]:
        query = (
            "SELECT key, stream, consumer, sequence, deliveries, started_ms, error FROM ledger_attempts WHERE agent = ?"
        )
        with translated(self.path):
            return [Attempt(*row) for row in self.connection.execute(query, (self._agent,))]

    def forget_attempts(self, keys: Sequence[bytes]) -> None:
        with self._own() as db:
            db.executemany("DELETE FROM ledger_attempts WHERE key = ?", [(key,) for key in keys])

    def call_result(self, key: bytes, name: str) -> bytes | None:
        query = "SELECT result FROM ledger_calls WHERE key = ? AND name = ?"
        with translated(self.path):
            row = self.connection.execute(query, (key, name)).fetchone()
        return row[0] if row else None

    def keep_call(self, key: bytes, name: str, result: bytes) -> None:
        with self._own() as db:
            db.execute("INSERT OR IGNORE INTO ledger_calls VALUES (?, ?, ?)", (key, name, result))

    def due(self, now_ms: int, limit: int) -> list[Delayed]:
        query = "SELECT due_ms, sending FROM ledger_delayed WHERE agent = ? AND due_ms <= ? ORDER BY due_ms LIMIT ?"
        with translated(self.path):
            rows = self.connection.execute(query, (self._agent, now_ms, limit)).fetchall()
        return [read_delayed(due_ms, sending) for due_ms, sending in rows]

    def next_due_ms(self) -> int | None:
        query = "SELECT min(due_ms) FROM ledger_delayed WHERE agent = ?"
        with translated(self.path):
            found: int | None = self.connection.execute(query, (self._agent,)).fetchone()[0]
        return found

    def drop_due(self, ids: Sequence[str]) -> set[str]:
        with self._own() as db:
            query = "DELETE FROM ledger_delayed WHERE id = ? RETURNING id"
            return {row[0] for one in ids for row in db.execute(query, (one,)).fetchall()}

    def note(self, name: str, text: str) -> None:
        with self._own() as db:
            db.execute("INSERT OR REPLACE INTO ledger_meta VALUES (?, ?)", (f"{self._agent} {name}", text))

    def noted(self, name: str) -> str | None:
        with translated(self.path):
            query = "SELECT value FROM ledger_meta WHERE name = ?"
            row = self.connection.execute(query, (f"{self._agent} {name}",)).fetchone()
        return row[0] if row else None

    def forget(self, before_ms: int, blocks_max: int) -> int:
        with self._own() as db:
            blocks = old_blocks(self, before_ms, blocks_max)
            if blocks:
                base = head_at(blocks[-1])
                calls = [(key,) for key in identity_keys(self._agent, blocks)]
                db.executemany("DELETE FROM ledger_calls WHERE key = ?", calls)
                db.execute("DELETE FROM ledger_blocks WHERE chain = ? AND number <= ?", (self._chain, base.number))
                update = "UPDATE ledger_chains SET base = ?, base_hash = ?, base_state = ? WHERE chain = ?"
                db.execute(update, (*base, self._chain))
                self.keys.drop_runs(base.number)
        self._blocks.clear()
        return len(blocks)

    # ---- reading

    def waiting(self) -> list[Delayed]:
        return self.due(FAR_MS, -1)

    def head(self) -> Head:
        return self._head("number, hash, state")

    def base(self) -> Head:
        return self._head("base, base_hash, base_state")

    def _head(self, columns: str) -> Head:
        query = f"SELECT {columns} FROM ledger_chains WHERE chain = ?"  # noqa: S608 - our own column names
        with translated(self.path):
            return Head(*self.connection.execute(query, (self._chain,)).fetchone())

    def confirmed(self) -> Confirmed:
        query = "SELECT confirmed, confirmed_streams FROM ledger_chains WHERE chain = ?"
        with translated(self.path):
            block, streams = self.connection.execute(query, (self._chain,)).fetchone()
        return Confirmed(block, _decode_streams(streams))

    def block(self, number: int) -> Block | None:
        if found := self._blocks.get(number):
            return found
        query = "SELECT content, announcement FROM ledger_blocks WHERE chain = ? AND number = ?"
        with translated(self.path):
            row = self.connection.execute(query, (self._chain, number)).fetchone()
        return None if row is None else self._blocks.add(read_block(number, *row))

    def unconfirmed(self) -> list[tuple[int, Ranges]]:
        with translated(self.path):
            marks = self._marks()
            blocks = self._blocks_after(self.confirmed().block)
            open_ = [(number, rules.holes(effects + 1, marks.get(number, []))) for number, effects in blocks]
        return [(number, missing) for number, missing in open_ if missing]

    # ---- processes

    def enter(self, process: str, now_ms: int) -> bool:
        with self._own() as db:
            left = db.execute("SELECT process FROM ledger_processes WHERE agent = ?", (self._agent,)).fetchall()
            gone = [row for row in left if not is_alive(row[0])]
            db.executemany("DELETE FROM ledger_processes WHERE process = ?", gone)
            db.execute("INSERT OR REPLACE INTO ledger_processes VALUES (?, ?, ?)", (process, self._agent, now_ms))
        return bool(gone)

    def leave(self, process: str) -> None:
        with self._own() as db:
            db.execute("DELETE FROM ledger_processes WHERE process = ?", (process,))
