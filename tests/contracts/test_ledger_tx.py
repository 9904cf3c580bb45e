"""`ctx.tx` on both stores: what it offers, that it ends with its handler, and that nothing of it outlives that."""

from __future__ import annotations

import contextlib
import gc
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import rows as factories
from psycopg import sql

from oncewire._ground.errors import Corrupt, Refused
from oncewire._ground.ledger import postgres_session
from oncewire._ground.ledger.postgres import PostgresStore
from oncewire._ground.ledger.postgres_tx import PostgresTx
from oncewire._ground.ledger.sqlite_tx import SqliteTx
from oncewire._ground.ledger.store import Store
from tests.support.ledgers import (
    AGENT,
    SOURCES,
    TENANT,
    WORKSPACE,
    LedgerKit,
    PostgresKit,
    SqliteKit,
    content,
    entry,
    handle,
    insert,
    key_of,
    settle,
)

WAIT_S = 30.0
OVER = "ctx.tx was used after its transaction had ended"


@pytest.fixture(params=["sqlite", "postgres"])
def kit(request: pytest.FixtureRequest, tmp_path: Path) -> LedgerKit:
    return SqliteKit(tmp_path) if request.param == "sqlite" else PostgresKit()


@pytest.fixture
def store(kit: LedgerKit) -> Iterator[Store]:
    opened = kit.new()
    yield opened
    opened.close()


@pytest.fixture
def postgres() -> Iterator[PostgresStore]:
    opened = PostgresKit().unopened()
    opened.open(TENANT, WORKSPACE, AGENT)
    yield opened
    opened.close()


def begun(store: Store) -> Any:
    """The transaction of a handler."""
    store.begin()
    store.claim([key_of(1)])
    return store.savepoint()


def committed(store: Store) -> None:
    store.append(content([entry(1)]), SOURCES, [])
    store.commit()


def mark(store: Store) -> str:
    return "?" if store.url.startswith("sqlite") else "%s"


def in_thread(work: Callable[[], Any]) -> list[Any]:
    """What it returned, or the error."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(WAIT_S)
    return found


# ---- its end


@pytest.mark.parametrize("finish", ["keep", "undo", "rollback"])
def test_a_transaction_that_was_kept_is_refused_after_its_handler(kit: LedgerKit, store: Store, finish: str) -> None:
    """In every form in which somebody may still hold it; no statement of it runs, in whichever thread."""
    tx = begun(store)
    insert(tx, 1)
    cursor, unused = tx.cursor(), tx.cursor()
    cursor.execute("SELECT 1 UNION SELECT 2 UNION SELECT 3")
    half_read = iter(cursor)
    next(half_read)
    whole = tx.execute("SELECT 4")
    block = tx.transaction()
    getattr(store, finish)()
    uses: list[Callable[[], Any]] = [
        lambda: tx.execute("INSERT INTO charges VALUES (8)"),
        lambda: tx.executemany("INSERT INTO charges VALUES (9)", [()]),
        lambda: tx.cursor(),
        lambda: cursor.execute("INSERT INTO charges VALUES (10)"),
        lambda: unused.execute("INSERT INTO charges VALUES (11)"),
        lambda: cursor.executemany("INSERT INTO charges VALUES (12)", [()]),
        lambda: next(half_read),
        lambda: cursor.fetchone(),
        lambda: cursor.fetchmany(),
        lambda: whole.fetchall(),
        lambda: block.__enter__(),
        lambda: tx.__enter__(),
    ]
    for use in uses:
        with pytest.raises(Refused, match=OVER) as caught:
            use()
        assert "connection of their own" in caught.value.hint
        assert OVER in str(in_thread(use)[0])
    if finish != "rollback":
        store.savepoint()
        store.keep()
        committed(store)
    assert kit.rows() == ([1] if finish == "keep" else [])


def test_a_transaction_of_one_input_does_not_come_to_life_in_the_next(store: Store) -> None:
    tx = begun(store)
    store.keep()
    other = store.savepoint()
    with pytest.raises(Refused, match=OVER):
        tx.execute("SELECT 1")
    assert tuple(other.execute("SELECT 1").fetchone()) == (1,)
    store.rollback()


def test_results_that_are_not_read_to_their_end_do_not_hold_the_ledger(kit: LedgerKit, store: Store) -> None:
    """SQLite would neither release the savepoint nor let go of what the statement sees."""
    tx = begun(store)
    kept = [tx.execute("INSERT INTO charges VALUES (1) RETURNING id"), tx.execute("SELECT 1 UNION SELECT 2")]
    store.keep()
    committed(store)
    with contextlib.closing(kit.new()) as other:
        settle(other, [2])
    settle(store, [3])
    assert kit.rows() == [1]
    assert len(kept) == 2


SLOW = {
    "sqlite": "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n",
    "postgres": "SELECT pg_sleep(600)",
}


def test_a_statement_that_a_thread_is_inside_of_is_cut_off_with_its_handler(kit: LedgerKit, store: Store) -> None:
    """It may not end in the next input's transaction, and what the handler wrote is not all there: it fails."""
    tx = begun(store)
    insert(tx, 1)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(_outcome(lambda: tx.execute(SLOW[kit.kind]).fetchall())))
    thread.start()
    while not _is_held(tx._lock):
        pass
    with pytest.raises(Refused, match="a thread was still running a statement"):
        store.keep()
    thread.join(WAIT_S)
    assert "interrupt" in str(found[0]) or "cancel" in str(found[0]), found
    assert tuple(store.savepoint().execute("SELECT 1").fetchone()) == (1,)
    store.keep()
    committed(store)
    assert kit.rows() == []


