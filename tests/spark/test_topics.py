"""Topics of the broker in the lake: every message once, each with what became of it, whatever topics come and go."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from oncewire._ground.contracts.broker import RetryPolicy
from oncewire._ground.contracts.topics import RECORDS, records_of
from oncewire._ground.errors import NotFound
from oncewire._ground.jetstream import Outgoing
from oncewire.pipeline.auditing.run import audit
from oncewire.pipeline.gold.refresh import Gold
from oncewire.pipeline.lake.keep import Keeping
from oncewire.pipeline.lake.log import Lake
from oncewire.pipeline.reading import Reads, Streams
from oncewire.pipeline.run import Pipeline
from oncewire.pipeline.standing import topics as topics_standing
from oncewire.pipeline.topics import Topics
from tests.spark.brokerage import TENANT, Desk, with_node
from tests.spark.lakes import Ran, doubled, once, rows
from tests.spark.support import api, publish, state, until
from tests.support.nats import NatsServer, nats_server
from tests.support.wait import until_async

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    with nats_server() as one:
        yield one


async def first_traffic(desk: Desk) -> None:
    """Six orders: four are done, one is dead at its second attempt, one is nobody's yet. Two topics besides."""
    await desk.make("orders", 2)
    for number in range(6):
        await desk.produce(
            "orders", f"order {number}", str(number), run_id="run", step_id=f"s{number}",
            parent_step_id="s0" if number else "", traceparent=PARENT, retry_policy=RetryPolicy(max_attempts=2),
        )  # fmt: skip
    got = await desk.read("orders", 6)
    for one in got[:4]:
        await desk.settle("orders", "ack", one)
    await desk.settle("orders", "nack", got[4], reason="no stock")
    [again] = await desk.read("orders", 1)
    await desk.settle("orders", "nack", again, reason="still no stock")
    await desk.make("idle")
    await desk.make("short")
    await desk.produce("short", "first life")


async def second_traffic(desk: Desk) -> None:
    """A topic that is deleted and made anew, one whose settled messages are forgotten before the lake reads them, and a
    name that no file could have."""
    await desk.delete("short")
    await desk.make("short")
    await desk.produce("short", "second life")
    await desk.make("quick")
    for number in range(5):
        await desk.produce("quick", f"quick {number}")
    for one in (await desk.read("quick", 5))[:3]:
        await desk.settle("quick", "ack", one)

    async def is_forgotten() -> bool:
        return await desk.first_of("quick") == 4

    await until_async(is_forgotten)
    await desk.make("ä" * 90)
    await desk.produce("ä" * 90, "long")


class Told:
    """A lake after one pass, and after another one over what happened meanwhile."""

    def __init__(self, lake: Path, first: Ran, second: Ran) -> None:
        self.lake = lake
        self.first, self.second = first, second

    def rows(self, name: str, *columns: str) -> list[tuple[Any, ...]]:
        return sorted(tuple(one[column] for column in columns) for one in rows(self.lake, name, *columns))


