"""Files that are missing, cut off or changed behind the log's back: each is named, with what stood in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from oncewire.pipeline.auditing.intact import FILES_PER_TASK, Found, Look, files_of, in_parts
from oncewire.pipeline.auditing.opened import open_lake
from oncewire.pipeline.tables import open_table
from tests.support.lakes import EVENTS, FakeAgent, Lake


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lake = Lake(tmp_path_factory.mktemp("la ke"))
    agent = FakeAgent(lake, "biller")
    agent.settle(agent.orders(40), effects=1)
    agent.close()
    return lake.write()


@pytest.fixture
def path(base: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(base, tmp_path / "lake"))


def file_of(path: Path, name: str) -> Path:
    """The largest file of a table."""
    return max((path / name).glob("*.parquet"), key=lambda one: one.stat().st_size)


def looked(path: Path) -> dict[str, Found]:
    """What is wrong, by table."""
    opened = open_lake(path)
    named = [file for name, handle in opened.handles.items() for file in files_of(name, handle)]
    found = Look(str(path))(named)
    return {file.table: one for file, one in zip(named, found, strict=True) if one is not None}


def changed(path: Path, name: str, column: str, value: object) -> None:
    """A column of a file is written anew, everything else is as it was: nobody tells the log."""
    file = file_of(path, name)
    rows = pq.read_table(file)
    at = rows.schema.get_field_index(column)
    kind = rows.schema.field(column).type
    new = pa.array([value, *rows[column].to_pylist()[1:]], kind)
    pq.write_table(rows.set_column(at, rows.schema.field(column), new), file, row_group_size=1 << 20)


Damage = Callable[[Path], object]


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 100)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 1
    file.write_bytes(content)


DAMAGE: dict[str, tuple[Damage, str, bool]] = {
    "removed": (Path.unlink, "missing", False),
    "cut off": (truncate, "unreadable", False),
    "empty": (lambda file: file.write_bytes(b""), "unreadable", False),
    "one bit is flipped": (flip, "other_bytes", True),
    "a folder": (lambda file: (file.unlink(), file.mkdir()), "unreadable", False),
}


@pytest.mark.parametrize("name", ["bronze", "silver/runtime", "silver/ledger", "batches"])
@pytest.mark.parametrize("what", DAMAGE)
def test_a_file_that_is_not_as_it_was_written_is_named(path: Path, what: str, name: str) -> None:
    damage, problem, is_readable = DAMAGE[what]
    assert {} == looked(path)
    damage(file_of(path, name))
    found = looked(path)
    assert [name] == [*found]
    if what == "one bit is flipped":  # whether Parquet itself minds depends on the place
        assert found[name].problem in ("other_bytes", "unreadable")
    else:
        assert (problem, is_readable) == (found[name].problem, found[name].is_readable)


@pytest.mark.parametrize(
    ("name", "column", "value"),
    [
        ("bronze", "timestamp", None),
        ("bronze", "tenant", "evil"),
        ("bronze", "payload", b"{}"),
        ("silver/runtime", "payload", '{"order":1,"cents":999999}'),
        ("silver/runtime", "tenant", "evil"),
        ("batches", "rows_in", 1),
    ],
)
def test_content_that_is_rewritten_in_place_is_another_file_that_can_be_read(
    path: Path, name: str, column: str, value: object
) -> None:
    changed(path, name, column, value)
    found = looked(path)
    assert [name] == [*found]
    assert found[name].problem in ("other_size", "other_bytes")
    assert found[name].is_readable, "so that the checks of what it says name the rows"


def test_a_missing_file_is_named_by_stream_and_sequences(path: Path) -> None:
    (file,) = [one for one in files_of("bronze", open_table(path, "bronze")) if one.first[0] == EVENTS]
    assert (EVENTS, 1, 80, 80) == (file.lifetime and file.lifetime[0], file.first[3], file.last[3], file.rows)
    sequences = pq.read_table(path / "bronze" / file.path)["sequence"]
    assert (1, 80) == (pc.min(sequences).as_py(), pc.max(sequences).as_py())


def test_files_are_looked_at_in_parts_of_bounded_size(path: Path) -> None:
    (file,) = files_of("silver/runtime", open_table(path, "silver/runtime"))
    small, large = file._replace(size_bytes=1), file._replace(size_bytes=1 << 30)
    assert [FILES_PER_TASK, 1] == [len(part) for part in in_parts([small] * (FILES_PER_TASK + 1))]
    assert [1, 1, 2] == [len(part) for part in in_parts([large, large, small, small])]
    assert [] == list(in_parts([]))
