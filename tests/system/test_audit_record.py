"""What audits have seen of a lake, kept where the lake is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from oncewire._ground.errors import Corrupt, InvalidSetting, Refused
from oncewire.pipeline.auditing.record import Record, default_record
from oncewire.pipeline.auditing.verdict import Head, Known, Log, Outside, Stop
from oncewire.pipeline.lake.place import place_of
from tests.support.objects import BUCKET, object_store

KNOWN = Known(
    5, [Stop("S", 1, 0, 7)], [Head("a@b", 3, "ff")], [Log("bronze", "id", 9, "ee")],
    [Outside("bronze", 4, 6, "DELETE", None, 0)],
)  # fmt: skip


def test_what_was_seen_is_read_back(tmp_path: Path) -> None:
    record = Record(tmp_path / "elsewhere" / "lake.json", tmp_path / "lake")
    assert record.read() is None
    for known in (KNOWN, Known(6), KNOWN):  # of the same length or not: the old content goes
        record.write(known)
        assert known == record.read()
    assert ["lake.json"] == [path.name for path in (tmp_path / "elsewhere").iterdir()]


def test_a_record_may_be_in_another_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with object_store() as store:
        for name, value in store.environ.items():
            monkeypatch.setenv(name, value)
        record = Record(f"s3://{BUCKET}/audits/lake.json", tmp_path / "lake")
        assert record.read() is None
        record.write(KNOWN)
        record.write(Known(6))
        assert Known(6) == record.read()


@pytest.mark.parametrize("where", ["lake/audits.json", "lake", "lake/gold/x.json"])
def test_a_record_inside_the_lake_is_refused(tmp_path: Path, where: str) -> None:
    """Whoever changes the lake could change it too."""
    with pytest.raises(InvalidSetting, match="is inside the lake"):
        Record(tmp_path / where, tmp_path / "lake")
    Record(tmp_path / "lake-audits.json", tmp_path / "lake")


def test_a_record_that_was_changed_is_not_taken_for_a_new_lake(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text("{")
    with pytest.raises(Corrupt, match="cannot be read"):
        Record(path, tmp_path / "lake").read()
    with pytest.raises(Refused, match="cannot be written"):
        Record(path / "below", tmp_path / "lake").write(KNOWN)


def test_each_lake_has_its_record_in_the_data_folder(tmp_path: Path) -> None:
    lakes = [place_of(tmp_path / "a" / "lake"), place_of(tmp_path / "b" / "lake"), place_of("s3://bucket/lake")]
    found = [default_record(tmp_path, lake) for lake in lakes]
    assert 3 == len(set(found))
    assert {tmp_path / "audits"} == {path.parent for path in found}
    assert all(path.name.startswith("lake-") for path in found)
