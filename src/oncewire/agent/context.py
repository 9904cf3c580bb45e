"""What a handler is given besides its payload: the input's facts, its transaction, calls that happen once.

Time, chance and ids derive from the input, so that a replay runs the same. The wall clock and everything else outside
come in through `once`, whose result is recorded.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Coroutine
from threading import get_ident
from typing import Any, NoReturn, Protocol

import msgspec

from oncewire._ground.arguments import check_text, wrong
from oncewire._ground.contracts.canonical import has_no_number
from oncewire._ground.contracts.runtime import RuntimeEnvelope
from oncewire._ground.errors import Refused
from oncewire._ground.ledger.rules import Head
from oncewire._ground.ledger.store import Block, Store
from oncewire._ground.ledger.tx import Tx, ended
from oncewire.agent.effects import derived_hex


class History(Protocol):
    """The blocks that the ledger held before this input's transaction, and nothing else of it."""

    def head(self) -> Head: ...
    def block(self, number: int) -> Block | None: ...


class Work(Protocol):
    """The runtime behind a context: the transaction, and the results of calls."""

    @property
    def history(self) -> History: ...
    def tx(self, context: Context) -> Tx | Section: ...
    def once(
        self, name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Coroutine[Any, Any, Any]: ...


class SyncWork:
    """The transaction behind the `def` handlers of a batch: for each a savepoint, which opens when it first uses
    `ctx.tx`."""

    __slots__ = ("_store", "context", "history", "opened", "thread")

    def __init__(self, store: Store) -> None:
        self._store = store
        self.history = StoredHistory(store)
        self.context: Context | None = None
        """Whose handler runs. Contexts that were kept from before open nothing."""
        self.thread = 0
        """Where handlers run: no other thread opens a savepoint, perhaps when its handler has just returned."""
        self.opened: Tx | None = None

    def tx(self, context: Context) -> Tx:
        if context is not self.context:
            raise ended()
        if self.opened is None:
            if get_ident() != self.thread:
                raise Refused("ctx.tx is first used in a thread", hint="Use it once in the handler itself before.")
            self.opened = self._store.savepoint()
        return self.opened

    def once(self, *_: object) -> Coroutine[Any, Any, Any]:
        raise Refused(
            "ctx.once needs an `async def` handler", hint="A `def` handler holds the transaction: it must not wait."
        )

    def finish(self, *, is_good: bool) -> None:
        self.context = None
        if self.opened is not None:
            self.opened = None
            (self._store.keep if is_good else self._store.undo)()


class Section:
    """`async with ctx.tx as tx:` in an `async def` handler. Entered when it is its turn; what it wrote goes when it
    raises, whether or not the handler goes on."""

    __slots__ = ("_enter", "_leave", "_tx")

    def __init__(self, enter: Callable[[], Awaitable[Tx]], leave: Callable[[bool], None]) -> None:
        self._enter = enter
        self._leave = leave

    async def __aenter__(self) -> Tx:
        self._tx = await self._enter()
        return self._tx

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._tx.leave()
        self._leave(kind is None)

    def __enter__(self) -> NoReturn:
        raise Refused("an `async def` handler writes in `async with ctx.tx as tx:`", hint="Write `async with`.")

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"an `async def` handler writes in `async with ctx.tx as tx:`, and there calls tx.{name}")


class StoredHistory:
    """The history in a store."""

    __slots__ = ("block", "head")

    def __init__(self, store: Store) -> None:
        self.head = store.head
        self.block = store.block


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
        """This input's part of the ledger's transaction: statements as the driver has them, until the handler ends. In
        an `async def` handler it is entered, `async with ctx.tx as tx:`, as the last section before the return."""
        return self._work.tx(self)

    @property
    def history(self) -> History:
        """What was settled before this input, for those who build their state from it."""
        return self._work.history

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

    def once(self, name: str, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
        """Call outside and record the result, in a commit of its own, before going on. A redelivery gets the recorded
        result; a crash inside the call runs it again, so hand `ctx.key(name)` to the other side."""
        if "\0" in check_text("ctx.once", "name", name):
            raise wrong("ctx.once", "name", name, "has a NUL")
        return self._work.once(name, fn, args, kwargs)


def encode_result(result: object) -> bytes:
    """The result of a call as it is recorded."""
    try:
        if has_no_number(msgspec.to_builtins(result)):
            raise ValueError("it has NaN or an infinite number, which JSON does not have")
        return msgspec.json.encode(result)
    except (TypeError, ValueError, RecursionError) as error:
        raise Refused(f"the result of ctx.once cannot be recorded: {error}", hint="Return JSON-like values.") from None


async def run_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = fn(*args, **kwargs)
    return await result if isinstance(result, Awaitable) else result
