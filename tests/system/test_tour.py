"""`oncewire demo`: every check of the tour holds, and one that does not is said."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from oncewire import connect
from oncewire._ground.processes import IS_LINUX
from oncewire.cli import demo, main
from oncewire.demo.biller import CHARGED
from oncewire.embedded.folder import DataFolder
from oncewire.embedded.process import command_of
from tests.support.up import ANY_PORTS, ONCEWIRE, Up, clean_environ, made, oncewire, until

CHARGES_TWICE = """
from oncewire import Agent
from oncewire.demo import biller

agent = Agent("tour-biller", tenant="default", workspace="tour", ack_wait_s=2, handler_timeout_s=60)


@agent.on("charge")
def charge(ctx, order: biller.Order):
    effect = biller.charge(ctx, order)
    ctx.tx.execute("INSERT INTO oncewire_tour.charges (id, tour, cents) VALUES (%s, %s, 1)", (order.id, order.tour))
    return effect
"""


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with Up(made(tmp_path_factory.mktemp("tour") / "data")) as running:
        yield running.ready()


def take(data: Path, *words: str) -> Result:
    return CliRunner(env=clean_environ()).invoke(main, ["demo", "--json", "--data", str(data), *words])


def events(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_every_effect_happens_once_while_the_agent_is_killed(up: Up) -> None:
    result = take(up.folder.path, "--no-spark", "--orders", "8", "--kills", "2")
    told = events(result)
    assert 0 == result.exit_code, result.output
    checked = [one["text"] for one in told if one["event"] == "checked"]
    assert "every effect happened once: 9 orders, 2 kills, nothing lost, nothing doubled" == checked[-1]
    assert 2 == sum(one["text"].startswith("killed (-9)") for one in told)
    assert up.process.poll() is None  # it was not the tour's to stop
    causes = [(one["causation_id"], one["payload"]["order"]) for one in asyncio.run(charged(up))]
    assert 9 == len(causes)
    assert {True} == {cause == order for cause, order in causes}


async def charged(up: Up) -> list[dict[str, Any]]:
    async with connect(up.url("nats")) as client:
        return [json.loads(one.payload) for one in await client.get_batch("MESHFORGE_EVENTS", subject=CHARGED)]


def test_a_charge_too_many_is_seen(up: Up, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "charges_twice.py").write_text(CHARGES_TWICE)
    monkeypatch.setattr(demo, "AGENT", "charges_twice:agent")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    result = take(up.folder.path, "--no-spark", "--orders", "4", "--kills", "0")
    assert 1 == result.exit_code, result.output
    wrong = [one["text"] for one in events(result) if one["event"] == "checked" and not one["holds"]]
    assert "4 orders, 8 charges in PostgreSQL: each once" == wrong[0]


def test_an_up_that_cannot_start_is_said(tmp_path: Path, up: Up) -> None:
    port = up.url("nats").rpartition(":")[2]
    ports = ANY_PORTS | {"ONCEWIRE_NATS_PORT": port}
    done = oncewire("demo", "--data", str(tmp_path / "data"), cwd=tmp_path, **ports)
    assert 3 == done.returncode
    assert f"port {port} is taken" in done.stderr
    assert DataFolder.at(tmp_path / "data").holder() is None


@pytest.mark.faults
def test_the_whole_tour_starts_and_stops_its_own_servers(tmp_path: Path) -> None:
    data = made(tmp_path / "data")
    result = CliRunner(env=clean_environ(**ANY_PORTS)).invoke(main, ["demo", "--json", "--data", str(data)])
    assert 0 == result.exit_code, result.output
    checked = [one["text"] for one in events(result) if one["event"] == "checked"]
    assert "25 rows in silver/runtime for 25 orders: each once" in checked
    assert "audit: nothing lost, doubled or changed" in checked
    assert DataFolder.at(data).holder() is None


def agents_of(data: Path) -> list[int]:
    """Agents of the tour that work for this folder."""
    pids = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
    return [pid for pid in pids if demo.AGENT in command_of(pid) and str(data) in _environ(pid)]


def _environ(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/environ").read_text(errors="replace")
    except OSError:  # it has ended meanwhile
        return ""


@pytest.mark.skipif(not IS_LINUX, reason="needs /proc")
def test_a_tour_that_is_broken_off_leaves_no_agent_behind(up: Up) -> None:
    words = [*ONCEWIRE, "demo", "--json", "--data", str(up.folder.path), "--no-spark", "--orders", "100"]
    with subprocess.Popen(words, env=clean_environ(), stdout=subprocess.PIPE, text=True) as tour:
        assert tour.stdout is not None
        for line in tour.stdout:
            if "one transaction holds" in line:
                until(lambda: agents_of(up.folder.path), "the agent")
                tour.send_signal(signal.SIGINT)
                break
        tour.stdout.read()
    assert 130 == tour.returncode
    until(lambda: not agents_of(up.folder.path), "the agent's end")
    assert up.process.poll() is None
