"""The outbox and its relay: what it costs writers, how soon messages arrive, how fast a backlog goes.

Writers are `pgbench` (32 connections, 1,000 conversations), so that the database is what is busy, not the clients;
relays are processes of their own; everything shares the machine. PostgreSQL syncs every commit. Delivery is counted
from the begin of the writer's transaction to the stream's own timestamp.

    python -m benchmarks.relay [saturated] [steady] [backlog] [backlog-always]    # all, or some of its parts
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import asyncpg
import uvloop

import oncewire
from benchmarks.measure import ratio, table, take_turns, verdict
from oncewire._ground.jetstream import Client, Outgoing
from oncewire.cli import face
from oncewire.embedded.postgres import programs
from oncewire.outbox.conversations import Conversations
from oncewire.outbox.purge import purge
from oncewire.outbox.relay import RelayOptions, relaying
from tests.support.nats import nats_server
from tests.support.outbox import STREAM, RelayProcess, make_chat_stream, open_rows
from tests.support.postgres import PostgresServer, postgres_server

WRITERS = 32
CONVERSATIONS = 1_000
ROUNDS = 3
SATURATED_S = 6
STEADY_S = 10
WARM_S = 3
"""Connections, plans, conversations and what a relay learns are made in a time that does not count."""
STEADY_ROUNDS = 2
STEADY_RATE = 4_000
BACKLOG = 1_000_000
BACKLOG_SLOW = 15_000
POLL_S = 0.25
BODY = "x" * 200

_ENQUEUE = f"""\\set n random(1, {CONVERSATIONS})
SELECT enqueue_conversation_message(lpad(to_hex(:n::int), 32, '0')::uuid, 'user', '{BODY}');
"""
_ENQUEUE_AND_NOTIFY = f"""\\set n random(1, {CONVERSATIONS})
BEGIN;
SELECT enqueue_conversation_message(lpad(to_hex(:n::int), 32, '0')::uuid, 'user', '{BODY}');
NOTIFY oncewire_outbox;
COMMIT;
"""
_FILL = f"""
INSERT INTO conversations (id, last_sequence)
    SELECT lpad(to_hex(n), 32, '0')::uuid, $1::int / {CONVERSATIONS} FROM generate_series(1, {CONVERSATIONS}) n;
WITH made AS (
    INSERT INTO conversation_messages (conversation_id, sequence, role, content)
        SELECT lpad(to_hex(n % {CONVERSATIONS} + 1), 32, '0')::uuid, n / {CONVERSATIONS} + 1, 'user', '{BODY}'
            FROM generate_series(0, $1::int - 1) n
        RETURNING id, conversation_id, sequence
)
INSERT INTO message_outbox (conversation_id, sequence, message_id, body_bytes)
    SELECT conversation_id, sequence, id, 2300 FROM made
