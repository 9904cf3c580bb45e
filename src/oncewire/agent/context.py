"""What a handler is given besides its payload: the input's facts, its transaction, calls that happen once.

Time, chance and ids derive from the input, so that a replay runs the same. The wall clock and everything else outside
come in through `once`, whose result is recorded.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import msgspec

from oncewire.agent.effects import derived_hex
from oncewire.contracts.runtime import RuntimeEnvelope
from oncewire.errors import Refused
from oncewire.ledger.store import Store


class Work(Protocol):
    """The runtime behind a context: the transaction, and the results of calls."""

    @property
    def store(self) -> Any: ...
    def open_tx(self) -> Any: ...
    def section(self) -> Any: ...
    async def once(self, name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


class SyncWork:
    """The transaction behind a `def` handler: a savepoint opens on the first use of `ctx.tx`."""

    __slots__ = ("is_open", "store")

    def __init__(self, store: Store) -> None:
        self.store = store
        self.is_open = False

    def open_tx(self) -> Any:
        if not self.is_open:
            self.store.savepoint()
            self.is_open = True
        return self.store.connection

    def section(self) -> Any:
        raise Refused("a `def` handler uses ctx.tx directly")

    async def once(self, *_: object) -> Any:
        raise Refused("ctx.once needs an `async def` handler")

    def finish(self, *, is_good: bool) -> None:
        if self.is_open:
            self.is_open = False
            (self.store.keep if is_good else self.store.undo)()


class Context(msgspec.Struct, eq=False):
    """One per input and attempt."""

    envelope: RuntimeEnvelope
    identity: str
    subject: str
    stream: str
    sequence: int
    consumer: str
    deliveries: int
    _work: Work
    _is_async: bool
    _random: random.Random | None = None
    _ids: int = 0

    @property
    def ts(self) -> int:
        """The message's time in Unix milliseconds: the only time that a replay sees again."""
        return self.envelope.ts

    @property
    def tenant(self) -> str:
        return self.envelope.tenant

    @property
    def workspace(self) -> str:
        return self.envelope.workspace

    @property
    def trace_id(self) -> str:
        return self.envelope.trace_id

    @property
    def tx(self) -> Any:
        """The ledger's own transaction. In a `def` handler the driver's connection; in an `async def` handler
        `async with ctx.tx as tx:` as the last section before the return."""
        return self._work.section() if self._is_async else self._work.open_tx()

    @property
    def store(self) -> Any:
        """The ledger that holds this input's transaction, for those who read what was settled before."""
        return self._work.store

    @property
    def random(self) -> random.Random:
        """Chance that a second run repeats."""
        if self._random is None:
            self._random = random.Random(derived_hex(self.identity, "random"))  # noqa: S311 - must repeat
        return self._random

    def id(self) -> str:
        """A fresh id that a second run makes again: the first call gives the first, and so on."""
        self._ids += 1
        return derived_hex(self.identity, f"id:{self._ids}")

    def key(self, name: str) -> str:
        """The idempotency key to hand to the other side of a call: the same for every attempt at this input."""
        return derived_hex(self.identity, f"key:{name}")

    async def once(self, name: str, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call outside and record the result, in a commit of its own, before going on. A redelivery gets the recorded
        result; a crash inside the call runs it again, so hand `ctx.key(name)` to the other side."""
        if not self._is_async:
            raise Refused(
                "ctx.once needs an `async def` handler", hint="A `def` handler holds the transaction: it must not wait."
            )
        return await self._work.once(name, fn, args, kwargs)


def encode_result(result: object) -> bytes:
    """The result of a call as it is recorded."""
    try:
        return msgspec.json.encode(result)
    except (TypeError, ValueError) as error:
        raise Refused(f"the result of ctx.once cannot be recorded: {error}", hint="Return JSON-like values.") from None


async def run_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = fn(*args, **kwargs)
    return await result if isinstance(result, Awaitable) else result
