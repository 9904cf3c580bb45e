"""Run everything again that a ledger says is done, and see whether the same comes out.

Each input that is done goes through its handler once more, in the order of commits, against the user's tables as they
were at the beginning: empty. What it returns must be the effects that the ledger holds, byte by byte under the same
ids; the tables that handlers wrote must hold the same rows at the end; the blocks must chain, and the state hash must
be what the entries add up to. The first thing that differs is named, with the input where it happened. A handler that
raises is tried again as if the input had been delivered again: it may have been so the first time.

Nothing goes out and nothing is changed: effects are compared, not published; `ctx.once` gives the recorded results and
calls nobody; rows go into a scratch place. A ledger that was shortened is replayed from where it begins, and then only
its hash and chain are certain, since the rows from before are not there.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import msgspec

from oncewire._ground.contracts import blocks, ids
from oncewire._ground.contracts.blocks import Announcement, Inputs, Outcome
from oncewire._ground.contracts.inputs import read_input
from oncewire._ground.errors import Corrupt, NotFound, Refused, Unavailable
from oncewire._ground.jetstream.losses import INCARNATION
from oncewire._ground.jetstream.protocol import parse_headers, parse_time_ns
from oncewire._ground.ledger import rules
from oncewire._ground.ledger.rules import Entry, Head, Ledger, Sending
from oncewire._ground.ledger.scratch import Scratch, TableDifference, open_scratch
from oncewire._ground.ledger.store import Block, Store
from oncewire._ground.ledger.tx import Tx
from oncewire.agent.agent import Agent
from oncewire.agent.context import Context, Section
from oncewire.agent.effects import Effect, effects_of, finished, message_of
from oncewire.agent.handlers import Handler, find_handler

SHOWN_CHARS = 200


class Difference(msgspec.Struct, frozen=True, omit_defaults=True):
    """The first thing that is not as the ledger says, and the input at which it shows ('' for the whole)."""

    what: str
    block: int = 0
    identity: str = ""
    subject: str = ""
    stream: str = ""
    sequence: int = 0


class HashReport(msgspec.Struct, frozen=True):
    """The state hash as stored and as the entries add up to; `difference` names the first block that does not fit."""

    agent: str
    ledger: str
    first: int
    last: int
    stored: str
    recomputed: str
    difference: Difference | None

    @property
    def is_equal(self) -> bool:
        return self.difference is None and self.stored == self.recomputed


class Report(msgspec.Struct, frozen=True):
    """What a replay found. `state` is what an adapter's `get_state` gives at the end, None for other agents."""

    hash: HashReport
    inputs: int
    effects: int
    tables: list[str]
    filled: list[str]
    difference: Difference | None
    rows: list[TableDifference]
    state: Any = None

    @property
    def is_equal(self) -> bool:
        return self.hash.is_equal and self.difference is None and not self.rows


# ---- pure: what must be the same


def effect_difference(stored: Sequence[Sending], made: Sequence[Sending]) -> str:
    """'' when they are the same messages in the same order; the stream is the server's affair."""
    for index, (one, other) in enumerate(zip(stored, made, strict=False)):
        for name in ("id", "subject", "payload", "headers", "trace"):
            was, now = getattr(one, name) or None, getattr(other, name) or None
            if was != now:
                return f"{name} of effect {index}: stored {_shown(was)}, made {_shown(now)}"
    if len(stored) != len(made):
        return f"{len(stored)} effects stored, {len(made)} made"
    return ""


def _shown(value: object) -> str:
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else repr(value)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}…"


def chain_difference(head: Head, block: Block, announced: Announcement, state: bytes) -> str:
    """'' when the block follows `head` and says the state that its entries add up to."""
    if (block.number, announced.number) != (head.number + 1, head.number + 1):
        return f"block {head.number + 1} says that it is {announced.number}"
    if announced.previous != head.hash.hex():
        return "it does not name the hash of the block before it"
    if announced.state != state.hex():
        return "its state hash is not what its entries add up to"
    if announced.effects != [effect.id for effect in block.content.effects]:
        return "its announcement names other effects"
    return ""


def split_effects(block: Block) -> Iterator[tuple[Entry, list[Sending]]]:
    """Each entry with its own effects."""
    at = 0
    for entry in block.content.entries:
        yield entry, block.content.effects[at : at + entry.effects]
        at += entry.effects


def at_entry(what: str, block: int, entry: Entry) -> Difference:
    return Difference(what, block, entry.identity, entry.subject, entry.stream, entry.sequence)


# ---- reading


