"""The control plane: looks at what the server has, and carries out what the rules say. Decides nothing.

Requests are raw JSON, so that no key gets lost that this version does not know. Consumers are always made with
`action: create` and changed with `action: update`: without one a create silently moves another's filter. Many processes
may do this at once: who comes second finds the thing there (10058, 10148), looks again, and plans anew.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Set
from datetime import datetime
from typing import Any

from oncewire._ground.errors import NotFound, OncewireError, OutcomeUnknown, TimedOut, Unavailable
from oncewire._ground.jetstream import Client, codes
from oncewire._ground.topology.model import Topology
from oncewire._ground.topology.rules import Act, Found, FoundConsumer, FoundStream, Permitted, Plan, Step, plan

STEP_TIMEOUT_S = 5.0
ASKED_MAX = 4
"""How often a question is asked. One that reaches a cluster while it elects is answered by nobody, however long one
waits; the next one is answered by the new leader."""

CONSUMER_TO_UPDATE_NOT_FOUND = 10149
ROUNDS_MAX = 20
"""How often a plan is made anew because others changed the server meanwhile."""

FAILED_STEPS_MAX = 5
"""How often the server may fail at a step before that is reported: it removes a deleted stream's files beside its
answer, and a stream made anew under that name in the same moment can find them in its way."""

LOOK_AGAIN_S = 0.25
ELECTION_S_MAX = 8.0
"""Longer than the election of a leader takes (4 to 6 s)."""

OVERTAKEN = frozenset(
    {
        codes.STREAM_NAME_IN_USE,
        codes.CONSUMER_EXISTS,
        codes.STREAM_NOT_FOUND,
        codes.CONSUMER_NOT_FOUND,
        CONSUMER_TO_UPDATE_NOT_FOUND,
    }
)
"""Answers that say: it is not as you have seen it."""

OnStep = Callable[[Step], None]
Permit = Callable[[Iterable[Step]], Permitted]


class _Silent(Unavailable):
    """Something is there and does not answer."""


class _Overtaken(Exception):
    """What the plan has seen is no longer there."""


async def look(client: Client, topology: Topology, *, is_whole: bool = True, is_deep: bool = False) -> Found:
    """What the server has of this topology. `is_whole` also lists what else is there; it needs wider permissions.
    `is_deep` looks into that too, and asks only streams that have consumers for them: for who looks again and again.

    In a cluster a stream that somebody just made has no leader for a moment, and is neither there nor missing: to take
    it for missing could make it anew. So we look again, for a while.
    """
    clock = asyncio.get_running_loop().time
    until = clock() + ELECTION_S_MAX
    while True:
        try:
            return await _look(client, topology, is_whole, is_deep)
        except _Silent:
            if clock() > until:
                raise
            await asyncio.sleep(LOOK_AGAIN_S)


async def _look(client: Client, topology: Topology, is_whole: bool, is_deep: bool) -> Found:
    info = await _ask(client, "INFO")
    streams: dict[str, FoundStream] = {}
    others: dict[str, tuple[str, ...]] = {}
    strangers: dict[str, FoundStream] = {}
    declared = {stream.name for stream in topology.streams} | {consumer.stream for consumer in topology.consumers}
    async for answer in _answers(client, declared, is_whole):
        name = answer["config"]["name"]
        if name in declared:
            durables = {consumer.name for consumer in topology.consumers if consumer.stream == name}
            streams[name] = await _look_into(client, answer, durables, is_deep)
        else:
            others[name] = tuple(answer["config"].get("subjects") or ())
            if is_deep:
                strangers[name] = await _look_into(client, answer, set(), is_deep)
    level = int(info.get("api", {}).get("level") or 0)
    return Found(streams=streams, others=others, strangers=strangers, api_level=level)


async def _ask(client: Client, endpoint: str, request: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A question, which may be asked again: it changes nothing."""
    for _ in range(ASKED_MAX - 1):
        with contextlib.suppress(TimedOut):
            return await client.api(endpoint, request, timeout_s=STEP_TIMEOUT_S)
    return await client.api(endpoint, request, timeout_s=STEP_TIMEOUT_S)


async def _answers(client: Client, names: Set[str], is_whole: bool) -> AsyncIterator[dict[str, Any]]:
    if is_whole:
        async for answer in _pages(client, "STREAM.LIST", "streams", names):
            yield answer
        return
    for name in sorted(names):
        try:
            yield await _ask(client, f"STREAM.INFO.{name}")
        except NotFound:
            continue


