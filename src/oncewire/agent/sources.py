"""Where an agent's inputs come from: durable pull consumers, and the proof that this ledger owns them.

An agent makes one durable per stream that it reads. `Agent(consumers=…)` binds it to declared ones instead, of which a
stream may have several; one that is missing is created as it is declared.

Two agents or two ledgers on one durable would each run half of the inputs and know nothing of the other half, so the
owner (agent and ledger) stands in a create-only key: the second one refuses to run. A copy of the first ledger is
refused as well, until a person says that only the copy will run from now on. A ledger that is behind what it has
announced was copied or restored, and refuses too. So does an agent whose stream went back: sequences that it settled
are being used again, so new messages would pass for old ones, until a person looks and starts a new incarnation of the
stream.
"""

from __future__ import annotations

import hashlib
from itertools import combinations
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec

from oncewire._ground.contracts import subjects
from oncewire._ground.contracts.blocks import Announcement, read_announcement
from oncewire._ground.errors import Conflict, Corrupt, NotFound, Refused
from oncewire._ground.jetstream import Client, codes, losses
from oncewire._ground.jetstream.keyvalue import Entry
from oncewire._ground.jetstream.losses import Cause, Loss
from oncewire._ground.ledger.rules import Durable, Head, Ledger, Source, brings
from oncewire._ground.ledger.store import Store
from oncewire._ground.settings import Settings
from oncewire._ground.topology import names
from oncewire._ground.topology.service import ensure_durable
from oncewire.agent.agent import Agent
from oncewire.agent.outflow import now_ms

OWNERS_BUCKET = "OW_LEDGERS"
LEDGER_STREAM = "LEDGER"
BLOCKS_BACK_MAX = 1_000
"""So far back a start looks for the last settled input of each stream."""
DELIVERIES_UNLIMITED = 1 << 31


class Opened(NamedTuple):
    """A durable that is ready to be pulled from."""

    source: Source
    ack_wait_s: float
    max_deliver: int
    delivered: int
    first: int
    """Where the stream began when it was opened."""


def durable_of(agent: Agent, stream: str, settings: Settings) -> str:
    """The agent's durable on a stream: the settings' prefix on `sr-*`, its own name elsewhere."""
    if stream.startswith(f"{settings.stream_prefix}-"):
        return names.sr_durable_name(settings.consumer_prefix, agent.name, agent.tenant, agent.workspace)
    return names.durable_name(agent.name, agent.tenant, agent.workspace)


async def open_all(client: Client, agent: Agent, settings: Settings) -> dict[Durable, Opened]:
    """The durables that the agent reads, ready to be pulled from."""
    if not agent.handlers:
        raise Refused(f"agent {agent.full_name} has no handlers", hint="Register one with @agent.on.")
    opened: list[Opened] = []
    patterns = await patterns_by_stream(client, agent)
    _check_bound(agent, patterns)
    for stream, mine in patterns.items():
        if stream in agent.consumers:
            opened += await _open_declared(client, agent, stream, mine, settings)
        else:
            opened.append(await open_source(client, agent, stream, mine, durable_of(agent, stream, settings)))
    return {one.source.durable: one for one in opened}


def durables_of(agent: Agent, stream: str, settings: Settings) -> tuple[str, ...]:
    """The names of all its durables on a stream."""
    return agent.consumers.get(stream) or (durable_of(agent, stream, settings),)


def _check_bound(agent: Agent, patterns: dict[str, list[str]]) -> None:
    unread = sorted(set(agent.consumers) - set(patterns))
    if unread:
        raise Refused(
            f"agent {agent.full_name} is bound to consumers on {unread[0]}, and no handler reads that stream",
            hint=f"Register a handler for its subjects, or take {unread[0]} out of `consumers`.",
        )


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
    return {stream: without_covered(patterns) for stream, patterns in found.items()}


def without_covered(patterns: list[str]) -> list[str]:
    """The filters of a consumer may not overlap: a pattern that another one covers brings nothing more."""
    return [one for one in patterns if not any(other != one and subjects.covers(other, one) for other in patterns)]


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
        _check_order(info["config"], agent, consumer)
    return await _opened(client, info)


