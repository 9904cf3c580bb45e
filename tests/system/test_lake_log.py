"""The tables of the lake: made once, by whichever thread of a driver comes first, and refused when they are others."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from oncewire._ground.errors import Refused
from oncewire.pipeline import tables
from oncewire.pipeline.lake.log import Lake

THREADS = 4
TABLES = 12


def test_streams_that_begin_at_once_make_a_table_once_and_commit_to_it(tmp_path: Path) -> None:
    failed: list[Exception] = []
    for number in range(TABLES):
        lake = Lake(tmp_path / str(number))
        barrier = threading.Barrier(THREADS)

        def begin(stream: int, lake: Lake = lake, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            try:
                handle = lake.open(tables.BRONZE)
                lake.commit(handle, tables.BRONZE, [], f"stream-{stream}", 1)
            except Exception as error:
                failed.append(error)

        threads = [threading.Thread(target=begin, args=(stream,)) for stream in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [] == failed
        log = sorted(entry.name for entry in (Path(lake.root(tables.BRONZE)) / "_delta_log").glob("*.json"))
        assert THREADS + 1 == len(log), "one version that makes the table, one for each commit"


def test_a_table_with_other_columns_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    lake, runtime = Lake(tmp_path), tables.SILVER["runtime"]
    lake.open(replace(runtime, columns=runtime.columns[:-1]))
    with pytest.raises(Refused, match=r"silver/runtime .* has other columns") as refused:
        lake.open(runtime)
    assert "--lake DIR" in refused.value.hint
    assert len(runtime.columns) - 1 == len(tables.open_table(tmp_path, runtime.name).schema().fields)
