"""Everything durable is its owner's alone, whatever the umask: the real parts write, and every file is looked at."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from oncewire._ground.files import close_off, make_folder, open_private, owner_only, write_whole
from oncewire._ground.ledger.sqlite import SqliteStore
from oncewire._ground.trust.keys import KeyFile
from oncewire.embedded.folder import DataFolder
from oncewire.pipeline.lake.hold import held, write_state
from oncewire.pipeline.lake.place import place_of
from tests.support.scenarios import local_broker
from tests.support.up import Up, made

IS_ROOT = os.geteuid() == 0


@pytest.fixture(params=[0o000, 0o022, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    assert request.param == os.umask(before), "what we do leaves the umask of the process as it is"


def open_to_others(folder: Path) -> list[tuple[str, str]]:
    """What somebody else on this machine could read, write or list."""
    found = [folder, *folder.rglob("*")]
    modes = [(str(one), stat.S_IMODE(one.lstat().st_mode)) for one in found if not one.is_symlink()]
    return [(name, oct(mode)) for name, mode in modes if mode & 0o077]


def test_a_ledger_with_its_wal_is_its_owners_alone(tmp_path: Path, umask: int) -> None:
    folder = tmp_path / "ledgers"
    make_folder(folder)
    store = SqliteStore(str(folder / "ledger.db"))
    store.open("t", "w", "a")
    assert {"ledger.db", "ledger.db-wal", "ledger.db-shm"} == {one.name for one in folder.iterdir()}
    assert [] == open_to_others(folder)
    store.close()


def test_a_ledger_that_lies_open_is_closed_off(tmp_path: Path, umask: int) -> None:
    """A copy or a backup came with the modes of another place."""
    path = tmp_path / "ledger.db"
    store = SqliteStore(str(path))
    store.open("t", "w", "a")
    for one in tmp_path.iterdir():
        one.chmod(0o644)
    again = SqliteStore(str(path))
    again.open("t", "w", "a")
    assert [] == [one for one in open_to_others(tmp_path) if one[0] != str(tmp_path)]
    again.close()
    store.close()


async def test_the_log_of_a_broker_is_its_owners_alone(tmp_path: Path, umask: int) -> None:
    from tests.support.http import post, wire

    async with local_broker({"wal": "", "tick_ms": "10"}, tmp_path / "deep" / "wal") as port, wire(port) as client:
        assert 201 == (await client.ask(post("/v1/topics?name=t", b""))).status
        assert 200 == (await client.ask(post("/v1/produce?topic=t&value=v", b""))).status
    assert list((tmp_path / "deep").rglob("*"))
    assert [] == open_to_others(tmp_path / "deep")


def test_a_lake_in_a_folder_is_its_owners_alone(tmp_path: Path, umask: int) -> None:
    """Data files, what waits for others, Delta's own log, the lock and the state."""
    from oncewire.pipeline import checkpoints
    from oncewire.pipeline.auditing.run import keep_verdict
    from oncewire.pipeline.lake.files import write_file
    from oncewire.pipeline.lake.log import Lake
    from oncewire.pipeline.tables import BRONZE
    from tests.support import reports

    lake = tmp_path / "deep" / "lake"
    with held(lake, what="test", since="now"):
        write_state(lake, {"streams": {}})
        place = place_of(lake)
        (place / "staging" / "1.arrow").sink().close()
        log = Lake(place)
        handle = log.open(BRONZE)
        rows = BRONZE.schema.empty_table()
        written = write_file(log.root(BRONZE), "part", "", rows, False)
        log.commit(handle, BRONZE, [written], "app", 1)
        log.clear(BRONZE, 1)
        checkpoints.begin(lake, "S", 0)
        keep_verdict(lake, reports.verdict(is_good=True))
    names = {one.suffix for one in lake.rglob("*") if one.is_file()}
    assert {".json", ".parquet", ".arrow"} <= names
    assert [] == open_to_others(tmp_path / "deep")


def test_keys_are_their_owners_alone(tmp_path: Path, umask: int) -> None:
    keys = KeyFile(tmp_path / "deep" / "keys.json")
    keys.create("test", "acme", ("*",), int(time.time()))
    assert [] == open_to_others(tmp_path / "deep")


