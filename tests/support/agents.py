"""For fault tests of agents: real streams, real stores, real processes, and a ledger outside that counts.

The count knows nothing of the runtime but its published formats: it reads the streams through nats-py, the rows through
the database's own driver, and computes ids, chains, sums and the state hash by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import multiprocessing
import os
import signal
import sqlite3
import struct
import sys
import time
import types
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
from nats.aio.client import Client as Witness
from nats.errors import Error as NatsError
from nats.js.api import AckPolicy, ConsumerConfig

from tests.faults import agent_worker
from tests.faults.agent_points import ENDING
from tests.faults.agent_worker import AWAY_CODE as AWAY_CODE
from tests.faults.agent_worker import LOGS, TARGETS, WORKSPACE, Plan, kind_of, subject_of, target_subject
from tests.support.streams import unique, witness
from tests.support.wait import LOOK_S, until_async

ROOT = Path(__file__).parents[2]
DEADLINE_S = 90.0
KILLED = -signal.SIGKILL
SHARED = {
    "LEDGER": {"subjects": ["ledger.>"]},
    "DLQ_REQUESTS": {"subjects": ["dlq_requests.*"]},
} | {
    f"KV_{bucket}": {"subjects": [f"$KV.{bucket}.>"], "max_msgs_per_subject": 1, "allow_rollup_hdrs": True}
    for bucket in ("OW_LEDGERS", "OW_INCARNATIONS", "OW_LOSSES")
}
KINDS_OF_STREAMS: dict[str, dict[str, Any]] = {
    "queue": {"retention": "workqueue"},
    "latest": {"max_msgs_per_subject": 1},
    "brief": {"allow_msg_ttl": True},
    "foreign": {"allow_direct": False, "allow_atomic": False, "allow_batched": False},
}
"""How the targets differ from a log of ours."""
BATCHES = {"allow_atomic": True, "allow_batched": True}
TABLE = "CREATE TABLE IF NOT EXISTS business (n INTEGER NOT NULL, kind TEXT NOT NULL)"
IMMEDIATE = {"sync": (("a", "out", 0), ("b", "far", 1)), "wait": (("a", "out", 0),), "again": (("a", "out", 0),)}
IMMEDIATE |= {"slow": (("a", "out", 0),), "regex": (("a", "out", 0),)}
IMMEDIATE |= {"fan": tuple((part, part, index) for index, part in enumerate(TARGETS))}
LATER = {"late": (("d", "out", 0),)}
ROWS = frozenset({"sync", "wait", "again", "late", "slow", "regex", "fan"})
CALLERS = frozenset({"wait", "again"})
GIVEN_UP = frozenset({"bad", "poison"})


class Outside:
    """A service outside: answers each key with one number, always the same, and counts how often it was called."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.results: dict[str, int] = {}
        self.port = 0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Outside]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        async with server:
            yield self

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            if key := (await reader.readline()).decode().strip():
                self.calls[key] += 1
                writer.write(b"%d\n" % self.results.setdefault(key, len(self.results) + 1))
                await writer.drain()
        writer.close()


_fork = multiprocessing.get_context("forkserver")
_fork.set_forkserver_preload(["tests.faults.agent_worker", "tests.faults.agent_links"])


