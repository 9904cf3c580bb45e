"""`up --demo` runs a small shop beside the servers, and every `up` ends its start with commands that can be pasted."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest

from oncewire._ground.jetstream import Client, connect
from oncewire._ground.users import identity
from oncewire.demo import shop
from tests.support.up import ANY_PORTS, ONCEWIRE, Up, clean_environ, made, oncewire, until
from tests.support.wait import until_async


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A system that asks for credentials everywhere: API keys over HTTP, and keys of NATS."""
    folder = tmp_path_factory.mktemp("shop")
    made(folder / ".oncewire")
    created = oncewire(
        "keys", "create", "--auth-keys", "keys.json", "--tenant", "default", "--name", "a", "--allow", "*", cwd=folder
    )
    assert 0 == created.returncode, created.stderr
    return folder


@pytest.fixture(scope="module")
def up(folder: Path) -> Iterator[Up]:
    with Up(folder / ".oncewire", "--demo", **secured(folder)) as running:
        yield running.ready()


def secured(folder: Path) -> dict[str, str]:
    return {"ONCEWIRE_AUTH_KEYS": str(folder / "keys.json"), "ONCEWIRE_NATS_ACCESS": "keys"}


def operator(up: Up) -> Client:
    found = identity(up.folder.keys, "operator")
    return connect(up.url("nats"), nkey=found["nats_nkey"], inbox_prefix=found["nats_inbox_prefix"])


async def waiting(client: Client) -> dict[str, int]:
    info = await client.api(f"STREAM.INFO.{shop.STREAM}", {"subjects_filter": shop.COMMAND})
    return dict(info["state"].get("subjects") or {})


async def charges(up: Up) -> int:
    database = await asyncpg.connect(up.url("postgres"))
    try:
        return int(await database.fetchval("SELECT count(*) FROM oncewire_shop.charges"))
    finally:
        await database.close()


def letters(up: Up) -> str:
    folder = up.folder.path.parent
    return oncewire("dlq", "ls", "--json", cwd=folder, **secured(folder)).stdout


async def test_the_shop_charges_orders_where_credentials_are_asked_for(up: Up) -> None:
    async def has_sold() -> bool:
        return await charges(up) >= 10

    await until_async(has_sold)
    async with operator(up) as client:
        events = await client.get_batch("MESHFORGE_EVENTS", subject="evt.default.shop.>", count=100)
    subjects = {event.subject for event in events}
    assert {shop.PLACED, shop.CHARGED} == subjects


def test_a_rare_order_becomes_a_letter_with_its_cause(up: Up) -> None:
    until(lambda: "no price is set for a gift card" in letters(up), "the dead letter")


async def test_a_stopped_shop_leaves_no_order_waiting(up: Up, folder: Path) -> None:
    assert 0 == up.stop()
    stops = [event["part"] for event in up.events if event["event"] == "stopped"]
    assert stops.index("shop") < stops.index("dlq") < stops.index("nats-server")
    with Up(folder / ".oncewire", **secured(folder)) as plain:
        plain.ready()
        assert "shop" not in {event.get("part") for event in plain.events}
        async with operator(plain) as client:
            assert {} == await waiting(client)


@pytest.mark.parametrize("words", [("--demo",), ()], ids=["with a shop", "without"])
def test_the_start_ends_with_three_commands_to_paste(tmp_path: Path, words: tuple[str, ...]) -> None:
    made(tmp_path / ".oncewire")
    environ = clean_environ(**ANY_PORTS)
    with subprocess.Popen(
        [*ONCEWIRE, "up", *words], cwd=tmp_path, env=environ, stdout=subprocess.PIPE, text=True
    ) as run:
        try:
            assert run.stdout is not None
            lines = iter(run.stdout.readline, "")
            assert "Next, in another terminal:\n" in lines  # reads up to it
            commands = [next(lines).strip() for _ in range(3)]
            for command in commands:
                done = subprocess.run(command, shell=True, cwd=tmp_path, env=pasting(), capture_output=True, text=True)
                assert done.returncode in (0, 1 if "dlq ls" in command else 0), (
                    command,
                    done.stderr,
                )  # 1: there are letters
        finally:
            run.terminate()
    assert ("agent" if words else "doctor") == commands[0].split()[1]


def pasting() -> dict[str, str]:
    return clean_environ(PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
