"""The lake's files and log on a real disk: same rows, same names; what a version names is synced before it is named."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from oncewire._ground.errors import InvalidSetting, Unavailable
from oncewire.pipeline.lake import files
from oncewire.pipeline.lake.log import Lake, is_partitioned
from oncewire.pipeline.lake.rules import Written
from oncewire.pipeline.tables import BRONZE, dataset, open_table

DAYS = [datetime(2026, 11, day, 12, tzinfo=UTC) for day in (15, 16)]


def rows(*payloads: bytes) -> pa.Table:
    """Messages of two days, in turns."""
    made = [
        {
            "tenant": "acme", "stream": "EVENTS", "created_ns": 1, "incarnation": 0, "sequence": at + 1, "nanos": 0,
            "subject": "evt.acme.main.x", "timestamp": DAYS[at % 2], "headers": [], "payload": payload,
            "date": DAYS[at % 2].date(),
        }
        for at, payload in enumerate(payloads)
    ]  # fmt: skip
    return pa.Table.from_pylist(made, BRONZE.schema)


def write(lake: Lake, found: pa.Table) -> list[Written]:
    is_dated = is_partitioned(lake.open(BRONZE))
    return list(files.write_files(lake.root(BRONZE), BRONZE, "EVENTS-1-2", found, is_partitioned=is_dated))


def test_a_lake_is_a_path_or_its_url_or_a_prefix_in_a_bucket_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "a b"
    assert str(folder) == str(Lake(folder.as_uri()).place) == str(Lake(str(folder)).place) == str(Lake(folder).place)
    assert "s3://bucket/lake" == str(Lake("s3://bucket/lake/").place)
    for url in ("s3://me:secret@bucket/lake", "abfss://lake@account/x", "gs://bucket"):
        with pytest.raises(InvalidSetting, match="a lake") as refused:
            Lake(url)
        assert "secret" not in str(refused.value)
        with pytest.raises(InvalidSetting):
            open_table(url, "bronze")


def test_the_same_rows_have_the_same_names_and_other_rows_have_others(tmp_path: Path) -> None:
    """So a batch that is run again writes nothing new, and a straggler never changes what is committed."""
    one, other = Lake(tmp_path / "one"), Lake(tmp_path / "other")
    first = write(one, rows(b"a", b"b"))
    assert first == write(one, rows(b"a", b"b")) == write(other, rows(b"a", b"b"))
    assert {file.path for file in first}.isdisjoint(file.path for file in write(one, rows(b"a", b"c")))


def test_a_file_that_stands_there_is_never_touched_again(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    [file] = write(lake, rows(b"a", b"b"))
    path = Path(lake.root(BRONZE), file.path)
    before = path.stat().st_ino
    write(lake, rows(b"a", b"b"))
    assert before == path.stat().st_ino


class Disk:
    """What was synced, named and committed, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, str]] = []
        fsync, replace, write_ = os.fsync, Path.replace, Lake._write

        def synced(file: int) -> None:
            self.events.append(("sync", str(Path(f"/proc/self/fd/{file}").readlink())))
            fsync(file)

        def named(path: Path, target: Path) -> Path:
            self.events.append(("name", str(target)))
            self.events = [(what, str(target) if one == str(path) else one) for what, one in self.events]
            return replace(path, target)

        def written(lake: Lake, *args: Any, **more: Any) -> None:
            self.events.append(("commit", args[1].name))
            write_(lake, *args, **more)

        monkeypatch.setattr(os, "fsync", synced)
        monkeypatch.setattr(Path, "replace", named)
        monkeypatch.setattr(Lake, "_write", written)

    def synced(self) -> set[str]:
        return {one for what, one in self.events if what == "sync"}


@pytest.mark.parametrize("partition_by", ["", "date"])
def test_a_file_is_synced_before_it_is_named_and_its_name_before_it_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, partition_by: str
) -> None:
    disk, lake = Disk(monkeypatch), Lake(tmp_path / "lake", partition_by=partition_by)
    written = write(lake, rows(b"a", b"b"))
    lake.commit(lake.open(BRONZE), BRONZE, written, "app", 2)
    commit = disk.events.index(("commit", "bronze"))
    assert written
    for file in written:
        path = Path(lake.root(BRONZE), file.path)
        name = disk.events.index(("name", str(path)))
        assert ("sync", str(path)) in disk.events[:name]
        assert ("sync", str(path.parent)) in disk.events[name:commit]


@pytest.mark.parametrize("partition_by", ["", "date"])
def test_nothing_of_a_committed_table_is_left_unsynced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, partition_by: str
) -> None:
    """Files, log entries, and every folder down to them: the power may go right behind a commit."""
    disk, lake = Disk(monkeypatch), Lake(tmp_path / "lake", partition_by=partition_by)
    lake.commit(lake.open(BRONZE), BRONZE, write(lake, rows(b"a", b"b")), "app", 2)
    there = {str(path) for path in (tmp_path, tmp_path / "lake", *(tmp_path / "lake").rglob("*"))}
    assert set() == there - disk.synced()


def test_a_name_that_was_left_unsynced_by_a_kill_is_synced_by_the_next_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = Lake(tmp_path)
    write(lake, rows(b"a", b"b"))
    disk = Disk(monkeypatch)
    write(lake, rows(b"a", b"b"))
    assert lake.root(BRONZE) in disk.synced()


def test_a_file_that_housekeeping_removed_before_its_commit_is_not_committed(tmp_path: Path) -> None:
    """It was left by an attempt that died before the retention began, so vacuum takes it for an orphan."""
    lake = Lake(tmp_path)
    handle = lake.open(BRONZE)
    written = write(lake, rows(b"a", b"b"))
    os.utime(Path(lake.root(BRONZE), written[0].path), (0, 0))
    again = write(lake, rows(b"a", b"b"))
    lake.clear(BRONZE, 1)
    with pytest.raises(Unavailable, match="was removed before it was committed"):
        lake.commit(handle, BRONZE, again, "app", 2)
    assert 0 == dataset(open_table(tmp_path, "bronze")).count_rows()
    lake.commit(lake.open(BRONZE), BRONZE, write(lake, rows(b"a", b"b")), "app", 2)
    assert 2 == dataset(open_table(tmp_path, "bronze")).count_rows()
