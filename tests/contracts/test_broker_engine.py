"""What every engine promises to the routes, in its durable and its forgetful form."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from oncewire._ground.contracts.broker import BrokerEnvelope, Delivery, ProduceBody
from oncewire._ground.errors import Conflict, Corrupt, NotFound, OncewireError, OutcomeUnknown, Unavailable
from oncewire.broker.engine import Consume, Engine, Limits, Produced, RoutingDecision, Settle, TopicCreated
from oncewire.broker.journal import Journal, replay_into
from oncewire.broker.local import LocalEngine, open_local, steady_clock
from oncewire.broker.log.inspect import inspect, verify
from oncewire.broker.log.writer import Log
from oncewire.broker.state import State
from tests.support.broker import Reader
from tests.support.disk import SimDisk
from tests.support.wait import until


@pytest.fixture(params=["memory", "log"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def answer(call: Callable[..., Any], *args: Any) -> Any:
    """What `done` gets."""
    got = asyncio.get_running_loop().create_future()
    call(*args, got.set_result)
    return await asyncio.wait_for(got, 20)


@contextlib.asynccontextmanager
async def opened(kind: str, folder: Path, **options: Any) -> AsyncIterator[LocalEngine]:
    engine = await open_local(folder / "wal" if kind == "log" else None, **options)
    try:
        yield engine
    finally:
        await engine.stop()


@pytest.fixture
async def engine(kind: str, tmp_path: Path) -> AsyncIterator[LocalEngine]:
    async with opened(kind, tmp_path) as one:
        await answer(one.create_topic, "", "t", 1)
        yield one


def body(value: str = "v", topic: str = "t", **envelope: Any) -> ProduceBody:
    return ProduceBody(topic=topic, value=value, envelope=BrokerEnvelope(**envelope) if envelope else None)


READ = Consume("t", "g", "a", in_flight=1_000)


async def test_a_message_goes_from_producer_to_reader_and_is_acked(engine: Engine, kind: str) -> None:
    assert (kind == "log") == engine.is_durable
    assert Produced("t", 0, 0) == await answer(engine.produce, "", body())
    reader = Reader()
    await answer(engine.subscribe, "", READ, reader)
    await until(lambda: reader.got, "the delivery")
    assert await answer(engine.settle, "", Settle("ack", "t", "g", 0, 0, "a")) is None
    shown = await answer(engine.show_topic, "", "t")
    assert (1, 0) == (shown.messages, shown.groups[0].lag)
    assert ["t"] == await answer(engine.list_topics, "")
    assert [] == engine.problems()


async def test_requests_that_come_together_share_commits(engine: Engine) -> None:
    await asyncio.gather(*(answer(engine.produce, "", body(str(n))) for n in range(500)))
    stats = engine.stats()
    assert 500 == stats.counters["produced"]
    if stats.log is not None:
        assert stats.log.commits < 50


async def test_many_at_once_get_a_result_each(engine: Engine) -> None:
    results = await answer(engine.produce_many, "", [body(), body(topic="nowhere"), body(idempotency_key="k")])
    assert [Produced, NotFound, Produced] == [type(one) for one in results]
    taken = await answer(lambda *a: engine.take(*a), "", READ, 10, 5_000)
    assert 2 == len(taken)
    settles = [Settle("ack", "t", "g", 0, one.offset, "a") for one in taken]
    assert [None, None, "message is not in-flight"] == [
        one and one.message for one in await answer(engine.settle_many, "", [*settles, settles[0]])
    ]


async def test_a_long_poll_waits_for_a_message_and_gives_up_in_time(engine: Engine) -> None:
    assert [] == await answer(lambda *a: engine.take(*a), "", READ, 10, 1)
    waiting = asyncio.ensure_future(answer(lambda *a: engine.take(*a), "", READ, 10, 20_000))
    await asyncio.sleep(0)
    await answer(engine.produce, "", body())
    assert ["v"] == [one.value for one in await waiting]


async def test_a_long_poll_without_waiting_takes_what_is_there(engine: Engine) -> None:
    await answer(engine.produce_many, "", [body(str(n)) for n in range(5)])
    await answer(lambda *a: engine.take(*a), "", Consume("t", "g", "a", 1), 1, 20_000)
    taken = await answer(lambda *a: engine.take(*a), "", READ, 3, 0)
    assert ["1", "2", "3"] == [one.value for one in taken]


async def test_a_long_poll_that_is_closed_takes_nothing(engine: Engine) -> None:
    got: list[list[Delivery] | OncewireError] = []
    engine.take("", READ, 10, 20_000, got.append).close()
    assert [[]] == got
    await answer(engine.produce, "", body())
    assert ["v"] == [one.value for one in await answer(lambda *a: engine.take(*a), "", READ, 10, 20_000)]


async def test_a_reader_that_stops_reading_is_bounded_and_resumes(engine: Engine) -> None:
    reader = Reader(room=2)
    subscription = await answer(engine.subscribe, "", READ, reader)
    await answer(engine.produce_many, "", [body(str(n)) for n in range(5)])
    await until(lambda: len(reader.got) == 2, "two deliveries")
    reader.space = 3
    subscription.resume()
    await until(lambda: len(reader.got) == 5, "the rest")
    subscription.close()
    subscription.close()


async def test_a_lease_that_ends_brings_the_message_again(kind: str, tmp_path: Path) -> None:
    async with opened(kind, tmp_path, limits=Limits(tick_ms=5)) as engine:
        await answer(engine.create_topic, "", "t", 1)
        await answer(engine.produce, "", body())
        reader = Reader()
        await answer(engine.subscribe, "", Consume("t", "g", "a", 10), reader)
        await until(lambda: len(reader.got) > 2, "redeliveries")
        assert [1, 2, 3] == [one.attempts for one in reader.got[:3]]


async def test_deleting_a_topic_ends_its_readers(engine: Engine) -> None:
    reader = Reader()
    await answer(engine.subscribe, "", READ, reader)
    assert await answer(engine.delete_topic, "", "t") is None
    await until(lambda: reader.end is not None, "the end")
    assert isinstance(reader.end, NotFound)


async def test_a_stop_ends_readers_and_refuses_what_comes_after(kind: str, tmp_path: Path) -> None:
    async with opened(kind, tmp_path) as engine:
        await answer(engine.create_topic, "", "t", 1)
        reader = Reader()
        await answer(engine.subscribe, "", READ, reader)
        last = asyncio.ensure_future(answer(engine.produce, "", body()))
        await asyncio.sleep(0)
        await engine.stop()
        assert isinstance(reader.end, Unavailable)
        assert isinstance(await last, Produced if kind == "log" else (Produced, Unavailable))
        assert isinstance(await answer(engine.produce, "", body()), Unavailable)
        assert engine.problems()


# ---- the router


@pytest.mark.parametrize("style", ["function", "coroutine"])
async def test_a_router_is_asked_before_anything_is_stored(kind: str, tmp_path: Path, style: str) -> None:
    def route(topic: str, sent: ProduceBody) -> RoutingDecision:
        return RoutingDecision(label=f"{topic}:{sent.value}")

    async def route_later(topic: str, sent: ProduceBody) -> RoutingDecision:
        return route(topic, sent)

    async with opened(kind, tmp_path, router=route if style == "function" else route_later) as engine:
        await answer(engine.create_topic, "", "t", 1)
        await answer(engine.produce_many, "", [body("1"), body("2")])
        taken = await answer(lambda *a: engine.take(*a), "", READ, 10, 20_000)
        assert ["t:1", "t:2"] == [one.routing and one.routing.label for one in taken]


@pytest.mark.parametrize("fault", ["raises", "hangs", "nonsense"])
async def test_a_failing_router_neither_fails_nor_delays_a_produce(
    kind: str, tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    released = threading.Event()

    def route(topic: str, sent: ProduceBody) -> Any:
        if fault == "raises":
            raise ValueError("no idea")
        if fault == "hangs":
            released.wait(30)
        return {"label": 7}

    async with opened(kind, tmp_path, router=route, router_timeout_ms=20) as engine:
        await answer(engine.create_topic, "", "t", 1)
        assert Produced("t", 0, 0) == await answer(engine.produce, "", body())
        assert 1 == engine.stats().counters["router_failures"]
        assert "a message goes without the router" in caplog.text
        released.set()


# ---- over restarts


async def test_what_was_acknowledged_survives_exactly_when_the_engine_says_so(kind: str, tmp_path: Path) -> None:
    async with opened(kind, tmp_path) as engine:
        await answer(engine.create_topic, "", "t", 3)
        await answer(engine.produce_many, "", [body(str(n), idempotency_key=str(n)) for n in range(10)])
    async with opened(kind, tmp_path) as engine:
        topics = await answer(engine.list_topics, "")
        assert (["t"] if engine.is_durable else []) == topics
        if engine.is_durable:
            assert TopicCreated("t", 3) == await answer(engine.create_topic, "", "t", 1)
            assert (await answer(engine.produce, "", body("0", idempotency_key="0"))).is_duplicate
            assert 10 == len(await answer(lambda *a: engine.take(*a), "", READ, 100, 20_000))
            assert verify(tmp_path / "wal").commits >= 2


async def test_one_process_has_a_log_at_a_time(tmp_path: Path) -> None:
    async with opened("log", tmp_path):
        with pytest.raises(Conflict, match="in use by process"):
            await open_local(tmp_path / "wal")
        assert not inspect(tmp_path / "wal").damage, "but anyone may look"
    async with opened("log", tmp_path):
        pass


async def test_a_damaged_log_is_not_started(tmp_path: Path) -> None:
    async with opened("log", tmp_path) as engine:
        await answer(engine.create_topic, "", "t", 1)
    segment = next((tmp_path / "wal").glob("segment-*"))
    stored = bytearray(segment.read_bytes())
    stored[60] ^= 1
    segment.write_bytes(stored)
    with pytest.raises(Corrupt, match="byte 4"):
        await open_local(tmp_path / "wal")
    assert "byte 4" in inspect(tmp_path / "wal").damage
    with pytest.raises(Corrupt):
        verify(tmp_path / "wal")


# ---- a disk that fails


def engine_on(disk: SimDisk, **options: Any) -> LocalEngine:
    ids = itertools.count(1)
    state = State(Limits(tick_ms=20))
    log = Log(disk, lambda: next(ids), **options)
    journal = Journal(log, replay_into(state, log))
    return LocalEngine(state, journal, None, steady_clock(), None, 0)


async def test_a_full_disk_refuses_clearly_and_recovers_without_a_restart() -> None:
    disk = SimDisk()
    engine = engine_on(disk)
    await answer(engine.create_topic, "", "t", 1)
    await answer(engine.produce, "", body("before"))
    disk.room = 10
    assert isinstance(await answer(engine.produce, "", body("lost")), OutcomeUnknown)
    refused = await answer(engine.produce, "", body("lost"))
    assert isinstance(refused, Unavailable)
    assert "is full: nothing was written" in refused.message
    assert engine.problems()
    disk.room = 1 << 20
    await until(lambda: not engine.problems(), "the engine to notice that there is room again")
    assert isinstance(await answer(engine.produce, "", body("after")), Produced)
    await engine.stop()
    again = engine_on(disk.copy())
    taken = await answer(lambda *a: again.take(*a), "", READ, 100, 20_000)
    assert ["before", "after"] == [one.value for one in taken]
    await again.stop()


async def test_snapshots_bound_the_log_while_it_is_used() -> None:
    disk = SimDisk()
    engine = engine_on(disk, segment_bytes_max=2_000, snapshot_bytes_min=10_000)
    await answer(engine.create_topic, "", "t", 1)
    begun = time.monotonic()
    while engine.stats().log.snapshots < 5 and time.monotonic() < begun + 60:  # type: ignore[union-attr]
        await answer(engine.produce, "", body("x" * 500))
        for one in await answer(lambda *a: engine.take(*a), "", READ, 100, 20_000):
            await answer(engine.settle, "", Settle("ack", "t", "g", 0, one.offset, "a"))
    assert 5 <= engine.stats().log.snapshots  # type: ignore[union-attr]
    await answer(engine.produce, "", body("last"))
    await engine.stop()
    again = engine_on(disk.copy())
    taken = await answer(lambda *a: again.take(*a), "", READ, 100, 20_000)
    assert ["last"] == [one.value for one in taken]
    await again.stop()
