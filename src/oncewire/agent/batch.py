"""One group commit: what happens to a batch of inputs between BEGIN and COMMIT.

Runs in the ledger's thread, on the store alone: no network, no event loop. The decision for each input:

    replay meant for another consumer          passed
    does not keep its contract                 terminated, handed to the dead-letter service
    no handler knows the subject               retried; at its last delivery dead ("no_handler")
    identity done, same subject and content    duplicate (or, at the same position, the same input again: resumed)
    identity done, other subject or content    dead ("identity_conflict"), never dropped
    handler returns                            done, with its effects
    handler raises Retry or anything else      retried after a delay; at its last delivery dead (see `ends`)
    handler raises Terminate                   terminated, handed to the dead-letter service

Everything that is handed to the dead-letter service is an effect like any other: in the ledger before it is published,
published before the message is settled.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, NamedTuple

import msgspec

from oncewire._ground import logs
from oncewire._ground.contracts import headers as names
from oncewire._ground.contracts import letters
from oncewire._ground.contracts.blocks import Outcome, raw_digest
from oncewire._ground.contracts.inputs import Input
from oncewire._ground.contracts.runtime import FRAMED_BYTES_MAX, Frame, RuntimeEnvelope
from oncewire._ground.errors import ContractViolation, TooLarge
from oncewire._ground.fields import columns, distinct
from oncewire._ground.jetstream.protocol import Message
from oncewire._ground.jetstream.pull import Delivery
from oncewire._ground.ledger import rules
from oncewire._ground.ledger.keys import Place
from oncewire._ground.ledger.rules import Content, Delayed, Entry, Ledger, Sending, Sources
from oncewire._ground.ledger.store import Appended, Attempt, Mark, Store
from oncewire.agent.context import Context, SyncWork
from oncewire.agent.effects import (
    Effect,
    Plain,
    Retry,
    Terminate,
    check_target,
    delayed_of,
    effects_of,
    finished,
    frame_of,
    plain_of,
    sending_of,
)
from oncewire.agent.ends import failure_of, reason_of, traceback_of
from oncewire.agent.handlers import UNREAD, Handler
from oncewire.agent.handover import letter_request

log = logging.getLogger("oncewire.agent")

NO_HANDLER = "no_handler"
IDENTITY_CONFLICT = "identity_conflict"
_set_trace_id = logs.trace_id.set
_TERMINAL = (Outcome.TERMINATED, Outcome.DEAD)
"""Settled by TERM: the server tells that it was given up."""


class Item(msgspec.Struct, frozen=True, gc=False):
    """An input in hand, read and ready to be decided on. `wrong` says why it can never be handled."""

    message: Message
    delivery: Delivery
    subject: str
    input: Input | None
    handler: Handler | None
    key: bytes
    at_key: bytes
    wrong: str = ""
    is_passed: bool = False

    @property
    def carried(self) -> dict[str, str]:
        """The headers of the message."""
        return self.message.headers


class _Done(NamedTuple):
    """What was said under an identity that is done."""

    subject: str
    digest: bytes


class _Ended(msgspec.Struct, frozen=True, gc=False):
    """How an input ended, before it is written: with its key, the error, and how many effects it has."""

    item: Item
    outcome: Outcome
    key: bytes
    error: str
    effects: int


class Worked(NamedTuple):
    """When a handler ran, for whoever traces it; its effects are `sendings[first:last]`."""

    item: Item
    began_ns: int
    ended_ns: int
    error: str
    first: int
    last: int


@dataclass
class Settled:
    """What must be done once the commit is durable, in this order: publish, then ack; retries may go at once."""

    block: int = 0
    sendings: list[Sending] = field(default_factory=list)
    announcement: bytes = b""
    acks: list[Message] = field(default_factory=list)
    terms: list[tuple[Message, str]] = field(default_factory=list)
    naks: list[tuple[Message, float]] = field(default_factory=list)
    resumes: list[tuple[int, Message]] = field(default_factory=list)
    later: list[Item] = field(default_factory=list)
    left: list[Item] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    worked: list[Worked] = field(default_factory=list)


Point = Callable[[str], None]
"""Called at each named step. Production passes `nothing_happens`; fault tests make the power go there."""


class PowerCut(BaseException):
    """What a Point raises when the process is to end there: nothing may take it for a failure and go on."""


def nothing_happens(step: str) -> None:
    """The default at every named step."""


class Limits(NamedTuple):
    """What the batch must know of its agent and its surroundings."""

    ledger: Ledger
    max_deliver: int
    stream_of: Callable[[str], str]
    check_size: Callable[[Sending], None]
    now_ms: int
    at: Point = nothing_happens
    budget_s: float = float("inf")
    """So long a batch may hold the ledger; inputs that it has not come to are left for the next."""
    is_careful: bool = False
    """Every input of the batch has a durable mark that it began."""
    around: Callable[[Item], AbstractContextManager[Any]] | None = None
    """Where handlers are traced: the span that each runs in."""


class GroupCommit:
    """Decides on one batch inside one transaction."""

    def __init__(self, store: Store, limits: Limits, sources: Sources) -> None:
        self.store = store
        self.limits = limits
        self.sources = sources
        self.entries: list[Entry] = []
        self._outcomes: list[_Ended] = []
        self._done: list[Item] = []
        self._done_effects: list[int] = []
        """Done since the last of `_outcomes`, and how many effects each has: mostly that is all there is."""
        self.sendings: list[Sending | Plain] = []
        self.delayed: list[Delayed] = []
        self.failed: list[Attempt] = []
        self.ended: list[bytes] = []
        self.out = Settled()
        self._work = SyncWork(store)
        self._now: dict[bytes, _Done] = {}
        self._here: set[bytes] = set()
        self._ways: dict[tuple[str, str], tuple[str, Frame | None]] = {}
        """By subject and type of an effect: its stream, and the frame of its envelope."""
        self._twins: list[Item] = []
        self._is_fresh = False
        """Nothing of the batch was seen before, or stands in it twice: nobody asks what it has settled so far."""
        self.is_begun = False
        """The store was there: the transaction is open, and handlers may run."""
        self.began_ns: dict[bytes, int] = {}
        """When handlers began that ran before this commit, by position; only where somebody traces them."""

    def run(self, items: Sequence[Item], targets: Mapping[str, int], marks: Sequence[Mark]) -> Settled:
        """The whole transaction. An error of the store rolls all of it back and is raised. `targets` says how far each
        stream is known to reach; it grows while handlers run."""
        try:
            found = self.begin(items, may_wait=True)
            self._is_fresh = _are_fresh(items, found)
            deciding = self._handling(items) if self._is_fresh else map(self.decide, items, repeat(found))
            clock = time.monotonic
            until = clock() + self.limits.budget_s
            for index, _ in enumerate(deciding):
                if clock() > until:
                    self._leave(items[index + 1 :])
                    break
            self.limits.at("handled")
            return self.end(targets, marks)
        except BaseException:
            self.store.rollback()
            raise
        finally:
            logs.trace_id.set("")  # what this thread says from here on belongs to no message

    def begin(self, items: Sequence[Item], *, may_wait: bool = False) -> dict[bytes, Place]:
        """Open the transaction and see which of the inputs are settled already. With `may_wait` those whose handler
        waits outside are only looked up: they are claimed when it comes back."""
        self.store.begin()
        self._work.thread = threading.get_ident()
        later = [item for item in items if _waits(item)] if may_wait and _has_async(items) else []
        now = [item for item in items if not _waits(item)] if later else items
        keys, at_keys = columns(now, Item, "key", "at_key")
        is_all_read = all(keys)
        claimed = keys if is_all_read else [key or at_key for key, at_key in zip(keys, at_keys, strict=True)]
        looked = at_keys if is_all_read and now is items else [item.at_key for item in items if item.key]
        found = self.store.claim(claimed, [*(item.key for item in later), *looked])
        self.is_begun = True
        self.limits.at("claimed")
        return found

    def end(self, targets: Mapping[str, int], marks: Sequence[Mark]) -> Settled:
        """Write the block as the last statement and commit."""
        self._write(targets, marks)
        self.limits.at("written")
        self.store.commit()
        self.limits.at("committed")
        return self.out

    def _write(self, targets: Mapping[str, int], marks: Sequence[Mark]) -> None:
        store, out = self.store, self.out
        self._write_entries()
        if self.failed:
            store.begun(self.failed)
        if self.ended:
            store.forget_attempts(self.ended)
        if marks:
            store.mark(marks)
        if self.entries or self.sendings:
            sendings = finished(self.limits.ledger, self.sendings)
            # A copy of this moment: streams that handlers named for the first time are known by now.
            content = Content(self.entries, sendings, self.limits.now_ms, dict(targets))
            appended: Appended = store.append(content, self.sources, self.delayed)
            out.block, out.sendings, out.announcement = appended.number, sendings, appended.announcement
        out.resumes += [(out.block, item.message) for item in self._twins]  # the same position twice in one batch

    def _write_entries(self) -> None:
        """What the outcomes mean for the ledger and for the inputs, step by step over all of them."""
        if self._outcomes:
            self._end_done()
            items, outcomes, keys, errors, effects = columns(
                self._outcomes, _Ended, "item", "outcome", "key", "error", "effects"
            )
        elif self._done:
            items, effects, count = self._done, self._done_effects, len(self._done)
            (keys,) = columns(items, Item, "key")
            outcomes, errors = [Outcome.DONE] * count, [""] * count
        else:
            return
        out = self.out
        messages, places, inputs, subjects_, at_keys = columns(
            items, Item, "message", "delivery", "input", "subject", "at_key"
        )
        if not all(inputs):
            inputs = [one or _nameless(item) for one, item in zip(inputs, items, strict=True)]
        identities, digests = columns(inputs, Input, "identity", "digest")
        bodies, headers = columns(messages, Message, "payload", "header_raw")
        streams, sequences, times_ns, deliveries = columns(
            places, Delivery, "stream", "sequence", "timestamp_ns", "deliveries"
        )
        self.entries = list(
            map(
                Entry, keys, identities, subjects_, bodies, headers, outcomes, streams, sequences, times_ns, digests,
                effects, errors,
            )
        )  # fmt: skip
        if self.limits.is_careful:
            self.ended += at_keys
        elif max(deliveries) > 1:
            self.ended += [key for key, count in zip(at_keys, deliveries, strict=True) if count > 1]
        kinds = distinct(outcomes)
        out.counts |= {one.value: outcomes.count(one) for one in kinds}
        if not [one for one in kinds if one in _TERMINAL]:
            out.acks += messages
            return
        for message, outcome, error in zip(messages, outcomes, errors, strict=True):
            if outcome in _TERMINAL:
                out.terms.append((message, error))
            else:
                out.acks.append(message)

    def _end_done(self) -> None:
        """Entries stand in the order of their effects."""
        done = zip(self._done, self._done_effects, strict=True)
        self._outcomes += [_Ended(item, Outcome.DONE, item.key, "", effects) for item, effects in done]
        self._done, self._done_effects = [], []

    def _leave(self, items: Sequence[Item]) -> None:
        self.out.left += items

    def has_settled(self, key: bytes) -> bool:
        """Whether this very batch settled the identity."""
        return key in self._now

    # ---- decisions

    def decide(self, item: Item, found: dict[bytes, Place]) -> None:
        if item.at_key in self._here:
            self._twins.append(item)
        elif item.at_key in found:
            self._again(item, found[item.at_key].block)
        elif item.is_passed:
            self._settle(item, Outcome.PASSED, item.at_key)
        elif item.wrong:
            self.give_up(item, Outcome.TERMINATED, item.wrong)
        elif item.input is None or item.handler is None:
            self._retry_or_die(item, NO_HANDLER, None)
        elif item.key in self._now:
            self._duplicate_or_conflict(item, self._now[item.key])
        elif item.key in found:
            self._known(item, found[item.key])
        elif item.handler.is_async:
            self.out.later.append(item)
        else:
            self._handle(item, context_of(item, self._work), UNREAD)

    def _again(self, item: Item, block: int) -> None:
        """The same position again: nothing to add, its effects may still be on their way."""
        self._count("redelivered")
        self.ended.append(item.at_key)
        self.out.resumes.append((block, item.message))

    def _known(self, item: Item, place: Place) -> None:
        stored = self.store.block(place.block)
        assert stored is not None
        assert item.input is not None
        entry = stored.content.entries[place.at]
        if (entry.stream, entry.sequence) == (item.delivery.stream, item.delivery.sequence):
            self._again(item, place.block)
        else:
            self._duplicate_or_conflict(item, _Done(entry.subject, entry.digest))

    def _duplicate_or_conflict(self, item: Item, done: _Done) -> None:
        """Another copy of an identity that is done: the same content on the same subject is a duplicate, anything else
        is never dropped."""
        assert item.input is not None
        is_copy = item.input.digest == done.digest or self._replaces(item, done.digest)
        if is_copy and item.subject == done.subject:
            self._settle(item, Outcome.DUPLICATE, item.at_key)
        else:
            self.give_up(item, Outcome.DEAD, IDENTITY_CONFLICT)

    @staticmethod
    def _replaces(item: Item, done: bytes) -> bool:
        """An edited replay of something that is done by now: it names the content that it stands for."""
        return item.carried.get(names.REPLAY_REPLACES, "") == done.hex()

    def _handling(self, items: Sequence[Item]) -> Iterator[None]:
        """Handles one more at each step. What they need is made ready for all of them first: that is cheaper."""
        inputs, places, subjects_, handlers = columns(items, Item, "input", "delivery", "subject", "handler")
        envelopes, identities = columns(inputs, Input, "envelope", "identity")
        at = columns(places, Delivery, "stream", "sequence", "consumer", "deliveries")
        contexts = map(Context, envelopes, identities, subjects_, *at, repeat(self._work))
        payloads = repeat(UNREAD)
        if len(distinct(handlers)) == 1:
            # What a type's own code raises is found out when each is decoded alone.
            with contextlib.suppress(BaseException):
                payloads = handlers[0].decode_all(columns(envelopes, RuntimeEnvelope, "payload")[0])
        return map(self._handle, items, contexts, payloads)

    def _handle(self, item: Item, context: Context, payload: Any) -> None:
        handler, input_, work, sendings = item.handler, item.input, self._work, self.sendings
        assert input_ is not None
        assert handler is not None
        start, late = len(sendings), len(self.delayed)
        envelope = context.envelope
        _set_trace_id(envelope.trace_id)
        work.context = context
        try:
            if self.limits.around is None:
                returned = handler.run(context, handler.decode(envelope.payload) if payload is UNREAD else payload)
            else:
                returned = self._traced(item, context, payload)
            if type(returned) is Effect:  # as most do
                self._add_effect(input_, 0, returned)
            elif returned is not None:
                for index, effect in enumerate(effects_of(returned)):
                    self._add_effect(input_, index, effect)
        except BaseException as error:  # in this thread no signal raises: whatever it is, the handler did it
            del sendings[start:], self.delayed[late:]
            work.finish(is_good=False)
            self.fail(item, failure_of(error))
            return
        if work.opened is None:
            work.context = None
        else:
            work.finish(is_good=True)  # an error here is the store's, not the handler's
        self._done.append(item)
        self._done_effects.append(len(sendings) - start)
        if not self._is_fresh:
            self._now[item.key] = _Done(item.subject, input_.digest)
            self._here.add(item.at_key)
        if self.began_ns:
            self._worked(item, start)

    def _traced(self, item: Item, context: Context, payload: Any) -> Any:
        """The handler inside its span."""
        assert item.handler is not None
        assert self.limits.around is not None
        self.began_ns[item.at_key] = time.time_ns()
        with self.limits.around(item):
            decoded = item.handler.decode(context.envelope.payload) if payload is UNREAD else payload
            return item.handler.run(context, decoded)

    def _worked(self, item: Item, start: int, error: str = "") -> None:
        began_ns = self.began_ns.get(item.at_key)
        if began_ns is not None:
            self.out.worked.append(Worked(item, began_ns, time.time_ns(), error, start, len(self.sendings)))

    def finish_async(self, item: Item, effects: list[Effect]) -> bool:
        """An `async def` handler has returned: its effects join this commit. False when they cannot: then it has
        failed."""
        start, late = len(self.sendings), len(self.delayed)
        try:
            assert item.input is not None
            for index, effect in enumerate(effects):
                self._add_effect(item.input, index, effect)
        except BaseException as error:  # a payload's own code runs here, in the ledger's thread
            del self.sendings[start:], self.delayed[late:]
            self.fail(item, failure_of(error))
            return False
        self._now[item.key] = _Done(item.subject, item.input.digest)
        self._settle(item, Outcome.DONE, item.key, effects=len(self.sendings) - start)
        self._worked(item, start)
        return True

    def _add_effect(self, input_: Input, index: int, effect: Effect) -> None:
        limits = self.limits
        way = self._ways.get((effect.subject, effect.type))
        if way is None:
            check_target(effect.subject)
            stream = limits.stream_of(effect.subject)
            has_room = _takes_every_plain_one(limits, stream)
            around = frame_of(limits.ledger, effect.subject, effect.type) if has_room else None
            way = self._ways[effect.subject, effect.type] = (stream, around)
        stream, around = way
        if around is not None:
            plain = plain_of(effect, input_, index, stream, around)
            if plain is not None:
                self.sendings.append(plain)
                return
        sending = sending_of(effect, limits.ledger, input_, index, stream)
        limits.check_size(sending)
        if effect.delay_s:
            self.delayed.append(delayed_of(effect, sending, limits.now_ms))
        else:
            self.sendings.append(sending)

    def fail(self, item: Item, error: Exception) -> None:
        """The visible rule: who raised what, and what follows."""
        reason = reason_of(error)
        self._worked(item, len(self.sendings), reason)
        self._tell(item, error, reason)
        if isinstance(error, Terminate):
            self.give_up(item, Outcome.TERMINATED, error.reason)
        elif isinstance(error, ContractViolation | TooLarge):
            self.give_up(item, Outcome.TERMINATED, f"{error.code}: {error.message}")
        else:
            self._retry_or_die(item, reason, error.after_s if isinstance(error, Retry) else None)

    def _tell(self, item: Item, error: Exception, reason: str) -> None:
        """What a handler decided is a line; what happened to it has a traceback."""
        at, name = item.delivery, item.handler.name if item.handler else item.subject
        words = (self.limits.ledger.name, name, at.stream, at.sequence, at.deliveries, reason)
        if isinstance(error, Retry | Terminate | ContractViolation | TooLarge):
            log.info("agent %s: %s, %s %d, delivery %d: %s", *words)
        else:
            log.warning("agent %s: %s, %s %d, delivery %d: %s\n%s", *words, traceback_of(error))

    def _retry_or_die(self, item: Item, reason: str, after_s: float | None) -> None:
        if item.delivery.deliveries >= self.limits.max_deliver:
            self.give_up(item, Outcome.DEAD, reason)
            return
        delay = rules.retry_delay_s(item.delivery.deliveries) if after_s is None else after_s
        self._count("retried")
        self.out.naks.append((item.message, delay))
        self.failed.append(attempt_of(item, self.limits.now_ms, reason))

    def give_up(self, item: Item, outcome: Outcome, reason: str, *, is_gone: bool = False) -> None:
        """Settle it, and hand it to the dead-letter service as an effect; of one that is gone nothing is left to hand
        over but its place. The reason may be anybody's text."""
        reason = letters.one_line(reason)
        source = self.sources[item.delivery.stream, item.delivery.consumer]
        letter = letter_request(item, self.limits, source, outcome, reason)
        if is_gone:
            told = (letter.headers or {}) | {letters.PAYLOAD: letters.GONE}
            letter = msgspec.structs.replace(letter, headers=told)
        self.sendings.append(letter)
        self._settle(item, outcome, item.at_key, error=reason, effects=1)

    def _settle(self, item: Item, outcome: Outcome, key: bytes, *, error: str = "", effects: int = 0) -> None:
        self._end_done()
        self._outcomes.append(_Ended(item, outcome, key, error, effects))
        self._here.add(item.at_key)

    def _count(self, what: str) -> None:
        counts = self.out.counts
        counts[what] = counts.get(what, 0) + 1