def _work(main: Callable[[str], None], plan: str, log: str) -> None:
    """In the child: all it says goes into its log."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    main(plan)


class WorkerProcess:
    """One worker, killed by the id we started. It is forked from a server that has loaded everything already: half of
    a short life would be imports."""

    def __init__(self, plan: msgspec.Struct, log: Path, main: Callable[[str], None] = agent_worker.main) -> None:
        self.log = log
        log.touch()
        words = (main, msgspec.json.encode(plan).decode(), str(log))
        self.process = _fork.Process(target=_work, args=words, daemon=True)
        pytest_main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")  # or each child would load pytest
        try:
            self.process.start()
        finally:
            sys.modules["__main__"] = pytest_main

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def code(self) -> int | None:
        return self.process.exitcode

    def signal(self, number: int) -> None:
        if self.code is None:
            os.kill(self.pid, number)

    def family(self) -> list[int]:
        """The worker and the keep-alive process that it started."""
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
            return [self.pid, *map(int, children)]
        return [self.pid]

    def signal_all(self, number: int) -> None:
        """To both: what a paused machine does."""
        for pid in self.family():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    @property
    def is_stopped(self) -> bool:
        with contextlib.suppress(OSError):
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        return False

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    @property
    def is_running(self) -> bool:
        """Whether its agent has started."""
        return self.code is None and "running\n" in self.log.read_text(errors="replace")

    async def ended(self, deadline_s: float = DEADLINE_S) -> int:
        deadline = time.monotonic() + deadline_s
        while (code := self.code) is None:
            assert time.monotonic() < deadline, f"the worker does not end: {self.tail()}"
            await asyncio.sleep(LOOK_S)
        return code

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]


class Gone(Exception):
    """A point that no process reaches: a kill that cannot land proves nothing."""


@dataclass
class Found:
    """A message as nats-py reads it."""

    sequence: int
    subject: str
    id: str
    headers: dict[str, str]
    data: bytes

    @property
    def payload(self) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(self.data)
        return body.get("payload", body)  # outside our contracts the body is the payload

    @property
    def effect_id(self) -> str:
        """A MessageEnvelope is published under its idempotency key, and its own id is the effect's."""
        message_id: str = json.loads(self.data)["message_id"] if self.subject.startswith("sr.") else self.id
        return message_id


def _found(sequence: int, subject: str, headers: Any, data: bytes) -> Found:
    headers = dict(headers or {})
    return Found(sequence, subject, headers.get("Nats-Msg-Id", ""), headers, data)


