"""The examples run beside `oncewire up`, in its folder and with its users, and print what they promise."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from oncewire._ground.errors import NotFound
from oncewire.embedded import postgres_url
from tests.support.streams import forget_ids
from tests.support.up import Up, clean_environ, made, operator

ROOT = Path(__file__).parents[2]


def run_example(name: str, folder: Path, **environ: str) -> str:
    command = [sys.executable, str(ROOT / "examples" / name)]
    environ = clean_environ(PYTHONPATH=str(ROOT), **environ)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environ, cwd=folder)
    assert 0 == done.returncode, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with Up(made(tmp_path_factory.mktemp("examples") / ".oncewire")) as running:
        yield running.ready()


async def run_beside(up: Up, name: str) -> list[str]:
    environ = {
        "NATS_URL": up.url("nats"),
        "GATEWAY_URL": up.running.services["gateway"],
        "BROKER_URL": up.running.services["broker"],
    }
    return (await asyncio.to_thread(run_example, name, up.folder.path.parent, **environ)).splitlines()


async def test_an_event_is_stored_once_however_often_and_whenever_the_example_runs(up: Up) -> None:
    first = await run_beside(up, "publish_once.py")
    async with operator(up) as client:
        await forget_ids(client, "MESHFORGE_EVENTS", "evt.default.demo.probe")
    second = await run_beside(up, "publish_once.py")
    outcomes = [line.rpartition(", ")[2] for line in (*first[:2], *second[:2])]
    assert ["stored", *["duplicate: already stored"] * 3] == outcomes
    assert 1 == sum("publish-once.placed" in line for line in second)


async def test_dead_letters_are_grouped_and_replayed(up: Up) -> None:
    expected = [
        "1 × TimeoutError on evt.default.demo.dead-letters.placed for biller_consumer",
        "1 of 1 replayed",
    ]
    assert expected == await run_beside(up, "dead_letters.py")


async def test_an_answer_is_streamed_and_stored(up: Up) -> None:
    assert ["stored: Every token arrives once, and in order.", "completed"] == await run_beside(up, "stream_answer.py")


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg", "sqlalchemy", "django"])
async def test_the_outbox_is_found_where_up_runs(up: Up, driver: str) -> None:
    (line, *_) = await run_beside(up, f"outbox_{driver}.py")
    assert line.startswith("message 1 of ")


async def test_a_worker_charges_each_order_once(up: Up) -> None:
    assert [
        "refused: topic does not exist (create it first)",
        "charged o1: 4200 cents (attempt 1)",
        "charged o2: 990 cents (attempt 1)",
        "2 acked, lag 0",
    ] == await run_beside(up, "broker_worker.py")


async def test_a_chat_stores_a_question_and_its_answer(up: Up) -> None:
    expected = ["1 user What is once?", "2 assistant You asked: What is once?"]
    assert expected == [line.strip() for line in await run_beside(up, "chat_backend.py")]


def test_without_a_postgresql_the_hint_names_both_ways_to_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONCEWIRE_POSTGRES_URL", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotFound) as missing:
        postgres_url()
    assert str(tmp_path / ".oncewire") in missing.value.message
    assert "ONCEWIRE_POSTGRES_URL" in missing.value.hint
    assert not list(tmp_path.iterdir())