async def _open_declared(
    client: Client, agent: Agent, stream: str, patterns: list[str], settings: Settings
) -> list[Opened]:
    """Consumers of the catalog: their settings count, and nothing of them is changed."""
    named = agent.consumers[stream]
    opened = [await _opened(client, await _declared_info(client, stream, name, settings)) for name in named]
    for one in opened:
        _check_handled(one.source, patterns)
    _check_apart([one.source for one in opened])
    for pattern in patterns:
        if not any(subjects.overlaps(mine, pattern) for one in opened for mine in one.source.filters):
            raise Conflict(
                f"no consumer of agent {agent.full_name} on {stream} brings {pattern}, so its handler would never run",
                hint=f"Name one that does beside {', '.join(named)} in `consumers`.",
            )
    return opened


async def _declared_info(client: Client, stream: str, consumer: str, settings: Settings) -> dict[str, Any]:
    """As the server has it; one that is missing is created from its declaration."""
    try:
        return await client.api(f"CONSUMER.INFO.{stream}.{consumer}")
    except NotFound:
        await ensure_durable(client, stream, consumer, settings)
        return await client.api(f"CONSUMER.INFO.{stream}.{consumer}")


def _check_handled(source: Source, patterns: list[str]) -> None:
    if not all(any(subjects.covers(mine, pattern) for mine in patterns) for pattern in source.filters):
        raise Conflict(
            f"consumer {source.consumer} on {source.stream} brings {', '.join(source.filters)}, which the agent does "
            "not handle all of",
            hint="Register a handler for each of its subjects.",
        )


def _check_apart(sources: list[Source]) -> None:
    """What two of them bring would come twice, and nobody could tell by which it came."""
    for one, other in combinations(sources, 2):
        both = [mine for mine in one.filters if any(subjects.overlaps(mine, pattern) for pattern in other.filters)]
        if both:
            raise Conflict(
                f"consumers {one.consumer} and {other.consumer} on {one.stream} both bring {both[0]}",
                hint="Bind the agent to one of them.",
            )


async def _opened(client: Client, info: dict[str, Any]) -> Opened:
    stream, config = info["stream_name"], info["config"]
    about = await client.api(f"STREAM.INFO.{stream}")
    source = Source(
        stream,
        await losses.incarnation_of(client, stream, about["created"]),
        info["name"],
        tuple(filters_of(config)),
        max(1, int(config.get("opt_start_seq") or 1)),
        about["config"]["retention"] == "workqueue",
    )
    limit = config.get("max_deliver", -1)
    deliveries = limit if limit > 0 else DELIVERIES_UNLIMITED
    first = about["state"]["first_seq"]
    return Opened(source, config["ack_wait"] / 1e9, deliveries, info["delivered"]["stream_seq"], first)


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


async def apply(client: Client, agent: Agent, settings: Settings) -> dict[str, list[str]]:
    """Bring the agent's own durables to what it asks for now: filters, ack_wait, max_deliver, max_ack_pending. By
    consumer what changed; those of the catalog are left alone."""
    changed: dict[str, list[str]] = {}
    for stream, patterns in (await patterns_by_stream(client, agent)).items():
        if stream in agent.consumers:
            continue
        consumer = durable_of(agent, stream, settings)
        wanted = consumer_config(agent, consumer, patterns)
        try:
            found = (await client.api(f"CONSUMER.INFO.{stream}.{consumer}"))["config"]
        except NotFound:
            await open_source(client, agent, stream, patterns, consumer)
            changed[f"{stream}/{consumer}"] = ["created"]
            continue
        differs = _differences(found, wanted)
        if differs:
            config = {name: value for name, value in found.items() if not name.startswith("filter_subject")} | wanted
            body = {"stream_name": stream, "config": config, "action": "update"}
            await client.api(f"CONSUMER.CREATE.{stream}.{consumer}", body)
        changed[f"{stream}/{consumer}"] = differs
    return changed


