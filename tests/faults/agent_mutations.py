"""The runtime built wrongly on purpose: one step of its protocol swapped, skipped or left out at a time.

A harness that stays green with one of these proves nothing. Each is put into the worker's process only.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
from collections.abc import Callable
from typing import Any

import msgspec

from oncewire._ground import native
from oncewire._ground.contracts import ids
from oncewire._ground.jetstream import Client, Outgoing, Pull
from oncewire.agent import outflow
from oncewire.agent.outflow import Outflow, outgoing
from oncewire.agent.ways import Ways
from tests.faults.agent_points import Points

Mutation = Callable[[type, Points], None]
MUTATIONS: dict[str, Mutation] = {}
WAYS = ("publish_many", "publish_all", "publish_fast")


def apply(name: str, store: type, at: Points) -> None:
    if name:
        MUTATIONS[name](store, at)


def mutation(function: Mutation) -> Mutation:
    MUTATIONS[function.__name__] = function
    return function


def _wrap(cls: Any, method: str, around: Callable[..., Any]) -> None:
    """`around(original, self, …)` instead of the method."""
    original = getattr(cls, method)
    setattr(cls, method, functools.wraps(original)(lambda self, *args, **kw: around(original, self, *args, **kw)))


# ---- two steps swapped


@mutation
def ack_before_commit(store: type, at: Points) -> None:
    """At most once: acked as soon as it is there."""

    async def fetch(original: Any, self: Pull, *args: Any, **kwargs: Any) -> Any:
        messages = await original(self, *args, **kwargs)
        if messages:
            self.ack(messages)
            await self._connection.flush(5.0)
        return messages

    _wrap(Pull, "fetch", fetch)


@mutation
def ack_before_publish(store: type, at: Points) -> None:
    """The ack is not last: while the effects are on their way, nobody would bring the input again."""
    fetched: list[tuple[Pull, Any]] = []

    async def fetch(original: Any, self: Pull, *args: Any, **kwargs: Any) -> Any:
        messages = await original(self, *args, **kwargs)
        fetched.extend((self, message) for message in messages)
        return messages

    async def publish(original: Any, self: Client, *args: Any, **kwargs: Any) -> Any:
        while fetched:
            pull, message = fetched.pop()
            pull.ack([message])
        await self.connection.flush(5.0)
        at("swapped")
        return await original(self, *args, **kwargs)

    _wrap(Pull, "fetch", fetch)
    for way in WAYS:
        _wrap(Client, way, publish)


@mutation
def publish_before_commit(store: type, at: Points) -> None:
    """The world hears of it before it is decided."""
    known: dict[str, Any] = {}
    _remember_loop(known)

    def append(original: Any, self: Any, content: Any, *args: Any) -> Any:
        appended = original(self, content, *args)
        if content.effects:
            sending = known["client"].publish_many(outgoing(content.effects))
            asyncio.run_coroutine_threadsafe(sending, known["loop"]).result(10)
            at("swapped")
        return appended

    _wrap(store, "append", append)


def _remember_loop(known: dict[str, Any]) -> None:
    async def open_(original: Any, self: Client) -> None:
        known["client"], known["loop"] = self, asyncio.get_running_loop()
        await original(self)

    _wrap(Client, "open", open_)


@mutation
def rows_committed_before_the_block(store: type, at: Points) -> None:
    """Two transactions instead of one: the handlers' rows, then the ledger."""

    def append(original: Any, self: Any, content: Any, *args: Any) -> Any:
        if content.entries:
            self.commit()
            at("swapped")
            self.begin()
        return original(self, content, *args)

    _wrap(store, "append", append)


@mutation
def delayed_dropped_before_sent(store: type, at: Points) -> None:
    """The row of a delayed effect goes before the block that sends it is there."""

    def append(original: Any, self: Any, content: Any, *args: Any) -> Any:
        if content.effects and not content.entries:
            self.drop_due([one.id for one in content.effects])
            self.commit()
            at("swapped")
            self.begin()
        return original(self, content, *args)

    _wrap(store, "append", append)


# ---- a step skipped


@mutation
def marks_never_written(store: type, at: Points) -> None:
    _wrap(store, "mark", lambda original, self, marks: None)


@mutation
def sweep_skipped(store: type, at: Points) -> None:
    _wrap(store, "unconfirmed", lambda original, self: [])


