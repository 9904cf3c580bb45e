"""How much an agent takes in hand, by what it measured."""

from __future__ import annotations

from oncewire.agent.flow import BATCH_S, FIRST, HOLD_S, Bucket, Pace, Shares


def granted(bucket: Bucket, start: float, seconds: float) -> int:
    return sum(bucket.take(start + step / 1000) for step in range(int(seconds * 1000)))


def test_a_bucket_gives_its_rate_and_a_small_burst() -> None:
    bucket = Bucket(50)
    assert 50 <= granted(bucket, 1.0, 1.0) <= 52
    assert sum(bucket.take(100.0) for _ in range(100)) == 5, "a tenth of a second can be saved, no more"


def test_a_slow_bucket_says_how_long_to_wait() -> None:
    bucket = Bucket(0.5)
    assert bucket.take(10.0)
    assert not bucket.take(10.0)
    assert bucket.wait_s() == 2.0
    assert not bucket.take(11.9)
    assert bucket.take(12.0)
    assert bucket.hold == 1


def test_nothing_measured_means_few() -> None:
    assert Pace(1_000).batch == FIRST
    assert Pace(10).batch == 10


def test_slow_messages_make_small_batches_and_few_in_hand() -> None:
    pace = Pace(1_000)
    pace.measured(10, 10.0)
    assert (pace.batch, pace.hold) == (1, int(HOLD_S))
    pace.measured(0, 5.0)
    assert pace.batch == 1


def test_fast_messages_make_full_batches_by_and_by() -> None:
    pace = Pace(1_000)
    pace.measured(1, 0.01)
    assert pace.batch == BATCH_S / 0.01
    for _ in range(20):
        pace.measured(1_000, 0.05)
    assert (pace.batch, pace.hold) == (1_000, 3_000)


def test_slower_counts_at_once() -> None:
    pace = Pace(1_000)
    pace.measured(1_000, 0.05)
    pace.measured(10, 1.0)
    assert pace.batch == 5


def test_a_kind_with_few_places_limits_by_its_share() -> None:
    shares = Shares(["async"])
    assert shares.room("async", 10) == 10, "until something was seen all may be of that kind"
    for _ in range(50):
        shares.seen({"async": 10}, 100)
    assert 90 <= shares.room("async", 10) <= 100
    shares.seen({"async": 100}, 100)
    assert shares.room("async", 10) == 10, "more counts at once"
    assert shares.room("async", 0) == 0
    assert shares.room("async", -3) == -3
