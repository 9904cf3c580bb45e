"""`oncewire dlq run`, as a process of its own, and inside `oncewire up`."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import oncewire
from tests.support.dlq import failing, given_up, until_letters
from tests.support.nats import NatsServer
from tests.support.up import ONCEWIRE, Up, clean_environ, operator

RUN = [*ONCEWIRE, "dlq", "run", "--json"]


async def test_it_keeps_letters_until_it_is_told_to_stop_and_makes_its_streams_itself(server: NatsServer) -> None:
    with subprocess.Popen(RUN, env=clean_environ(NATS_URL=server.url), stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert "serving" == json.loads(process.stdout.readline())["event"]
            async with oncewire.connect(server.url) as client:
                stream = await failing(client, count=2)
                await given_up(client, stream, 2)
            await until_letters(server.url, stream, 2)
            process.send_signal(signal.SIGTERM)
            assert {"event": "end", "letters": 2} == json.loads(process.stdout.readline())
            assert 0 == process.wait(30)
        finally:
            process.terminate()


def test_without_a_nats_server_it_is_unavailable() -> None:
    done = subprocess.run(RUN, env=clean_environ(NATS_URL="nats://127.0.0.1:1"), capture_output=True, text=True)
    assert (3, "not_connected") == (done.returncode, json.loads(done.stderr.splitlines()[-1])["error"]["code"])


async def test_up_keeps_letters_too(tmp_path: Path) -> None:
    up = Up(tmp_path / "data").ready()
    try:
        async with operator(up) as client:
            stream = await failing(client)
            await given_up(client, stream, 1)
        await until_letters(up.url("nats"), stream, 1)
    finally:
        up.stop()
