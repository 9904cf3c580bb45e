"""What services call: make what is missing, change nothing, and say what is not as declared."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from enum import StrEnum
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from oncewire._ground.errors import NotFound, OncewireError, PermissionDenied
from oncewire._ground.jetstream import Client
from oncewire._ground.settings import Settings
from oncewire._ground.topology.declared import load
from oncewire._ground.topology.model import Topology
from oncewire._ground.topology.rules import NONE, Act, Found, FoundStream, Plan, Step, creates, permit, plan, show
from oncewire._ground.topology.server import OnStep, bring_about, look

log = logging.getLogger("oncewire.topology")

FULL_SHARE = 0.8
"""From here on a limit that drops the oldest messages is worth a warning."""


class Trouble(StrEnum):
    JETSTREAM = "jetstream"
    MISSING = "missing"
    DRIFT = "drift"
    FILLING = "filling"

    @property
    def is_ready(self) -> bool:
        """Whether traffic may begin all the same, degraded."""
        return self in (Trouble.DRIFT, Trouble.FILLING)


class Problem(Struct, frozen=True, kw_only=True):
    item: str
    trouble: Trouble
    text: str
    remedy: str


def is_ready(problems: Iterable[Problem]) -> bool:
    return all(problem.trouble.is_ready for problem in problems)


async def init_streams(client: Client, *, topology: Topology | None = None) -> list[Problem]:
    """Create every declared stream that is missing. What differs is left as it is: warned about and returned.

    Safe to call from many services at once. Without `topology` the shipped catalogs count, with the settings of this
    process; `topology.load` takes files of your own and the environment.
    """
    declared = topology or load()
    return await _create_missing(client, replace(declared, consumers=()), declared)


async def ensure_consumers(client: Client, service: str, *, topology: Topology | None = None) -> list[Problem]:
    """Create the durables of one service that are missing, as `init_streams` does for streams."""
    declared = topology or load()
    return await _create_missing(client, declared.for_service(service), declared)


async def ensure_durable(client: Client, stream: str, consumer: str, settings: Settings) -> None:
    """Create one declared durable, if it is missing; NotFound when nobody declares it."""
    declared = load(settings=settings)
    mine = tuple(one for one in declared.consumers if (one.stream, one.name) == (stream, consumer))
    if not mine:
        raise NotFound(
            f"consumer {consumer} on {stream} does not exist, and no catalog declares it",
            hint="Declare it in a file of ONCEWIRE_TOPOLOGY, or check the name.",
        )
    try:
        await _create_missing(client, replace(declared, streams=(), consumers=mine), declared)
    except PermissionDenied as denied:
        raise NotFound(
            f"consumer {consumer} on {stream} does not exist, and this user may not create it: {denied.message}",
            hint="An operator creates it: `oncewire topology apply`.",
        ) from None


async def ensure(client: Client, *, topology: Topology | None = None) -> list[Problem]:
    """Create every declared stream and durable that is missing, as `init_streams` and `ensure_consumers` do."""
    declared = topology or load()
    return await _create_missing(client, declared, declared)


async def _create_missing(client: Client, part: Topology, known: Topology) -> list[Problem]:
    left = await bring_about(client, part, known, creates, lambda _: None, is_whole=False)
    problems = [_problem(step) for step in left.steps]
    for problem in problems:
        log.warning("%s: %s. %s", problem.item, problem.text, problem.remedy)
    return problems


async def apply(
    client: Client,
    topology: Topology,
    *,
    service: str | None = None,
    recreate: frozenset[str] = NONE,
    accept: frozenset[str] = NONE,
    on_step: OnStep = lambda _: None,
) -> Plan:
    """Make the server as declared; return the plan that remains, empty but for what no flag allows.

    `recreate` and `accept` name items as plans show them, such as `stream:BILLING` or `consumer:BILLING/worker`.
    """
    part = topology.for_service(service) if service is not None else topology
    allowed = partial(permit, recreate=recreate, accept=accept)
    return await bring_about(client, part, topology, allowed, on_step, is_whole=True)


async def compare(client: Client, topology: Topology, *, service: str | None = None) -> Plan:
    """What `apply` would have to do."""
    part = topology.for_service(service) if service is not None else topology
    return plan(part, await look(client, part), topology)


class Survey(Struct, frozen=True):
    """What is not as declared, and what each declared stream that is there holds."""

    problems: list[Problem]
    streams: Mapping[str, FoundStream] = {}


async def readiness(client: Client, topology: Topology, service: str | None = None) -> list[Problem]:
    """Whether traffic may begin: JetStream answers, and what is declared is there as declared.

    A server that does not answer is a problem in the list, not an error.
    """
    return (await survey(client, topology, topology.for_service(service) if service is not None else topology)).problems


async def survey(client: Client, topology: Topology, part: Topology) -> Survey:
    """The same for a part of what is declared, with what the streams hold."""
    try:
        found = await look(client, part, is_whole=False)
    except OncewireError as error:
        remedy = error.hint or "Check that the server runs with JetStream and that this user may use it."
        return Survey([Problem(item="jetstream", trouble=Trouble.JETSTREAM, text=error.message, remedy=remedy)])
    return Survey(troubles(part, found, topology), found.streams)


def troubles(part: Topology, found: Found, known: Topology) -> list[Problem]:
    """What is not as declared, and what is filling, of what was found."""
    return [*(_problem(step) for step in plan(part, found, known).steps), *_filling(part, found)]


def _problem(step: Step) -> Problem:
    if step.act is Act.CREATE:
        text = step.cost or "is missing"
        return Problem(item=step.item, trouble=Trouble.MISSING, text=text, remedy="Run `oncewire topology apply`.")
    differs = ", ".join(
        f"{one.key} is {show(one.key, one.found)}, not {show(one.key, one.declared)}" for one in step.changes
    )
    return Problem(
        item=step.item,
        trouble=Trouble.DRIFT,
        text=f"is not as declared: {differs}",
        remedy=f"Run `oncewire topology apply{' ' * bool(step.flag)}{step.flag}`.",
    )


def _filling(part: Topology, found: Found) -> Iterable[Problem]:
    """Streams that are about to drop their oldest messages."""
    for stream in part.streams:
        there = found.streams.get(stream.name)
        limit = there.config.get("max_bytes", -1) if there else -1
        if there and stream.discard == "old" and 0 < FULL_SHARE * limit <= there.bytes:
            yield Problem(
                item=stream.item,
                trouble=Trouble.FILLING,
                text=f"is {there.bytes / limit:.0%} full: at {show('max_bytes', limit)} it drops its oldest messages",
                remedy="Raise its max_bytes, or see that old messages are no longer needed.",
            )
