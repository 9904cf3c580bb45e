"""What only a SQLite file can get wrong: a full disk, damage, another process with the lock, keys in runs."""

from __future__ import annotations

import contextlib
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from oncewire._ground.errors import Corrupt, OncewireError, Refused, Unavailable
from oncewire._ground.ledger import keys as key_rules
from oncewire._ground.ledger import sqlite, sqlite_checkpoints
from oncewire._ground.ledger.sqlite import SqliteStore
from oncewire._ground.ledger.sqlite_checkpoints import Checkpoints
from oncewire._ground.ledger.store import Mark
from tests.support.ledgers import (
    AGENT,
    NOW_MS,
    SOURCES,
    TENANT,
    WORKSPACE,
    SqliteKit,
    content,
    entry,
    found_by,
    handle,
    insert,
    key_of,
    mark,
    settle,
)


@pytest.fixture
def kit(tmp_path: Path) -> SqliteKit:
    return SqliteKit(tmp_path)


@pytest.fixture
def store(kit: SqliteKit) -> Iterator[SqliteStore]:
    opened = kit.unopened()
    opened.open(TENANT, WORKSPACE, AGENT)
    yield opened
    opened.close()


# ---- keys in runs


def test_keys_are_found_in_runs_by_all_processes(kit: SqliteKit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes that spill in turn write each key into one run, and find those of the other."""
    monkeypatch.setattr(key_rules, "SPILL_KEYS", 10)
    stores = [kit.new(), kit.new()]
    for start in range(0, 120, 4):
        settle(stores[start // 4 % 2], list(range(start, start + 4)))
    third = kit.new()
    expected = {number: (number // 4 + 1, number % 4) for number in range(120)}
    for one in (*stores, third):
        assert expected == found_by(one, list(range(125)))
        one.close()
    (items, count), *_ = kit.sql("SELECT (SELECT sum(length(items)) FROM ledger_runs), spilled_keys FROM ledger_chains")
    assert count == items // key_rules.ITEM_BYTES <= 120
    assert count > 100


def test_a_spill_that_is_rolled_back_leaves_the_keys_where_they_were(
    kit: SqliteKit, store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_rules, "SPILL_KEYS", 10)
    settle(store, list(range(9)))
    fill_disk(store)
    with pytest.raises(Unavailable):
        settle(store, list(range(9, 700)))
    store.rollback()
    free_disk(store)
    assert set(range(9)) == set(found_by(store, list(range(700))))
    settle(store, list(range(9, 700)))
    assert set(range(700)) == set(found_by(store, list(range(700))))


def test_a_filter_that_has_become_too_small_is_made_anew(kit: SqliteKit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_rules, "SPILL_KEYS", 1_000)
    monkeypatch.setattr(key_rules, "BITS_PER_KEY", 400)
    first, second = kit.new(), kit.new()
    for start in range(0, 12_000, 500):
        settle(first, list(range(start, start + 500)))
    assert 12_000 == len(found_by(first, list(range(12_100))))
    assert 12_000 == len(found_by(second, list(range(12_100))))
    first.close()
    second.close()


# ---- a full disk


def fill_disk(store: SqliteStore) -> None:
    """SQLite answers to this limit as it does to a full disk."""
    pages = store.connection.execute("PRAGMA page_count").fetchone()[0]
    store.connection.execute(f"PRAGMA max_page_count = {pages}")


def free_disk(store: SqliteStore) -> None:
    store.connection.execute("PRAGMA max_page_count = 1000000")


def test_a_full_disk_is_unavailable_and_passes(kit: SqliteKit, store: SqliteStore) -> None:
    settle(store, [1], rows=True)
    fill_disk(store)
    with pytest.raises(Unavailable, match="full"):
        settle(store, list(range(2, 500)), rows=True)
    store.rollback()
    with pytest.raises(Unavailable, match="full"):
        store.keep_call(key_of(1), "big", bytes(100_000))
    free_disk(store)
    assert ([1], {1: (1, 0)}) == (kit.rows(), found_by(store, list(range(1, 500))))
    settle(store, [2], rows=True)
    store.keep_call(key_of(1), "big", bytes(100_000))
    assert [1, 2] == kit.rows()


def test_a_full_disk_in_a_handler_that_swallows_it_keeps_nothing_of_its_group(
    kit: SqliteKit, store: SqliteStore
) -> None:
    fill_disk(store)
    store.begin()
    store.claim([key_of(1)])
    tx = store.savepoint()
    with pytest.raises(sqlite3.OperationalError, match="full"):
        tx.executemany("INSERT INTO charges VALUES (?)", [(number,) for number in range(100_000)])
    with pytest.raises(OncewireError, match=r"rolled .* back|full"):
        finish(store)
    store.rollback()
    free_disk(store)
    assert ([], {}) == (kit.rows(), found_by(store, [1]))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of two megabytes."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("this machine lets us mount nothing; the limit on pages above stands for it")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_is_really_full_loses_nothing_and_passes(small_disk: Path) -> None:
    kit = SqliteKit(small_disk)
    store = kit.new()
    settle(store, [1], rows=True)
    with contextlib.suppress(OSError):
        (small_disk / "ballast").write_bytes(bytes(2 << 20))
    with pytest.raises(Unavailable):
        settle(store, list(range(2, 900)), rows=True)
    store.rollback()
    assert found_by(store, [1, 2]) == {1: (1, 0)}
    (small_disk / "ballast").unlink()
    settle(store, list(range(2, 900)), rows=True)
    assert list(range(1, 900)) == kit.rows()
    store.close()


def finish(store: SqliteStore) -> None:
    store.keep()
    store.append(content([entry(1)]), SOURCES, [])
    store.commit()


# ---- a transaction that is over


def test_a_handler_that_rolls_back_by_a_statement_keeps_nothing_of_its_group(
    kit: SqliteKit, store: SqliteStore
) -> None:
    """OR ROLLBACK ends the whole transaction, and no authorizer sees it."""
    store.begin()
    store.claim([key_of(1)])
    handle(store, 1)
    tx = store.savepoint()
    with pytest.raises(sqlite3.IntegrityError):
        tx.execute("INSERT OR ROLLBACK INTO charges VALUES (1)")
    for step in (
        store.keep,
        store.undo,
        store.savepoint,
        lambda: store.append(content([entry(1)]), SOURCES, []),
        lambda: store.mark([]),
        store.commit,
    ):
        with pytest.raises(Refused, match="rolled the transaction back"):
            step()
    store.rollback()
    assert ([], {}, 0) == (kit.rows(), found_by(store, [1]), store.head().number)


@pytest.mark.parametrize(
    ("method", "statement", "what"),
    [
        ("executescript", "INSERT INTO charges VALUES (2)", "use executescript: it commits"),
        ("execute", "ATTACH ':memory:' AS elsewhere", "attach another database"),
        ("execute", "SAVEPOINT handler", "end or begin the ledger's transaction"),
        ("execute", "BEGIN", "end or begin the ledger's transaction"),
        ("execute", "PRAGMA query_only = ON", "change the ledger's connection by PRAGMA"),
        ("execute", "PRAGMA busy_timeout(1)", "change the ledger's connection by PRAGMA"),
    ],
)
def test_a_handler_cannot_reach_around_the_transaction(
    kit: SqliteKit, store: SqliteStore, method: str, statement: str, what: str
) -> None:
    store.begin()
    tx = store.savepoint()
    insert(tx, 1)
    with pytest.raises(Refused, match=f"a handler may not {what}"):
        getattr(tx, method)(statement)
    with pytest.raises(Refused, match=f"a handler may not {what}"):
        getattr(tx.cursor(), method)(statement)
    store.undo()
    store.rollback()
    assert [] == kit.rows()


# ---- other processes and files


def test_a_file_that_another_process_holds_is_unavailable(
    kit: SqliteKit, store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "BUSY_MS", 10)
    second = kit.new()
    store.begin()
    with pytest.raises(Unavailable, match="locked") as caught:
        second.begin()
    second.rollback()
    assert "another process holds the file" in caught.value.message
    store.rollback()
    settle(second, [1])
    second.close()


def test_a_copy_of_a_ledger_has_another_identity(kit: SqliteKit, store: SqliteStore, tmp_path: Path) -> None:
    settle(store, [1])
    store.close()
    shutil.copy(kit.path, tmp_path / "copy.db")
    store.open(TENANT, WORKSPACE, AGENT)
    copy = SqliteStore(str(tmp_path / "copy.db"))
    copy.open(TENANT, WORKSPACE, AGENT)
    assert store.identity()["ledger"] == copy.identity()["ledger"]
    assert store.identity()["store"] != copy.identity()["store"]
    copy.close()


def test_a_file_of_another_kind_is_corrupt(tmp_path: Path) -> None:
    path = tmp_path / "letter.txt"
    path.write_bytes(b"Dear Sir or Madam, " * 1000)
    with pytest.raises(Corrupt, match="not a database") as caught:
        SqliteStore(str(path)).open(TENANT, WORKSPACE, AGENT)
    assert "--store" in caught.value.hint


@pytest.mark.parametrize("path", [".", "nowhere/ledger.db"])
def test_a_path_that_cannot_be_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(Refused, match="folder"):
        SqliteStore(str(tmp_path / path)).open(TENANT, WORKSPACE, AGENT)


def test_a_damaged_file_is_corrupt(kit: SqliteKit) -> None:
    store = kit.new()
    settle(store, list(range(500)), effects=100)
    store.close()
    size = kit.path.stat().st_size
    with kit.path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (size - 4096))
    with pytest.raises(Corrupt, match="malformed"):
        kit.new()


def test_a_block_that_cannot_be_read_is_corrupt(kit: SqliteKit, store: SqliteStore) -> None:
    settle(store, [1])
    kit.sql("UPDATE ledger_blocks SET content = x'9391c0'")
    with pytest.raises(Corrupt, match="block 1"):
        store.block(1)


def test_a_ledger_in_memory_works_alone() -> None:
    store = SqliteStore(":memory:")
    store.open(TENANT, WORKSPACE, AGENT)
    settle(store, [1])
    assert found_by(store, [1]) == {1: (1, 0)}
    assert store.identity()["store"].startswith("memory:")
    store.close()


def test_a_run_whose_blocks_are_all_forgotten_goes_and_the_newest_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oncewire._ground.ledger.keys.SPILL_KEYS", 4)
    kit = SqliteKit(tmp_path)
    store = kit.new()
    for number in range(1, 7):
        settle(store, [2 * number, 2 * number + 1])
    mark(store, *(Mark(block, 0, 0, "LEDGER", block) for block in range(1, 7)))
    runs = "SELECT DISTINCT run FROM ledger_runs ORDER BY run"
    before = [row[0] for row in kit.sql(runs)]

    store.forget(NOW_MS + 1, 3)  # one whole run, and half of the next

    assert before[1:] == [row[0] for row in kit.sql(runs)]
    assert {8: (4, 0), 13: (6, 1)} == found_by(store, [2, 5, 6, 8, 13])
    store.forget(NOW_MS + 1, 10)
    assert before[-1:] == [row[0] for row in kit.sql(runs)]
    store.close()
    with contextlib.closing(kit.new()) as again:
        assert {13: (6, 1)} == found_by(again, [2, 8, 13])
        settle(again, [20, 21, 22, 23])
        assert {13, 20} == found_by(again, [2, 13, 20]).keys()


def test_whoever_only_looks_does_not_wait_for_a_process_that_writes(kit: SqliteKit, store: SqliteStore) -> None:
    settle(store, [1])
    store.begin()
    with contextlib.closing(kit.new()) as looking:
        assert 1 == looking.head().number
    store.rollback()


# ---- the WAL


def test_the_wal_is_emptied_beside_the_commits(
    kit: SqliteKit, store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By passes in a thread: SQLite's own rule, inside a commit, has nothing to do. All stays found, also anew."""
    monkeypatch.setattr(sqlite_checkpoints, "PASS_BYTES", 1)
    passes: list[str] = []
    run = Checkpoints._run
    monkeypatch.setattr(Checkpoints, "_run", lambda self: (passes.append(threading.current_thread().name), run(self)))
    store.connection.execute("PRAGMA wal_autocheckpoint = 0")
    for number in range(200):
        settle(store, [number])
    size = Path(f"{store.path}-wal").stat().st_size

    assert len(passes) > 5
    assert {"oncewire-checkpoint"} == set(passes)
    assert size < 100 * sqlite.PAGE_BYTES, "every commit writes some pages: without a pass there would be hundreds"
    other = kit.new()
    assert list(range(200)) == list(found_by(other, list(range(210))))
    other.close()


def test_a_pass_that_fails_costs_nothing_but_space(
    kit: SqliteKit, store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_checkpoints, "PASS_BYTES", 1)
    monkeypatch.setattr(sqlite_checkpoints, "_CHECKPOINT", "PRAGMA wal_checkpoint(PASSIVE) no such statement")
    for number in range(20):
        settle(store, [number])
    assert list(range(20)) == list(found_by(store, list(range(20))))


def test_a_ledger_is_closed_after_its_pass(kit: SqliteKit, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that still works on the file would keep its WAL, and would outlive the ledger."""
    monkeypatch.setattr(sqlite_checkpoints, "PASS_BYTES", 1)
    store = kit.new()
    settle(store, [1])
    assert isinstance(store, SqliteStore)
    store.close()
    assert "oncewire-checkpoint" not in {thread.name for thread in threading.enumerate()}
    assert not Path(f"{store.path}-wal").exists()


DIES_IN_A_PASS = """
import os, signal, sys, threading
from oncewire._ground.ledger import sqlite_checkpoints
from oncewire._ground.ledger.stores import open_store
from tests.support.ledgers import *
sqlite_checkpoints.PASS_BYTES = 8_000_000
run = sqlite_checkpoints.Checkpoints._run
def die(path, before):
    while os.stat(path).st_mtime_ns == before:
        pass
    os.kill(os.getpid(), signal.SIGKILL)
def passing(self):
    threading.Thread(target=die, args=(self._path, os.stat(self._path).st_mtime_ns)).start()
    run(self)
    print("ended", flush=True)
sqlite_checkpoints.Checkpoints._run = passing
store = open_store(sys.argv[1])
store.open(TENANT, WORKSPACE, AGENT)
number = int(sys.argv[2])
while True:
    settle(store, range(number, number + 100), effects=100)
    number += 100
    print(number, flush=True)
"""


def test_a_process_that_is_killed_inside_a_pass_loses_nothing(kit: SqliteKit) -> None:
    """Commits leave the file as it is, so its first change is a pass under way: the process kills itself then. On a
    busy machine that may come when the pass is over, and is tried again."""
    root, settled, has_landed = Path(__file__).parents[2], set[int](), False
    for _ in range(20):
        command = [sys.executable, "-c", DIES_IN_A_PASS, kit.url, str(max(settled, default=-1) + 1001)]
        died = subprocess.run(command, capture_output=True, text=True, cwd=root)
        assert -signal.SIGKILL == died.returncode, died.stderr
        told = died.stdout.split()
        has_landed = "ended" not in told
        settled |= {one for end in told if end != "ended" for one in range(int(end) - 100, int(end))}
        with contextlib.closing(kit.new()) as store:
            assert isinstance(store, SqliteStore)
            assert [("ok",)] == store.connection.execute("PRAGMA integrity_check").fetchall()
            assert settled == found_by(store, sorted(settled)).keys()
        if has_landed:
            break
    assert has_landed
