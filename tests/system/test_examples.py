"""The examples run as a user runs them, and print what the README says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import oncewire
from oncewire._ground.topology import ensure
from tests.support.nats import NatsServer

ROOT = Path(__file__).parents[2]


def run_example(name: str, **environ: str) -> str:
    command = [sys.executable, str(ROOT / "examples" / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **environ})
    assert 0 == done.returncode, done.stderr
    return done.stdout


async def test_an_event_published_twice_under_one_id_stands_once(server: NatsServer) -> None:
    async with oncewire.connect(server.url) as client:
        await ensure(client)
    printed = run_example("publish_once.py", NATS_URL=server.url)
    shown = (ROOT / "README.md").read_text()
    first_two = "\n".join(printed.splitlines()[:2])
    assert first_two in shown
    assert 1 == printed.count("evt.default.demo.orders.placed")


async def test_dead_letters_are_grouped_and_replayed(server: NatsServer) -> None:
    async with oncewire.connect(server.url) as client:
        await ensure(client)
    expected = [
        "1 × TimeoutError on evt.default.demo.orders.placed for biller_consumer",
        "1 of 1 replayed",
    ]
    assert expected == run_example("dead_letters.py", NATS_URL=server.url).splitlines()


async def test_an_answer_is_streamed_and_stored(server: NatsServer) -> None:
    async with oncewire.connect(server.url) as client:
        await ensure(client)
        expected = ["stored: Every token arrives once, and in order.", "completed"]
        assert expected == run_example("stream_answer.py", NATS_URL=server.url).splitlines()
        assert (
            2 == (await client.api("STREAM.INFO.CHAT_EVENTS", {"subjects_filter": "chat.>"}))["state"]["num_subjects"]
        )
