"""Memory stays flat; the five million messages of `make faults` in short."""

from __future__ import annotations

import gc
import tracemalloc

from oncewire._ground.jetstream import Client, Outgoing
from tests.support.load import load_client
from tests.support.nats import NatsServer
from tests.support.streams import make_consumer, make_stream
from tests.support.wait import within

PART = 20_000
WARM_PARTS = 3
"""Until the stream is full and every cache has its size."""
LEAK_BYTES = 24
"""A kept object costs so much a message; a read buffer of 64 KiB more or less, spread over them, does not."""


async def flow(client: Client, stream: str, first: int, count: int) -> None:
    """Publish, pull and ack some messages."""
    async with client.pull(stream, "c", batch=1_000) as pull:
        for start in range(first, first + count, 5_000):
            messages = [Outgoing(f"{stream}.x", b"x" * 100, str(one)) for one in range(start, start + 5_000)]
            await client.publish_many(messages)
            taken = 0
            while taken < 5_000:
                got = await within(pull.fetch())
                pull.ack(got)
                taken += len(got)


async def test_memory_is_flat_over_eighty_thousand_messages(server: NatsServer) -> None:
    async with load_client(server.url) as client:
        stream = await make_stream(client, max_msgs=30_000, discard="old")
        await make_consumer(client, stream, max_ack_pending=-1)
        for part in range(WARM_PARTS):
            await flow(client, stream, part * PART, PART)
        gc.collect()
        tracemalloc.start()
        try:
            await flow(client, stream, WARM_PARTS * PART, PART // 2)
            gc.collect()
            before = tracemalloc.get_traced_memory()[0]
            await flow(client, stream, WARM_PARTS * PART + PART // 2, PART // 2)
            gc.collect()
            grown = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()

        assert grown < LEAK_BYTES * PART // 2, f"{grown} bytes for {PART // 2} messages"
        assert client.connection.replies == {}
        assert client.connection._subs == {}
        assert client.publisher.in_flight() == 0
