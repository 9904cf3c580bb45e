"""`oncewire relay run`, as a process of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import uuid

import oncewire
from tests.support.nats import NatsServer
from tests.support.outbox import ENQUEUE, assert_all_once_in_order, drained, make_chat_stream, postgres
from tests.support.postgres import shared_postgres
from tests.support.up import clean_environ

RELAY = [sys.executable, "-c", "from oncewire.cli.relay import relay; relay()", "run", "--json"]


async def test_it_relays_until_it_is_told_to_stop(server: NatsServer) -> None:
    url = await shared_postgres().new_database()
    async with oncewire.connect(server.url) as client:
        await make_chat_stream(client)
    environ = clean_environ(ONCEWIRE_POSTGRES_URL=url, NATS_URL=server.url)
    with subprocess.Popen(RELAY, env=environ, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert json.loads(process.stdout.readline())["event"] == "serving"
            async with postgres(url) as connection:
                await connection.fetch(ENQUEUE, uuid.uuid4(), "a")
            await drained(url)
            process.send_signal(signal.SIGTERM)
            assert json.loads(process.stdout.readline()) == {"event": "end", "published": 1}
            assert process.wait(30) == 0
        finally:
            process.kill()
    assert await assert_all_once_in_order(server.url, url) == 1


def test_without_a_nats_server_it_is_unavailable() -> None:
    environ = clean_environ(ONCEWIRE_POSTGRES_URL="postgresql://x@127.0.0.1:1/x", NATS_URL="nats://127.0.0.1:1")
    done = subprocess.run(RELAY, env=environ, capture_output=True, text=True)
    assert (done.returncode, json.loads(done.stderr.splitlines()[-1])["error"]["code"]) == (3, "not_connected")
