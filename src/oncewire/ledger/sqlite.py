"""The ledger in a SQLite file: WAL, synchronous FULL, one writer at a time over all processes of the machine.

Handlers get the `sqlite3.Connection` itself. COMMIT, ROLLBACK and ATTACH inside a handler are refused by SQLite's
authorizer, since they would tear the handler's rows from the ledger. Our own statements carry a comment, so that the
statement cache can never hand one of ours to a handler.

Blocks that other processes wrote are taken in at `begin`, under the write lock: the keys in memory are then complete.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Final

import msgspec

from oncewire.errors import Corrupt, Refused, Unavailable
from oncewire.ledger import keys as key_rules
from oncewire.ledger import rules
from oncewire.ledger.keys import Filter, Place
from oncewire.ledger.rules import Confirmed, Content, Delayed, Head, Ledger, Sending, Source
from oncewire.ledger.store import Appended, Attempt, Block, Mark

FORMAT: Final = "1"
BUSY_MS: Final = 30_000
CHECKPOINT_PAGES: Final = 8_000
_REFUSED_IN_HANDLERS: Final = {sqlite3.SQLITE_TRANSACTION, sqlite3.SQLITE_SAVEPOINT, sqlite3.SQLITE_ATTACH}

_decode_sending = msgspec.msgpack.Decoder(Sending).decode
_encode = msgspec.msgpack.Encoder().encode


@contextlib.contextmanager
def translated(path: str) -> Iterator[None]:
    """sqlite3's errors in our tree: a busy or full disk may pass, damage may not."""
    try:
        yield
    except sqlite3.OperationalError as error:
        text = str(error)
        if "not authorized" in text:
            raise Refused(
                "a handler may not end or nest the ledger's transaction", hint="Leave it to the agent."
            ) from error
        if any(word in text for word in ("locked", "busy", "full", "disk I/O", "unable to open")):
            hint = "Another process holds the file." if "locked" in text or "busy" in text else "Free disk space."
            raise Unavailable(f"the ledger {path}: {text}", hint=hint) from error
        raise
    except sqlite3.DatabaseError as error:
        if type(error) is sqlite3.DatabaseError:  # its subclasses are a statement's fault, not the file's
            raise Corrupt(
                f"the ledger {path}: {error}", hint="Restore it from a backup: `PRAGMA integrity_check`."
            ) from error
        raise


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
        self._is_ours = True
        self._hot: dict[bytes, Place] = {}
        self._seen = 0
        self._spilled = 0
        self._filter = Filter(4 * key_rules.SPILL_KEYS)
        self._runs: list[int] = []
        self._is_open = False
        self._added: list[bytes] = []
        self._seen_before = 0
        self._has_spilled = False

    # ---- life

    def open(self, tenant: str, workspace: str, agent: str) -> Ledger:
        with translated(self.path):
            folder = Path(self.path).absolute().parent
            if self.path != ":memory:" and not folder.is_dir():
                raise Refused(f"the folder of the ledger does not exist: {folder}", hint="Make it, or mend --store.")
            self._db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False, timeout=BUSY_MS / 1000)
            self._pragmas()
            self._db.set_authorizer(self._authorize)
            self._prepare(rules.agent_name(tenant, workspace, agent))
            self._load()
        self._ledger = Ledger(f"{self.ledger_id}-{self._chain}", tenant, workspace, agent)
        return self._ledger

    def _pragmas(self) -> None:
        db = self.connection
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        db.execute(f"PRAGMA busy_timeout = {BUSY_MS}")
        db.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")

    def _prepare(self, agent: str) -> None:
        db = self.connection
        self._begin()
        for statement in files("oncewire.ledger").joinpath("sql", "sqlite.sql").read_text().split(";\n"):
            db.execute(statement)
        db.execute("INSERT OR IGNORE INTO ledger_meta VALUES ('id', ?), ('format', ?)", (secrets.token_hex(8), FORMAT))
        found = dict(db.execute("SELECT name, value FROM ledger_meta"))
        if found["format"] != FORMAT:
            self._rollback()
            raise Refused(f"the ledger has format {found['format']}, this version reads {FORMAT}")
        self.ledger_id = found["id"]
        self._agent = agent
        head = rules.FIRST
        db.execute(
            "INSERT OR IGNORE INTO ledger_chains (agent, number, hash, state) VALUES (?, ?, ?, ?)",
            (agent, head.number, head.hash, head.state),
        )
        self._chain = db.execute("SELECT chain FROM ledger_chains WHERE agent = ?", (agent,)).fetchone()[0]
        self._commit()

    def _load(self) -> None:
        """Fill the filter from the runs and the newest keys from the blocks since the last spill."""
        db = self.connection
        name = f"spilled:{self._chain}"
        spilled = db.execute("SELECT value FROM ledger_meta WHERE name = ?", (name,)).fetchone()
        self._spilled = self._seen = int(spilled[0]) if spilled else 0
        self._reload_runs()
        self._take_in()

    def _reload_runs(self) -> None:
        db = self.connection
        self._runs = [row[0] for row in db.execute("SELECT DISTINCT run FROM ledger_runs ORDER BY run DESC")]
        items = db.execute("SELECT coalesce(sum(length(items)), 0) FROM ledger_runs").fetchone()[0]
        rows = db.execute("SELECT items FROM ledger_runs")
        found = (key for (page,) in rows for key in key_rules.keys_in_page(page))
        self._filter = key_rules.filter_of(found, items // key_rules.ITEM_BYTES)

    def close(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            db.close()

    def identity(self) -> dict[str, str]:
        """What tells this file from every other: the ledger's id with machine, device and inode."""
        found = Path(self.path).stat() if self.path != ":memory:" else None
        machine = _machine()
        return {
            "ledger": self.ledger_id,
            "store": f"sqlite:{machine}:{found.st_dev}:{found.st_ino}" if found else f"memory:{id(self)}",
        }

    @property
    def connection(self) -> sqlite3.Connection:
        if self._db is None:
            raise Unavailable("the ledger is closed")
        return self._db

    def _authorize(self, action: int, *_: object) -> int:
        if self._is_ours or action not in _REFUSED_IN_HANDLERS:
            return sqlite3.SQLITE_OK
        return sqlite3.SQLITE_DENY

    # ---- a transaction

    def begin(self) -> None:
        with translated(self.path):
            self._begin()
            self._is_open = True
            self._take_in()
            self._added = []
            self._seen_before = self._seen
            self._has_spilled = False

    def _begin(self) -> None:
        self._is_ours = True
        self.connection.execute("BEGIN IMMEDIATE -- ledger")

    def _commit(self) -> None:
        self._is_ours = True
        self.connection.execute("COMMIT -- ledger")

    def _rollback(self) -> None:
        self._is_ours = True
        if self.connection.in_transaction:
            self.connection.execute("ROLLBACK -- ledger")

    def _take_in(self) -> None:
        """Keys of blocks that other processes appended, or that this one has not loaded yet."""
        rows = self.connection.execute(
            "SELECT number, keys FROM ledger_blocks WHERE chain = ? AND number > ? ORDER BY number",
            (self._chain, self._seen),
        )
        for number, keys in rows:
            self._remember(number, keys)

    def _remember(self, number: int, keys: bytes) -> None:
        size = rules.KEY_BYTES
        hot = self._hot
        for at in range(0, len(keys), size):
            hot[keys[at : at + size]] = Place(number, at // size)
        self._seen = number

    def claim(self, keys: Sequence[bytes]) -> dict[bytes, Place]:
        hot, may_have = self._hot, self._filter.may_have
        found: dict[bytes, Place] = {}
        for key in keys:
            place = hot.get(key)
            if place is None and may_have(key):
                place = self._find_in_runs(key)
            if place is not None:
                found[key] = place
        return found

    def _find_in_runs(self, key: bytes) -> Place | None:
        for run in self._runs:
            row = self.connection.execute(
                "SELECT items FROM ledger_runs WHERE run = ? AND first <= ? ORDER BY first DESC LIMIT 1", (run, key)
            ).fetchone()
            place = key_rules.find_in_page(row[0], key) if row else None
            if place is not None:
                return place
        return None

    def drop_claims(self, keys: Sequence[bytes]) -> None:
        """Nothing to drop: a key stands in the ledger only once its block is appended."""

    def savepoint(self) -> None:
        with translated(self.path):
            self._is_ours = True
            self._check_still_open()
            self.connection.execute("SAVEPOINT handler -- ledger")
            self._is_ours = False

    def keep(self) -> None:
        with translated(self.path):
            self._is_ours = True
            self._check_still_open()
            self.connection.execute("RELEASE handler -- ledger")

    def undo(self) -> None:
        with translated(self.path):
            self._is_ours = True
            self._check_still_open()
            self.connection.execute("ROLLBACK TO handler -- ledger")
            self.connection.execute("RELEASE handler -- ledger")

    def _check_still_open(self) -> None:
        """A full disk ends the whole transaction inside a handler's statement: what came after would stand alone."""
        if not self.connection.in_transaction:
            raise Unavailable(f"the ledger {self.path}: SQLite ended the transaction", hint="Free disk space.")

    def append(self, content: Content, sources: Mapping[str, Source], delayed: Sequence[Delayed]) -> Appended:
        assert self._ledger is not None
        with translated(self.path):
            self._is_ours = True
            db = self.connection
            after, announcement = rules.next_block(self._ledger, self.head(), content, sources, self.confirmed())
            keys = b"".join([entry.key for entry in content.entries])
            db.execute(
                "INSERT INTO ledger_blocks (chain, number, entries, effects, keys, content, announcement)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    self._chain,
                    after.number,
                    len(content.entries),
                    len(content.effects),
                    keys,
                    rules.pack(content),
                    announcement,
                ),
            )
            db.execute(
                "UPDATE ledger_chains SET number = ?, hash = ?, state = ? WHERE chain = ?",
                (after.number, after.hash, after.state, self._chain),
            )
            rows = [(one.sending.id, self._agent, one.due_ms, _encode(one.sending)) for one in delayed]
            db.executemany("INSERT OR IGNORE INTO ledger_delayed VALUES (?, ?, ?, ?)", rows)
            settled = [(entry.key,) for entry in content.entries]
            if db.execute("SELECT EXISTS (SELECT 1 FROM ledger_attempts)").fetchone()[0]:
                db.executemany("DELETE FROM ledger_attempts WHERE key = ?", settled)
            self._remember(after.number, keys)
            self._added += [entry.key for entry in content.entries]
            if len(self._hot) >= key_rules.SPILL_KEYS:
                self._spill()
            return Appended(after.number, announcement)

    def _spill(self) -> None:
        """Move the newest keys into a sorted run: once in 65,536 inputs, sequential, in the same transaction."""
        db = self.connection
        run = 1 + db.execute("SELECT coalesce(max(run), 0) FROM ledger_runs").fetchone()[0]
        pages = key_rules.pages(list(self._hot.items()))
        db.executemany("INSERT INTO ledger_runs VALUES (?, ?, ?)", [(run, first, items) for first, items in pages])
        db.execute("INSERT OR REPLACE INTO ledger_meta VALUES (?, ?)", (f"spilled:{self._chain}", str(self._seen)))
        if self._filter.count + len(self._hot) > self._filter.capacity:
            self._reload_runs()
        else:
            for key in self._hot:
                self._filter.add(key)
            self._runs.insert(0, run)
        self._spilled = self._seen
        self._hot = {}
        self._has_spilled = True

    def mark(self, marks: Sequence[Mark]) -> None:
        with translated(self.path):
            rows = [(self._chain, *mark) for mark in marks]
            self.connection.executemany("INSERT OR REPLACE INTO ledger_marks VALUES (?, ?, ?, ?, ?, ?)", rows)
            self._advance()

    def _advance(self) -> None:
        """Move `confirmed` over blocks that are covered by marks, whoever wrote them; old marks go."""
        db = self.connection
        start = db.execute("SELECT confirmed FROM ledger_chains WHERE chain = ?", (self._chain,)).fetchone()[0]
        at = start
        rows = db.execute(
            "SELECT b.number, b.effects, (SELECT coalesce(sum(last - first + 1), 0) FROM ledger_marks m"
            " WHERE m.chain = b.chain AND m.block = b.number)"
            " FROM ledger_blocks b WHERE b.chain = ? AND b.number > ? ORDER BY b.number",
            (self._chain, start),
        )
        for number, effects, covered in rows:
            if covered < effects + 1:
                break
            at = number
        if at > start:
            db.execute("UPDATE ledger_chains SET confirmed = ? WHERE chain = ?", (at, self._chain))
            highest = "SELECT stream, max(sequence) FROM ledger_marks WHERE chain = ? AND block <= ? GROUP BY stream"
            for stream, sequence in db.execute(highest, (self._chain, at)).fetchall():
                db.execute(
                    "INSERT INTO ledger_meta VALUES (?, ?) ON CONFLICT (name) DO UPDATE"
                    " SET value = max(CAST(value AS INTEGER), CAST(excluded.value AS INTEGER))",
                    (f"confirmed:{self._chain}:{stream}", str(sequence)),
                )
            db.execute("DELETE FROM ledger_marks WHERE chain = ? AND block <= ?", (self._chain, at))

    def commit(self) -> None:
        with translated(self.path):
            self._commit()
            self._is_open = False

    def rollback(self) -> None:
        """Back to what was committed last, in memory too."""
        with translated(self.path):
            self._rollback()
            self._is_open = False
            if self._has_spilled:
                self._hot = {}
                self._load()
            for key in self._added:
                self._hot.pop(key, None)
            self._seen = min(self._seen, self._seen_before)

    # ---- small facts

    @contextlib.contextmanager
    def _own(self) -> Iterator[sqlite3.Connection]:
        """In the open transaction, or in one of its own."""
        with translated(self.path):
            if self._is_open:
                was_ours, self._is_ours = self._is_ours, True
                try:
                    yield self.connection
                finally:
                    self._is_ours = was_ours
                return
            self._begin()
            try:
                yield self.connection
            except BaseException:
                self._rollback()
                raise
            self._commit()

    def begun(self, attempts: Sequence[Attempt]) -> None:
        rows = [
            (one.key, self._agent, one.stream, one.sequence, one.deliveries, one.started_ms, one.error)
            for one in attempts
        ]
        with self._own() as db:
            db.executemany("INSERT OR REPLACE INTO ledger_attempts VALUES (?, ?, ?, ?, ?, ?, ?)", rows)

    def attempts(self) -> list[Attempt]:
        query = "SELECT key, stream, sequence, deliveries, started_ms, error FROM ledger_attempts WHERE agent = ?"
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
        return [Delayed(due_ms, _decode_sending(sending)) for due_ms, sending in rows]

    def next_due_ms(self) -> int | None:
        query = "SELECT min(due_ms) FROM ledger_delayed WHERE agent = ?"
        with translated(self.path):
            found: int | None = self.connection.execute(query, (self._agent,)).fetchone()[0]
        return found

    def drop_due(self, ids: Sequence[str]) -> None:
        with self._own() as db:
            db.executemany("DELETE FROM ledger_delayed WHERE id = ?", [(one,) for one in ids])

    # ---- reading

    def head(self) -> Head:
        with translated(self.path):
            row = self.connection.execute(
                "SELECT number, hash, state FROM ledger_chains WHERE chain = ?", (self._chain,)
            ).fetchone()
        return Head(*row)

    def confirmed(self) -> Confirmed:
        db = self.connection
        with translated(self.path):
            block = db.execute("SELECT confirmed FROM ledger_chains WHERE chain = ?", (self._chain,)).fetchone()[0]
            prefix = f"confirmed:{self._chain}:"
            rows = db.execute(
                "SELECT name, value FROM ledger_meta WHERE name >= ? AND name < ?", (prefix, prefix + "\uffff")
            )
            return Confirmed(block, {name.removeprefix(prefix): int(value) for name, value in rows})

    def block(self, number: int) -> Block | None:
        query = "SELECT content, announcement FROM ledger_blocks WHERE chain = ? AND number = ?"
        with translated(self.path):
            row = self.connection.execute(query, (self._chain, number)).fetchone()
        return None if row is None else Block(number, rules.unpack(row[0]), row[1])

    def unconfirmed(self) -> list[tuple[int, list[tuple[int, int]]]]:
        db = self.connection
        with translated(self.path):
            start = db.execute("SELECT confirmed FROM ledger_chains WHERE chain = ?", (self._chain,)).fetchone()[0]
            blocks = db.execute(
                "SELECT number, effects FROM ledger_blocks WHERE chain = ? AND number > ? ORDER BY number",
                (self._chain, start),
            ).fetchall()
            marks: dict[int, list[tuple[int, int]]] = {}
            for block, first, last in db.execute(
                "SELECT block, first, last FROM ledger_marks WHERE chain = ? ORDER BY block, first", (self._chain,)
            ):
                marks.setdefault(block, []).append((first, last))
        holes = ((number, _holes(effects + 1, marks.get(number, []))) for number, effects in blocks)
        return [(number, missing) for number, missing in holes if missing]

    # ---- processes

    def enter(self, process: str, now_ms: int) -> bool:
        with self._own() as db:
            left = db.execute("SELECT process FROM ledger_processes WHERE agent = ?", (self._agent,)).fetchall()
            gone = [row for row in left if not _is_alive(row[0])]
            db.executemany("DELETE FROM ledger_processes WHERE process = ?", gone)
            db.execute("INSERT OR REPLACE INTO ledger_processes VALUES (?, ?, ?)", (process, self._agent, now_ms))
        return bool(gone)

    def leave(self, process: str) -> None:
        with self._own() as db:
            db.execute("DELETE FROM ledger_processes WHERE process = ?", (process,))


def _holes(count: int, covered: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The closed ranges of 0 … count-1 that are not covered."""
    holes, at = [], 0
    for first, last in covered:
        if first > at:
            holes.append((at, first - 1))
        at = max(at, last + 1)
    if at < count:
        holes.append((at, count - 1))
    return holes


def _machine() -> str:
    for path in (Path("/etc/machine-id"), Path("/proc/sys/kernel/random/boot_id")):
        with contextlib.suppress(OSError):
            return path.read_text().strip()
    return os.uname().nodename


def process_name() -> str:
    """This process, told from a later one with the same number by its start."""
    return f"{os.getpid()}:{_start_of(os.getpid())}:{secrets.token_hex(4)}"


def _start_of(pid: int) -> str:
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""


def _is_alive(process: str) -> bool:
    pid, start, _ = process.split(":")
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return _start_of(int(pid)) == start