def blocks_of(store: Store) -> Iterator[Block]:
    """All blocks that are kept, in order."""
    for number in range(store.base().number + 1, store.head().number + 1):
        block = store.block(number)
        if block is None and store.base().number >= number:
            raise Unavailable(f"block {number} was forgotten while it was about to be read", hint="Run it again.")
        if block is None:
            raise Corrupt(f"block {number} of the ledger is not there")
        yield block


def _opened(agent: Agent, store: Store) -> Ledger:
    ledger = store.open(agent.tenant, agent.workspace, agent.name)
    if store.head().number == 0:
        raise NotFound(
            f"agent {agent.full_name} has done nothing in {store.url}", hint="Check --store, tenant and workspace."
        )
    return ledger


def recompute_hash(agent: Agent, store: Store) -> HashReport:
    """`agent hash`: the chain and the state hash, from the entries alone."""
    with contextlib.closing(store):
        return _hash_report(_opened(agent, store), store)


def _hash_report(ledger: Ledger, store: Store) -> HashReport:
    base, end = store.base(), store.head()
    head, found = base, None
    for block in blocks_of(store):
        announced = blocks.read_announcement(block.announcement)
        counted = [entry for entry in block.content.entries if entry.outcome in blocks.COUNTED]
        state = blocks.add(head.state, [rules.element(ledger.name, entry) for entry in counted])
        wrong = chain_difference(head, block, announced, state)
        if wrong and found is None:
            found = Difference(wrong, block.number)
        head = Head(block.number, blocks.announcement_hash(block.announcement), state)
    if found is None and head.hash != end.hash:
        found = Difference("the chain's end is not the hash of its last block", end.number)
    return HashReport(ledger.name, ledger.id, base.number + 1, end.number, end.state.hex(), head.state.hex(), found)


# ---- running again


class _NotRecorded(Refused):
    """A handler asks for a call that the ledger has no result of."""


class _Past:
    """The ledger as it was when a block was about to be written: what an adapter folds its state from."""

    def __init__(self, store: Store, before: int) -> None:
        self._store = store
        self._head = store.head()._replace(number=before - 1)

    def head(self) -> Head:
        return self._head

    def block(self, number: int) -> Block | None:
        return self._store.block(number)


