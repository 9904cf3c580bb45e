"""Messages and the rows that were derived from them, brought down to hashes: no column can differ unseen."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from oncewire._ground.contracts import blocks
from oncewire.pipeline import envelopes
from oncewire.pipeline.auditing.narrow import Derived, Narrow, Sample, wrong_columns
from oncewire.pipeline.auditing.rowhash import columns_of, row_hashes
from oncewire.pipeline.auditing.rules import Reader
from oncewire.pipeline.tables import BRONZE, QUARANTINE, SILVER
from tests.support.everything import everything
from tests.support.lakes import CREATED_NS, EVENTS, Lake

FAMILIES = (*SILVER, QUARANTINE.name)


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    made = everything(tmp_path_factory.mktemp("lake"))
    made.derive()
    return made


def table_of(lake: Lake, name: str) -> pa.Table:
    if name == QUARANTINE.name:
        return pa.Table.from_pylist(lake.quarantine, QUARANTINE.schema)
    return pa.Table.from_pylist(lake.silver[name], SILVER[name].schema)


def batches(rows: pa.Table, size: int) -> Iterator[pa.RecordBatch]:
    return iter(rows.combine_chunks().to_batches(size))


def narrowed(lake: Lake, size: int = 7) -> dict[tuple[str, int], dict[str, Any]]:
    rows = pa.Table.from_pylist(lake.rows, BRONZE.schema)
    readers = {(EVENTS, CREATED_NS, 0): [Reader("a", (("evt.>",),), 1, 0, 0)]}
    made = [row for batch in Narrow(readers)(batches(rows, size)) for row in batch.to_pylist()]
    return {(row["stream"], row["sequence"]): row for row in made}


def test_the_lake_has_every_family(lake: Lake) -> None:
    assert set(SILVER) == set(lake.silver)
    assert {"contract", "version", "subject", "unreadable"} == {row["reason"] for row in lake.quarantine}


@pytest.mark.parametrize("name", FAMILIES)
def test_what_was_derived_is_what_follows_from_its_message(lake: Lake, name: str) -> None:
    messages = narrowed(lake)
    found = [row for batch in Derived(name)(batches(table_of(lake, name), 3)) for row in batch.to_pylist()]
    assert found
    for row in found:
        message = messages[row["stream"], row["sequence"]]
        assert message["row"] == row["row"]
        assert (message["family"] or None) == row["family"]
        assert (message["key"] is None) is (name == QUARANTINE.name)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_row_that_differs_in_any_column_has_another_hash(lake: Lake, name: str) -> None:
    rows = table_of(lake, name).slice(0, 1)
    (before,) = row_hashes(name, rows).to_pylist()
    hashes = [before]
    for column, kind in columns_of(name):
        value = rows[column][0].as_py()
        for other in (another(value, kind), None if value is not None else another(value, kind)):
            at = rows.schema.get_field_index(column)
            changed = rows.set_column(at, rows.schema.field(column), pa.array([other], kind))
            hashes += row_hashes(name, changed).to_pylist()
    assert not [number for number, one in enumerate(hashes[1:]) if one == before]


def another(value: Any, kind: pa.DataType) -> Any:
    """Something else of the same type."""
    if pa.types.is_binary(kind):
        return (value or b"") + b"\x00"
    if pa.types.is_string(kind):
        return (value or "") + "x"
    if pa.types.is_boolean(kind):
        return not value
    if pa.types.is_integer(kind):
        return (value or 0) + 1
    if pa.types.is_timestamp(kind):
        return (value or datetime(2026, 1, 1)) + timedelta(microseconds=1)
    if pa.types.is_date(kind):
        return (value or date(2026, 1, 1)) + timedelta(days=1)
    if pa.types.is_list(kind):
        return [*(value or []), another(None, kind.value_type)]
    assert pa.types.is_struct(kind)
    return {field.name: another(None, field.type) if number == 0 else None for number, field in enumerate(kind)}


def test_what_stands_at_the_border_of_two_columns_belongs_to_one_of_them(lake: Lake) -> None:
    rows = table_of(lake, "runtime").slice(0, 1)
    told = {"identity": "ab", "msg_id": "c"}, {"identity": "a", "msg_id": "bc"}, {"identity": "abc", "msg_id": ""}
    found = [row_hashes("runtime", pa.Table.from_pylist([rows.to_pylist()[0] | one], rows.schema)) for one in told]
    assert 3 == len({one[0].as_py() for one in found})


def test_the_hash_of_a_row_does_not_depend_on_the_rows_around_it(lake: Lake) -> None:
    for size in (1, 5, 1_000):
        assert narrowed(lake) == narrowed(lake, size)


def test_inputs_of_agents_are_told_as_agents_read_them(lake: Lake) -> None:
    messages = narrowed(lake)
    for (stream, sequence), row in messages.items():
        is_read = stream == EVENTS and row["subject"].startswith("evt.")
        body = lake.row(stream, sequence)["payload"]
        assert (blocks.position_element(stream, sequence, body) if is_read else None) == row["position"]
        if is_read and row["key"] is None:
            assert ("", blocks.raw_digest(body)) == (row["identity"], row["digest"])
    assert "key:acme/main/order-1" in {row["identity"] for row in messages.values()}


def test_tenant_and_date_of_bronze_must_follow_from_subject_headers_and_time(lake: Lake) -> None:
    rows = pa.Table.from_pylist(lake.rows, BRONZE.schema)
    assert wrong_columns(rows, {}).null_count == rows.num_rows
    first = lake.rows[0]
    changed = [
        first | {"tenant": "evil"},
        first | {"tenant": None},
        first | {"date": first["date"] - timedelta(days=30)},
        first | {"tenant": "evil", "date": None},
    ]
    told = wrong_columns(pa.Table.from_pylist(changed, BRONZE.schema), {}).to_pylist()
    assert ["tenant", "tenant", "date", "tenant and date"] == told
    assert ["tenant"] == wrong_columns(rows.slice(0, 1), {0: "another"}).to_pylist()


def test_the_plain_reader_is_asked_about_all_messages_or_a_sample_by_a_seed(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = narrowed(lake).values()
    assert [row["row"] for row in every] == [row["plain"] for row in every]
    sequences = np.arange(1, 100_001)
    picked = [set(Sample(50, seed).picks(sequences)) for seed in (1, 1, 2)]
    assert picked[0] == picked[1] != picked[2]
    assert all(1_500 < len(one) < 2_500 for one in picked)
    assert set(Sample(50, 1).picks(sequences[500:])) == {at - 500 for at in picked[0] if at >= 500}


def test_a_mistake_of_silver_s_reader_is_seen_by_the_plain_one(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    original = envelopes.columns

    def mistaken(*told: Any) -> dict[str, Any]:
        made = original(*told)
        return made | {"type": made["id"], "id": made["type"]}

    monkeypatch.setattr(envelopes, "columns", mistaken)
    found = narrowed(lake).values()
    assert {row["family"] for row in found if row["row"] != row["plain"]} == {"runtime"}
