"""Where an agent's inputs come from: one durable pull consumer per stream, and the proof that this ledger owns it.

Two ledgers on one durable would each run half of the inputs and know nothing of the other half, so the owner's name
stands in a create-only key: the second one refuses to run. A ledger that is behind what it has announced was copied or
restored, and refuses too.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import msgspec

from oncewire.agent.agent import Agent
from oncewire.contracts import subjects
from oncewire.errors import Conflict, Corrupt, NotFound, Refused
from oncewire.jetstream import Client, codes
from oncewire.ledger.rules import Announcement, Ledger, Source
from oncewire.ledger.store import Store
from oncewire.settings import Settings
from oncewire.topology import names

OWNERS_BUCKET = "OW_LEDGERS"
LEDGER_STREAM = "LEDGER"


class Opened(NamedTuple):
    """A durable that is ready to be pulled from."""

    source: Source
    ack_wait_s: float
    max_deliver: int
    delivered: int


def durable_of(agent: Agent, stream: str, settings: Settings) -> str:
    """The agent's durable on a stream: the settings' prefix on `sr-*`, its own name elsewhere."""
    if stream.startswith(f"{settings.stream_prefix}-"):
        return names.sr_durable_name(settings.consumer_prefix, agent.name)
    return names.durable_name(agent.name, agent.tenant, agent.workspace)


async def patterns_by_stream(client: Client, agent: Agent) -> dict[str, list[str]]:
    """The agent's subjects, each under the one stream that holds it."""
    found: dict[str, list[str]] = {}
    for handler in agent.handlers:
        names = (await client.api("STREAM.NAMES", {"subject": handler.pattern})).get("streams") or []
        if len(names) != 1:
            what = "no stream captures" if not names else f"several streams ({', '.join(names)}) capture"
            raise NotFound(
                f"{what} {handler.pattern}", hint="Run `oncewire topology apply`, or mend the handler's subject."
            )
        found.setdefault(names[0], []).append(handler.pattern)
    return found


async def open_source(client: Client, agent: Agent, stream: str, patterns: list[str], consumer: str) -> Opened:
    """Make the durable, or take the one that is there; another filter under its name is drift."""
    wanted = consumer_config(agent, consumer, patterns)
    try:
        body = {"stream_name": stream, "config": wanted, "action": "create"}
        info = await client.api(f"CONSUMER.CREATE.{stream}.{consumer}", body)
    except Conflict as conflict:
        if conflict.server_code not in (codes.CONSUMER_EXISTS, 10013, 10105):
            raise
        info = await client.api(f"CONSUMER.INFO.{stream}.{consumer}")
        _check_filters(info["config"], patterns, consumer)
    about = await client.api(f"STREAM.INFO.{stream}")
    config = info["config"]
    source = Source(
        stream,
        about["created"],
        consumer,
        tuple(filters_of(config)),
        max(1, int(config.get("opt_start_seq") or 1)),
        about["config"]["retention"] == "workqueue",
    )
    return Opened(source, config["ack_wait"] / 1e9, config["max_deliver"], info["delivered"]["stream_seq"])


def consumer_config(agent: Agent, consumer: str, patterns: list[str]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "name": consumer,
        "durable_name": consumer,
        "ack_policy": "explicit",
        "ack_wait": int(agent.ack_wait_s * 1e9),
        "max_deliver": agent.max_deliver,
        "deliver_policy": "all",
        "replay_policy": "instant",
        "max_ack_pending": 1 if agent.is_ordered else max(1_000, agent.batch * 4, agent.concurrency * 2),
    }
    return config | ({"filter_subject": patterns[0]} if len(patterns) == 1 else {"filter_subjects": sorted(patterns)})


def filters_of(config: dict[str, Any]) -> list[str]:
    return config.get("filter_subjects") or [config.get("filter_subject") or ">"]


def _check_filters(config: dict[str, Any], patterns: list[str], consumer: str) -> None:
    if sorted(filters_of(config)) != sorted(patterns):
        raise Conflict(
            f"consumer {consumer} filters {', '.join(filters_of(config))}, the agent handles {', '.join(patterns)}",
            hint="Run `oncewire agent apply` to change the durable of this agent.",
        )


async def own(client: Client, source: Source, identity: dict[str, str]) -> None:
    """Prove that no other ledger works on this durable."""
    created = hashlib.sha256(source.created.encode()).hexdigest()[:12]
    key = f"{source.stream}.{created}.{source.consumer}"
    value = msgspec.json.encode(identity)
    bucket = client.kv(OWNERS_BUCKET)
    try:
        await bucket.create(key, value)
    except Conflict:
        entry = await bucket.get(key)
        if entry is not None and entry.value != value:
            raise Refused(
                f"consumer {source.consumer} on {source.stream} belongs to another ledger",
                hint="Use the same SQLite file on one machine, or PostgreSQL for several: --store postgresql://…",
            ) from None


async def check_not_behind(client: Client, store: Store, ledger: Ledger) -> None:
    """A ledger that has announced more than it holds was copied or restored."""
    try:
        last = await client.get_last(LEDGER_STREAM, subjects.ledger(ledger.agent, ledger.id))
    except NotFound:
        return
    announced = msgspec.json.decode(last.payload, type=Announcement).number
    if announced > store.head().number:
        raise Corrupt(
            f"the ledger ends at block {store.head().number}, but has announced block {announced}",
            hint="It was copied or restored from a backup: what came after would happen twice. Use the newest copy.",
        )
