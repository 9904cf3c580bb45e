"""A chain of agents, each in a process of its own: the command that one sends is the next one's input.

    evt in  →  link 0  →  cmd  →  link 1  →  cmd  →  …  →  evt out

Each link writes a row and returns one effect. Whatever dies and whenever, each input passes each link once.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from typing import Any

import msgspec

import oncewire
from oncewire._ground.errors import Unavailable
from oncewire._ground.ledger.stores import open_store
from oncewire.agent import Agent, Effect
from oncewire.agent.run import Runner
from tests.faults.agent_worker import AWAY_CODE

WORKSPACE = "links"


class Link(msgspec.Struct):
    """What a process is told."""

    nats: str
    store: str
    chain: str
    at: int
    links: int
    ack_wait_s: float = 1.0

    @property
    def name(self) -> str:
        return f"{self.chain}{self.at}"

    @property
    def next_subject(self) -> str:
        if self.at + 1 == self.links:
            return event_subject(self.chain, "out")
        return f"cmd.default.{WORKSPACE}.{self.chain}{self.at + 1}.step"


def event_subject(chain: str, end: str) -> str:
    return f"evt.default.{WORKSPACE}.{chain}.{end}"


def make_link(link: Link) -> Agent:
    agent = Agent(link.name, workspace=WORKSPACE, ack_wait_s=link.ack_wait_s, max_deliver=1_000, batch=5)
    mark = "%s" if link.store.startswith("postgres") else "?"
    insert = f"INSERT INTO passed (link, n) VALUES ({mark}, {mark})"

    @agent.on("step" if link.at else event_subject(link.chain, "in"))
    def step(ctx: Any, body: dict[str, Any]) -> Effect:
        ctx.tx.execute(insert, (link.at, body["n"]))
        return Effect(link.next_subject, {"n": body["n"]})

    return agent


async def run(link: Link) -> None:
    store = open_store(link.store)
    async with oncewire.connect(link.nats) as client, Runner(make_link(link), client, store) as runner:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, runner.ask_to_stop)
        print("running", flush=True)
        await runner.wait()


def main(told: str) -> None:
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    try:
        asyncio.run(run(msgspec.json.decode(told, type=Link)))
    except Unavailable as problem:  # whoever runs it starts it again
        print(problem, file=sys.stderr)
        sys.exit(AWAY_CODE)
