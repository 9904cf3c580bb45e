"""Dead-lettering and replay, each beside the obvious way on nats-py: one fetch, one publish, one ack at a time.

Dead-lettering starts with advisories of given-up messages of a work queue and ends when each has its letter, is removed
from the queue and its advisory is acked. Replay starts with letters and ends when each stands on its subject again and
is deleted from DLQ. Both ways pay for the same steps; ours also records what it is about to publish.
"""

from __future__ import annotations

import asyncio
import logging
import time

import nats
import uvloop

import oncewire
from benchmarks.measure import table, take_turns
from oncewire._ground.contracts import letters as names
from oncewire._ground.jetstream import Client, Outgoing
from oncewire._ground.topology import ensure
from oncewire.dlq.letters import Filter
from oncewire.dlq.replay import Replay, ReplayOptions
from oncewire.dlq.service import DlqOptions, serving
from tests.support.nats import nats_server
from tests.support.streams import consumer_info, make_consumer, make_stream, unique

ROUNDS = 3
LETTERS = 5_000
LETTERS_SLOW = 500
BODY = b"x" * 256
ADVISORIES = "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES"


class Bench:
    """One server; DLQ is emptied before each run."""

    def __init__(self, client: Client, url: str) -> None:
        self.client = client
        self.url = url

    async def _empty(self) -> None:
        for stream in ("DLQ", "DLQ_ADVISORIES", "DLQ_REPLAYS"):
            await self.client.api(f"STREAM.PURGE.{stream}", {})

    async def _given_up(self, count: int) -> str:
        """A work queue whose messages the server gave up, with an advisory each."""
        await self._empty()
        client = self.client
        stream = await make_stream(client, unique("B"), retention="workqueue")
        await make_consumer(client, stream, "w", ack_wait=50_000_000, max_deliver=1, max_ack_pending=-1)
        await client.publish_all([Outgoing(f"{stream}.x", BODY) for _ in range(count)])
        async with client.pull(stream, "w", batch=1_000, ahead=2) as pull:
            while (await client.api("STREAM.INFO.DLQ_ADVISORIES"))["state"]["messages"] < count:
                await pull.fetch(timeout_s=0.05)
        return stream

    # ---- dead-lettering

    async def our_letters(self) -> float:
        stream = await self._given_up(LETTERS)
        began = time.perf_counter()
        async with serving(self.client, DlqOptions(sweep_s=3_600)):
            while await self._are_open(stream):
                await asyncio.sleep(0.01)
            took_s = time.perf_counter() - began
        await self.client.api(f"STREAM.DELETE.{stream}")
        return LETTERS / took_s

    async def _are_open(self, stream: str) -> bool:
        info = await consumer_info(self.client, "DLQ_ADVISORIES", "dlq_service_advisories")
        left = (await self.client.api(f"STREAM.INFO.{stream}"))["state"]["messages"]
        return bool(info["num_pending"] or info["num_ack_pending"] or left)

    async def their_letters(self) -> float:
        stream = await self._given_up(LETTERS_SLOW)
        connection = await nats.connect(self.url)
        js = connection.jetstream()
        sub = await js.pull_subscribe(f"{ADVISORIES}.>", durable=unique("slow"), stream="DLQ_ADVISORIES")
        began = time.perf_counter()
        for _ in range(LETTERS_SLOW):
            (advisory,) = await sub.fetch(1, timeout=10)
            sequence = int(advisory.data.partition(b'"stream_seq":')[2].partition(b",")[0])
            original = await js.get_msg(stream, sequence, direct=True)
            headers = {"Nats-Msg-Id": f"dlq:{stream}:w:{sequence}"}
            await js.publish(f"dlq.{stream}.x", original.data or b"", headers=headers)
            await connection.request(f"$JS.ACK.{stream}.w.1.{sequence}.1.0.0", b"+ACK")
            await advisory.ack_sync()
        took_s = time.perf_counter() - began
        await sub.unsubscribe()
        await connection.close()
        await self.client.api(f"STREAM.DELETE.{stream}")
        return LETTERS_SLOW / took_s

    # ---- replay

    async def _letters(self, count: int) -> str:
        await self._empty()
        stream = await make_stream(self.client, unique("B"))
        told = {names.STREAM: stream, names.CONSUMER: "w", names.SUBJECT: f"{stream}.x", names.CAUSE: "bench"}
        messages = [
            Outgoing(f"dlq.{stream}.x", BODY, f"dl.{stream}{at:036x}", told | {names.SEQUENCE: str(at + 1)})
            for at in range(count)
        ]
        await self.client.publisher.publish_all(messages)
        return stream

    async def our_replay(self) -> float:
        stream = await self._letters(LETTERS)
        began = time.perf_counter()
        report = await Replay(self.client, Filter(stream=stream), ReplayOptions()).run()
        took_s = time.perf_counter() - began
        assert report.replayed == LETTERS, report
        await self.client.api(f"STREAM.DELETE.{stream}")
        return LETTERS / took_s

    async def their_replay(self) -> float:
        stream = await self._letters(LETTERS_SLOW)
        connection = await nats.connect(self.url)
        js = connection.jetstream()
        first = (await js.stream_info("DLQ")).state.first_seq
        began = time.perf_counter()
        for sequence in range(first, first + LETTERS_SLOW):
            letter = await js.get_msg("DLQ", sequence, direct=True)
            await js.publish(f"{stream}.x", letter.data or b"", headers={"Nats-Msg-Id": f"rp.{sequence}"})
            await js.delete_msg("DLQ", sequence)
        took_s = time.perf_counter() - began
        await connection.close()
        await self.client.api(f"STREAM.DELETE.{stream}")
        return LETTERS_SLOW / took_s


async def run() -> None:
    for sync_always in (False, True):
        mode = "a server that syncs always" if sync_always else "a server with the default sync"
        with nats_server(sync_always=sync_always) as server:
            async with oncewire.connect(server.url) as client:
                await ensure(client)
                bench = Bench(client, server.url)
                runs = await take_turns({"oncewire": bench.our_letters, "nats-py": bench.their_letters}, ROUNDS)
                print(table(f"letters written, {mode}", runs, "nats-py"), flush=True)
                runs = await take_turns({"oncewire": bench.our_replay, "nats-py": bench.their_replay}, ROUNDS)
                print(table(f"letters replayed, {mode}", runs, "nats-py"), flush=True)


def main() -> None:
    logging.getLogger("oncewire.dlq").setLevel(logging.ERROR)  # a line per letter is made, and shown to nobody
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())
