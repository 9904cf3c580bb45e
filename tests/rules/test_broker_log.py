"""The log: what survives, what is cut, what is damage."""

from __future__ import annotations

import itertools

import pytest

from oncewire._ground.errors import Corrupt, OncewireError, OutcomeUnknown, Unavailable
from oncewire.broker.log.format import HEADER_BYTES, IMAGE_HEADER_BYTES, number_of, segment_name
from oncewire.broker.log.inspect import inspect_files
from oncewire.broker.log.writer import Log
from tests.support.brokerlog import open_log, power_cuts
from tests.support.disk import SimDisk

GROUPS = [[b"one", b"two"], [b"three"], [b"four", b"five", b"six"]]
ALL = [record for group in GROUPS for record in group]


def written(groups: list[list[bytes]] = GROUPS, seed: int = 0) -> tuple[SimDisk, Log, list[int]]:
    """A disk, the open log on it, and the end of each group in segment 1."""
    disk = SimDisk(seed)
    log, _ = open_log(disk, 10_000)
    ends = []
    for group in groups:
        log.commit(group)
        ends.append(disk.size(segment_name(1)))
    return disk, log, ends


def read(disk: SimDisk) -> list[bytes] | str:
    """The records, or 'damage'."""
    try:
        return open_log(disk.copy())[1]
    except Corrupt:
        return "damage"


def test_what_was_committed_is_read_again_in_order() -> None:
    disk, _, _ = written()
    assert ALL == read(disk)


def test_a_group_is_there_whole_or_not_at_all() -> None:
    """Cut at every byte: what is left is all groups that end before it."""
    disk, _, ends = written()
    file = disk.seen[segment_name(1)]
    whole = bytes(file.seen)
    for length in range(len(whole)):
        file.seen[:] = whole[:length]
        left = [record for group, end in zip(GROUPS, ends, strict=True) if end <= length for record in group]
        assert left == read(disk), length


@pytest.mark.parametrize("flip", [0x01, 0xFF])
def test_a_flipped_byte_is_damage_before_the_last_group_and_a_torn_tail_in_it(flip: int) -> None:
    disk, _, ends = written()
    file = disk.seen[segment_name(1)]
    for position in range(len(file.seen)):
        file.seen[position] ^= flip
        expected = GROUPS[0] + GROUPS[1] if position >= ends[1] else "damage"
        assert expected == read(disk), position
        file.seen[position] ^= flip


@pytest.mark.parametrize("flip", [0x01, 0xFF])
def test_after_a_clean_stop_any_flip_in_any_file_is_damage(flip: int) -> None:
    disk, log, _ = written()
    log.seal()
    assert ALL == read(disk)
    for name, file in disk.seen.items():
        for position in range(len(file.seen)):
            file.seen[position] ^= flip
            assert "damage" == read(disk), (name, position)
            file.seen[position] ^= flip


def test_after_a_clean_stop_a_shorter_file_is_damage() -> None:
    disk, log, _ = written()
    log.seal()
    for name, file in disk.seen.items():
        whole = bytes(file.seen)
        for length in range(len(whole)):
            file.seen[:] = whole[:length]
            assert "damage" == read(disk), (name, length)
        file.seen[:] = whole


def snapshot_and_more() -> SimDisk:
    disk, log, _ = written()
    log.begin_snapshot().write(iter([b"kept one", b"kept two"]))
    log.commit([b"seven"])
    log.commit([b"eight"])
    return disk


def test_a_snapshot_takes_the_place_of_what_was_before() -> None:
    disk = snapshot_and_more()
    assert ["segment-00000002.log", "snapshot-00000002.img"] == sorted(disk.names())
    assert [b"kept one", b"kept two", b"seven", b"eight"] == read(disk)


def test_a_flipped_or_missing_byte_of_a_snapshot_is_damage() -> None:
    disk = snapshot_and_more()
    file = disk.seen["snapshot-00000002.img"]
    whole = bytes(file.seen)
    for position in range(len(whole)):
        file.seen[position] ^= 0xFF
        assert "damage" == read(disk), position
        file.seen[:] = whole[:position]
        assert "damage" == read(disk), position
        file.seen[:] = whole
    assert IMAGE_HEADER_BYTES < len(whole)


@pytest.mark.parametrize("name", ["segment-00000002.log", "snapshot-00000002.img"])
def test_a_missing_file_is_damage(name: str) -> None:
    disk = snapshot_and_more()
    del disk.seen[name]
    assert "damage" == read(disk)


def test_a_segment_in_the_middle_that_is_missing_is_damage() -> None:
    disk = SimDisk()
    log, _ = open_log(disk, HEADER_BYTES + 1)
    for number in range(4):
        log.commit([b"%d" % number])
    assert 4 == len(disk.names())
    del disk.seen[segment_name(2)]
    assert "damage" == read(disk)


def test_a_segment_that_was_only_begun_is_removed() -> None:
    disk, _, _ = written()
    handle = disk.create(segment_name(2))
    handle.write(b"ONCELOG1 torn")
    assert ALL == read(disk)
    assert inspect_files_of(disk).torn_bytes == 13


def inspect_files_of(disk: SimDisk):  # type: ignore[no-untyped-def]
    from oncewire.broker.log.reading import read_log

    return read_log(disk, lambda _: None, lambda _: None)