class _Nameless(NamedTuple):
    """What stands for the input of a message that cannot be read."""

    identity: str
    digest: bytes


def _nameless(item: Item) -> _Nameless:
    return _Nameless("", raw_digest(item.message.payload))


_LARGEST = Sending("x" * 64, "", bytes(FRAMED_BYTES_MAX), None, "", "x" * 64)


def _takes_every_plain_one(limits: Limits, stream: str) -> bool:
    """Whether no effect that is written later with the others can turn out too large for its stream or the server."""
    try:
        limits.check_size(msgspec.structs.replace(_LARGEST, stream=stream))
    except TooLarge:
        return False
    return True


def _are_fresh(items: Sequence[Item], found: dict[bytes, Place]) -> bool:
    """Whether nothing is to be decided: none was seen before or stands here twice, each has a handler that runs now."""
    keys, at_keys, inputs, handlers = columns(items, Item, "key", "at_key", "input", "handler")
    if found or len(set(keys)) < len(items) or len(set(at_keys)) < len(items):
        return False
    return all(inputs) and not [one for one in distinct(handlers) if one is None or one.is_async]


def _has_async(items: Sequence[Item]) -> bool:
    (handlers,) = columns(items, Item, "handler")
    return any(one is not None and one.is_async for one in distinct(handlers))


def _waits(item: Item) -> bool:
    return item.handler is not None and item.handler.is_async and bool(item.key)


def context_of(item: Item, work: Any) -> Context:
    assert item.input is not None
    input_, at = item.input, item.delivery
    return Context(
        input_.envelope,
        input_.identity,
        item.subject,
        at.stream,
        at.sequence,
        at.consumer,
        at.deliveries,
        work,
    )


def attempt_of(item: Item, now_ms: int, error: str) -> Attempt:
    """What is kept of an input that began or failed, by its position: that is what is delivered again."""
    delivery = item.delivery
    return Attempt(
        item.at_key, delivery.stream, delivery.consumer, delivery.sequence, delivery.deliveries, now_ms, error
    )
