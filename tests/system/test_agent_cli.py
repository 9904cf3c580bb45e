"""`oncewire agent` as people and machines use it: processes, signals, exit codes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sqlite3
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Any

import pytest
from click.testing import CliRunner, Result

from oncewire.cli import main
from tests.support.nats import NatsServer
from tests.support.running import EVENTS, payload_of, prepared, send, stored
from tests.support.wait import until_async, within

ROOT = Path(__file__).parents[2]
TARGET = "examples.biller:agent"
CHARGE = "cmd.default.demo.biller.charge"


def invoke(*args: str) -> Result:
    return CliRunner().invoke(main, ["agent", *args])


class Running:
    """An `agent run --json` of its own process."""

    def __init__(self, process: asyncio.subprocess.Process, log: IO[bytes]) -> None:
        self.process = process
        self._log = log

    def log(self) -> str:
        """What it has written to stderr so far."""
        self._log.seek(0)
        return self._log.read().decode()

    async def event(self, name: str) -> dict[str, Any]:
        assert self.process.stdout is not None
        while line := await within(self.process.stdout.readline()):
            told: dict[str, Any] = json.loads(line)
            if told["event"] == name:
                return told
        raise AssertionError(f"it ended without {name}")

    async def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return int(await within(self.process.wait()))


@asynccontextmanager
async def running(url: str, store: str, target: str = TARGET, folder: Path = ROOT) -> AsyncIterator[Running]:
    command = [
        "-c",
        "from oncewire.cli import main; main()",
        "agent",
        "run",
        target,
        "--store",
        store,
        "--nats-url",
        url,
        "--json",
    ]
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *command,
            cwd=folder,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, str(ROOT)])},
        )
        try:
            yield Running(process, log)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def test_run_waits_for_a_ledger_that_another_process_holds_and_ends_cleanly_meanwhile(
    server: NatsServer, tmp_path: Path
) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "biller.db", isolation_level=None)) as holder:
        holder.execute("PRAGMA journal_mode = WAL")
        holder.execute("BEGIN IMMEDIATE")
        async with prepared(server.url), running(server.url, f"sqlite:///{tmp_path}/biller.db") as agent:
            waiting = await agent.event("trouble")
            assert "another process holds the file" in waiting["text"]
            assert await agent.stop() == 0
            assert (await agent.event("end"))["counts"] == {}


async def test_a_start_that_waited_for_the_ledger_goes_on_once_it_is_free(server: NatsServer, tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "biller.db", isolation_level=None)) as holder:
        holder.execute("PRAGMA journal_mode = WAL")
        holder.execute("BEGIN IMMEDIATE")
        async with prepared(server.url), running(server.url, f"sqlite:///{tmp_path}/biller.db") as agent:
            await agent.event("trouble")
            holder.execute("ROLLBACK")
            await agent.event("serving")
            assert await agent.stop() == 0


async def test_run_handles_drains_on_sigterm_and_status_tells(server: NatsServer, tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/biller.db"
    async with prepared(server.url) as client:
        async with running(server.url, store) as agent:
            serving = await agent.event("serving")
            assert serving["agent"] == "default/demo/biller"
            assert not serving["is_unclean"]
            await send(client, CHARGE, {"id": "o1", "cents": 4200})
            await send(client, CHARGE, {"id": "o2", "cents": 0})
            await until_async(lambda: stored(server.url, EVENTS))
            await until_async(lambda: stored(server.url, "DLQ_REQUESTS"))
            assert await agent.stop() == 0
            end = await agent.event("end")
            assert end["counts"] == {"done": 1, "terminated": 1}
        assert [payload_of(one) for one in await stored(server.url, EVENTS)] == [{"order": "o1", "cents": 4200}]
        shown = await asyncio.to_thread(invoke, "status", TARGET, "--store", store, "--nats-url", server.url, "--json")
        assert shown.exit_code == 0, shown.output
        told = json.loads(shown.output)
        assert [(one["lag"], one["in_flight"]) for one in told["sources"]] == [(0, 0)]
        assert told["ledger"]["incomplete"] == 0
        assert "order o2 costs 0 cents" in told["ledger"]["last_error"]
        proof = await asyncio.to_thread(invoke, "replay", TARGET, "--store", store, "--json")
        assert proof.exit_code == 0, proof.output
        report = json.loads(proof.output)
        assert (report["is_equal"], report["inputs"], report["tables"]) == (True, 1, ["charges"])
        summed = await asyncio.to_thread(invoke, "hash", TARGET, "--store", store)
        assert summed.output.splitlines()[0] == told["ledger"]["state"] == report["hash"]["stored"]
        await _change_a_row(tmp_path / "biller.db")
        differs = await asyncio.to_thread(invoke, "replay", TARGET, "--store", store)
        assert differs.exit_code == 1
        assert "charges" in differs.output
        await send(client, CHARGE, {"id": "o3", "cents": 1})
        plain = await asyncio.to_thread(invoke, "status", TARGET, "--store", store, "--nats-url", server.url)
        assert plain.exit_code == 1
        assert "1 messages of MESHFORGE_COMMANDS wait, and nobody pulls" in plain.output
        assert "for ever" in plain.output


async def _change_a_row(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("UPDATE charges SET cents = 1")
    db.close()


async def test_two_processes_with_two_files_are_refused_with_a_sentence(server: NatsServer, tmp_path: Path) -> None:
    async with prepared(server.url), running(server.url, f"sqlite:///{tmp_path}/one.db") as agent:
        await agent.event("serving")
        second = await asyncio.to_thread(
            invoke, "run", TARGET, "--store", f"sqlite:///{tmp_path}/two.db", "--nats-url", server.url
        )
        assert second.exit_code == 2
        assert "belongs to another ledger" in second.stderr
        assert "postgresql://" in second.stderr
        assert await agent.stop() == 0


async def test_a_ledger_on_another_disk_is_refused_until_it_is_adopted(server: NatsServer, tmp_path: Path) -> None:
    store, copy = f"sqlite:///{tmp_path}/biller.db", f"sqlite:///{tmp_path}/copy.db"
    async with prepared(server.url):
        async with running(server.url, store) as agent:
            await agent.event("serving")
            assert 0 == await agent.stop()
        shutil.copy(tmp_path / "biller.db", tmp_path / "copy.db")
        refused = await asyncio.to_thread(invoke, "run", TARGET, "--store", copy, "--nats-url", server.url)
        assert 2 == refused.exit_code
        assert "at another place" in refused.output
        assert "oncewire agent adopt" in refused.output

        adopt = ["adopt", TARGET, "--store", copy, "--nats-url", server.url]
        told = await asyncio.to_thread(invoke, *adopt)
        assert (0, 1) == (told.exit_code, told.output.count("belongs to this ledger at this place now"))
        again = await asyncio.to_thread(invoke, *adopt, "--json")
        assert {"adopted": []} == json.loads(again.output)
        async with running(server.url, copy) as agent:
            await agent.event("serving")
            assert 0 == await agent.stop()


EXITING = """
import asyncio, sys
from oncewire.agent import Agent, Effect