"""


class Bench:
    """One PostgreSQL, one nats-server; emptied before each run."""

    def __init__(self, server: PostgresServer, url: str, client: Client, nats_url: str) -> None:
        self.server = server
        self.url = url
        self.client = client
        self.nats_url = nats_url
        self.left: list[int] = []
        """Rows that were still open when writers at full speed stopped, per run."""

    async def empty(self) -> None:
        await self.client.api(f"STREAM.PURGE.{STREAM}", {})
        connection = await asyncpg.connect(self.url)
        await connection.execute(
            "TRUNCATE conversations, conversation_messages, message_outbox, conversation_relay RESTART IDENTITY"
        )
        await connection.execute("VACUUM ANALYZE")
        await connection.execute("CHECKPOINT")
        await connection.close()

    async def write(self, script: str, seconds: int, *options: str) -> float:
        """Commits per second of all writers."""
        file = self.server.folder / "writers.sql"
        file.write_text(script)
        where = ["-h", "127.0.0.1", "-p", str(self.server.port), "-U", "oncewire", self.url.rpartition("/")[2]]
        how = ["-n", "-M", "prepared", "-c", str(WRITERS), "-j", "2", "-T", str(seconds), "-f", str(file), *options]
        command = [str(programs() / "pgbench"), *how, *where]
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        out, err = await process.communicate()
        found = re.search(r"tps = ([0-9.]+)", out.decode())
        assert found, err.decode()
        return float(found[1])

    # ---- writers at full speed

    async def alone(self) -> float:
        await self.empty()
        return await self.write(_ENQUEUE, SATURATED_S)

    async def beside_relays(self) -> float:
        await self.empty()
        with RelayProcess(self.nats_url, self.url), RelayProcess(self.nats_url, self.url):
            await self._relays_are_up(2)
            rate = await self.write(_ENQUEUE, SATURATED_S)
            self.left.append(await open_rows(self.url))
        return rate

    async def notifying(self) -> float:
        """What a wake-up in each transaction would cost; nobody relays."""
        await self.empty()
        listening = await asyncpg.connect(self.url)
        await listening.add_listener("oncewire_outbox", lambda *_: None)
        rate = await self.write(_ENQUEUE_AND_NOTIFY, SATURATED_S)
        await listening.close()
        return rate

    async def _relays_are_up(self, count: int) -> None:
        connection = await asyncpg.connect(self.url)
        query = (
            "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'oncewire' AND datname = current_database()"
        )
        while await connection.fetchval(query) < 3 * count:  # each listens, and drains two outboxes
            await asyncio.sleep(0.05)
        await connection.close()

    # ---- a steady rate

    async def offered(self) -> float:
        """Commits/s reached when nobody relays: what the writers themselves can do."""
        await self.empty()
        await self.write(_ENQUEUE, WARM_S, "-R", str(STEADY_RATE))
        return await self.write(_ENQUEUE, STEADY_S, "-R", str(STEADY_RATE))

    async def steady(self, relay: Callable[[], Any]) -> tuple[float, list[float]]:
        """Commits/s reached, and the delivery times in ms."""
        await self.empty()
        with relay():
            await self._relays_are_up(1)
            await self.write(_ENQUEUE, WARM_S, "-R", str(STEADY_RATE))
            began_ns = time.time_ns()
            rate = await self.write(_ENQUEUE, STEADY_S, "-R", str(STEADY_RATE))
            while await open_rows(self.url):
                await asyncio.sleep(0.05)
        return rate, await self._delivery_ms(began_ns)

    async def _delivery_ms(self, began_ns: int) -> list[float]:
        """Of all messages whose transaction began since then."""
        times: list[float] = []
        after = 0
        while page := await self.client.get_batch(STREAM, sequence=after + 1):
            issued = [(one.timestamp_ns, _issued_ns(one.payload)) for one in page]
            times += [(stored_ns - issued_ns) / 1e6 for stored_ns, issued_ns in issued if issued_ns >= began_ns]
            after = page[-1].sequence
        return times

    # ---- a backlog

    async def drain(self, rows: int, relay: Callable[[int], Awaitable[None]]) -> float:
        """Rows per second."""
        await self.empty()
        connection = await asyncpg.connect(self.url)
        first, second = _FILL.split(";\n", 1)
        await connection.execute(first, rows)
        await connection.execute(second, rows)
        await connection.close()
        begun = time.perf_counter()
        await relay(rows)
        rate = rows / (time.perf_counter() - begun)
        assert (await self.client.api(f"STREAM.INFO.{STREAM}"))["state"]["messages"] == rows
        return rate

    async def with_relays(self, rows: int) -> None:
        """One relay, as `oncewire relay run` has it."""
        async with relaying(self.client, self.url) as relay:
            while relay.published < rows:
                await asyncio.sleep(0.01)

    async def row_by_row(self, rows: int) -> None:
        """Select 25, publish and mark each: what the protocol's original does."""
        connection = await asyncpg.connect(self.url)
        done = 0
        while done < rows:
            found = await connection.fetch(
                """SELECT o.id, o.conversation_id, m.content FROM message_outbox o
                    JOIN conversation_messages m ON m.id = o.message_id
                    WHERE o.status = 'pending' ORDER BY o.id LIMIT 25"""
            )
            for row in found:
                await self.client.publish_one(Outgoing(f"chat.events.{row[1]}", row[2].encode()), raw=True)
                await connection.execute("SELECT mark_outbox_dispatched($1)", row[0])
            done += len(found)
        await connection.close()

    async def sizes(self) -> str:
        """The outbox after a purge and a vacuum."""
        connection = await asyncpg.connect(self.url)
        before = await connection.fetchval("SELECT pg_total_relation_size('message_outbox')")
        gone = await purge(connection, keep_s=0)
        await connection.execute("VACUUM message_outbox")
        after = await connection.fetchval("SELECT pg_total_relation_size('message_outbox')")
        await connection.close()
        return f"  message_outbox: {before >> 20} MiB, after purging {gone['message_outbox']:,} rows {after >> 20} MiB"


