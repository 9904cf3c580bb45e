"""For tests of dead letters: messages that fail, the service as a task or a process, what a witness finds in DLQ."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oncewire._ground.contracts import letters as names
from oncewire._ground.jetstream import Client, Outgoing
from oncewire.dlq.service import DlqOptions, Service, serving
from tests.support.streams import make_consumer, make_stream, unique, witness
from tests.support.up import clean_environ
from tests.support.wait import until_async

ROOT = Path(__file__).parents[2]
QUICK = DlqOptions(sweep_s=0.2, stalled_s=3_600.0)
ACK_WAIT_NS = 50_000_000


@dataclass
class Found:
    """A letter as nats-py reads it."""

    sequence: int
    subject: str
    data: bytes
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def place(self) -> tuple[str, str, int]:
        told = self.headers
        return told[names.STREAM], told[names.CONSUMER], int(told[names.SEQUENCE])

    @property
    def cause(self) -> str:
        return self.headers[names.CAUSE]


async def read_stream(url: str, stream: str) -> list[Found]:
    """Everything in a stream, through nats-py."""
    found: list[Found] = []
    async with witness(url) as connection:
        js = connection.jetstream()
        total = (await js.stream_info(stream)).state.messages
        if not total:
            return found
        sub = await js.subscribe("", stream=stream, ordered_consumer=True)
        while len(found) < total:
            message = await sub.next_msg(timeout=10)
            place = message.metadata.sequence.stream
            found.append(Found(place, message.subject, message.data, dict(message.headers or {})))
        await sub.unsubscribe()
    return found


async def letters_of(url: str, stream: str) -> list[Found]:
    return [one for one in await read_stream(url, "DLQ") if one.headers.get(names.STREAM) == stream]


@contextlib.asynccontextmanager
async def service(client: Client, options: DlqOptions = QUICK) -> AsyncIterator[Service]:
    async with serving(client, options) as running:
        yield running


async def failing(client: Client, *, count: int = 1, max_deliver: int = 2, name: str = "", **config: Any) -> str:
    """A stream with messages and a durable `w` whose reader never settles anything."""
    stream = await make_stream(client, name or unique("F"), **config)
    await make_consumer(client, stream, "w", ack_wait=ACK_WAIT_NS, max_deliver=max_deliver)
    await publish(client, stream, count)
    return stream


async def publish(client: Client, stream: str, count: int, start: int = 0) -> None:
    messages = [
        Outgoing(f"{stream}.x", b"body %d" % at, f"{stream}-{at}", {"X-Mine": str(at), "traceparent": TRACE})
        for at in range(start, start + count)
    ]
    for outcome in await client.publish_many(messages):
        assert not isinstance(outcome, Exception), outcome


TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


async def given_up(client: Client, stream: str, count: int, consumer: str = "w") -> None:
    """Pull without settling until the server has given up `count` messages: a consumer that dies each time."""
    async with client.pull(stream, consumer, batch=1_000, ahead=1, expires_s=2.0, heartbeat_s=0.5) as pull:

        async def is_over() -> bool:
            await pull.fetch(timeout_s=0.05)
            subject = f"$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.{stream}.{consumer}"
            told = await client.get_batch("DLQ_ADVISORIES", subject=subject)
            return len({json.loads(one.payload)["stream_seq"] for one in told}) >= count

        await until_async(is_over, f"{stream} to be given up")


async def hasten(client: Client) -> None:
    """Events that a killed service had in hand come back at once, not after half a minute."""
    for stream, consumer in (("DLQ_REQUESTS", "dlq_service_requests"), ("DLQ_ADVISORIES", "dlq_service_advisories")):
        config = (await client.api(f"CONSUMER.INFO.{stream}.{consumer}"))["config"] | {"ack_wait": 1_000_000_000}
        body = {"stream_name": stream, "config": config, "action": "update"}
        await client.api(f"CONSUMER.CREATE.{stream}.{consumer}", body)


async def until_letters(url: str, stream: str, count: int) -> list[Found]:
    found: list[Found] = []

    async def are_there() -> bool:
        found[:] = await letters_of(url, stream)
        return len(found) >= count

    await until_async(are_there, f"{count} letters of {stream}")
    return found


def assert_one_letter_each(found: list[Found], stream: str, sequences: range) -> None:
    places = Counter(one.place for one in found)
    assert {(stream, "w", one): 1 for one in sequences} == dict(places)


class DlqProcess:
    """The service as a process that dies at a step, killed by the id we started."""

    def __init__(self, url: str, step: str = "", nth: int = 1, mutation: str = "") -> None:
        command = [sys.executable, "-m", "tests.faults.dlq_worker", url, step, str(nth), mutation]
        self.process = subprocess.Popen(command, cwd=ROOT, env=clean_environ(PATH=os.environ["PATH"]))

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> DlqProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_running:
            self.kill()
