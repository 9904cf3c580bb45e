"""What only PostgreSQL can get wrong: hidden commits, deadlocks, lost sessions, schemas."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from oncewire._ground.errors import NotConnected, Refused, Unavailable
from oncewire._ground.ledger import postgres_session
from oncewire._ground.ledger.postgres import PostgresStore
from oncewire._ground.ledger.postgres_tx import PostgresTx
from oncewire._ground.ledger.processes import process_name
from tests.support.ledgers import (
    AGENT,
    SOURCES,
    TENANT,
    WORKSPACE,
    PostgresKit,
    content,
    entry,
    found_by,
    handle,
    insert,
    key_of,
    settle,
)

WAIT_S = 30.0


@pytest.fixture
def kit() -> PostgresKit:
    return PostgresKit()


@pytest.fixture
def store(kit: PostgresKit) -> Iterator[PostgresStore]:
    opened = kit.unopened()
    opened.open(TENANT, WORKSPACE, AGENT)
    yield opened
    opened.close()


@pytest.fixture
def stranger(kit: PostgresKit) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(kit.url, autocommit=True) as connection:
        yield connection


# ---- commits that hide


def begin_with_a_neighbour(store: PostgresStore) -> PostgresTx:
    """A group in which another handler has written already, and this one is inside its savepoint."""
    store.begin()
    store.claim([key_of(1), key_of(2)])
    handle(store, 1)
    tx = store.savepoint()
    insert(tx, 2)
    return tx


def assert_nothing_was_kept(kit: PostgresKit, store: PostgresStore) -> None:
    with pytest.raises(Refused, match="may not end"):
        store.append(content([entry(1), entry(2)]), SOURCES, [])
    with pytest.raises(Refused, match="may not end"):
        store.commit()
    store.rollback()
    assert ([], {}, 0) == (kit.rows(), found_by(store, [1, 2]), store.head().number)
    settle(store, [1, 2], rows=True)
    assert [1, 2] == kit.rows()


def test_a_hidden_commit_fails_and_takes_all_of_the_transaction_along(kit: PostgresKit, store: PostgresStore) -> None:
    tx = begin_with_a_neighbour(store)
    with pytest.raises(psycopg.Error, match="may not end the ledger's transaction"):
        tx.execute("SELECT 1; COMMIT")
    with pytest.raises(Refused, match="may not end"):
        store.undo()
    assert_nothing_was_kept(kit, store)


@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK", "COMMIT; BEGIN", "ROLLBACK; BEGIN", "COMMIT AND CHAIN"])
def test_a_handler_that_ends_the_transaction_and_goes_on_is_found_out(
    kit: PostgresKit, store: PostgresStore, end: str
) -> None:
    """What it writes afterwards stands in another transaction, which is thrown away as well."""
    tx = begin_with_a_neighbour(store)
    with contextlib.suppress(psycopg.Error):
        tx.execute(f"SELECT 1; {end}")
    insert(tx, 3)
    with pytest.raises(Refused, match="may not end"):
        store.keep()
    assert_nothing_was_kept(kit, store)


def test_a_procedure_that_commits_fails_alone(kit: PostgresKit, store: PostgresStore) -> None:
    tx = begin_with_a_neighbour(store)
    with pytest.raises(psycopg.errors.InvalidTransactionTermination):
        tx.execute("DO $$ BEGIN COMMIT; END $$")
    store.undo()
    store.append(content([entry(1)]), SOURCES, [])
    store.commit()
    assert [1] == kit.rows()


def test_a_handler_may_nest_a_transaction_of_its_own(kit: PostgresKit, store: PostgresStore) -> None:
    tx = begin_with_a_neighbour(store)
    with pytest.raises(psycopg.errors.UniqueViolation), tx.transaction():
        insert(tx, 1)
    tx.execute("SAVEPOINT mine")
    tx.execute("ROLLBACK TO SAVEPOINT mine")
    store.keep()
    store.append(content([entry(1), entry(2)]), SOURCES, [])
    store.commit()
    assert [1, 2] == kit.rows()


def test_a_handler_that_swallows_a_failed_statement_fails_alone(kit: PostgresKit, store: PostgresStore) -> None:
    """PostgreSQL answers nothing more until a rollback: its rows cannot be kept."""
    tx = begin_with_a_neighbour(store)
    with pytest.raises(psycopg.errors.UndefinedTable):
        tx.execute("SELECT * FROM nowhere")
    with pytest.raises(Refused, match="went on after a statement failed"):
        store.keep()
    store.append(content([entry(1)]), SOURCES, [])
    store.commit()
    assert [1] == kit.rows()


def test_a_handler_may_set_its_own_search_path(kit: PostgresKit, store: PostgresStore) -> None:
    tx = begin_with_a_neighbour(store)
    tx.execute("SET LOCAL search_path = pg_catalog")
    store.keep()
    store.append(content([entry(1), entry(2)]), SOURCES, [])
    store.commit()
    assert [1, 2] == kit.rows()


# ---- locks


def test_an_input_that_another_process_holds_too_long_is_unavailable(
    kit: PostgresKit, stranger: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(postgres_session.SETTINGS, "lock_timeout", "50ms")
    store = kit.unopened()
    store.open(TENANT, WORKSPACE, AGENT)
    with stranger.transaction():
        stranger.execute("INSERT INTO ledger_inbox VALUES (%s, 1)", (key_of(1),))
        store.begin()
        with pytest.raises(Unavailable, match="lock timeout") as caught:
            store.claim([key_of(1)])
        store.rollback()
    assert not isinstance(caught.value, NotConnected)
    store.close()


def wait_for_a_waiter(kit: PostgresKit) -> None:
    """Until some session of this database waits for a lock."""
    waiting = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    deadline = time.monotonic() + WAIT_S
    while not kit.sql(waiting):
        assert time.monotonic() < deadline


def test_an_agent_starts_while_another_process_stands_inside_its_commit(
    kit: PostgresKit, store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was stopped there, perhaps for long: whoever is to do its work must not fail before it begins."""
    monkeypatch.setitem(postgres_session.SETTINGS, "lock_timeout", "100ms")
    store.begin()
    store.claim([key_of(1)])
    store.append(content([entry(1)]), SOURCES, [])
    other = kit.unopened()
    try:
        other.open(TENANT, WORKSPACE, AGENT)
        assert store.ledger_id == other.ledger_id
    finally:
        other.close()
        store.rollback()


