"""Lakes for tests: streams with messages of every family, a pipeline over them, and what other readers find."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oncewire._ground.contracts import encode_message, new_message
from oncewire._ground.jetstream import Outgoing
from oncewire.pipeline.deriving import Batch
from oncewire.pipeline.lake.keep import Keeping
from oncewire.pipeline.lake.log import Lake
from oncewire.pipeline.lake.place import Place
from oncewire.pipeline.reading import Reads
from oncewire.pipeline.run import Pipeline
from oncewire.pipeline.tables import dataset, open_table
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


def once(spark: SparkSession, lake: Path | str, server: NatsServer, *names: str, **options: Any) -> Ran:
    """One pass, as `oncewire pipeline run --once` makes it."""
    made = {name: options.pop(name) for name in ("partition_by", "checkpoints") if name in options}
    keeping, gold = options.pop("keeping", Keeping()), options.pop("gold", None)
    told: list[Any] = []
    reads = Reads({"url": server.url}, **options)
    pipeline = Pipeline(spark, Lake(lake, **made), names, reads, keeping=keeping, gold=gold, tell=told.append)
    pipeline.once(threading.Event())
    return Ran(pipeline, told)


def rows(lake: Path | str | Place, name: str, *columns: str) -> list[dict[str, Any]]:
    """A table as delta-rs itself reads it."""
    return dataset(open_table(lake, name)).to_table(columns=list(columns) or None).to_pylist()


def doubled(values: Sequence[Any]) -> dict[Any, int]:
    return {value: times for value, times in Counter(values).items() if times > 1}