@mutation
def resend_pretended(store: type, at: Points) -> None:
    """What was left open is marked as published, and nobody has looked."""

    async def resend(original: Any, self: Outflow, block: Any, holes: Any, now_ms: int) -> Any:
        from oncewire._ground.ledger.store import Mark

        return [Mark(block.number, first, last, "LEDGER", 1) for first, last in holes], ""

    _wrap(Outflow, "resend", resend)


@mutation
def claim_ignored(store: type, at: Points) -> None:
    """Every delivery is taken for the first."""

    def claim(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        original(self, *args, **kwargs)
        return {}

    _wrap(store, "claim", claim)


@mutation
def calls_never_recorded(store: type, at: Points) -> None:
    _wrap(store, "keep_call", lambda original, self, *args: None)


@mutation
def delayed_never_dropped(store: type, at: Points) -> None:
    _wrap(store, "drop_due", lambda original, self, ids_: set(ids_))


@mutation
def block_not_announced(store: type, at: Points) -> None:
    """Effects go out, the announcement does not."""

    def announce(messages: Any) -> Any:
        return [one for one in messages if not one.subject.startswith("ledger.")]

    async def publish(original: Any, self: Client, messages: Any, *args: Any, **kwargs: Any) -> Any:
        from oncewire._ground.jetstream import PubAck

        acks = iter(await original(self, announce(messages), *args, **kwargs))
        return [PubAck("LEDGER", 1) if one.subject.startswith("ledger.") else next(acks) for one in messages]

    _wrap(Client, "publish_many", publish)
    _wrap(Client, "publish_all", publish)


# ---- a step done carelessly


@mutation
def fsync_left_out(store: type, at: Points) -> None:
    """SQLite: commits that only the kernel has. PostgreSQL: commits that only the server's memory has."""

    def open_(original: Any, self: Any, *args: Any) -> Any:
        ledger = original(self, *args)
        if hasattr(self, "path"):
            self.connection.execute("PRAGMA synchronous = OFF")
            self.connection.execute("PRAGMA wal_autocheckpoint = 0")
        else:
            self._session.connection.execute("SET SESSION synchronous_commit = off")
        return ledger

    _wrap(store, "open", open_)


@mutation
def confirmed_half_way(store: type, at: Points) -> None:
    """What the server says of a first part of fast ingest is taken for the whole."""

    async def ingest(original: Any, self: Client, messages: Any, *args: Any, **kwargs: Any) -> Any:
        half = await original(self, messages[: (len(messages) + 1) // 2], *args, **kwargs)
        return msgspec.structs.replace(half, count=len(messages))

    outflow.MANY = 2
    _wrap(Ways, "wants_look", lambda *_: False)
    _wrap(Ways, "choose_atomic", lambda *_: False)
    _wrap(Client, "publish_fast", ingest)


@mutation
def random_ids_at_publish(store: type, at: Points) -> None:
    """Each attempt to publish is a message of its own."""

    async def publish(original: Any, self: Client, messages: Any, *args: Any, **kwargs: Any) -> Any:
        fresh = [
            one if one.subject.startswith("ledger.") else _with_id(one, f"fx.{secrets.token_hex(20)}")
            for one in messages
        ]
        return await original(self, fresh, *args, **kwargs)

    for way in WAYS:
        _wrap(Client, way, publish)


def _with_id(one: Outgoing, id_: str) -> Outgoing:
    return msgspec.structs.replace(one, msg_id=id_)


@mutation
def random_effect_ids(store: type, at: Points) -> None:
    """Ids by chance: a second run of the same input makes other messages."""
    native.caused = None  # its twin is the one that is built wrongly
    ids.effect_ids = lambda *parts: [f"fx.{secrets.token_hex(20)}" for _ in parts[-1]]  # type: ignore[assignment]


@mutation
def ids_without_the_index(store: type, at: Points) -> None:
    """With less in it, messages swallow each other."""
    native.caused = None
    original = ids.effect_ids
    ids.effect_ids = lambda tenant, workspace, agent, effects: original(  # type: ignore[assignment]
        tenant, workspace, agent, [(identity, 0) for identity, _ in effects]
    )


@mutation
def old_effects_not_looked_up(store: type, at: Points) -> None:
    """Published again, however old: the server has forgotten the id."""
    outflow.is_doubtful = lambda *_: False  # type: ignore[assignment]
