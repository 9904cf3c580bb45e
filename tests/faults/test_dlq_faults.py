"""The long fault runs of dead letters; tests/system/test_dlq_crashes.py holds the short form."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections import Counter

import pytest

import oncewire
from oncewire._ground.contracts import letters as names
from oncewire._ground.jetstream import Client, Outgoing
from oncewire._ground.topology import ensure
from tests.faults.dlq_crash import STEPS, problems_after
from tests.support.dlq import read_stream
from tests.support.nats import NatsServer, nats_server
from tests.support.streams import make_stream, state_of, unique
from tests.support.up import ONCEWIRE, clean_environ
from tests.support.wait import until_async

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1_800)]

KILLS = 20
LETTERS = 100_000


@pytest.mark.parametrize("retention", ["workqueue", "limits"])
@pytest.mark.parametrize("step", STEPS)
async def test_twenty_deaths_at_a_step_lose_and_double_nothing(server: NatsServer, step: str, retention: str) -> None:
    assert [] == await problems_after(server, [step] * KILLS, retention=retention)


@pytest.mark.parametrize(
    ("mutation", "step", "retention", "found"),
    [
        ("settle_first", "mutated", "workqueue", "original lost"),
        ("ack_first", "mutated", "limits", "letter missing"),
        ("new_ids", "letters", "limits", "letter doubled"),
    ],
)
async def test_a_broken_law_is_seen(server: NatsServer, mutation: str, step: str, retention: str, found: str) -> None:
    problems = await problems_after(server, [step], retention=retention, mutation=mutation)
    assert any(problem.startswith(found) for problem in problems), problems


async def make_letters(client: Client, count: int) -> str:
    """Letters as the service writes them, without their failures."""
    stream = await make_stream(client, unique("F"))
    told = {names.STREAM: stream, names.CONSUMER: "w", names.SUBJECT: f"{stream}.x", names.CAUSE: "bulk"}
    for start in range(0, count, 1_000):
        numbers = range(start, min(start + 1_000, count))
        part = [
            Outgoing(f"dlq.{stream}.x", b"%d" % at, f"dl.{at:040x}", told | {names.SEQUENCE: str(at + 1)})
            for at in numbers
        ]
        for outcome in await client.publisher.publish_all(part):
            assert not isinstance(outcome, Exception), outcome
    return stream


@pytest.mark.parametrize("sync_always", [False, True], ids=["default", "always"])
async def test_a_replay_of_a_hundred_thousand_letters_killed_half_way_publishes_each_once(sync_always: bool) -> None:
    with nats_server(sync_always=sync_always) as server:
        async with oncewire.connect(server.url) as client:
            await ensure(client)
            stream = await make_letters(client, LETTERS)
            command = [*ONCEWIRE, "dlq", "replay", "--stream", stream, "--json"]
            for share in (0.2, 0.5, 0.8):
                with subprocess.Popen(
                    command, env=clean_environ(NATS_URL=server.url), stdout=subprocess.DEVNULL
                ) as process:

                    async def is_there(wanted: int = int(share * LETTERS)) -> bool:
                        return bool((await state_of(client, stream))["messages"] >= wanted)

                    await until_async(is_there, f"{share:.0%} of the letters", deadline_s=600)
                    process.send_signal(signal.SIGKILL)
            environ = clean_environ(NATS_URL=server.url)
            done = await asyncio.to_thread(subprocess.run, command, env=environ, capture_output=True, text=True)
            assert 0 == done.returncode, done.stdout + done.stderr
            assert 0 == (await state_of(client, "DLQ"))["messages"]
        found = Counter(one.data for one in await read_stream(server.url, stream))
    assert {b"%d" % at: 1 for at in range(LETTERS)} == found
