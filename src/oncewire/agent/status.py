"""How an agent stands, asked from outside: its durables at the server, its ledger in the store. Changes nothing."""

from __future__ import annotations

import msgspec

from oncewire._ground.contracts.blocks import Outcome
from oncewire._ground.errors import NotFound
from oncewire._ground.jetstream import Client
from oncewire._ground.jetstream.losses import losses
from oncewire._ground.ledger.store import Store
from oncewire._ground.settings import Settings
from oncewire.agent import sources
from oncewire.agent.agent import Agent

BLOCKS_BACK_MAX = 100
"""So far back it looks for the last error."""


class SourceStatus(msgspec.Struct, frozen=True):
    """A durable: what waits, what is being worked on, what was delivered more than once and is not settled."""

    stream: str
    consumer: str
    lag: int
    in_flight: int
    redelivered: int


class LedgerStatus(msgspec.Struct, frozen=True):
    """What the ledger says of itself."""

    id: str
    block: int
    base: int
    """All blocks up to this one were forgotten; 0 when none was."""
    confirmed: int
    state: str
    incomplete: int
    """Inputs that began or failed and have no outcome yet."""
    unpublished: int
    """Effects that are durable and not confirmed by their stream."""
    next_due_ms: int | None
    last_error: str


class Status(msgspec.Struct, frozen=True):
    """An agent as a whole."""

    agent: str
    sources: list[SourceStatus]
    ledger: LedgerStatus
    problems: list[str]
    keep_s: int
    """How long the ledger remembers what is complete, by the settings; 0 is for ever."""

    @property
    def is_well(self) -> bool:
        return not self.problems


def ledger_status(store: Store, agent: Agent) -> LedgerStatus:
    ledger = store.open(agent.tenant, agent.workspace, agent.name)
    head, attempts = store.head(), store.attempts()
    return LedgerStatus(
        ledger.id,
        head.number,
        store.base().number,
        store.confirmed().block,
        head.state.hex(),
        len(attempts),
        sum(last - first + 1 for _, holes in store.unconfirmed() for first, last in holes),
        store.next_due_ms(),
        max(((one.started_ms, one.error) for one in attempts if one.error), default=(0, ""))[1]
        or _last_error(store, head.number),
    )


def _last_error(store: Store, number: int) -> str:
    """Of the newest input that was given up."""
    for at in range(number, max(0, number - BLOCKS_BACK_MAX), -1):
        block = store.block(at)
        for entry in reversed(block.content.entries if block else []):
            if entry.outcome in (Outcome.DEAD, Outcome.TERMINATED):
                return f"{entry.subject} at {entry.stream} {entry.sequence}: {entry.error}"
    return ""


async def status(client: Client, store: Store, agent: Agent, settings: Settings) -> Status:
    """Ask the server for each durable, and the store for the rest."""
    found: list[SourceStatus] = []
    problems: list[str] = []
    streams = await sources.patterns_by_stream(client, agent)
    for stream, consumer in [(one, name) for one in streams for name in sources.durables_of(agent, one, settings)]:
        try:
            info = await client.api(f"CONSUMER.INFO.{stream}.{consumer}")
        except NotFound:
            problems.append(f"consumer {consumer} on {stream} does not exist: the agent has not run yet")
            continue
        found.append(
            SourceStatus(stream, consumer, info["num_pending"], info["num_ack_pending"], info["num_redelivered"])
        )
        if info["num_pending"] and not info["num_waiting"]:
            problems.append(f"{info['num_pending']} messages of {stream} wait, and nobody pulls")
    readers = {one.consumer for one in found}
    problems += [
        f"{loss.sentence}: `oncewire agent apply --accept-loss {loss.stream}`"
        for loss in await losses(client)
        if loss.reader in readers and not loss.is_acknowledged
    ]
    return Status(agent.full_name, found, ledger_status(store, agent), problems, settings.ledger_keep_s)