def test_a_torn_tail_is_reported_and_cut() -> None:
    disk, _, ends = written()
    del disk.seen[segment_name(1)].seen[-1:]
    found = inspect_files_of(disk)
    assert ends[2] - 1 - ends[1] == found.torn_bytes
    assert f"from byte {ends[1]} on" in found.torn
    open_log(disk)
    assert ends[1] == disk.size(segment_name(1))
    assert "" == inspect_files_of(disk).torn


def test_bytes_that_look_like_a_commit_do_not_turn_a_torn_tail_into_damage() -> None:
    """A client may send anything, a piece of another log too."""
    other, _, _ = written([[b"%d" % n] for n in range(9)], seed=1)
    disk, mine, _ = written([[b"x"]])
    mine.commit([bytes(other.seen[segment_name(1)].seen)])
    del disk.seen[segment_name(1)].seen[-1:]
    assert [b"x"] == read(disk)


def test_a_failed_write_is_never_synced_again_and_a_new_segment_goes_on_from_the_last_commit() -> None:
    disk, log, ends = written()
    disk.failing = {"sync"}
    with pytest.raises(OutcomeUnknown, match="outcome unknown"):
        log.commit([b"unknown"])
    disk.failing.clear()
    size = disk.size(segment_name(1))
    log.commit([b"after"])
    assert size == disk.size(segment_name(1)) > ends[-1]
    assert [*ALL, b"after"] == read(disk)


def test_a_full_disk_is_said_and_leaves_nothing_behind() -> None:
    disk, log, _ = written()
    disk.room = 0
    with pytest.raises(OutcomeUnknown):
        log.commit([b"unknown"])
    for _ in range(3):
        with pytest.raises(Unavailable, match=r"is full: nothing was written"):
            log.commit([b"refused"])
    disk.room = 1 << 20
    log.commit([b"after"])
    assert [*ALL, b"after"] == read(disk)
    assert 2 == len(disk.names())


def test_a_snapshot_that_fails_changes_nothing() -> None:
    disk, log, _ = written()
    snapshot = log.begin_snapshot()
    disk.failing = {"sync"}
    with pytest.raises(OncewireError):
        snapshot.write(iter([b"kept"]))
    disk.failing.clear()
    log.commit([b"after"])
    assert [*ALL, b"after"] == read(disk)
    assert [] == [name for name in disk.names() if name.endswith(".new")]


def test_a_snapshot_is_due_after_many_small_segments_and_not_again_at_once() -> None:
    disk = SimDisk()
    log, _ = open_log(disk, HEADER_BYTES)
    count = 0
    while not log.is_snapshot_due:
        log.commit([b"x"])
        count += 1
    assert 60 < count < 70
    snapshot = log.begin_snapshot()
    disk.failing = {"sync"}
    with pytest.raises(OncewireError):
        snapshot.write(iter([b"kept"]))
    disk.failing.clear()
    log.commit([b"x"])
    assert not log.is_snapshot_due


def test_segments_are_limited_in_size() -> None:
    disk = SimDisk()
    log, _ = open_log(disk, 200)
    for _ in range(20):
        log.commit([b"x" * 50])
    sizes = [disk.size(name) for name in disk.names() if number_of(name, "segment")]
    assert len(sizes) > 4
    assert max(sizes) < 200 + 50 + 60


def test_start_up_and_disk_do_not_grow_with_history() -> None:
    disk = SimDisk()
    ids = itertools.count(1)
    log = Log(disk, lambda: next(ids), segment_bytes_max=1_000, snapshot_bytes_min=5_000)
    log.open(lambda _: None, lambda _: None)
    sizes = []
    for _ in range(5_000):
        log.commit([b"x" * 50])
        if log.is_snapshot_due:
            log.begin_snapshot().write(iter([b"state"]))
        sizes.append(sum(disk.size(name) for name in disk.names()))
    assert max(sizes) < 10_000


def test_what_a_killed_process_wrote_is_made_durable_before_it_is_shown() -> None:
    """It was read from the system's memory: a power cut after the start must not take it back."""
    disk, log, _ = written()
    disk.is_lying = True
    log.commit([b"seven"])
    disk.is_lying = False
    _, found = open_log(disk)
    assert [*ALL, b"seven"] == found
    disk.cut_power()
    assert [*ALL, b"seven"] == read(disk)


def test_an_unknown_file_is_left_alone() -> None:
    disk, _, _ = written()
    disk.create("notes.txt")
    assert ALL == open_log(disk)[1]
    assert "notes.txt" in disk.names()


def test_inspect_shows_damage_instead_of_raising() -> None:
    disk, _, _ = written()
    disk.seen[segment_name(1)].seen[HEADER_BYTES + 9] ^= 1
    assert "byte" in inspect_files(disk).damage


@pytest.mark.parametrize("seeds", [range(150), range(150, 300)])
def test_power_cuts_lose_nothing_that_was_acked(seeds: range) -> None:
    assert [] == [problem for seed in seeds if (problem := power_cuts(seed))]


def test_the_power_cuts_find_a_sync_that_does_nothing() -> None:
    assert [problem for seed in range(30) if (problem := power_cuts(seed, is_lying=True))]
