"""Runs of messages that many are sent: put together once, found again, forgotten when there are too many."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from oncewire.gateway import slabs
from oncewire.gateway.frames import Envelope
from oncewire.gateway.slabs import Slab, Slabs
from tests.support.gatewaysim import stored, unframed


def envelopes(first: int, last: int) -> list[Envelope]:
    return [stored(n, n, "e1", f"m{n}", is_numbered=True) for n in range(first, last + 1)]


def sequences(data: bytes) -> list[int]:
    return [frame["sequence"] for frame in unframed(data)]


def test_all_who_have_nothing_of_a_run_get_the_same_bytes() -> None:
    slab = Slab("room", envelopes(3, 6))
    assert slab.data is slab.behind(2) is slab.behind(0)
    assert [[3, 4, 5, 6], [5, 6], []] == [sequences(slab.behind(last)) for last in (2, 4, 6)]


def test_a_run_ends_where_it_is_large_enough_and_before_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slabs, "SLAB_BYTES", 2 * len(envelopes(1, 1)[0].replay_frame))
    assert [1, 2] == sequences(Slab("room", envelopes(1, 9)).data)
    assert [1] == sequences(Slab("room", [*envelopes(1, 1), *envelopes(3, 4)]).data)


def test_a_run_is_found_by_each_of_its_messages_in_its_room_alone() -> None:
    kept = Slabs()
    first, second = kept.add(Slab("a", envelopes(1, 4))), kept.add(Slab("a", envelopes(8, 9)))
    assert [first, first, None, second, None] == [kept.find("a", sequence) for sequence in (1, 4, 5, 8, 10)]
    assert kept.find("b", 1) is None
    kept.forget("a")
    assert (None, 0) == (kept.find("a", 1), kept.bytes)


def test_the_least_recently_used_run_goes_when_the_sum_is_too_large() -> None:
    def made() -> Iterator[Slab]:
        for at in range(1, 10, 3):
            yield Slab("a", envelopes(at, at + 2))

    kept = Slabs(bytes_max=2 * len(next(made()).data))
    one, two, three = made()
    kept.add(one)
    kept.add(two)
    assert kept.find("a", 1) is one
    kept.add(three)
    assert [one, None, three] == [kept.find("a", sequence) for sequence in (1, 4, 7)]
    assert kept.bytes == len(one.data) + len(three.data)