class _Work:
    """What stands behind a context: the scratch place, and the results that were recorded."""

    def __init__(self, store: Store, scratch: Scratch, block: int, entry: Entry, handler: Handler | None) -> None:
        self._is_async = handler is not None and handler.is_async
        self.history = _Past(store, block)
        self._recorded = store
        self._scratch = scratch.store
        self._key = entry.key
        self._tx: Tx | None = None
        self._is_good = True

    def tx(self, _: Context) -> Tx | Section:
        return Section(self._enter, self._leave) if self._is_async else self._open()

    def _open(self) -> Tx:
        if self._tx is None:
            self._tx = self._scratch.savepoint()
        return self._tx

    async def _enter(self) -> Tx:
        return self._open()

    def _leave(self, is_good: bool) -> None:
        self._is_good = is_good

    async def once(self, name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ARG002 - nobody is called
        recorded = self._recorded.call_result(self._key, name)
        if recorded is None:
            raise _NotRecorded(f"ctx.once({name!r}) is not recorded")
        return msgspec.json.decode(recorded)

    def finish(self, *, is_good: bool) -> None:
        if self._tx is not None:
            self._tx = None
            (self._scratch.keep if is_good and self._is_good else self._scratch.undo)()


class _Replay:
    """One pass over the ledger. Stops at the first difference."""

    def __init__(self, agent: Agent, ledger: Ledger, store: Store, scratch: Scratch) -> None:
        self._agent = agent
        self._ledger = ledger
        self._store = store
        self._scratch = scratch
        self._waiting: dict[str, tuple[Sending, Difference]] = {}
        self.inputs = 0
        self.effects = 0

    async def run(self) -> Difference | None:
        for block in blocks_of(self._store):
            found = await self._block(block)
            if found is not None:
                return found
        return self._still_waiting()

    async def _block(self, block: Block) -> Difference | None:
        told = blocks.read_announcement(block.announcement).inputs
        for entry, stored in split_effects(block):
            if entry.outcome is Outcome.DONE:
                found = await self._entry(block.number, entry, _told_of(told, entry), stored)
                if found is not None:
                    return found
        return self._due(block) if not block.content.entries else None

    async def _entry(self, number: int, entry: Entry, told: Inputs, stored: list[Sending]) -> Difference | None:
        for deliveries in range(1, self._agent.max_deliver + 1):
            work = _Work(self._store, self._scratch, number, entry, find_handler(self._agent.handlers, entry.subject))
            try:
                made = await self._handle(entry, told, deliveries, work)
            except Exception as error:  # whatever a handler raises: at some delivery it did not
                work.finish(is_good=False)
                failed = at_entry(f"it fails now: {rules.short_error(error)}", number, entry)
            else:
                work.finish(is_good=True)
                return self._compare(number, entry, stored, made)
        return failed

    def _compare(
        self, number: int, entry: Entry, stored: list[Sending], made: list[tuple[Effect, Sending]]
    ) -> Difference | None:
        now = [sending for effect, sending in made if not effect.delay_s]
        wrong = effect_difference(stored, now)
        if wrong:
            return at_entry(wrong, number, entry)
        self.inputs += 1
        self.effects += len(made)
        missing = at_entry("its delayed effect is nowhere", number, entry)
        self._waiting |= {sending.id: (sending, missing) for effect, sending in made if effect.delay_s}
        return None

    async def _handle(self, entry: Entry, told: Inputs, deliveries: int, work: _Work) -> list[tuple[Effect, Sending]]:
        handler = find_handler(self._agent.handlers, entry.subject)
        if handler is None:
            raise Refused("no handler knows the subject")
        origin = ids.Origin(
            entry.stream, parse_time_ns(told.created.partition(INCARNATION)[0]), entry.sequence, entry.timestamp_ns
        )
        carried = parse_headers(entry.header) if entry.header else {}
        input_ = read_input(entry.body, subject=entry.subject, origin=origin, carried=carried)
        context = Context(
            input_.envelope, input_.identity, entry.subject, entry.stream, entry.sequence, told.consumer, deliveries,
            work,
        )  # fmt: skip
        returned = handler.run(context, handler.decode(input_.envelope.payload))
        if handler.is_async:
            async with asyncio.timeout(handler.timeout_s or self._agent.handler_timeout_s):
                returned = await returned
        effects, ledger = effects_of(returned), self._ledger
        made = [message_of(one, ledger, input_, at, "") for at, one in enumerate(effects)]
        return list(zip(effects, finished(ledger, made), strict=True))

    def _due(self, block: Block) -> Difference | None:
        """Delayed effects whose time came: each must have been waiting."""
        for effect in block.content.effects:
            if effect.id not in self._waiting:
                if self._store.base().number:  # its input was forgotten
                    continue
                return Difference(f"no input explains the effect {effect.id} on {effect.subject}", block.number)
            made, origin = self._waiting.pop(effect.id)
            wrong = effect_difference([effect], [made])
            if wrong:
                return msgspec.structs.replace(origin, what=wrong)
        return None

    def _still_waiting(self) -> Difference | None:
        stored = {one.sending.id: one.sending for one in self._store.waiting()}
        for id_, (made, origin) in self._waiting.items():
            if id_ not in stored:
                return origin
            wrong = effect_difference([stored[id_]], [made])
            if wrong:
                return msgspec.structs.replace(origin, what=wrong)
        return None


def _told_of(told: Sequence[Inputs], entry: Entry) -> Inputs:
    """By which durable an input came that is done."""
    return next(
        one
        for one in told
        if one.stream == entry.stream and any(first <= entry.sequence <= last for first, last in one.done)
    )


def replay(agent: Agent, store: Store) -> Report:
    """`agent replay`. Not inside a running event loop: it brings its own."""
    return asyncio.run(_replay(agent, store))


async def _replay(agent: Agent, store: Store) -> Report:
    with contextlib.closing(store):
        ledger = _opened(agent, store)
        async with agent.lifespan(agent):
            report, only_read = await _pass(agent, ledger, store, ())
            if not report.is_equal and only_read:
                # What handlers only read was not theirs to make: give it to them and try again.
                report, _ = await _pass(agent, ledger, store, only_read)
        return report


async def _pass(agent: Agent, ledger: Ledger, store: Store, filled: Collection[str]) -> tuple[Report, set[str]]:
    with open_scratch(store, filled) as scratch:
        hashed = _hash_report(ledger, store)
        run = _Replay(agent, ledger, store, scratch)
        found = await run.run()
        touched = scratch.touched()
        tables = sorted(touched.written)
        compared = tables if found is None and not store.base().number else []
        rows = [one for one in map(scratch.compare, compared) if one is not None]
        state = _state(agent, store) if found is None else None
    report = Report(hashed, run.inputs, run.effects, tables, sorted(filled), found, rows, state)
    return report, touched.only_read


def _state(agent: Agent, store: Store) -> Any:
    if agent.adapted is None:
        return None
    agent.adapted.catch_up(store)
    return agent.adapted.get_state()
