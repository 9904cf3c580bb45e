"""A console for tests, served in this process against a real nats-server; and a lake with tables in it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import write_deltalake

from oncewire._ground import topology
from oncewire._ground.jetstream import Client, options_from
from oncewire._ground.settings import Settings, resolve
from oncewire.cli import console
from oncewire.console.watch import Figures, Watch
from oncewire.dlq.replay import inject
from oncewire.pipeline.auditing.run import keep_verdict
from oncewire.pipeline.gold.tables import HEALTH, RUNS, STEPS
from oncewire.pipeline.lake.table import Table
from oncewire.pipeline.tables import BRONZE, table_path
from tests.support import reports
from tests.support.http import Answer, Wire, wire
from tests.support.nats import NatsServer
from tests.support.wait import within

SUBJECT = "evt.default.demo.orders.placed"


class Served:
    """One console."""

    def __init__(self, client: Client, watch: Watch, url: str) -> None:
        self.client = client
        self.watch = watch
        self.url = url
        self.port = int(url.rpartition(":")[2])

    async def ask(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Answer:
        """With the headers of the console's own page, unless others are given."""
        sent = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        own = {"Host": f"127.0.0.1:{self.port}"} | ({"Content-Type": "application/json"} if method == "POST" else {})
        lines = [f"{name}: {value}" for name, value in (own | dict(headers or {})).items()]
        head = "\r\n".join([f"{method} {path} HTTP/1.1", *lines, f"Content-Length: {len(sent)}", "", ""])
        async with wire(self.port) as line:
            await line.send(head.encode() + sent)
            return await line.answer(is_head=method == "HEAD")

    async def get(self, path: str, status: int = 200, **headers: str) -> Any:
        answer = await self.ask("GET", path, headers=headers)
        assert status == answer.status, answer.body
        return answer.json

    async def post(self, path: str, body: Any, status: int = 200, **headers: str) -> Any:
        answer = await self.ask("POST", path, body, headers)
        assert status == answer.status, answer.body
        return answer.json

    @contextlib.asynccontextmanager
    async def watching(self, **headers: str) -> AsyncIterator[Events]:
        lines = [f"{name}: {value}" for name, value in headers.items()]
        async with wire(self.port) as line:
            await line.send("\r\n".join(["GET /api/live HTTP/1.1", "Host: localhost", *lines, "", ""]).encode())
            status, told = await line.head()
            assert (200, "text/event-stream; charset=utf-8") == (status, told["content-type"])
            yield Events(line)


class Events:
    """What a watcher is told."""

    def __init__(self, line: Wire) -> None:
        self._line = line
        self._held = b""

    async def next(self, name: str, **wanted: Any) -> Any:
        """The next event of this name that has these members."""
        while True:
            found, value = await self._one()
            if found == name and all(value.get(key) == one for key, one in wanted.items()):
                return value

    async def until(self, name: str, is_it: Any) -> Any:
        while True:
            found, value = await self._one()
            if found == name and is_it(value):
                return value

    async def is_over(self) -> bool:
        """Read on until it ends, however."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while await self._line.chunk():
                pass
        return True

    async def _one(self) -> tuple[str, Any]:
        while b"\n\n" not in self._held:
            chunk = await within(self._line.chunk())
            assert chunk, "the stream has ended"
            self._held += chunk
        frame, _, self._held = self._held.partition(b"\n\n")
        name, data = frame.split(b"\n")
        return name.removeprefix(b"event: ").decode(), json.loads(data.removeprefix(b"data: "))


def settings_for(server: NatsServer, folder: Path, **more: str) -> Settings:
    flags = {"nats_url": server.url, "nats_monitor_url": server.monitor_url, "console_listen": "127.0.0.1:0"}
    return resolve(flags | {"data": str(folder), "lake": str(folder / "lake")} | more, {}, {}).settings


@contextlib.asynccontextmanager
async def served(
    server: NatsServer, folder: Path, broker_url: str = "", figures: Callable[[], Figures] = dict, **more: str
) -> AsyncIterator[Served]:
    settings = settings_for(server, folder, **more)
    async with Client(options_from(settings, name="console")) as client:
        await topology.ensure(client, topology=topology.load(settings=settings))
        async with console.serving(client, settings, broker_url, figures) as (watch, url):
            yield Served(client, watch, url)


async def kill_off(client: Client, body: bytes, cause: str, consumer: str = "shipping") -> str:
    """A dead letter."""
    return await inject(client, SUBJECT, body, consumer, cause)


def make_lake(lake: Path, *, is_good: bool = True) -> None:
    """Tables as the pipeline leaves them: a run, a minute of health, a verdict."""
    lineage = reports.lineage()
    run = lineage.run | {"ended_at": reports.BEGIN, "depth": 4, "is_cut": False}
    steps = [step | {"tenant": run["tenant"], "run": run["run"]} for step in lineage.steps]
    _write(lake, BRONZE, [])
    _write(lake, RUNS, [run])
    _write(lake, STEPS, steps)
    _write(lake, HEALTH, reports.health(3))
    keep_verdict(lake, reports.verdict(is_good=is_good))


def _write(lake: Path, table: Table, rows: list[dict[str, Any]]) -> None:
    write_deltalake(table_path(lake, table.name), pa.Table.from_pylist(rows, table.schema))
