"""The adapter form of an agent: an object that receives envelopes and keeps its state in memory.

    receive(envelope)    what follows from an input: effects, or Retry, Terminate; reads the state, never changes it
    apply(envelope)      folds an input that is done into the state; never fails, never looks outside
    tick(now)            what follows from a tick, as receive; a tick that is done is applied like any input
    get_state()          the state as JSON-like values          health()     what readiness shows besides

The state is a fold over the ledger: before an input is received, everything that any process has settled since is
applied, in the ledger's order, under the ledger's lock. So a crash, a rollback, a restart or a second process cannot
make it differ. It costs one commit per input: the state must hold all inputs before this one.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from oncewire._ground.contracts import ids
from oncewire._ground.contracts.blocks import Announcement, Outcome
from oncewire._ground.contracts.inputs import read_input
from oncewire._ground.contracts.runtime import RuntimeEnvelope
from oncewire._ground.errors import Corrupt, Refused
from oncewire._ground.jetstream.losses import INCARNATION
from oncewire._ground.jetstream.protocol import parse_headers, parse_time_ns
from oncewire._ground.ledger.rules import Entry
from oncewire._ground.ledger.store import Block
from oncewire.agent.context import Context, History
from oncewire.agent.effects import Effect, effects_of

if TYPE_CHECKING:
    from oncewire.agent.agent import Agent


class Adapter(Protocol):
    """Only `receive` must be there."""

    def receive(self, envelope: RuntimeEnvelope) -> Effect | list[Effect] | None: ...


class Adapted:
    """The handlers of an adapter, and its state at a block of the ledger."""

    def __init__(self, agent: Agent, adapter: Adapter | Callable[[], Adapter]) -> None:
        self._agent = agent
        self._make: Callable[[], Any] = (
            adapter if inspect.isroutine(adapter) or inspect.isclass(adapter) else (lambda: copy.deepcopy(adapter))
        )
        self.adapter: Any = self._make()
        self.seen = 0
        if not callable(getattr(self.adapter, "receive", None)):
            raise Refused(f"{type(self.adapter).__name__} has no receive(envelope)", hint="An adapter receives.")
        if any(inspect.iscoroutinefunction(getattr(self.adapter, name, None)) for name in ("receive", "apply", "tick")):
            raise Refused("an adapter's methods are `def`", hint="Use `@agent.on` with an `async def` to wait.")

    def receive(self, ctx: Context, payload: dict[str, Any]) -> list[Effect]:  # noqa: ARG002 - the handler's shape
        self.catch_up(ctx.history)
        return effects_of(self.adapter.receive(ctx.envelope))

    def tick(self, ctx: Context) -> list[Effect]:
        self.catch_up(ctx.history)
        tick = getattr(self.adapter, "tick", None)
        return effects_of(tick(ctx.ts)) if tick else []

    def get_state(self) -> Any:
        get_state = getattr(self.adapter, "get_state", None)
        return get_state() if get_state else None

    def health(self) -> Mapping[str, Any]:
        health = getattr(self.adapter, "health", None)
        return dict(health()) if health else {}

    # ---- the fold

    def catch_up(self, history: History) -> None:
        """Apply what was settled since, by whichever process."""
        head = history.head().number
        if self.seen > head:  # a ledger that is not the one from before
            self.adapter, self.seen = self._make(), 0
        while self.seen < head:
            block = history.block(self.seen + 1)
            if block is None:
                raise Corrupt(f"block {self.seen + 1} of the ledger is not there: the state cannot be rebuilt")
            self._apply(block)
            self.seen += 1

    def _apply(self, block: Block) -> None:
        apply = getattr(self.adapter, "apply", None)
        done = [entry for entry in block.content.entries if entry.outcome is Outcome.DONE]
        if apply is None or not done:
            return
        told = msgspec.json.decode(block.announcement, type=Announcement)
        created = {one.stream: parse_time_ns(one.created.partition(INCARNATION)[0]) for one in told.inputs}
        for entry in done:
            apply(_envelope_of(entry, created[entry.stream]))


def _envelope_of(entry: Entry, created_ns: int) -> RuntimeEnvelope:
    """The envelope as the handler saw it."""
    carried = parse_headers(entry.header) if entry.header else {}
    origin = ids.Origin(entry.stream, created_ns, entry.sequence, entry.timestamp_ns)
    return read_input(entry.body, subject=entry.subject, origin=origin, carried=carried).envelope