@pytest.fixture(scope="module")
def told(spark: SparkSession, server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Told:
    lake = tmp_path_factory.mktemp("topics") / "lake"
    with_node(server, first_traffic)
    first = once(spark, lake, server, RECORDS)
    with_node(server, second_traffic, settled_age_ms=1, idempotency_ttl_ms=100)
    return Told(lake, first, once(spark, lake, server, RECORDS))


def test_every_message_is_in_silver_once(told: Told) -> None:
    assert ([], []) == (told.first.errors, told.second.errors)
    orders = [("orders", at, f"order {at}", TRACE, "run") for at in range(6)]
    others = [
        ("dlq.orders", 0, "order 4", TRACE, "run"),
        ("quick", 3, "quick 3", None, None),
        ("quick", 4, "quick 4", None, None),
        ("short", 0, "first life", None, None),
        ("short", 0, "second life", None, None),
        ("ä" * 90, 0, "long", None, None),
    ]
    found = told.rows("silver/broker", "tenant", "topic", "offset", "value", "trace_id", "run_id")
    assert sorted((TENANT, *one) for one in [*orders, *others]) == found


def test_each_pass_balances(told: Told) -> None:
    for ran in (told.first, told.second):
        rows_in, rows_out, duplicates, quarantined = ran.balance
        assert (rows_in, 0, 0) == (rows_out, duplicates, quarantined)
        assert rows_in > 0


def test_what_the_broker_forgot_before_it_was_read_is_a_known_gap(told: Told) -> None:
    found = told.rows("gaps", "stream", "first", "last", "cause")
    (quick,) = [stream for topic, stream in told.rows("topics", "topic", "stream") if topic == "quick"]
    assert (quick, 1, 3, "before") in found


def test_a_topic_that_is_made_anew_is_another_one(told: Told) -> None:
    numbers = [number for name, number in told.rows("topics", "topic", "number") if name == "short"]
    assert 2 == len(set(numbers))


def test_settlements_are_read_in_order(told: Told) -> None:
    found = rows(told.lake, "silver/broker_record", "sequence", "topic", "events")
    events = [
        (one["kind"], one["offset"], one["attempts"], one["consumer"], one["error"])
        for row in sorted(found, key=lambda row: row["sequence"])
        if row["topic"] == "orders"
        for one in row["events"]
        if one["offset"] == 4
    ]
    assert [
        ("retried", 4, 1, "worker", "no stock"),
        ("buried", 4, 2, "worker", "still no stock"),
    ] == events


@pytest.mark.faults
def test_gold_knows_what_became_of_each(spark: SparkSession, told: Told) -> None:
    lake = Lake(told.lake)
    Gold(spark, lake).refresh(told.second.pipeline.silver_has)
    found = [one for one in told.rows("gold/outcomes", "topic", "offset", "outcome", "attempts") if one[0] == "orders"]
    settled = [("orders", at, "settled", 1) for at in range(4)]
    assert [*settled, ("orders", 4, "dead", 2), ("orders", 5, "pending", 0)] == found
    [run] = [one for one in rows(told.lake, "gold/runs") if one["run"] == "run"]
    assert (6, 1) == (run["steps"], run["retries"])


@pytest.mark.faults
def test_a_broker_in_order_is_called_good(spark: SparkSession, told: Told) -> None:
    verdict = audit(spark, told.lake)
    assert ([], True) == (verdict.findings, verdict.is_good)
    names = ("settled", "dead", "pending", "with_letter")
    assert [4, 1, 1, 1] == [verdict.counted("settlements", name, "orders") for name in names]


@pytest.mark.faults
def test_a_forged_settlement_is_found(spark: SparkSession, server: NatsServer, told: Told) -> None:
    """Somebody who may publish writes a record as if the owner had: the next pass reads it, and the audit names it."""
    [number] = [number for name, number in told.rows("topics", "topic", "number") if name == "orders"]
    body = {
        "owner": "somebody", "after": 1, "tenant": "", "topic": "orders", "groups": {"1": "g"},
        "records": [[6, number, 1, 0, 5, 1]],
    }  # fmt: skip
    publish(server, [Outgoing(records_of(number, 0), json.dumps(body).encode())])
    sequence = state(server, RECORDS)["last_seq"]
    once(spark, told.lake, server, RECORDS)
    verdict = audit(spark, told.lake)
    found = {(one.problem, one.first) for one in verdict.findings}
    assert {("forked", sequence), ("stale_owner", sequence)} <= found


def test_status_counts_topics(server: NatsServer, told: Told) -> None:
    asking = Streams({"url": server.url})
    stands = topics_standing(Lake(told.lake), asking)
    asking.close()
    assert (6, 6, 0, {}) == (stands.read, stands.listed, stands.behind, stands.stopped)
    assert api(server, "STREAM.NAMES", {"subject": "owb.>"})["total"] == stands.listed


def test_a_topic_that_comes_while_it_runs_is_read(spark: SparkSession, server: NatsServer, tmp_path: Path) -> None:
    """No restart, no query of its own: the next list has it."""
    (tmp_path / "lake").mkdir()
    reads = Reads({"url": server.url}, trigger_s=0.2)
    pipeline = Pipeline(spark, Lake(tmp_path / "lake"), [], reads, keeping=Keeping())
    stop = threading.Event()
    running = threading.Thread(target=pipeline.run, args=[stop])
    running.start()

    async def late(desk: Desk) -> None:
        await desk.make("late")
        await desk.produce("late", "here I am")

    def is_there() -> bool:
        assert running.is_alive()
        try:
            return "here I am" in [one["value"] for one in rows(tmp_path / "lake", "silver/broker", "value")]
        except NotFound:  # a table is there with its first commit
            return False

    try:
        with_node(server, late)
        until(is_there, timeout_s=120.0)
    finally:
        stop.set()
        running.join(60.0)
    assert [] == list(spark.streams.active)


def test_two_drivers_at_once_read_and_name_each_topic_once(
    spark: SparkSession, server: NatsServer, told: Told, tmp_path: Path
) -> None:
    """The one is overtaken while it reads, after it has learned which topics the table has."""
    lake, reads = Lake(tmp_path / "lake"), Reads({"url": server.url})

    class Overtaken(Topics):
        def _read(self, chosen: Any) -> Any:
            landed = super()._read(chosen)
            other.round(listed)
            return landed

    with closing(Streams(reads.access)) as asking:
        one, other = (kind(spark, lake, reads, asking, lambda _: None) for kind in (Overtaken, Topics))
        listed = [topic for topic in one.listed() if topic.facts.last]
        Topics.round(other, listed[:1])
        one._name(listed[:1])
        one.round(listed)
        one.close()
        other.close()
    assert {} == doubled([row["stream"] for row in rows(lake.place, "topics")])
    assert len(listed) == len(rows(lake.place, "topics"))
    assert {} == doubled([(row["stream"], row["sequence"]) for row in rows(lake.place, "bronze")])
