"""A dead-letter service that is killed at its steps, and what is wrong afterwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import oncewire
from oncewire._ground.jetstream import Client
from oncewire._ground.topology import ensure
from tests.support.dlq import DlqProcess, failing, given_up, hasten, letters_of, read_stream
from tests.support.nats import NatsServer
from tests.support.streams import consumer_info, state_of
from tests.support.wait import until, until_async

STEPS = ["fetched", "decided", "letters", "settled", "told", "acked"]
PART = 12


async def is_quiet(client: Client) -> bool:
    for stream, consumer in (("DLQ_REQUESTS", "dlq_service_requests"), ("DLQ_ADVISORIES", "dlq_service_advisories")):
        info = await consumer_info(client, stream, consumer)
        if info["num_pending"] or info["num_ack_pending"]:
            return False
    return True


async def problems_after(
    server: NatsServer, steps: Sequence[str], *, retention: str = "workqueue", mutation: str = ""
) -> list[str]:
    """Services die one after the other, each at its step, while new messages fail; a last one finishes. What is wrong
    then."""
    async with oncewire.connect(server.url) as client:
        await ensure(client)
        await hasten(client)
        stream = await failing(client, count=0, max_deliver=1, retention=retention)
        for time, step in enumerate(steps):
            for n in range(time * PART, (time + 1) * PART):
                await client.publish(f"{stream}.x", b"%d" % n)
            await given_up(client, stream, (time + 1) * PART)
            with DlqProcess(server.url, step, 1, mutation) as doomed:
                await until(lambda doomed=doomed: not doomed.is_running, f"a death at {step}")
        with DlqProcess(server.url, mutation=mutation):
            await until_async(lambda: is_quiet(client), "all events to be handled")
            if retention == "workqueue" and not mutation:
                await until_async(lambda: _is_empty(client, stream), "an empty queue")
        return await _problems(server.url, stream, len(steps) * PART)


async def _is_empty(client: Client, stream: str) -> bool:
    return bool((await state_of(client, stream))["messages"] == 0)


async def _problems(url: str, stream: str, count: int) -> list[str]:
    letters = await letters_of(url, stream)
    by_place = Counter(one.place for one in letters)
    wanted = {(stream, "w", at) for at in range(1, count + 1)}
    problems = [f"letter missing: {place}" for place in sorted(wanted - by_place.keys())]
    problems += [f"letter doubled: {place} x{n}" for place, n in sorted(by_place.items()) if n > 1]
    problems += [f"letter of nobody: {place}" for place in sorted(by_place.keys() - wanted)]
    bodies = {one.data for one in letters} | {one.data for one in await read_stream(url, stream)}
    return problems + [f"original lost: {n}" for n in range(count) if b"%d" % n not in bodies]
