"""`Agent`: what a user writes. Handlers, their subjects and limits; no connection, no store, no loop.

agent = Agent("biller", tenant="default", workspace="demo")

@agent.on("charge")
def charge(ctx, order: Order) -> Effect:
    ctx.tx.execute("INSERT INTO charges VALUES (?, ?)", (order.id, order.cents))
    return Effect("evt.default.demo.billing.charged", {"order": order.id})
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from oncewire._ground.arguments import check_count, check_number, check_text
from oncewire._ground.contracts import subjects
from oncewire._ground.contracts.blocks import agent_name
from oncewire._ground.errors import Refused
from oncewire.agent.handlers import TICK, Handler, full_subject, make_handler

if TYPE_CHECKING:
    from oncewire._ground.jetstream import Client
    from oncewire._ground.ledger.store import Store
    from oncewire.agent.adapter import Adapted, Adapter
    from oncewire.agent.run import Runner

BATCH = 1_000
CONCURRENCY = 64
ACK_WAIT_S = 30.0
MAX_DELIVER = 5
HANDLER_TIMEOUT_S = 300.0
COUNT_MAX = 10_000
TIME_S_MAX = 7 * 24 * 3600
EVERY_S_MAX = 366 * 24 * 3600

Run = TypeVar("Run", bound=Callable[..., Any])
Lifespan = Callable[["Agent"], AbstractAsyncContextManager[Any]]


class Agent:
    """A named set of handlers with one ledger. `tenant` and `workspace` stand in its subjects and in its ids.

    `ordered` handles one message at a time over all processes, in stream order, retries included. `consumers` binds a
    stream to a durable that the catalog declares, or to several: their ack_wait and max_deliver count, and nothing of
    them changes.
    """

    def __init__(
        self,
        name: str,
        *,
        tenant: str = subjects.DEFAULT_TENANT,
        workspace: str = subjects.DEFAULT_WORKSPACE,
        ordered: bool = False,
        concurrency: int = CONCURRENCY,
        batch: int = BATCH,
        ack_wait_s: float = ACK_WAIT_S,
        max_deliver: int = MAX_DELIVER,
        handler_timeout_s: float = HANDLER_TIMEOUT_S,
        consumers: Mapping[str, str | Sequence[str]] | None = None,
        lifespan: Lifespan | None = None,
    ) -> None:
        self.name = subjects.token(check_text("Agent", "name", name), "agent")
        self.tenant = subjects.token(check_text("Agent", "tenant", tenant), "tenant")
        self.workspace = subjects.token(check_text("Agent", "workspace", workspace), "workspace")
        check_count("Agent", "batch", batch, 1, COUNT_MAX)
        check_count("Agent", "concurrency", concurrency, 1, COUNT_MAX)
        check_count("Agent", "max_deliver", max_deliver, 1, 1_000)
        check_number("Agent", "ack_wait_s", ack_wait_s, 1, TIME_S_MAX, "seconds")
        check_number("Agent", "handler_timeout_s", handler_timeout_s, ack_wait_s, TIME_S_MAX, "seconds")
        self.is_ordered = ordered
        self.concurrency = 1 if ordered else concurrency
        self.batch = 1 if ordered else batch
        self.ack_wait_s = ack_wait_s
        self.max_deliver = max_deliver
        self.handler_timeout_s = handler_timeout_s
        self.consumers = {stream: _durables(stream, named) for stream, named in (consumers or {}).items()}
        if ordered and any(len(named) > 1 for named in self.consumers.values()):
            raise Refused("an ordered agent reads a stream by one durable: several have no order among them")
        self.lifespan = lifespan or _no_lifespan
        self.handlers: list[Handler] = []
        self.adapted: Adapted | None = None

    def __repr__(self) -> str:
        return f"Agent({self.full_name!r}, {len(self.handlers)} handlers)"

    @property
    def full_name(self) -> str:
        return agent_name(self.tenant, self.workspace, self.name)

    def on(self, subject: str, *, rate_per_s: float = 0.0, timeout_s: float = 0.0) -> Callable[[Run], Run]:
        """Register a handler. A name without dots is the agent's own command (`cmd.{tenant}.{workspace}.{agent}.` and
        the name); a full subject may hold wildcards."""
        pattern = full_subject(subject, self.tenant, self.workspace, self.name)

        def register(run: Run) -> Run:
            self._add(make_handler(run, pattern, rate_per_s=rate_per_s, timeout_s=timeout_s))
            return run

        return register

    def every(self, seconds: float, *, timeout_s: float = 0.0) -> Callable[[Run], Run]:
        """Run a handler once per time slot, whatever the number of processes: `handler(ctx)`, with the slot's time in
        `ctx.ts`."""
        check_number("every", "seconds", seconds, 1, EVERY_S_MAX, "seconds")

        def register(run: Run) -> Run:
            pattern = subjects.cmd(self.tenant, self.workspace, self.name, TICK)
            self._add(make_handler(run, f"{pattern}.{run.__name__}", timeout_s=timeout_s, every_s=seconds))
            return run

        return register

    @classmethod
    def from_adapter(
        cls, adapter: Adapter | Callable[[], Adapter], *on: str, name: str, tick_s: float = 0.0, **options: Any
    ) -> Agent:
        """An agent around an object with `receive(envelope)` and, as it likes, `apply(envelope)`, `tick(now)`,
        `get_state()`, `health()`: see `oncewire.agent.adapter`. `on` are its subjects, by default all its commands."""
        from oncewire.agent.adapter import Adapted  # only for those who bring one

        agent = cls(name, **options, batch=1, concurrency=1)
        agent.adapted = adapted = Adapted(agent, adapter)
        for subject in on or (f"cmd.{agent.tenant}.{agent.workspace}.{agent.name}.>",):
            agent.on(subject)(adapted.receive)
        if tick_s:
            agent.every(tick_s)(adapted.tick)
        return agent

    def running(self, client: Client, store: Store, **options: Any) -> AbstractAsyncContextManager[Runner]:
        """Run inside a service of your own: `async with agent.running(client, store):`. Leaving drains it."""
        from oncewire.agent.run import running  # the loop is loaded only by those who run it

        return running(self, client, store, **options)

    def _add(self, handler: Handler) -> None:
        if any(one.pattern == handler.pattern for one in self.handlers):
            raise Refused(f"{handler.pattern} has two handlers", hint="Register one handler per subject.")
        self.handlers.append(handler)


def _durables(stream: str, named: str | Sequence[str]) -> tuple[str, ...]:
    names = (named,) if isinstance(named, str) else tuple(named)
    if not all(names) or len(set(names)) != max(1, len(names)):
        raise Refused(
            f"consumers of {stream}: {named!r} names no durables, or one twice",
            hint='Write {"STREAM": "durable"}, or {"STREAM": ["durable", "another"]}.',
        )
    return names


@asynccontextmanager
async def _no_lifespan(agent: Agent) -> AsyncIterator[None]:  # noqa: ARG001 - the hook's shape
    yield
