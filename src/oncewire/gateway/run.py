"""A gateway that listens: node, acks, presence and the HTTP front, from start to an orderly stop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from oncewire._ground import http
from oncewire._ground.jetstream import Client
from oncewire._ground.tracing import Tracer
from oncewire.gateway.acks import Acks
from oncewire.gateway.history import Archive
from oncewire.gateway.limits import Limits
from oncewire.gateway.node import Node
from oncewire.gateway.presence import Presences
from oncewire.gateway.routes import GatewayRoutes
from oncewire.gateway.service import Gateway

STOP_S = 5.0

Front = Callable[[http.Routes], http.Server]
"""Makes the server for these routes: with its limits, and whoever it asks who is there."""


@contextlib.asynccontextmanager
async def serving(
    client: Client,
    host: str,
    port: int,
    *,
    limits: Limits | None = None,
    events_prefix: str = "chat.events",
    tokens_prefix: str = "chat.tokens",
    archive: Archive | None = None,
    pages: http.Pages | None = None,
    extend: Callable[[http.Routes], None] | None = None,
    front: Front | None = None,
    tracer: Tracer | None = None,
    stop_s: float = STOP_S,
) -> AsyncIterator[Gateway]:
    """Serve until the block ends: then clients are told to reconnect, and what waits is written.

    `extend` adds routes of an application that shares the gateway's address.
    """
    prefixes = {"events_prefix": events_prefix, "tokens_prefix": tokens_prefix}
    node = Node(client, limits or Limits(), **prefixes, archive=archive, tracer=tracer)
    acks, presences = Acks(client), Presences(client, node)
    gateway = Gateway(node, acks, presences)
    table = GatewayRoutes(gateway, pages=pages).routes()
    if extend is not None:
        extend(table)
    server = front(table) if front is not None else http.Server(table)
    gateway.server = server
    try:
        await node.start()
        node.spawn(acks.run())
        node.spawn(presences.run())
        node.spawn(presences.watch())
        node.spawn(node.watch_answers())
        await server.start(host, port)
        try:
            yield gateway
        finally:
            await server.stop(stop_s)
    finally:
        await node.stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(stop_s):
                await presences.flush()
                await acks.flush()
