"""The FastAPI example: HTTP in, one effect out, drained with the service."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sqlite3
import sys
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

from tests.support.nats import NatsServer
from tests.support.running import EVENTS, payload_of, prepared, stored
from tests.support.up import clean_environ
from tests.support.wait import until_async

ROOT = Path(__file__).parents[2]
SERVICE = [sys.executable, "-m", "uvicorn", "examples.fastapi_service:app", "--port", "0"]
START_S = 60.0


@asynccontextmanager
async def service(nats_url: str, ledger: Path) -> AsyncIterator[str]:
    """The example as its page starts it; the address that it serves. SIGTERM ends it."""
    environ = clean_environ(NATS_URL=nats_url, BILLER_STORE=f"sqlite:///{ledger}")
    process = await asyncio.create_subprocess_exec(*SERVICE, cwd=ROOT, env=environ, stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    try:
        async with asyncio.timeout(START_S):
            lines = []
            while not (match := re.search(r"running on (http://[0-9.:]+)", "".join(lines))):
                line = await process.stderr.readline()
                assert line, f"the service ended: {''.join(lines)}"
                lines.append(line.decode())
        yield match[1]
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(START_S):
            await process.communicate()


async def ask(url: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    """Status and JSON of an answer; a POST when there is a body."""

    def call() -> tuple[int, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=START_S) as answer:
            return answer.status, json.load(answer)

    return await asyncio.to_thread(call)


async def test_an_order_over_http_is_charged_once(server: NatsServer, tmp_path: Path) -> None:
    ledger = tmp_path / "biller.db"
    async with prepared(server.url):
        async with service(server.url, ledger) as url:
            for _ in range(2):
                status, _ = await ask(f"{url}/orders", {"id": "o1", "cents": 4200})
                assert 202 == status
            await until_async(lambda: stored(server.url, EVENTS))
            status, health = await ask(f"{url}/ready")
            assert (200, True) == (status, health["is_ready"])
        assert [{"order": "o1", "cents": 4200}] == [payload_of(one) for one in await stored(server.url, EVENTS)]
    with closing(sqlite3.connect(ledger)) as opened:
        charges = opened.execute("SELECT * FROM charges").fetchall()
        left = opened.execute("SELECT process FROM ledger_processes").fetchall()
    assert ([("o1", 4200)], []) == (charges, left), "charged once, and drained: no running mark is left"