def test_the_data_folder_is_its_owners_alone(tmp_path: Path, umask: int) -> None:
    """Root lets PostgreSQL's user through to its own folder, and through only."""
    folder = DataFolder.at(tmp_path / "data")
    (tmp_path / "data").mkdir(mode=0o755)
    folder.create()
    with folder.lock():
        modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (folder.path, folder.nats, folder.postgres)}
    assert {folder.path: 0o711 if IS_ROOT else 0o700, folder.nats: 0o700} == {
        path: mode for path, mode in modes.items() if path != folder.postgres
    }
    assert [] == [one for one in open_to_others(folder.path) if not Path(one[0]).is_dir()]


@pytest.mark.parametrize("mask", [0o000, 0o022])
def test_a_whole_run_leaves_nothing_that_others_can_read(tmp_path: Path, mask: int) -> None:
    """nats-server and PostgreSQL write for themselves: they get a umask of their own."""
    prefix = [sys.executable, "-c", f"import os, sys; os.umask({mask}); os.execvp(sys.argv[1], sys.argv[1:])"]
    with Up(made(tmp_path / "data"), "--engine", "local", prefix=prefix).ready() as up:
        (up.folder.path / "postgres").chmod(0o755)
        found = open_to_others(up.folder.path)
        through = {str(up.folder.path), str(up.folder.postgres)} if IS_ROOT else set()
        seen = [(name, mode) for name, mode in found if name not in through and "/postgres/data/" not in name]
        assert [] == [one for one in seen if one[0] != str(up.folder.postgres)]
        assert (up.folder.path / "up.json").exists()
        assert list((up.folder.nats / "jetstream").rglob("*.blk"))


# ---- the helpers


def test_folders_above_are_made_closed_and_those_that_exist_are_left(tmp_path: Path, umask: int) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    theirs.chmod(0o755)
    make_folder(theirs / "a" / "b")
    make_folder(theirs / "a" / "b")
    assert 0o755 == stat.S_IMODE(theirs.stat().st_mode)
    assert [(str(theirs), "0o755")] == open_to_others(theirs)
    (theirs / "file").touch(0o600)
    with pytest.raises(FileExistsError):
        make_folder(theirs / "file")


def test_a_file_is_closed_off_and_one_that_is_not_there_is_not_missed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    path.chmod(0o664)
    close_off(path)
    assert 0o600 == stat.S_IMODE(path.stat().st_mode)
    close_off(tmp_path / "none")


def test_files_are_written_and_opened_for_their_owner(tmp_path: Path, umask: int) -> None:
    folder = tmp_path / "own"
    make_folder(folder)
    write_whole(folder / "whole", b"1")
    os.close(open_private(folder / "opened", os.O_WRONLY | os.O_CREAT))
    with owner_only():
        sqlite3.connect(folder / "db").close()
        (folder / "text").write_text("x")
        (folder / "below").mkdir()
    assert [] == open_to_others(folder)


def test_blocks_of_several_threads_overlap_and_leave_the_umask(tmp_path: Path, umask: int) -> None:
    both, first_left = threading.Barrier(2, timeout=30), threading.Event()

    def early() -> None:
        with owner_only():
            both.wait()
        first_left.set()

    def late() -> None:
        with owner_only():
            both.wait()
            assert first_left.wait(30)
            (tmp_path / "late").touch()

    threads = [threading.Thread(target=work) for work in (early, late)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0o600 == stat.S_IMODE((tmp_path / "late").stat().st_mode)


def test_a_child_of_ours_makes_private_files(tmp_path: Path, umask: int) -> None:
    from oncewire.embedded.process import Child, Log

    async def run() -> int:
        script = f"open({str(tmp_path / 'made')!r}, 'w')"
        child = await Child.start("child", [sys.executable, "-c", script], Log(tmp_path / "log"), death_signal=15)
        return await child.wait()

    assert 0 == asyncio.run(run())
    assert 0o600 == stat.S_IMODE((tmp_path / "made").stat().st_mode)
    assert subprocess.run(["true"], check=True)
