"""Lakes for tests: streams with messages of every family, a pipeline over them, and what other readers find."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from oncewire.contracts import encode_message, new_message
from oncewire.jetstream import Outgoing
from oncewire.pipeline.deriving import Batch
from oncewire.pipeline.lake.keep import Keeping
from oncewire.pipeline.lake.log import Lake
from oncewire.pipeline.reading import Reads
from oncewire.pipeline.run import Pipeline
from oncewire.pipeline.tables import open_table
from tests.spark.kills import LOCAL, Driver
from tests.spark.support import api
from tests.support.nats import NatsServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WHEN = datetime(2026, 11, 16, 12, tzinfo=UTC)


def streams(server: NatsServer, **subjects: Sequence[str]) -> None:
    """Streams by name, each made if it is not there."""
    for name, captured in subjects.items():
        api(server, f"STREAM.CREATE.{name}", {"name": name, "subjects": list(captured), "allow_direct": True})


def event(number: int, subject: str = "evt.acme.main.orders.placed", **more: Any) -> Outgoing:
    """A runtime message whose key is its number."""
    body = {"type": "OrderPlaced", "payload": {"order": number}, "idempotency_key": f"order-{number}", **more}
    return Outgoing(subject, json.dumps(body).encode())


def metered(number: int, quantity: int = 1, tenant: str = "acme") -> Outgoing:
    payload = {"tenant_id": tenant, "resource_id": "gpu-1", "meter": "hours", "quantity": quantity, "unit": "h"}
    made = new_message(
        "UsageMetered", payload, message_id=f"m-{number}", timestamp=WHEN, actor_id="meter", actor_kind="SYSTEM"
    )
    return Outgoing("platform.billing.usage.metered", encode_message(made))


def chat(number: int, conversation: str = "c1", *, event_type: str = "chat.message.created") -> Outgoing:
    told = {"type": event_type, "messageId": f"m{number}", "dedupeId": f"d{number}", "role": "user", "content": "hi"}
    body = {
        "version": "2024-12-01",
        "conversationId": conversation,
        "sequence": number,
        "issuedAt": "2026-11-16T12:00:00Z",
        "contract": {"guarantee": "at-least-once", "dedupeKey": f"k{number}"},
        "event": told,
    }
    headers = {"Oncewire-Tenant": "acme", "Oncewire-Epoch": "e1"}
    return Outgoing(f"chat.events.{conversation}", json.dumps(body).encode(), headers=headers)


class Ran:
    """What one pass over the streams did."""

    def __init__(self, pipeline: Pipeline, told: list[Any]) -> None:
        self.pipeline = pipeline
        self.batches = [one for one in told if isinstance(one, Batch)]
        self.errors = pipeline.stopped()

    @property
    def balance(self) -> tuple[int, ...]:
        """Rows in, rows out, duplicates, quarantined."""
        names = ("rows_in", "rows_out", "duplicates", "quarantined")
        return tuple(sum(batch.total(name) for batch in self.batches) for name in names)


def once(spark: SparkSession, lake: Path, server: NatsServer, *names: str, **options: Any) -> Ran:
    """One pass, as `oncewire pipeline run --once` makes it."""
    partition_by = options.pop("partition_by", "")
    keeping = options.pop("keeping", Keeping())
    told: list[Any] = []
    reads = Reads({"url": server.url}, **options)
    pipeline = Pipeline(spark, Lake(lake, partition_by=partition_by), names, reads, keeping=keeping, tell=told.append)
    pipeline.once(threading.Event())
    return Ran(pipeline, told)


def rows(lake: Path, name: str, *columns: str) -> list[dict[str, Any]]:
    """A table as delta-rs itself reads it."""
    return open_table(lake, name).to_pyarrow_table(columns=list(columns) or None).to_pylist()


def doubled(values: Sequence[Any]) -> dict[Any, int]:
    return {value: times for value, times in Counter(values).items() if times > 1}


# ---- kills

LOOK_S = 0.005


def until(is_so: Callable[[], bool], timeout_s: float) -> None:
    """Wait for something that shows in the lake's folder."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, "it did not come to be"
        time.sleep(LOOK_S)


class LakeJob(Driver):
    """A pipeline as a process of its own."""

    def __init__(self, server: NatsServer, lake: Path, last: int, *names: str, master: str = LOCAL) -> None:
        arguments = [master, server.url, str(lake), str(last), *names]
        super().__init__("tests.spark.lake_job", arguments, lake.parent / "lake.log")


@contextmanager
def running(server: NatsServer, lake: Path, last: int, *names: str, master: str = LOCAL) -> Iterator[LakeJob]:
    job = LakeJob(server, lake, last, *names, master=master)
    try:
        yield job
    finally:
        job.close()


def open_batches(lake: Path) -> set[tuple[str, str]]:
    """Batches of bronze that Spark has begun and not committed."""
    found = set()
    for entry in (lake / "_checkpoints").glob("*/*/offsets/[0-9]*"):
        if not (entry.parents[1] / "commits" / entry.name).exists():
            found.add((entry.parents[2].name, entry.name))
    return found


def uncommitted(lake: Path) -> set[str]:
    """Files of bronze that are written and in no version yet."""
    there = {path.name for path in (lake / "bronze").glob("*.parquet")}
    log = unquote("".join(path.read_text() for path in (lake / "bronze" / "_delta_log").glob("*.json")))
    return {name for name in there if name not in log}


def is_deriving(lake: Path) -> bool:
    return any((lake / "_staging").glob("*"))


def assert_each_once(lake: Path, stream: str, count: int, identities: set[str]) -> None:
    """Each sequence once in bronze, each identity once in silver, and the balance of all batches is even."""
    found = [one["sequence"] for one in rows(lake, "bronze", "stream", "sequence") if one["stream"] == stream]
    assert {} == doubled(found), "doubled in bronze"
    assert set() == set(range(1, count + 1)) ^ set(found), "lost in bronze"
    keys = [one["identity"] for one in rows(lake, "silver/runtime", "identity")]
    assert {} == doubled(keys), "doubled in silver"
    assert set() == identities ^ set(keys), "lost in silver"
    balance = rows(lake, "batches")
    assert count == sum(one["rows_in"] for one in balance)
    assert len(keys) == sum(one["rows_out"] for one in balance)
    assert count - len(keys) == sum(one["duplicates"] for one in balance)