async def _pages(client: Client, endpoint: str, field: str, needed: Set[str]) -> AsyncIterator[dict[str, Any]]:
    offset = 0
    while True:
        answer = await _ask(client, endpoint, {"offset": offset})
        silent = needed & set(answer.get("missing") or ())
        if silent:
            raise _Silent(
                f"{field} that are there do not answer: {', '.join(sorted(silent))}",
                hint="Their servers are down or electing a leader: wait, or bring them back.",
            )
        page = answer.get(field) or []
        for one in page:
            yield one
        offset += len(page)
        if not page or offset >= int(answer.get("total", 0)):
            return


async def _look_into(
    client: Client, answer: Mapping[str, Any], durables: Set[str], is_deep: bool = False
) -> FoundStream:
    config, state = answer["config"], answer["state"]
    consumers: dict[str, FoundConsumer] = {}
    try:
        if not is_deep or state["consumer_count"]:
            async for one in _pages(client, f"CONSUMER.LIST.{config['name']}", "consumers", durables):
                consumers[one["name"]] = _consumer(one)
    except NotFound:
        pass  # deleted between two requests: the next look says so
    return FoundStream(
        name=config["name"],
        config=config,
        created=answer["created"],
        messages=state["messages"],
        bytes=state["bytes"],
        oldest_ns=_age_ns(state["first_ts"], answer["ts"]) if state["messages"] else 0,
        first=state["first_seq"],
        last=state["last_seq"],
        last_at=state["last_ts"] if state["last_seq"] else "",
        consumers=consumers,
    )


def _consumer(answer: Mapping[str, Any]) -> FoundConsumer:
    return FoundConsumer(
        name=answer["name"],
        config=answer["config"],
        created=answer["created"],
        delivered=answer["delivered"]["stream_seq"],
        unacked=answer["num_ack_pending"],
        pending=answer["num_pending"],
        redelivered=answer["num_redelivered"],
        deliveries=answer["delivered"]["consumer_seq"],
        acked=answer["ack_floor"]["stream_seq"],
        waiting=answer.get("num_waiting", 0),
    )


def _age_ns(first: str, now: str) -> int:
    """Both times are the server's."""
    return int((_time(now) - _time(first)).total_seconds() * 10**9)


def _time(text: str) -> datetime:
    whole, _, fraction = text.removesuffix("Z").partition(".")
    return datetime.fromisoformat(f"{whole}.{fraction[:6]:0<6}+00:00")


async def bring_about(
    client: Client, topology: Topology, known: Topology, permit: Permit, on_step: OnStep, *, is_whole: bool
) -> Plan:
    """Do what is permitted until nothing of it is left; return the plan that then remains."""
    failures = 0
    for _ in range(ROUNDS_MAX):
        left = plan(topology, await look(client, topology, is_whole=is_whole), known)
        todo = permit(left.steps).todo
        if not todo:
            return left
        for step in todo:
            try:
                if await _is_done(client, step):
                    on_step(step)
            except (TimedOut, OutcomeUnknown):
                break  # of several that make one thing in a cluster at once, some get no answer: look what is there
            except Unavailable:
                failures += 1
                if failures == FAILED_STEPS_MAX:
                    raise
                await asyncio.sleep(LOOK_AGAIN_S)
                break
    raise Unavailable(
        f"still not as declared after {ROUNDS_MAX} rounds: {', '.join(step.item for step in todo)}",
        hint="Somebody else changes them at the same time, or the server does not keep what it is told.",
        retry_after_s=1.0,
    )


async def _is_done(client: Client, step: Step) -> bool:
    """False when somebody else was quicker: the next look shows what is there now."""
    try:
        await carry_out(client, step)
    except _Overtaken:
        return False
    except OncewireError as error:
        if error.server_code in OVERTAKEN:
            return False
        raise
    return True


async def carry_out(client: Client, step: Step) -> None:
    if step.act is Act.RECREATE:
        await _delete(client, step)
    if step.consumer:
        action = "update" if step.act is Act.UPDATE else "create"
        body = {"stream_name": step.stream, "config": step.config, "action": action}
        await client.api(f"CONSUMER.CREATE.{step.stream}.{step.consumer}", body, timeout_s=STEP_TIMEOUT_S)
    else:
        verb = "UPDATE" if step.act is Act.UPDATE else "CREATE"
        await client.api(f"STREAM.{verb}.{step.stream}", step.config, timeout_s=STEP_TIMEOUT_S)


async def _delete(client: Client, step: Step) -> None:
    """Delete what the plan has seen, not what somebody else made anew since. Never sent twice."""
    where = f"{step.stream}.{step.consumer}" if step.consumer else step.stream
    noun = "CONSUMER" if step.consumer else "STREAM"
    now = await client.api(f"{noun}.INFO.{where}", timeout_s=STEP_TIMEOUT_S)
    if now["created"] != step.created:
        raise _Overtaken
    await client.api(f"{noun}.DELETE.{where}", timeout_s=STEP_TIMEOUT_S, repeat=False)
