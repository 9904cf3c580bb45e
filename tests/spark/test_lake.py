"""The lake on a real server and a real Spark: every message once in bronze, every identity once in silver."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from oncewire.jetstream import Outgoing
from oncewire.pipeline.tables import high_water, open_table, read_table
from tests.spark.lakes import chat, doubled, event, metered, once, rows, streams
from tests.spark.support import publish
from tests.support.nats import NatsServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ALL = ("EVENTS", "BILLING", "CHAT")


def test_every_message_is_once_in_bronze_and_every_identity_once_in_silver(
    spark: SparkSession, server: NatsServer, tmp_path: Path
) -> None:
    lake = tmp_path / "lake"
    streams(server, EVENTS=["evt.>"], BILLING=["platform.billing.>"], CHAT=["chat.>"])
    publish(server, [event(number) for number in range(1, 101)])
    publish(server, [event(number) for number in range(1, 11)])  # ten come again
    publish(server, [metered(number) for number in range(1, 21)] + [chat(number) for number in range(1, 6)])
    first = once(spark, lake, server, *ALL)
    assert [] == first.errors
    assert (135, 125, 10, 0) == first.balance

    publish(server, [event(number) for number in (5, 50, 101)])
    publish(server, [metered(7, quantity=99), Outgoing("evt.acme.main.bad", b"{")])
    assert (5, 1, 2, 2) == once(spark, lake, server, *ALL).balance
    assert [] == once(spark, lake, server, *ALL).batches

    places = [(one["stream"], one["sequence"]) for one in rows(lake, "bronze", "stream", "sequence")]
    wanted = {"EVENTS": 114, "BILLING": 21, "CHAT": 5}
    assert {} == doubled(places)
    assert {(name, at) for name, count in wanted.items() for at in range(1, count + 1)} == set(places)
    found = high_water(open_table(lake, "bronze"))
    assert wanted == {lifetime[0]: last for lifetime, last in found.items()}
    keys = [one["identity"] for one in rows(lake, "silver/runtime", "identity")]
    assert {} == doubled(keys)
    assert {f"key:order-{number}" for number in range(1, 102)} == set(keys)
    refused = {(one["reason"], one["family"]) for one in rows(lake, "quarantine")}
    assert {("identity_conflict", "message"), ("contract", "runtime")} == refused
    assert {"acme"} == {one["tenant"] for one in rows(lake, "silver/realtime")}
    assert 101 == read_table(spark, lake, "silver/runtime").select("key").distinct().count()