def test_a_deadlock_is_unavailable_and_the_inputs_can_be_run_again(
    kit: PostgresKit, store: PostgresStore, stranger: psycopg.Connection[Any]
) -> None:
    """The stranger takes the keys in the other order; it never gives way by itself."""
    low, high = sorted([key_of(1), key_of(2)])
    stranger.execute("SET deadlock_timeout = '1h'")
    taken = threading.Event()

    def take() -> None:
        with stranger.transaction():
            stranger.execute("INSERT INTO ledger_inbox VALUES (%s, 1)", (high,))
            taken.set()
            wait_for_a_waiter(kit)
            stranger.execute("INSERT INTO ledger_inbox VALUES (%s, 1)", (low,))
            raise psycopg.Rollback

    thread = threading.Thread(target=take)
    thread.start()
    assert taken.wait(WAIT_S)
    store.begin()
    with pytest.raises(Unavailable, match=r"deadlock|lock timeout"):
        store.claim([low, high])
    store.rollback()
    thread.join(WAIT_S)
    settle(store, [1])
    settle(store, [2])


def test_two_batches_that_share_inputs_in_other_orders_do_not_wait_for_each_other(kit: PostgresKit) -> None:
    errors: list[BaseException] = []
    numbers = sorted(range(3_000), key=key_of)
    together = threading.Barrier(2, timeout=WAIT_S)

    def work(order: list[int]) -> None:
        mine = kit.new()
        try:
            for _ in range(5):
                mine.begin()
                together.wait()
                mine.claim([key_of(number) for number in order])
                mine.commit()
        except BaseException as error:
            errors.append(error)
        finally:
            mine.close()

    threads = [threading.Thread(target=work, args=(order,)) for order in (numbers, numbers[::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert [] == errors
    assert [] == kit.sql("SELECT * FROM ledger_inbox")


# ---- sessions


def end_session(stranger: psycopg.Connection[Any], store: PostgresStore) -> None:
    pid = store.connection.info.backend_pid
    stranger.execute("SELECT pg_terminate_backend(%s, 10000)", (pid,))


def test_a_lost_session_is_made_anew(kit: PostgresKit, store: PostgresStore, stranger: psycopg.Connection[Any]) -> None:
    store.begin()
    store.claim([key_of(1)])
    handle(store, 1)
    end_session(stranger, store)
    with pytest.raises(NotConnected):
        store.append(content([entry(1)]), SOURCES, [])
    store.rollback()
    assert [] == kit.rows()
    settle(store, [1], rows=True)
    end_session(stranger, store)
    with pytest.raises(NotConnected):
        store.head()
    assert (1, [1]) == (store.head().number, kit.rows())


def test_a_process_lives_on_in_its_next_session(
    kit: PostgresKit, store: PostgresStore, stranger: psycopg.Connection[Any]
) -> None:
    store.enter(process_name(), 1)
    end_session(stranger, store)
    with pytest.raises(NotConnected):
        store.head()
    store.head()
    second = kit.new()
    assert not second.enter(process_name(), 2)
    second.close()


def test_a_stopped_process_on_another_machine_is_known_by_its_session(kit: PostgresKit, store: PostgresStore) -> None:
    """Its process id says nothing here; the lock that its session held does."""
    elsewhere = kit.new()
    elsewhere.enter("1:1:elsewhere", 1)
    assert not store.enter(process_name(), 2)
    elsewhere.close()
    second = kit.new()
    assert second.enter(process_name(), 3)
    second.close()


def test_the_session_outlasts_a_handler_in_its_transaction(kit: PostgresKit) -> None:
    store = PostgresStore(kit.url, handler_timeout_s=100)
    store.open(TENANT, WORKSPACE, AGENT)
    shown = [
        store.connection.execute(f"SHOW {name}").fetchone()
        for name in ("lock_timeout", "idle_in_transaction_session_timeout")
    ]
    store.close()
    assert [("5s",), ("160s",)] == shown


def test_a_server_that_is_not_there_is_not_connected() -> None:
    with pytest.raises(NotConnected):
        PostgresStore("postgresql://oncewire@127.0.0.1:1/none").open(TENANT, WORKSPACE, AGENT)


# ---- schemas and identity


def test_a_ledger_stands_in_the_schema_that_was_asked_for(kit: PostgresKit) -> None:
    store = PostgresStore(kit.url.partition("?")[0], schema=kit.schema)
    store.open(TENANT, WORKSPACE, AGENT)
    settle(store, [1], rows=True)
    store.close()
    assert ([1], [(1,)]) == (kit.rows(), kit.sql("SELECT number FROM ledger_chains"))


@pytest.mark.parametrize("schema", ["nowhere", "public"])
def test_a_schema_without_a_ledger_says_what_to_do(kit: PostgresKit, schema: str) -> None:
    kit.sql("DROP TABLE IF EXISTS public.ledger_meta CASCADE")
    with pytest.raises(Refused) as caught:
        PostgresStore(kit.url.partition("?")[0], schema=schema).open(TENANT, WORKSPACE, AGENT)
    assert "oncewire migrate" in caught.value.hint


def test_two_ledgers_of_one_database_are_told_apart_by_any_role(kit: PostgresKit, store: PostgresStore) -> None:
    second = PostgresKit()
    second.sql(f"CREATE ROLE {second.schema} LOGIN; GRANT USAGE ON SCHEMA {second.schema} TO {second.schema}")
    second.sql(f"GRANT ALL ON ALL TABLES IN SCHEMA {second.schema} TO {second.schema}")
    other = PostgresStore(second.url.replace("oncewire@", f"{second.schema}@"))
    other.open(TENANT, WORKSPACE, AGENT)
    mine, theirs = store.identity()["store"].split(":"), other.identity()["store"].split(":")
    assert mine[1].isdigit()
    assert (mine[:3], kit.schema, second.schema) == (theirs[:3], mine[3], theirs[3])
    other.close()