def _issued_ns(body: bytes) -> int:
    from oncewire._ground.contracts import decode_realtime

    return int(decode_realtime(body).issued_at.timestamp() * 1e9)


@contextlib.contextmanager
def polling(nats_url: str, url: str) -> Iterator[None]:
    """A relay that looks every 250 ms and is never woken, in a process of its own."""
    code = "import sys; from benchmarks.relay import poll; poll(*sys.argv[1:])"
    process = subprocess.Popen([sys.executable, "-c", code, nats_url, url])
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def poll(nats_url: str, url: str) -> None:
    face.run(_poll(nats_url, url))


async def _poll(nats_url: str, url: str) -> None:
    options = RelayOptions()
    others = [await asyncpg.connect(url, server_settings={"application_name": "oncewire"}) for _ in range(2)]
    connection = await asyncpg.connect(url, server_settings={"application_name": "oncewire"})
    async with oncewire.connect(nats_url) as client:
        source = Conversations(
            client, prefix=options.prefix, batch_size=options.batch_size, schema="", on_step=options.on_step
        )
        while others:
            while (await source.relay_once(connection)).has_more:
                pass
            await asyncio.sleep(POLL_S)


async def saturated(bench: Bench) -> None:
    runs = await take_turns(
        {"no relay": bench.alone, "two relays": bench.beside_relays, "NOTIFY in each": bench.notifying}, ROUNDS
    )
    print(table(f"commits of {WRITERS} writers at full speed", runs, "no relay"))
    print(f"  rows still open when the writers stopped: {bench.left}")
    print(verdict("commits beside two relays", ratio(runs, "two relays", "no relay")[0], 0.7))


async def steady(bench: Bench) -> None:
    print(f"{STEADY_RATE:,} commits/s offered, delivery from begin of the transaction to the stream")
    contenders = {
        "oncewire": lambda: RelayProcess(bench.nats_url, bench.url),
        "polling every 250 ms": lambda: polling(bench.nats_url, bench.url),
    }
    for _ in range(STEADY_ROUNDS):
        alone = await bench.offered()
        print(f"  {'nobody relays':<22} {alone:>7,.0f}/s")
        for name, relay in contenders.items():
            rate, times = await bench.steady(relay)
            cuts = statistics.quantiles(times, n=100)
            print(f"  {name:<22} {rate:>7,.0f}/s   p50 {cuts[49]:>5.0f} ms   p99 {cuts[98]:>5.0f} ms")
            if name == "oncewire":
                print(verdict("the rate without a relay", rate / alone, 0.98))
                print(verdict("100 ms against p99", 100 / cuts[98], 1.0))


async def backlog(bench: Bench, sync: str) -> None:
    slow = await bench.drain(BACKLOG_SLOW, bench.row_by_row)
    fast = await bench.drain(BACKLOG, bench.with_relays)
    print(f"a backlog over {CONVERSATIONS:,} conversations, {sync}")
    print(f"  select 25, publish and mark each ({BACKLOG_SLOW:,} rows)  {slow:>8,.0f}/s")
    print(f"  oncewire, one relay ({BACKLOG:,} rows)             {fast:>8,.0f}/s")
    print(verdict("the backlog", fast / slow, 20.0))
    print(await bench.sizes())


PARTS = ("saturated", "steady", "backlog", "backlog-always")


async def run(server: PostgresServer, nats_url: str, part: str) -> None:
    url = await server.new_database()
    async with oncewire.connect(nats_url) as client:
        await make_chat_stream(client)
        bench = Bench(server, url, client, nats_url)
        match part:
            case "saturated":
                await saturated(bench)
            case "steady":
                await steady(bench)
            case _:
                await backlog(bench, "sync_interval: always" if part == "backlog-always" else "server default")


def main(parts: Sequence[str] = PARTS) -> None:
    for part in parts:
        with postgres_server(fsync="on") as server, nats_server(sync_always=part == "backlog-always") as nats:
            uvloop.run(run(server.migrated(), nats.url, part))


if __name__ == "__main__":
    main(sys.argv[1:] or PARTS)