def _differences(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    names = [name for name in ("ack_wait", "max_deliver", "max_ack_pending") if found.get(name) != wanted[name]]
    return names + (["filters"] if sorted(filters_of(found)) != sorted(filters_of(wanted)) else [])


def filters_of(config: dict[str, Any]) -> list[str]:
    return config.get("filter_subjects") or [config.get("filter_subject") or ">"]


def _check_filters(config: dict[str, Any], patterns: list[str], consumer: str) -> None:
    if sorted(filters_of(config)) != sorted(patterns):
        raise Conflict(
            f"consumer {consumer} filters {', '.join(filters_of(config))}, the agent handles {', '.join(patterns)}",
            hint="Run `oncewire agent apply` to change the durable of this agent.",
        )


def _check_order(config: dict[str, Any], agent: Agent, consumer: str) -> None:
    if agent.is_ordered and config.get("max_ack_pending") != 1:
        raise Conflict(
            f"consumer {consumer} gives out {config.get('max_ack_pending')} messages at a time, so order is lost",
            hint="Run `oncewire agent apply` to change the durable of this agent.",
        )


def _owner_key(source: Source) -> str:
    created = hashlib.sha256(source.created.encode()).hexdigest()[:12]
    return f"{source.stream}.{created}.{source.consumer}"


class Owner(msgspec.Struct, frozen=True):
    """Whose a durable is: an agent by its full name, its ledger's id, and the store that holds the ledger."""

    agent: str
    ledger: str
    store: str


def owner_of(store: Store, agent: Agent) -> Owner:
    """The agent on this store, which is open."""
    return Owner(agent.full_name, **store.identity())


async def own(client: Client, source: Source, owner: Owner) -> None:
    """Prove that no other agent and no other ledger works on this durable."""
    bucket, key, value = client.kv(OWNERS_BUCKET), _owner_key(source), msgspec.json.encode(owner)
    while True:
        try:
            await bucket.create(key, value)
        except Conflict:
            entry = await bucket.get(key, is_exact=True)
            if entry is None:  # deleted in between
                continue
            if entry.value != value:
                raise _not_ours(source, _read_owner(entry), owner) from None
        return


def _read_owner(entry: Entry) -> Owner:
    try:
        return msgspec.json.decode(entry.value, type=Owner)
    except msgspec.DecodeError as error:
        raise Corrupt(
            f"bucket {OWNERS_BUCKET} has no owner at {entry.key}: {error}",
            hint="Only agents write there. If none runs on this durable any more, delete the key.",
        ) from None


def _not_ours(source: Source, owner: Owner, own: Owner) -> Refused:
    name = f"consumer {source.consumer} on {source.stream}"
    if owner.agent != own.agent:
        return Refused(
            f"{name} belongs to agent {owner.agent}, this one is {own.agent}",
            hint="Each would get only a part of the messages. Give one of the agents another name.",
        )
    if owner.ledger == own.ledger:
        return Refused(
            f"{name} belongs to this ledger at another place: this one was copied, moved or restored",
            hint="Go on with the other one; if that is gone for good, `oncewire agent adopt MODULE:AGENT --store …`.",
        )
    return Refused(
        f"{name} belongs to another ledger of agent {own.agent}",
        hint="All processes of this agent share one ledger: the same SQLite file on one machine, or PostgreSQL for "
        "several, --store postgresql://…",
    )


async def adopt(client: Client, agent: Agent, settings: Settings, store: Store) -> list[str]:
    """Let the agent's durables belong to its ledger at the place where it stands now, and name those that did not.

    A person says by this that nobody will work at the other place again. What can be seen against it is looked at
    first: somebody who pulls, a ledger that is behind what it has announced, and one that is another.
    """
    ledger = store.open(agent.tenant, agent.workspace, agent.name)
    own, bucket = owner_of(store, agent), client.kv(OWNERS_BUCKET)
    announced = await last_announced(client, ledger)
    check_not_behind(store.head(), announced)
    elsewhere: dict[str, tuple[Source, Entry]] = {}
    for opened in (await open_all(client, agent, settings)).values():
        entry = await bucket.get(_owner_key(opened.source), is_exact=True)
        if entry is None or entry.value == msgspec.json.encode(own):
            continue
        owner = _read_owner(entry)
        if (owner.agent, owner.ledger) != (own.agent, own.ledger):
            raise _not_ours(opened.source, owner, own)
        await _check_nobody_pulls(client, opened.source)
        elsewhere[f"{opened.source.stream}/{opened.source.consumer}"] = (opened.source, entry)
    for source, entry in elsewhere.values():
        await bucket.update(_owner_key(source), msgspec.json.encode(own), entry.revision)
    return list(elsewhere)


async def _check_nobody_pulls(client: Client, source: Source) -> None:
    """An agent that has nothing to do always asks for more."""
    if (await client.api(f"CONSUMER.INFO.{source.stream}.{source.consumer}")).get("num_waiting"):
        raise Refused(
            f"somebody pulls from consumer {source.consumer} on {source.stream}: the ledger's other place is in use",
            hint="Stop that agent for good, then adopt again. What it asked for last may wait for half a minute.",
        )


async def last_announced(client: Client, ledger: Ledger) -> int:
    """The number of the block that this ledger has announced last; 0 when there is none."""
    try:
        last = await client.get_last(LEDGER_STREAM, subjects.ledger(ledger.agent, ledger.id))
    except NotFound:
        return 0
    return msgspec.json.decode(last.payload, type=Announcement).number


def check_not_behind(head: Head, announced: int) -> None:
    """A ledger that has announced more than it holds was copied or restored. `head` is read after `announced`: in
    between another process may commit and announce."""
    if announced > head.number:
        raise Corrupt(
            f"the ledger ends at block {head.number}, but has announced block {announced}",
            hint="It was copied or restored from a backup: what came after would happen twice. Use the newest copy.",
        )


# ---- streams that went back


class Seen(msgspec.Struct, frozen=True):
    """A position up to which a ledger knows a stream, and when the stream took in the message there (0: unknown)."""

    created: str
    sequence: int
    timestamp_ns: int = 0


def note_name(source: Source) -> str:
    """Under which a ledger notes how far it has seen a durable."""
    return f"{source.stream}/{source.consumer}"


def last_seen(store: Store, opened: list[Opened]) -> dict[Durable, Seen]:
    """How far each durable was seen, as noted; the first time it begins where the stream does."""
    found: dict[Durable, Seen] = {}
    for one in opened:
        noted = store.noted(note_name(one.source))
        seen = msgspec.json.decode(noted, type=Seen) if noted else None
        is_known = seen is not None and seen.created == one.source.created
        found[one.source.durable] = seen if seen and is_known else Seen(one.source.created, max(0, one.first - 1))
    return found


def last_settled(store: Store, number: int, opened: list[Opened]) -> dict[Durable, Seen]:
    """The highest settled sequence of each durable in its stream's present incarnation, from the newest blocks that
    have one."""
    found: dict[Durable, Seen] = {}
    for at in range(number, max(0, number - BLOCKS_BACK_MAX), -1):
        block = store.block(at)
        if len(found) == len(opened) or block is None:
            break
        told = read_announcement(block.announcement)
        for source in [one.source for one in opened if one.source.durable not in found]:
            if any((one.stream, one.created) == (source.stream, source.created) for one in told.inputs):
                mine = [one for one in block.content.entries if one.stream == source.stream]
                last = max((one for one in mine if brings(source.filters, one.subject)), key=_sequence, default=None)
                if last is not None:
                    found[source.durable] = Seen(source.created, last.sequence, last.timestamp_ns)
    return found


_sequence = attrgetter("sequence")


async def check_not_back(client: Client, source: Source, seen: Seen, ledger_id: str) -> None:
    """What was seen last must still be what it was; else record the loss and refuse to run."""
    stream = source.stream
    last = (await client.api(f"STREAM.INFO.{stream}"))["state"]["last_seq"]
    if last >= seen.sequence:
        try:
            stored = await client.get(stream, seen.sequence) if seen.timestamp_ns else None
        except NotFound:  # trimmed, or acked from a work queue: nothing speaks against it
            return
        if stored is None or stored.timestamp_ns == seen.timestamp_ns:
            return
    first = min(seen.sequence, last + 1)
    loss = Loss(stream, source.created, source.consumer, Cause.WENT_BACK, first, seen.sequence, now_ms(), ledger_id)
    await losses.record(client, loss)
    raise Corrupt(
        f"stream {stream} went back: it ends at {last}, and message {seen.sequence} that was there before is not",
        hint="It was restored, or lost its end in a power cut. What was lost stands in the bucket OW_LOSSES; "
        f"`oncewire agent apply --accept-loss {stream}` lets the agent go on with the stream as it is.",
    )