def _is_held(lock: Any) -> bool:
    is_free = lock.acquire(blocking=False)
    if is_free:
        lock.release()
    return not is_free


def _outcome(work: Callable[[], Any]) -> list[Any]:
    try:
        return [work()]
    except Exception as error:
        return [error]


def test_a_ledger_whose_session_is_in_a_transaction_stops_before_it_begins_one(kit: LedgerKit, store: Store) -> None:
    settle(store, [1])
    statement = "INSERT INTO charges VALUES (7)"
    store.connection.execute("BEGIN" if kit.kind == "sqlite" else statement)
    for step in (store.begin, lambda: store.note("name", "text")):
        with pytest.raises(Corrupt, match="inside a transaction that the agent did not begin"):
            step()
    store.connection.rollback()
    settle(store, [2])


def test_a_ledger_that_is_still_in_a_transaction_after_its_commit_publishes_nothing(
    postgres: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever opened it, the commit was a part of that: the rows are not durable."""
    with monkeypatch.context() as without:
        without.setattr(postgres_session.PostgresSession, "ensure", lambda _: None)
        postgres.connection.execute("SELECT 1")
        postgres.begin()
    with pytest.raises(Corrupt, match="inside a transaction that the agent did not begin"):
        committed(postgres)


# ---- blocks


def fails_after(block: Any, *steps: Callable[[], Any]) -> None:
    with block:
        for step in steps:
            step()
        raise ValueError("no")


def test_a_block_keeps_what_it_wrote_or_nothing(kit: LedgerKit, store: Store) -> None:
    tx = begun(store)

    def nested() -> None:
        with tx:
            insert(tx, 3)

    with tx as same:
        assert same is tx
        insert(tx, 1)
        with pytest.raises(ValueError, match="no"):
            fails_after(tx.transaction(), lambda: insert(tx, 2), nested)
        insert(tx, 4)
    with pytest.raises(ValueError, match="no"):
        fails_after(tx, lambda: insert(tx, 5))
    insert(tx, 6)
    store.keep()
    committed(store)
    assert kit.rows() == [1, 4, 6]


def test_a_statement_that_fails_inside_a_block_costs_only_the_block(kit: LedgerKit, store: Store) -> None:
    tx = begun(store)
    insert(tx, 1)
    with pytest.raises(Exception, match=r"(?i)unique"):
        fails_after(tx.transaction(), lambda: insert(tx, 2), lambda: insert(tx, 1))
    insert(tx, 3)
    store.keep()
    committed(store)
    assert kit.rows() == [1, 3]


def test_blocks_end_in_the_reverse_order_of_their_beginnings(store: Store) -> None:
    tx = begun(store)
    outer, inner = tx.transaction(), tx.transaction()
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(Refused, match="reverse order"):
        outer.__exit__(None, None, None)
    store.undo()
    committed(store)


def test_a_block_that_is_never_left_ends_with_the_handler(kit: LedgerKit, store: Store) -> None:
    tx = begun(store)
    block = tx.transaction()
    block.__enter__()
    insert(tx, 1)
    store.keep()
    committed(store)
    with pytest.raises(Refused, match=OVER):
        block.__exit__(None, None, None)
    error = ValueError("on its way")
    assert not block.__exit__(ValueError, error, None), "the handler's own error is not covered by ours"
    assert kit.rows() == [1]


def test_psycopg_s_rollback_ends_a_block_without_an_error(postgres: PostgresStore) -> None:
    tx = begun(postgres)
    with tx.transaction():
        insert(tx, 1)
        raise psycopg.Rollback
    with tx.transaction() as outer:
        insert(tx, 2)
        with tx.transaction():
            raise psycopg.Rollback(outer)  # type: ignore[arg-type]
    assert tx.execute("SELECT count(*) FROM charges").fetchone() == (0,)
    postgres.rollback()


def test_a_block_whose_statement_failed_unnoticed_is_rolled_back_and_says_so(postgres: PostgresStore) -> None:
    tx = begun(postgres)

    def swallow() -> None:
        with tx:
            insert(tx, 1)
            with contextlib.suppress(psycopg.Error):
                tx.execute("SELECT * FROM nowhere")

    with pytest.raises(Refused, match="went on after a statement failed"):
        swallow()
    assert tx.execute("SELECT count(*) FROM charges").fetchone() == (0,)
    postgres.rollback()


# ---- what a connection is told does not last


STATE = {
    "sqlite": [
        ("CREATE TEMP TABLE scratch (n)", "SELECT * FROM scratch", "no such table"),
        ("CREATE TEMP VIEW peek AS SELECT 1", "SELECT * FROM peek", "no such table"),
        (
            "CREATE TEMP TRIGGER spy AFTER INSERT ON charges BEGIN DELETE FROM charges; END",
            "DROP TRIGGER temp.spy",
            "no such trigger",
        ),
    ],
    "postgres": [
        ("SET search_path = pg_catalog", "SELECT count(*) FROM charges", "0"),
        ("SET LOCAL search_path = pg_catalog", "SELECT count(*) FROM charges", "0"),
        ("SELECT set_config('search_path', 'pg_catalog', false)", "SELECT count(*) FROM charges", "0"),
        ("SET app.tenant = 'blue'", "SELECT current_setting('app.tenant', true)", ""),
        ("SET synchronous_commit = off", "SHOW synchronous_commit", "on"),
        ("SET LOCAL synchronous_commit = off", "SHOW synchronous_commit", "on"),
        ("SET lock_timeout = '1h'", "SHOW lock_timeout", "5s"),
        ("SET LOCAL lock_timeout = '1h'", "SHOW lock_timeout", "5s"),
        ("SET client_encoding = 'latin1'", "SHOW client_encoding", "UTF8"),
        ("SET TRANSACTION READ ONLY", "SHOW transaction_read_only", "off"),
        ("SET ROLE pg_read_all_data", "SELECT current_user::text", "oncewire"),
        ("SET SESSION AUTHORIZATION pg_read_all_data", "SELECT session_user::text", "oncewire"),
        ("CREATE TEMP TABLE scratch (n int)", "SELECT * FROM scratch", "does not exist"),
        ("CREATE TEMP TABLE charges (n int)", "INSERT INTO charges VALUES (7) RETURNING id", "7"),
        ("DECLARE mine CURSOR FOR SELECT 1", "FETCH mine", "does not exist"),
        ("DECLARE mine CURSOR WITH HOLD FOR SELECT 1", "FETCH mine", "does not exist"),
    ],
}


@pytest.mark.parametrize("has_failed", [False, True])
@pytest.mark.parametrize(("kind", "at"), [(kind, at) for kind, rows in STATE.items() for at in range(len(rows))])
def test_what_one_input_sets_for_its_session_is_gone_for_the_next(
    kind: str, at: int, has_failed: bool, tmp_path: Path
) -> None:
    store = (SqliteKit(tmp_path) if kind == "sqlite" else PostgresKit()).new()
    change, look, expected = STATE[kind][at]
    begun(store).execute(change)
    (store.undo if has_failed else store.keep)()
    tx = store.savepoint()
    try:
        shown = tx.execute(look).fetchone()[0]
    except (sqlite3.Error, psycopg.Error) as error:
        shown = error
    assert expected in str("" if shown is None else shown)
    store.undo()
    committed(store)
    settle(store, [2])
    store.close()


def test_factories_are_those_of_one_input(kit: LedgerKit, store: Store) -> None:
    """Also one that raises: the ledger's own rows never go through it."""

    def broken(*_: Any) -> Any:
        raise ZeroDivisionError

    tx = begun(store)
    tx.row_factory = broken
    if isinstance(tx, SqliteTx):
        tx.text_factory = broken
    with pytest.raises(ZeroDivisionError):
        tx.execute("SELECT 'text'").fetchone()
    assert store.head().number == 0
    store.undo()
    assert store.savepoint().execute("SELECT 'text'").fetchone() == ("text",)
    store.keep()
    committed(store)
    settle(store, [2])
    assert store.head().number == 2


@pytest.mark.parametrize(
    "statement",
    [
        "PREPARE mine AS SELECT 1",
        "DEALLOCATE ALL",
        "DISCARD ALL",
        "LISTEN news",
        "UNLISTEN *",
        "/* x */ listen news",
        sql.SQL("LISTEN {}").format(sql.Identifier("news")),
        b"LISTEN news",
        "SELECT pg_advisory_lock(1)",
        "SELECT pg_try_advisory_lock_shared(1)",
        "SELECT pg_advisory_unlock_all()",
    ],
)
def test_what_would_outlast_the_transaction_is_refused(postgres: PostgresStore, statement: Any) -> None:
    tx = begun(postgres)
    with pytest.raises(Refused, match="outlasts its transaction"):
        tx.execute(statement)
    tx.execute("SELECT pg_advisory_xact_lock(1), 'COMMIT; LISTEN'").fetchone()
    postgres.keep()
    committed(postgres)


# ---- the connection is out of reach


def reachable(start: Any, depth: int) -> Iterator[Any]:
    """What public attributes lead to, from here on."""
    seen: set[int] = set()
    layer = [start]
    for _ in range(depth):
        following: list[Any] = []
        for one in layer:
            for name in dir(one):
                if name.startswith("_"):
                    continue
                try:
                    found = getattr(one, name)
                except Exception:
                    continue
                if id(found) not in seen:
                    seen.add(id(found))
                    following.append(found)
                    yield found
        layer = [one for one in following if not isinstance(one, str | int | tuple | type)]


def test_no_attribute_of_the_driver_s_leads_to_its_connection(store: Store) -> None:
    """Nor what factories of rows are called with."""
    seen: list[Any] = []

    def remember(cursor: Any, *row: Any) -> Any:
        seen.append(cursor)
        return row[0] if row else tuple

    tx = begun(store)
    tx.row_factory = remember
    cursor = tx.execute("SELECT 1")
    cursor.fetchone()
    assert seen
    block = tx.transaction().__enter__()
    for one in (tx, cursor, block, *seen):
        for found in reachable(one, 3):
            assert not isinstance(found, sqlite3.Connection | psycopg.Connection | psycopg.pq.PGconn), found
    assert cursor.connection is tx
    store.rollback()


@pytest.mark.parametrize("name", ["connection", "pgconn", "create_function", "backup", "set_authorizer", "autocommit"])
def test_what_a_transaction_lacks_it_says(store: Store, name: str) -> None:
    tx = begun(store)
    with pytest.raises(AttributeError, match=f"ctx.tx has no '{name}': it is the transaction of one input"):
        getattr(tx, name)
    with pytest.raises(AttributeError):
        setattr(tx, name, None)
    store.rollback()


# ---- what users of the drivers expect


def test_rows_come_as_the_sqlite3_module_has_them(tmp_path: Path) -> None:
    store = SqliteKit(tmp_path).new()
    tx = begun(store)
    assert isinstance(tx, SqliteTx)
    before = tx.total_changes
    cursor = tx.execute("INSERT INTO charges VALUES (:id)", {"id": 41})
    assert (cursor.lastrowid, cursor.rowcount, cursor.description) == (41, 1, None)
    many = tx.executemany("INSERT INTO charges VALUES (?)", ((n,) for n in range(3)))
    assert (many.rowcount, tx.total_changes - before, tx.in_transaction) == (3, 4, True)
    query = "SELECT id, 'x' AS name FROM charges ORDER BY id"
    rows = [(0, "x"), (1, "x"), (2, "x"), (41, "x")]
    assert list(tx.execute(query)) == tx.execute(query).fetchall() == rows
    assert tx.execute(query).fetchmany(2) == rows[:2]
    assert [column[0] for column in tx.execute(query).description] == ["id", "name"]

    tx.row_factory = sqlite3.Row
    assert tx.execute(query).fetchone()["name"] == "x"

    def as_dict(cursor: sqlite3.Cursor, row: tuple[Any, ...]) -> dict[str, Any]:
        return dict(zip([column[0] for column in cursor.description], row, strict=True))

    tx.row_factory = as_dict
    assert tx.execute(query).fetchone() == {"id": 0, "name": "x"}
    tx.row_factory = lambda cursor, row: dict(sqlite3.Row(cursor, row))
    assert tx.execute(query).fetchone() == {"id": 0, "name": "x"}
    own = tx.cursor()
    own.row_factory = None
    assert own.execute(query).fetchone() == rows[0]
    tx.text_factory = bytes
    assert own.execute(query).fetchone() == (0, b"x")
    own.close()
    store.keep()
    committed(store)
    store.close()


def test_a_cursor_of_many_results_forgets_those_that_are_dropped(tmp_path: Path) -> None:
    store = SqliteKit(tmp_path).new()
    tx = begun(store)
    for number in range(5_000):
        tx.execute("SELECT ?", (number,)).fetchone()
    gc.collect()
    assert len(tx._results or ()) < 2_000
    store.keep()
    committed(store)
    store.close()


def test_rows_come_as_psycopg_has_them(postgres: PostgresStore) -> None:
    tx = begun(postgres)
    assert isinstance(tx, PostgresTx)
    cursor = tx.execute("INSERT INTO charges VALUES (%(id)s)", {"id": 41})
    assert (cursor.rowcount, cursor.description, cursor.statusmessage) == (1, None, "INSERT 0 1")
    query = "SELECT id, 'x' AS name FROM charges ORDER BY id"
    tx.executemany("INSERT INTO charges VALUES (%s)", ((n,) for n in range(3)))
    rows = [(0, "x"), (1, "x"), (2, "x"), (41, "x")]
    assert list(tx.execute(query)) == tx.execute(query).fetchall() == rows
    with tx.cursor() as own:
        assert own.execute(query).fetchmany(2) == rows[:2]
        assert own.rownumber == 2
        own.scroll(-1)
        assert own.fetchone() == rows[1]
        assert [column.name for column in own.description] == ["id", "name"]
        own.executemany("INSERT INTO charges VALUES (%s) RETURNING id", [(5,), (6,)], returning=True)
        assert [result.fetchone() for result in own.results()] == [(5,), (6,)]
        assert own.set_result(0).closed is False
    assert own.closed

    @factories.kwargs_row
    def one_row(id: int, name: str) -> str:  # noqa: A002
        return f"{id}{name}"

    def last_first(cursor: psycopg.Cursor[Any]) -> Any:
        names = [column.name for column in cursor.description or ()]
        return lambda values: [*zip(names, values, strict=True)][::-1]

    expected: list[tuple[Any, Any]] = [
        (factories.dict_row, {"id": 0, "name": "x"}),
        (factories.namedtuple_row, (0, "x")),
        (factories.scalar_row, 0),
        (factories.class_row(dict), {"id": 0, "name": "x"}),
        (one_row, "0x"),
        (last_first, [("name", "x"), ("id", 0)]),
        (lambda cursor: factories.dict_row(cursor), {"id": 0, "name": "x"}),
    ]
    for factory, row in expected:
        assert tx.cursor(row_factory=factory).execute(query).fetchone() == row
        tx.row_factory = factory
        assert tx.execute(query).fetchone() == row
    table = sql.Identifier("charges")
    tx.row_factory = factories.tuple_row
    assert tx.execute(sql.SQL("SELECT max(id) FROM {}").format(table)).fetchone() == (41,)
    assert tx.execute("SELECT 1", binary=True, prepare=False).fetchone() == (1,)
    postgres.rollback()


def test_rows_are_copied_and_streamed_and_read_in_parts(postgres: PostgresStore) -> None:
    tx = begun(postgres)
    cursor = tx.cursor()
    with cursor.copy("COPY charges (id) FROM STDIN") as copy:
        for number in range(100):
            copy.write_row((number,))
        with pytest.raises(Refused, match=r"a COPY of ctx\.tx is under way"):
            tx.execute("SELECT 1")
    with tx.cursor().copy("COPY (SELECT id FROM charges ORDER BY id) TO STDOUT") as copy:
        copy.set_types(["int4"])
        assert [row[0] for row in copy.rows()] == list(range(100))
    with tx.cursor().copy("COPY charges TO STDOUT") as copy:
        assert copy.read(), "the rest is not wanted"
    for (number,) in tx.cursor().stream("SELECT id FROM charges ORDER BY id"):
        with pytest.raises(Refused, match=r"stream\(\) of ctx.tx is under way"):
            tx.execute("SELECT 1")
        assert number < 100
    server_side = tx.cursor("mine", scrollable=True)
    server_side.itersize = 10
    server_side.execute("SELECT id FROM charges ORDER BY id")
    assert (server_side.name, server_side.fetchone(), server_side.fetchmany(2)) == ("mine", (0,), [(1,), (2,)])
    assert sum(1 for _ in server_side) == 97
    server_side.close()
    with pytest.raises(Refused, match="keep a cursor beyond its transaction"):
        tx.cursor("mine", withhold=True)
    with pytest.raises(ValueError, match="no"):
        fails_after(tx.cursor().copy("COPY charges FROM STDIN"))
    postgres.undo()
    committed(postgres)


@pytest.mark.parametrize("way", ["copy in", "copy out", "stream"])
def test_a_copy_or_a_stream_that_is_left_open_fails_its_input_alone(postgres: PostgresStore, way: str) -> None:
    """psycopg holds the connection for as long as it is: the ledger would wait for it for ever."""
    kit_rows = "SELECT count(*) FROM charges"
    tx = begun(postgres)
    insert(tx, 1)
    kept: Any
    if way == "copy in":
        block = tx.cursor().copy("COPY charges FROM STDIN")
        kept = block.__enter__()
        kept.write_row((2,))
        use = lambda: kept.write_row((3,))  # noqa: E731
    elif way == "copy out":
        block = tx.cursor().copy("COPY (SELECT generate_series(1, 100000)) TO STDOUT")
        kept = block.__enter__()
        kept.read()
        use = kept.read
    else:
        kept = tx.cursor().stream("SELECT generate_series(1, 100000)")
        next(kept)
        use = lambda: next(kept)  # noqa: E731
    with pytest.raises(Refused, match=r"was not finished when its handler ended"):
        postgres.keep()
    assert postgres.savepoint().execute(kit_rows).fetchone() == (0,)
    postgres.keep()
    committed(postgres)
    with pytest.raises(Refused, match=OVER):
        use()


def test_rows_of_executemany_may_ask_the_database_themselves(postgres: PostgresStore) -> None:
    """psycopg reads them inside its lock: it would wait for itself."""
    tx = begun(postgres)
    tx.executemany("INSERT INTO charges VALUES (%s)", (tx.execute("SELECT %s::int", (n,)).fetchone() for n in range(3)))
    assert tx.execute("SELECT count(*) FROM charges").fetchone() == (3,)
    postgres.rollback()


def test_statements_of_sqlalchemy_run_on_it(kit: LedgerKit, store: Store) -> None:
    import sqlalchemy
    from sqlalchemy.dialects import postgresql, sqlite

    charges = sqlalchemy.Table("charges", sqlalchemy.MetaData(), sqlalchemy.Column("id", sqlalchemy.Integer))
    dialect: Any = sqlite.dialect(paramstyle="named") if kit.kind == "sqlite" else postgresql.psycopg.dialect()
    tx = begun(store)
    for statement in (charges.insert().values(id=7), charges.insert().values(id=8)):
        compiled = statement.compile(dialect=dialect)
        tx.execute(str(compiled), compiled.params)
    compiled = sqlalchemy.select(charges.c.id).where(charges.c.id > 7).compile(dialect=dialect)
    assert tx.execute(str(compiled), compiled.params).fetchall() == [(8,)]
    store.keep()
    committed(store)
    assert kit.rows() == [7, 8]


def test_a_handler_cannot_name_the_ledger_s_savepoint(postgres: PostgresStore) -> None:
    """A savepoint of its own under the same name would be all that a failure goes back to."""
    handle(postgres_begun(postgres), 1)
    tx = postgres.savepoint()
    insert(tx, 2)
    tx.execute("SAVEPOINT handler")
    insert(tx, 3)
    postgres.undo()
    assert postgres.savepoint().execute("SELECT id FROM charges").fetchall() == [(1,)]
    postgres.rollback()


def postgres_begun(store: PostgresStore) -> PostgresStore:
    store.begin()
    store.claim([key_of(1)])
    return store
