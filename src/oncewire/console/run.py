"""A console that listens: what it looks at, who it asks, from start to an orderly stop."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from oncewire._ground import http
from oncewire._ground.jetstream import Client
from oncewire._ground.topology import Topology
from oncewire.broker.client import BrokerClient
from oncewire.console.lake import LakeSide, Standing
from oncewire.console.letters import Letters
from oncewire.console.routes import ConsoleRoutes
from oncewire.console.sessions import Sessions
from oncewire.console.streams import AskServers, Surveyor
from oncewire.console.topics import Topics
from oncewire.console.watch import Figures, Watch
from oncewire.pipeline.lake.place import Place

BROKER_S_MAX = 5.0

Front = Callable[[http.Routes], http.Server]
"""Makes the server for these routes: with its limits, and whoever it asks who is there."""


@dataclass(frozen=True)
class Sources:
    """What is looked at. Without a broker's address there are no topics; `standing` says how the lake stands."""

    client: Client
    declared: Topology
    ask_servers: AskServers
    lake: Place
    standing: Standing
    broker_url: str = ""
    broker_key: str = ""
    broker_trust: Callable[[], ssl.SSLContext] | None = None
    figures: Callable[[], Figures] = dict
    """Histograms of the parts in this process."""


@contextlib.asynccontextmanager
async def serving(
    sources: Sources, host: str, port: int, front: Front, sessions: Sessions | None, stop_s: float
) -> AsyncIterator[tuple[http.Server, Watch]]:
    """Look only while somebody watches, and serve."""
    async with contextlib.AsyncExitStack() as stack:
        topics = None
        if sources.broker_url:
            made = BrokerClient(
                sources.broker_url, timeout_s=BROKER_S_MAX, token=sources.broker_key, tls=sources.broker_trust
            )
            topics = Topics(await stack.enter_async_context(made), sources.broker_url)
        surveyor = Surveyor(sources.client, sources.declared, sources.ask_servers)
        lake = LakeSide(sources.lake, sources.standing)
        watch = Watch(sources.client, surveyor, Letters(sources.client), topics, lake, sources.figures)
        await stack.enter_async_context(watch.running())
        server = front(ConsoleRoutes(sources.client, watch, sessions).routes())
        await server.start(host, port)
        try:
            yield server, watch
        finally:
            await server.stop(stop_s)
