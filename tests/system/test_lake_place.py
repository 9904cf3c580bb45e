"""Where a lake in an object store is, what is said when it cannot be reached, and that a version is committed once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from oncewire._ground.errors import AuthenticationFailed, Conflict, InvalidSetting, Refused, Unavailable
from oncewire.pipeline.auditing.run import last_verdicts
from oncewire.pipeline.lake import files
from oncewire.pipeline.lake.log import Lake
from oncewire.pipeline.lake.place import place_of
from oncewire.pipeline.lake.rules import Written
from oncewire.pipeline.tables import BATCHES, dataset, files_of, open_table
from tests.support.objects import BUCKET, SECRET, ObjectStore, object_store
from tests.support.ports import free_port

LAKE = f"s3://{BUCKET}/lake"


@pytest.fixture(scope="module")
def running() -> Iterator[ObjectStore]:
    with object_store() as store:
        yield store


@pytest.fixture
def store(running: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    for name, value in running.environ.items():
        monkeypatch.setenv(name, value)
    return running


def write(lake: Lake, *versions: int) -> list[Written]:
    rows = pa.Table.from_pylist([{"last_version": one, "family": "odd +@% name"} for one in versions], BATCHES.schema)
    return list(files.write_files(lake.root(BATCHES), BATCHES, "EVENTS @1+0 %25", rows, is_partitioned=False))


def test_of_two_that_commit_at_one_place_the_second_is_told(store: ObjectStore, tmp_path: Path) -> None:
    one, other = (Lake(LAKE, checkpoints=tmp_path / name) for name in ("one", "other"))
    first, second = one.open(BATCHES), other.open(BATCHES)
    written = write(one, 1, 2)
    one.commit(first, BATCHES, written, "app", 2)
    with pytest.raises(Conflict, match="another process has written"):
        other.commit(second, BATCHES, written, "app", 2)
    assert 2 == dataset(open_table(LAKE, "batches")).count_rows()
    assert {one.path for one in written} == files_of(open_table(LAKE, "batches")).keys()


def test_of_two_that_put_the_same_files_together_the_second_is_told(store: ObjectStore, tmp_path: Path) -> None:
    lake = Lake(f"{LAKE}-small", checkpoints=tmp_path)
    old = write(lake, 1) + write(lake, 2)
    lake.commit(lake.open(BATCHES), BATCHES, old, "app", 2)
    [version] = lake.versions(BATCHES, 0, 1)
    lake.rewrite(lake.open(BATCHES), BATCHES, version.added, write(lake, 1, 2))
    with pytest.raises(Conflict, match="no longer part of it"):
        lake.rewrite(lake.open(BATCHES), BATCHES, version.added, write(lake, 2, 1))
    assert 2 == dataset(open_table(f"{LAKE}-small", "batches")).count_rows()


def test_housekeeping_leaves_what_is_named_however_it_is_named(store: ObjectStore, tmp_path: Path) -> None:
    lake = Lake(f"{LAKE}-kept", checkpoints=tmp_path)
    lake.commit(lake.open(BATCHES), BATCHES, write(lake, 1), "app", 1)
    [orphan] = write(lake, 2)
    (lake.place / "_staging/another/7/0-runtime.arrow").store(b"left by a driver that never came back")
    lake.clear(BATCHES, 0)
    lake.clear_staging(1)
    assert (lake.place / "_staging/another/7/0-runtime.arrow").is_there
    lake.clear_staging(0)
    assert not (lake.place / "_staging/another/7/0-runtime.arrow").is_there
    assert [orphan.path] == (lake.place / "batches").gone([*files_of(lake.open(BATCHES)), orphan.path])
    assert 1 == dataset(open_table(lake.place, "batches")).count_rows()


def test_a_store_in_which_one_version_could_be_committed_twice_is_refused(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = Lake(f"{LAKE}-proof", checkpoints=tmp_path)
    lake.prove()
    assert [] == [one for one in store.listed(str(lake.place)) if one.is_file], "nothing is left of the proof"

    class Lax(Lake):
        """Each commit goes through, whatever was committed meanwhile."""

        def _write(self, handle: Any, table: Any, *args: Any, **more: Any) -> None:
            super()._write(self.open(table), table, *args, **more)

    with pytest.raises(Refused, match="lets two pipelines commit one version") as told:
        Lax(f"{LAKE}-proof", checkpoints=tmp_path).prove()
    assert "If-None-Match" in told.value.hint
    monkeypatch.setenv("AWS_S3_ALLOW_UNSAFE_RENAME", "true")
    with pytest.raises(InvalidSetting, match="AWS_S3_ALLOW_UNSAFE_RENAME"):
        lake.prove()
    Lake(tmp_path / "folder").prove()


@pytest.mark.parametrize(
    ("lake", "environ", "error", "said"),
    [
        (LAKE, {"AWS_SECRET_ACCESS_KEY": "wrong"}, AuthenticationFailed, "AWS_SECRET_ACCESS_KEY"),
        (LAKE, {"AWS_ACCESS_KEY_ID": "nobody"}, AuthenticationFailed, "AWS_ACCESS_KEY_ID"),
        ("s3://no-such-bucket/lake", {}, Refused, "Make it first"),
        (LAKE, {"AWS_ENDPOINT_URL": "closed"}, Unavailable, "AWS_ENDPOINT_URL"),
        (LAKE, {"AWS_ALLOW_HTTP": ""}, InvalidSetting, "AWS_ALLOW_HTTP=true"),
        ("s3://tables/a%20b", {}, InvalidSetting, "s3://bucket/prefix"),
        ("s3://key:hidden-lake-secret@tables/lake", {}, InvalidSetting, "AWS_ACCESS_KEY_ID"),
        ("gs://tables/lake", {}, InvalidSetting, "speaks S3"),
    ],
)
def test_what_cannot_be_reached_is_named_with_what_to_do(
    store: ObjectStore,
    monkeypatch: pytest.MonkeyPatch,
    lake: str,
    environ: dict[str, str],
    error: type[Refused],
    said: str,
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}" if value == "closed" else value)
    with pytest.raises(error) as looked:
        place_of(lake).check()
    with pytest.raises(error) as read:
        last_verdicts(lake)
    for told in (looked.value, read.value):
        assert said in told.hint
        assert SECRET not in f"{told.message} {told.hint}"


def test_keys_that_are_put_right_count_at_once(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process, which keeps its connection: a key that was renewed is another one."""
    place = place_of(f"s3://{BUCKET}")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not the key")
    with pytest.raises(AuthenticationFailed):
        place.check()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", store.environ["AWS_SECRET_ACCESS_KEY"])
    place.check()


def test_the_commands_say_it_in_two_lines(store: ObjectStore, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-c",
        "from oncewire.cli import main; main()",
        "pipeline",
        "status",
        "--data",
        str(tmp_path),
    ]
    command += ["--data", str(tmp_path), "--lake", "s3://no-such-bucket/lake"]
    ended = subprocess.run(command, env=os.environ | store.environ, capture_output=True, text=True, timeout=60)
    assert 0 != ended.returncode
    assert "no such bucket" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_checkpoints_of_each_lake_are_apart_from_those_of_another(store: ObjectStore, tmp_path: Path) -> None:
    found = {Lake(f"{LAKE}{name}", checkpoints=tmp_path).beside for name in ("", "-a", "-b")}
    assert 3 == len(found)
    assert {tmp_path} == {one.parent for one in found}
    with pytest.raises(InvalidSetting, match="needs a folder beside it"):
        _ = Lake(LAKE).beside
