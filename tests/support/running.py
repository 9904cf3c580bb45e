"""Agents inside a test's own process: declared streams, a store, a runner, and what a witness finds afterwards."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import nats.js.errors

from oncewire._ground.jetstream import Client, connect
from oncewire._ground.ledger.sqlite import SqliteStore
from oncewire._ground.ledger.store import Store
from oncewire._ground.topology import init_streams
from oncewire.agent import Agent, Runner
from oncewire.agent import running as run
from tests.support.streams import unique, witness
from tests.support.wait import until

EVENTS = "MESHFORGE_EVENTS"
COMMANDS = "MESHFORGE_COMMANDS"
ACK_WAIT_S = 1.0

__all__ = ["run"]


def new_agent(name: str = "", **options: Any) -> Agent:
    """An agent of its own name, whose unacked inputs come back soon."""
    return Agent(name or unique("agent"), **{"ack_wait_s": ACK_WAIT_S, "handler_timeout_s": 30.0, **options})


@asynccontextmanager
async def prepared(url: str) -> AsyncIterator[Client]:
    """A client on a server with all declared streams."""
    async with connect(url) as client:
        await init_streams(client)
        yield client


def sqlite_in(folder: Path, name: str = "ledger.db") -> Store:
    return SqliteStore(str(folder / name))


async def send(client: Client, subject: str, payload: Any, key: str = "", **fields: Any) -> int:
    """Publish an input as a lenient producer would; its sequence."""
    body: dict[str, Any] = {"type": fields.pop("type", "Test"), "payload": payload, **fields}
    if key:
        body["idempotency_key"] = key
    return (await client.publish(subject, body, msg_id=unique("in-"))).sequence


def command(agent: Agent, name: str) -> str:
    return f"cmd.{agent.tenant}.{agent.workspace}.{agent.name}.{name}"


async def counted(runner: Runner, **wanted: int) -> None:
    """Wait until the runner has counted so many of each outcome, and no more."""

    def is_there() -> bool:
        return all(runner.counts.get(name, 0) >= count for name, count in wanted.items())

    try:
        await until(is_there)
    except AssertionError:
        raise AssertionError(f"wanted {wanted}, there is {runner.counts}, last error {runner.last_error!r}") from None
    assert wanted == {name: runner.counts.get(name, 0) for name in wanted}


async def stored(url: str, stream: str, subject: str = "") -> list[Any]:
    """All messages of a stream as nats-py reads them, without leaving a trace."""
    found = []
    async with witness(url) as connection:
        js = connection.jetstream()
        state = (await js.stream_info(stream)).state
        for sequence in range(max(1, state.first_seq), state.last_seq + 1):
            with contextlib.suppress(nats.js.errors.NotFoundError):  # acked from a work queue, or deleted
                message = await js.get_msg(stream, sequence)
                if not subject or message.subject == subject:
                    found.append(message)
    return found


def payload_of(message: Any) -> Any:
    return json.loads(message.data)["payload"]