@dataclass
class World:
    """One agent's streams, its store, its inputs so far."""

    nats_url: str
    store: str
    folder: Path
    outside: Outside
    agent: str = field(default_factory=lambda: unique("w"))
    window_s: float = 120.0
    targets: tuple[str, ...] = LOGS
    """The streams that its inputs send effects to."""
    repeating: frozenset[str] = frozenset()
    """Those where an effect may come again once its id is forgotten: its receiver drops the repeat."""
    options: dict[str, Any] = field(default_factory=dict)
    sent: dict[int, str] = field(default_factory=dict)
    copies: int = 0
    kills: int = 0
    workers: list[WorkerProcess] = field(default_factory=list)

    @property
    def base(self) -> str:
        return f"evt.default.{WORKSPACE}.{self.agent}"

    @property
    def consumer(self) -> str:
        return f"default_{WORKSPACE}_{self.agent}_consumer"

    def stream(self, part: str) -> str:
        return f"{part.upper()}_{self.agent}"

    # ---- setting up

    def witness(self) -> AbstractAsyncContextManager[Witness]:
        return witness(self.nats_url, connect_timeout=10, error_cb=_quiet)

    async def prepare(self) -> World:
        async with self.witness() as connection:
            for name, config in SHARED.items():
                await self._make(connection, name, **config)
            subjects = {"in": f"{self.base}.in.>"} | {to: target_subject(self.agent, to, "*") for to in self.targets}
            for part, subject in subjects.items():
                config = {"duplicate_window": int(self.window_s * 1e9), "max_age": 3_600_000_000_000}
                config |= KINDS_OF_STREAMS.get(part, {})
                await self._make(connection, self.stream(part), subjects=[subject], **config)
        await self.execute(TABLE)
        return self

    @staticmethod
    async def _make(connection: Witness, name: str, **config: Any) -> None:
        body = {"name": name, "storage": "file", "allow_direct": True, **BATCHES, **config}
        reply = await connection.request(f"$JS.API.STREAM.CREATE.{name}", json.dumps(body).encode(), timeout=10)
        error = json.loads(reply.data).get("error")
        assert not error or error["err_code"] == 10058, error

    async def execute(self, statement: str) -> list[tuple[Any, ...]]:
        """On the store, through its own driver."""
        return await execute(self.store, statement)

    # ---- inputs

    async def send(self, count: int = 0, *, kinds: Iterable[str] = (), **more: Any) -> None:
        """The next inputs, by kind or by number; the first twice, under two ids, if it is one that may be."""
        first = len(self.sent)
        wanted = list(kinds) or [kind_of(first + index) for index in range(count)]
        messages: list[tuple[str, bytes, dict[str, str]]] = []
        for number, kind in enumerate(wanted, first):
            self.sent[number] = kind
            body = self._envelope(number, kind, more)
            for copy in range(2 if kind == "sync" and number == first else 1):
                self.copies += copy
                messages.append((subject_of(self.agent, kind), body, {"Nats-Msg-Id": f"{self.agent}-{number}-{copy}"}))
        await until_async(lambda: self._publish(messages), "inputs in their stream", deadline_s=DEADLINE_S)

    async def _publish(self, messages: list[tuple[str, bytes, dict[str, str]]]) -> bool:
        """All of them; after a server that went away all again, under the same ids."""
        with contextlib.suppress(NatsError, OSError, TimeoutError):
            async with self.witness() as connection:
                js = connection.jetstream(publish_async_max_pending=1_000)
                acks = [await js.publish_async(subject, body, headers=headers) for subject, body, headers in messages]
                await asyncio.wait_for(asyncio.gather(*acks), 10)
                return True
        return False

    def _envelope(self, number: int, kind: str, more: dict[str, Any]) -> bytes:
        body = {
            "id": f"input-{number}",
            "ts": 1_700_000_000_000 + number,
            "type": kind,
            "schema_version": "1.0",
            "trace_id": f"{number + 1:032x}",
            "span_id": f"{number + 1:016x}",
            "tenant": "default",
            "workspace": WORKSPACE,
            "actor": {"id": "harness", "role": "service"},
            "payload": {"n": number, **more},
            "idempotency_key": f"{self.agent}:{number}",
            "source": {"agent": "harness", "adapter": "test"},
            "security_context": {"principal_id": "harness", "principal_type": "service"},
        }
        return json.dumps(body).encode()

    # ---- workers

    def start(self, point: str = "", nth: int = 1, *, mutation: str = "", **options: Any) -> WorkerProcess:
        plan = Plan(
            self.nats_url,
            self.store,
            self.agent,
            self.outside.port,
            point=point,
            nth=nth,
            mutation=mutation,
            **(self.options | options),
        )
        worker = WorkerProcess(plan, self.folder / f"{self.agent}-{len(self.workers)}.log")
        self.workers.append(worker)
        return worker

    def stop_all(self) -> None:
        for worker in self.workers:
            if worker.code is None:
                worker.signal_all(signal.SIGCONT)
                worker.kill()

    async def die(
        self, point: str, nth: int = 1, *, burst: int = 30, kind: str = "", mutation: str = "", **options: Any
    ) -> None:
        """A worker dies at the point; inputs come until it does. Then the dead are looked at."""
        worker = self.start(point, nth, mutation=mutation, **options)
        for _ in range(8):
            if worker.code is None:
                if burst:
                    await self.send(burst, kinds=[kind] * burst if kind else ())
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(15):
                        while worker.code is None and not (worker.is_running and await self.is_drained()):
                            await asyncio.sleep(LOOK_S)
                        if point in ENDING:
                            worker.signal(signal.SIGTERM)
                        await _until_dead(worker, 5.0)
        if worker.code is None:
            worker.kill()
            raise Gone(f"no process came to {point}: {worker.tail()}")
        assert worker.code == KILLED, f"{point}: ended with {worker.code}: {worker.tail()}"
        self.kills += 1

    async def info(self) -> dict[str, Any]:
        """The durable as the server sees it; empty while it is not there."""
        async with self.witness() as connection:
            reply = await connection.request(f"$JS.API.CONSUMER.INFO.{self.stream('in')}.{self.consumer}", timeout=10)
            found: dict[str, Any] = json.loads(reply.data)
            return {} if "error" in found else found

    async def is_drained(self) -> bool:
        with contextlib.suppress(NatsError, OSError, TimeoutError):
            info = await self.info()
            return bool(info) and not any(info[name] for name in ("num_pending", "num_ack_pending", "num_redelivered"))
        return False

    async def finish(self, *, mutation: str = "", patience_s: float = DEADLINE_S, **options: Any) -> None:
        """A fresh worker finishes all that is left, and drains."""
        worker = self.start(mutation=mutation, **options)
        try:
            await self.settled(patience_s, worker)
        except AssertionError:
            if worker.code is None:
                worker.kill()
            raise
        worker.signal(signal.SIGTERM)
        code = await worker.ended()
        assert code == 0, f"the last worker ended with {code}: {worker.tail()}"

    async def settled(self, patience_s: float = DEADLINE_S, worker: WorkerProcess | None = None) -> None:
        """Until every input is settled and as many effects are there as there should be."""
        expected = Counter(to for _, _, to, _ in self.expected(delayed=True))

        async def is_settled() -> bool:
            if worker is not None:
                assert worker.code is None, f"the worker ended with {worker.code}: {worker.tail()}"
            if not await self.is_drained() or not (worker is None or worker.is_running):
                return False
            if not all([await self._has(to, count) for to, count in expected.items()]):
                return False
            return len(await self.letters()) >= sum(kind in GIVEN_UP for kind in self.sent.values())

        try:
            await until_async(is_settled, "settled inputs", deadline_s=patience_s)
        except AssertionError as error:
            raise AssertionError(f"{error}; {await self.state()}") from None

    async def state(self) -> str:
        """Where it stands, for whoever must find out why."""
        info = await self.info()
        facts = {name: info.get(name) for name in ("num_pending", "num_ack_pending", "ack_floor", "delivered")}
        attempts = await self.execute("SELECT sequence, deliveries, error FROM ledger_attempts")
        missing = self._count_effects({part: await self.read(self.stream(part)) for part in self.targets})
        missing += self._count_letters(await self.letters())
        log = self.workers[-1].tail() if self.workers else ""
        return f"{self.agent} after {self.kills} kills: {facts}, attempts {attempts}, {missing[:10]}; {log}"

    async def _has(self, part: str, count: int) -> bool:
        with contextlib.suppress(NatsError, OSError, TimeoutError):
            async with self.witness() as connection:
                state = (await connection.jetstream().stream_info(self.stream(part))).state
                return state.messages >= count
        return False

    # ---- what must be there

    def expected(self, *, delayed: bool, numbers: Iterable[int] | None = None) -> list[tuple[int, str, str, int]]:
        """(number, part, stream, index) of every effect."""
        table = IMMEDIATE | LATER if delayed else IMMEDIATE
        chosen = self.sent if numbers is None else numbers
        return [(number, *one) for number in chosen for one in table.get(self.sent[number], ())]

    def identity(self, number: int) -> str:
        return f"key:default/{WORKSPACE}/{self.agent}:{number}"

    def effect_id(self, number: int, index: int) -> str:
        parts = ["fx", "default", WORKSPACE, self.agent, self.identity(number), index]
        text = json.dumps(parts, separators=(",", ":"))
        return "fx." + hashlib.sha256(text.encode()).hexdigest()[:40]

    # ---- what is there

    async def read(self, stream: str, subject: str = "") -> list[Found]:
        """All of a stream; of a work queue too, whose messages no other reader may have."""
        async with self.witness() as connection:
            js = connection.jetstream()
            if stream == self.stream("queue"):
                state = (await js.stream_info(stream)).state
                messages = [await js.get_msg(stream, at) for at in range(max(1, state.first_seq), state.last_seq + 1)]
                return [_found(one.seq, one.subject, one.headers, one.data) for one in messages]
            found: list[Found] = []
            name = unique("reader")
            config = ConsumerConfig(
                name=name, ack_policy=AckPolicy.NONE, filter_subject=subject or None, mem_storage=True
            )
            info = await js.add_consumer(stream, config)
            total = info.num_pending or 0
            if total:
                sub = await js.pull_subscribe_bind(durable=name, stream=stream)
                while len(found) < total:
                    for message in await sub.fetch(min(500, total - len(found)), timeout=30):
                        place = message.metadata.sequence.stream
                        found.append(_found(place, message.subject, message.headers, message.data))
                await sub.unsubscribe()
            await js.delete_consumer(stream, name)
            return found

    async def letters(self) -> list[Found]:
        return await self.read("DLQ_REQUESTS", f"dlq_requests.{self.agent}")

    async def rows(self) -> Counter[int]:
        return Counter(row[0] for row in await self.execute("SELECT n FROM business"))

    # ---- the dead, before anybody takes over

    async def autopsy(self) -> list[str]:
        """The order of the steps, as a death between them shows it: commit, then publish, then ack."""
        info = await self.info()
        floor = info["ack_floor"]["stream_seq"] if info else 0
        inputs = await self.read(self.stream("in"))
        there = {
            (one.payload["n"], one.payload["part"])
            for part in self.targets
            for one in await self.read(self.stream(part))
        }
        letters = {int(one.headers["Oncewire-Dlq-Sequence"]) for one in await self.letters()}
        rows = await self.rows()
        acked = {one.payload["n"] for one in inputs if one.sequence <= floor}
        problems = [f"published and not committed: {n}{part}" for n, part in sorted(there) if n not in rows]
        problems += [
            f"acked and not published: {n}{part}"
            for n, part, _, _ in self.expected(delayed=False, numbers=sorted(acked))
            if (n, part) not in there
        ]
        problems += [f"acked and not committed: {n}" for n in sorted(acked) if self.sent[n] in ROWS and n not in rows]
        problems += [
            f"acked and not handed over: {one.payload['n']}"
            for one in inputs
            if one.sequence <= floor and self.sent[one.payload["n"]] == "bad" and one.sequence not in letters
        ]
        return problems

    # ---- the count

    async def count(self, *, repeated_calls: int | None = None) -> list[str]:
        """Everything that is wrong at the end; nothing is what is hoped for."""
        rows = await self.rows()
        wanted = {n for n, kind in self.sent.items() if kind in ROWS}
        problems = [f"row missing: {n}" for n in sorted(wanted - rows.keys())]
        problems += [f"row doubled: {n} x{count}" for n, count in sorted(rows.items()) if count > 1]
        problems += [f"row of nobody: {n}" for n in sorted(rows.keys() - wanted)]
        effects = {part: await self.read(self.stream(part)) for part in self.targets}
        letters = await self.letters()
        problems += self._count_effects(effects) + self._count_letters(letters)
        problems += self._count_calls(effects, self.kills * 64 if repeated_calls is None else repeated_calls)
        blocks = await self.read("LEDGER", f"ledger.{self.agent}.>")
        published = Counter(one.id for one in (*itertools.chain.from_iterable(effects.values()), *letters))
        problems += self._count_blocks(blocks, published)
        problems += self._count_positions(blocks, await self.read(self.stream("in")))
        return problems + await self._count_marks(blocks)

    def _count_effects(self, effects: dict[str, list[Found]]) -> list[str]:
        expected = {(n, part, to): self.effect_id(n, index) for n, part, to, index in self.expected(delayed=True)}
        found = Counter((one.payload["n"], one.payload["part"], to) for to, part in effects.items() for one in part)
        once = {to: part for to, part in effects.items() if to not in self.repeating}
        by_id = Counter(one.id for part in once.values() for one in part)
        problems = [f"effect missing: {one}" for one in sorted(expected.keys() - found.keys())]
        problems += [f"effect of nobody: {one}" for one in sorted(found.keys() - expected.keys())]
        problems += [
            f"effect doubled: {one} x{count}"
            for one, count in sorted(found.items())
            if count > 1 and one[2] not in self.repeating
        ]
        problems += [f"id doubled: {id_} x{count}" for id_, count in sorted(by_id.items()) if count > 1]
        stable = {one.effect_id for part in once.values() for one in part}
        problems += [f"effect without its stable id: {id_}" for id_ in sorted(stable - set(expected.values()))]
        return problems

    def _count_letters(self, letters: list[Found]) -> list[str]:
        numbers = Counter(json.loads(one.data)["payload"]["n"] for one in letters)
        wanted = {n for n, kind in self.sent.items() if kind in GIVEN_UP}
        problems = [f"letter missing: {n}" for n in sorted(wanted - numbers.keys())]
        problems += [f"letter of nobody: {n}" for n in sorted(numbers.keys() - wanted)]
        return problems + [f"letter doubled: {n} x{count}" for n, count in numbers.items() if count > 1]

    def _count_calls(self, effects: dict[str, list[Found]], repeats_max: int) -> list[str]:
        callers = [n for n, kind in self.sent.items() if kind in CALLERS]
        calls = self.outside.calls
        repeated = sum(calls.values()) - len(calls)
        problems = [] if len(calls) == len(callers) else [f"{len(calls)} keys called for {len(callers)} inputs"]
        if repeated > repeats_max:
            problems.append(f"{repeated} calls made again, at most {repeats_max} could have been cut off")
        told = [one.payload["result"] for part in effects.values() for one in part if "result" in one.payload]
        if sorted(set(told)) != sorted(self.outside.results.values()):
            problems.append("the results of calls in the effects are not those that were given")
        return problems

    def _count_blocks(self, blocks: list[Found], published: Counter[str]) -> list[str]:
        problems = [f"block doubled: {id_}" for id_, count in Counter(one.id for one in blocks).items() if count > 1]
        chain = sorted((json.loads(one.data)["number"], one.data) for one in blocks)
        if [number for number, _ in chain] != list(range(1, len(chain) + 1)):
            problems.append(f"the blocks are numbered {[number for number, _ in chain]}")
        previous = bytes(32).hex()
        announced: Counter[str] = Counter()
        for number, data in chain:
            block = json.loads(data)
            if block["previous"] != previous:
                problems.append(f"block {number} does not follow from the one before")
            previous = hashlib.sha256(data).hexdigest()
            announced.update(block["effects"])
        problems += [f"announced {count} times: {id_}" for id_, count in announced.items() if count > 1]
        problems += [f"announced and not there: {id_}" for id_ in sorted(announced.keys() - published.keys())]
        return problems + [f"there and not announced: {id_}" for id_ in sorted(published.keys() - announced.keys())]

    def _count_positions(self, blocks: list[Found], inputs: list[Found]) -> list[str]:
        problems: list[str] = []
        outcomes: dict[int, list[str]] = defaultdict(list)
        bodies = {one.sequence: one.data for one in inputs}
        state = [0] * 8
        for one in sorted(blocks, key=lambda one: int(json.loads(one.data)["number"])):
            block = json.loads(one.data)
            settled: list[int] = []
            for part in block["inputs"]:
                for outcome in ("done", "duplicate", "terminated", "dead", "passed"):
                    for first, last in part.get(outcome, []):
                        for sequence in range(first, last + 1):
                            outcomes[sequence].append(outcome)
                            settled.append(sequence)
                            state = _added(state, self._element(bodies.get(sequence, b""), outcome))
                if part["sum"] != _hex(self._sum(part["stream"], settled, bodies)):
                    problems.append(f"block {block['number']}: the sum over its inputs is wrong")
            if block["state"] != _hex(state):
                problems.append(f"block {block['number']}: the state hash is wrong")
        problems += [f"no outcome: position {one}" for one in sorted(bodies.keys() - outcomes.keys())]
        problems += [f"{len(them)} outcomes: position {at} {them}" for at, them in outcomes.items() if len(them) > 1]
        kept = Counter(them[0] for them in outcomes.values())
        if kept["duplicate"] != self.copies:
            problems.append(f"{kept['duplicate']} duplicates for {self.copies} copies")
        return problems

    @staticmethod
    def _sum(stream: str, sequences: list[int], bodies: dict[int, bytes]) -> list[int]:
        total = [0] * 8
        for sequence in sequences:
            head = f"{len(stream)}:{stream}{sequence}:".encode()
            total = _added(total, hashlib.blake2b(head + bodies.get(sequence, b""), digest_size=64).digest())
        return total

    def _element(self, body: bytes, outcome: str) -> bytes:
        """What a settled identity adds to the state hash, from the words of the decision (E14)."""
        if outcome in ("duplicate", "passed") or not body:
            return bytes(64)
        envelope = json.loads(body)
        content = {"payload": envelope["payload"], "type": envelope["type"]}
        digest = hashlib.sha256(json.dumps(content, separators=(",", ":"), sort_keys=True).encode()).digest()
        agent = f"default/{WORKSPACE}/{self.agent}"
        identity = f"key:default/{WORKSPACE}/{envelope['idempotency_key']}"
        subject = subject_of(self.agent, envelope["type"])
        head = f"{len(agent)}:{agent}{len(identity)}:{identity}{len(subject)}:{subject}{outcome}".encode()
        return hashlib.blake2b(head + digest, digest_size=64).digest()

    async def _count_marks(self, blocks: list[Found]) -> list[str]:
        """All that was published is known to be: only closing blocks may wait for the next commit."""
        if not blocks:
            return ["no block was announced"]
        told = [json.loads(one.data) for one in blocks]
        last = max((block["number"] for block in told if block["inputs"] or block["effects"]), default=0)
        known = f"SELECT confirmed FROM ledger_chains WHERE agent = 'default/{WORKSPACE}/{self.agent}'"
        confirmed = (await self.execute(known))[0][0]
        return [f"confirmed up to block {confirmed} of {last}"] if confirmed < last else []


