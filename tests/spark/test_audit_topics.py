"""Audits of topics: a broker in order is called good, and every kind of damage to settlements is found and named."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from oncewire._ground.contracts.records import GroupGone, GroupMade
from oncewire._ground.contracts.topics import RECORDS
from oncewire.pipeline.auditing.run import audit
from oncewire.pipeline.auditing.verdict import Verdict
from tests.support.brokerlakes import TYPO, FakeTopic, repack
from tests.support.lakes import Lake

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def busy(lake: Lake, name: str = "orders", number: int = 1) -> tuple[FakeTopic, FakeTopic]:
    """Ten messages: 0 to 6 are done (3 at its second attempt), 7 is dead, 8 has failed once, 9 is new; 0 to 4 are
    forgotten."""
    graves = FakeTopic(lake, f"dlq.{name}", number + 1)
    topic = FakeTopic(lake, name, number)
    for _ in range(10):
        topic.produce()
    topic.fail(3)
    topic.ack(0, 1, 2)
    topic.ack(4, 5, 6)
    topic.ack(3, attempts=2)
    topic.trim(4)
    topic.bury(7, graves)
    topic.fail(8)
    return topic, graves


class Damaged:
    """One lake: a topic that is in order, one whose story cannot be known whole, and one topic for each damage."""

    def __init__(self, lake: Lake) -> None:
        busy(lake)
        self.unknown(lake)
        self.looked_at(lake)
        self.removed, _ = busy(lake, "removed", 21)
        self.gone = self.removed.ack(9)
        self.removed.fail(8, 2)
        lake.drop(RECORDS, self.gone)
        self.doubled, _ = busy(lake, "doubled", 23)
        self.doubled.ack(6)
        self.forged, _ = busy(lake, "forged", 25)
        self.forged.write(self.forged.acked(40))
        lake.reached[self.forged.stream] = 50
        lake.gap(self.forged.stream, 11, 40, "limit")
        lake.gap(self.forged.stream, 42, 50, "limit")
        self.stranger, _ = busy(lake, "stranger", 27)
        self.stranger.write(self.stranger.acked(9), owner="n2")
        self.between, _ = busy(lake, "between", 29)
        before = self.between.ack(9)
        self.between.write(self.between.acked(8), after=before - 1)
        self.silent, _ = busy(lake, "silent", 31)
        first = min(row["sequence"] for row in lake.rows if row["subject"] == "broker_records.31.0") + 3
        repack(lake, first, [self.silent.acked(0), self.silent.acked(2)])
        self.dead, graves = busy(lake, "dead", 33)
        self.dead.bury(9, None)
        lake.now += timedelta(minutes=2)
        graves.produce()  # so late that all letters from before must be there

    def looked_at(self, lake: Lake) -> None:
        """A group was made by mistake, and is gone before the first messages were forgotten."""
        topic = FakeTopic(lake, "looked", 35)
        topic.write(GroupMade(35, TYPO, "typo", topic.now_ms))
        for _ in range(3):
            topic.produce()
        topic.ack(0, 1)
        topic.write(GroupGone(35, TYPO, topic.now_ms))
        topic.trim(1)

    def unknown(self, lake: Lake) -> None:
        """A partition whose oldest records are gone, and settlements above the cut."""
        old = FakeTopic(lake, "old", 7)
        lake.gap(RECORDS, lake.reached[RECORDS] - 1, lake.reached[RECORDS], "limit")
        old.ack(old.produce())
        old.trim(0)
        ahead = FakeTopic(lake, "ahead", 9)
        ahead.ack(ahead.produce(), ahead.produce())
        lake.drop(ahead.stream, 2)
        lake.reached[ahead.stream] = 1


@pytest.fixture(scope="module")
def told(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> tuple[Damaged, Verdict]:
    lake = Lake(tmp_path_factory.mktemp("topics"))
    return Damaged(lake), audit(spark, lake.write())


def test_every_kind_of_damage_is_found_and_nothing_else(told: tuple[Damaged, Verdict]) -> None:
    made, verdict = told
    assert {
        ("missing", RECORDS, made.gone, "removed/0"),
        ("two_outcomes", made.doubled.stream, 7, "doubled/0"),
        ("no_message", made.forged.stream, 41, "forged/0"),
        ("no_outcome", made.silent.stream, 2, "silent/0"),
        ("no_letter", made.dead.stream, 10, "dead/0"),
    } == {
        (one.problem, one.stream, one.first, one.chain)
        for one in verdict.findings
        if one.check == "settlements" and one.problem not in ("stale_owner", "forked")
    }
    named = [(one.problem, one.chain) for one in verdict.findings if one.problem in ("stale_owner", "forked")]
    assert [("forked", "between/0"), ("stale_owner", "stranger/0")] == named
    assert {"settlements", "sequences"} == {one.check for one in verdict.findings}


def test_a_topic_in_order_is_counted(told: tuple[Damaged, Verdict]) -> None:
    names = ("settled", "dead", "pending", "lapsed", "with_letter")
    assert [7, 1, 2, 0, 1] == [told[1].counted("settlements", name, "orders") for name in names]


def test_a_group_that_is_gone_is_not_counted(told: tuple[Damaged, Verdict]) -> None:
    names = ("settled", "dead", "pending", "lapsed")
    assert [2, 0, 1, 0] == [told[1].counted("settlements", name, "looked") for name in names]


def test_what_cannot_be_known_is_not_called_wrong(told: tuple[Damaged, Verdict]) -> None:
    verdict = told[1]
    assert [("begins_later", "old/0")] == [(one.problem, one.chain) for one in verdict.notes]
    assert 1 == verdict.counted("settlements", "pending", "ahead")
    assert 1 == sum(one.count for one in verdict.counts if (one.name, one.of) == ("unproven", "old/0"))