agent = Agent("exiting", ack_wait_s=1, handler_timeout_s=30, max_deliver=2)

@agent.on("go")
def go(ctx, payload):
    return Effect("evt.default.default.exiting.done", payload)

@agent.on("leave")
def leave(ctx, payload):
    sys.exit(payload["code"])

@agent.on("wait")
async def wait(ctx, payload):
    sys.exit(payload["code"])

@agent.on("task")
async def task(ctx, payload):
    async def leave():
        sys.exit(payload["code"])
    await asyncio.wait_for(asyncio.create_task(leave()), 5)
"""


@pytest.mark.parametrize("code", [0, 7])
async def test_sys_exit_in_a_handler_ends_its_own_input_alone(server: NatsServer, tmp_path: Path, code: int) -> None:
    (tmp_path / "exiting.py").write_text(EXITING)
    store, base = f"sqlite:///{tmp_path}/exiting.db", "cmd.default.default.exiting"
    async with (
        prepared(server.url) as client,
        running(server.url, store, "exiting:agent", tmp_path) as agent,
    ):
        await agent.event("serving")
        for n, kind in enumerate(["go", "leave", "go", "wait", "go", "task", "go"]):
            await send(client, f"{base}.{kind}", {"n": n, "code": code})
        await until_async(lambda: _are_stored(server.url, "DLQ_REQUESTS", 3), "the letters")
        await until_async(lambda: _are_stored(server.url, EVENTS, 4), "the innocent inputs")
        await send(client, f"{base}.go", {"n": 7})
        await until_async(lambda: _are_stored(server.url, EVENTS, 5), "an input after them")
        assert 0 == await agent.stop()
        assert {"done": 5, "retried": 3, "dead": 3} == (await agent.event("end"))["counts"]
        assert "a task called sys.exit" in agent.log()
    letters = await stored(server.url, "DLQ_REQUESTS")
    assert {f"SystemExit: {code}"} == {one.headers["Oncewire-Dlq-Cause"] for one in letters}
    assert {"leave", "wait", "task"} == {one.headers["Oncewire-Dlq-Subject"].rpartition(".")[2] for one in letters}


async def _are_stored(url: str, stream: str, count: int) -> bool:
    return len(await stored(url, stream)) >= count


def test_apply_makes_and_mends_the_durable(server: NatsServer, tmp_path: Path) -> None:
    async def make() -> None:
        async with prepared(server.url):
            pass

    asyncio.run(make())
    arguments = ("apply", TARGET, "--nats-url", server.url, "--json")
    made = json.loads(invoke(*arguments).output)["consumers"]
    assert made == {"MESHFORGE_COMMANDS/default_demo_biller_consumer": ["created"]}
    assert list(json.loads(invoke(*arguments).output)["consumers"].values()) == [[]]


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("biller", "is not MODULE:AGENT"),
        ("no.such.module:agent", "there is no module"),
        ("examples.biller:nothing", "is not there"),
        ("examples.biller:charge", "not an Agent"),
    ],
)
def test_a_wrong_target_is_refused(target: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    refused = invoke("status", target, "--store", "sqlite:///x.db")
    assert refused.exit_code == 2
    assert says in refused.stderr