def _added(state: list[int], element: bytes) -> list[int]:
    return [(one + more) % 2**64 for one, more in zip(state, struct.unpack("<8Q", element), strict=True)]


def _hex(state: list[int]) -> str:
    return struct.pack("<8Q", *state).hex()


async def execute(store: str, statement: str) -> list[tuple[Any, ...]]:
    """On a ledger's database, through the driver's own package."""
    if store.startswith("sqlite"):
        return await asyncio.to_thread(_on_sqlite, store.removeprefix("sqlite:///"), statement)
    connection = await asyncpg.connect(store)
    try:
        return [tuple(row) for row in await connection.fetch(statement)]
    finally:
        await connection.close()


def _on_sqlite(path: str, statement: str) -> list[tuple[Any, ...]]:
    connection = sqlite3.connect(path, timeout=30)
    try:
        with connection:
            return connection.execute(statement).fetchall()
    finally:
        connection.close()


async def _until_dead(worker: WorkerProcess, deadline_s: float) -> None:
    async with asyncio.timeout(deadline_s):
        while worker.code is None:
            await asyncio.sleep(LOOK_S)


async def _quiet(_: Exception) -> None:
    """nats-py tells of a server that was killed; the next request says so too."""


@contextlib.asynccontextmanager
async def world(nats_url: str, folder: Path, store: str = "", **fields: Any) -> AsyncIterator[World]:
    """A fresh world; whatever still runs of it is killed at its end. Without a store it has a SQLite file."""
    async with Outside().running() as outside:
        made = World(nats_url, store, folder, outside, **fields)
        made.store = store or f"sqlite:///{folder / made.agent}.db"
        await made.prepare()
        try:
            yield made
        finally:
            made.stop_all()
