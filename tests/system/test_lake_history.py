"""What a table's log says of the table, whatever became of its files."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from oncewire._ground.errors import Corrupt
from oncewire.pipeline.lake import files
from oncewire.pipeline.lake.log import Lake
from oncewire.pipeline.tables import BRONZE, app_id, high_water, lifetime_of, open_table

MANY = 215
"""Versions: two checkpoints, and entries behind them."""
OFTEN, ONCE, NEVER = ("EVENTS", 1, 0), ("a@b+c", 2, 3), ("EMPTIED", 3, 0)


def land(lake: Lake, lifetime: tuple[str, int, int], first: int, last: int) -> None:
    stream, created_ns, incarnation = lifetime
    place = {"stream": stream, "created_ns": created_ns, "incarnation": incarnation}
    rows = pa.Table.from_pylist([place | {"sequence": at} for at in range(first, last + 1)], BRONZE.schema)
    written = list(files.write_files(lake.root(BRONZE), BRONZE, f"{first}", rows, is_partitioned=False))
    lake.commit(lake.open(BRONZE), BRONZE, written, app_id(lifetime), last)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One stream that was read often, one that was read once, long ago, and one that had nothing left to read."""
    made = tmp_path_factory.mktemp("la ke")
    lake = Lake(made)
    land(lake, ONCE, 1, 5)
    lake.commit(lake.open(BRONZE), BRONZE, [], app_id(NEVER), 9)
    for number in range(1, MANY):
        land(lake, OFTEN, number, number)
    return made


def test_the_cut_names_every_stream_that_was_read_whatever_became_of_its_files(path: Path) -> None:
    """The files say nothing of a stream whose rows somebody deleted."""
    assert {OFTEN: MANY - 1, ONCE: 5, NEVER: 9} == high_water(open_table(path, "bronze"))
    DeltaTable(str(path / "bronze")).delete("stream = 'a@b+c'")
    assert 5 == high_water(open_table(path, "bronze"))[ONCE]


@pytest.mark.parametrize("version", [1, 99, 100, 101, 150, 210])
def test_an_older_version_has_the_cut_of_its_time(path: Path, version: int) -> None:
    wanted = {ONCE: 5} | ({NEVER: 9} if version > 1 else {}) | ({OFTEN: version - 2} if version > 2 else {})
    assert wanted == high_water(open_table(path, "bronze", version))


def test_without_the_name_of_its_newest_checkpoint_a_log_is_searched_for_one(path: Path) -> None:
    log = path / "bronze" / "_delta_log"
    assert list(log.glob("*.checkpoint.parquet"))
    (log / "_last_checkpoint").unlink()
    for entry in log.glob("00000000000000000[01]*.json"):  # what a checkpoint stands for may be cleaned away
        entry.unlink()
    assert {OFTEN: MANY - 1, ONCE: 5, NEVER: 9} == high_water(open_table(path, "bronze"))


def test_an_entry_that_no_checkpoint_stands_for_is_missed(path: Path) -> None:
    table = open_table(path, "bronze")
    entry = path / "bronze" / "_delta_log" / f"{table.version():020d}.json"
    kept = entry.rename(entry.with_suffix(".kept"))
    with pytest.raises(Corrupt, match="is missing from the log"):
        high_water(table)
    kept.rename(entry)


def test_a_transaction_id_of_somebody_else_is_no_stream() -> None:
    assert [("a@b+c", 2, 3), None, None] == [lifetime_of(app) for app in (app_id(ONCE), "silver", "jobs@x+1")]
