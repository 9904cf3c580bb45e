"""Whatever a handler does, it harms only its own input: that is retried, and becomes a letter with the real cause."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from oncewire._ground.errors import Refused
from oncewire._ground.jetstream import Pull
from oncewire._ground.ledger.store import Store
from oncewire._ground.ledger.stores import open_store
from oncewire.agent import Agent, Context, Effect
from tests.support import guilty
from tests.support.guilty import Guilt
from tests.support.ledgers import PostgresKit
from tests.support.nats import NatsServer
from tests.support.running import EVENTS, command, new_agent, payload_of, prepared, run, send, stored
from tests.support.streams import unique
from tests.support.wait import until

INNOCENT = 3
"""Inputs before, between and after the guilty ones."""
FORMS = ("def", "async def")
STORES = ("sqlite", "postgresql")


async def new_store(kind: str, folder: Path) -> Store:
    if kind == "sqlite":
        return open_store(f"sqlite:///{folder}/ledger.db")
    return open_store((await asyncio.to_thread(PostgresKit)).url)


def judged(form: str, kinds: dict[str, Guilt], subject: str, **options: Any) -> Agent:
    """An agent whose one handler does what its input says."""
    agent = new_agent(**{"max_deliver": 2, **options})

    def do(payload: dict[str, Any]) -> Any:
        if payload["kind"] in kinds:
            return kinds[payload["kind"]].act()
        return Effect(subject, payload)

    if form == "def":

        @agent.on("do")
        def at_once(ctx: Context, payload: dict[str, Any]) -> Any:
            return do(payload)

    else:

        @agent.on("do")
        async def wait(ctx: Context, payload: dict[str, Any]) -> Any:
            await asyncio.sleep(0)
            return do(payload)

    return agent


async def sent(client: Any, agent: Agent, kinds: dict[str, Guilt]) -> int:
    """One input of each kind, and innocent ones around each; how many innocent ones there are."""
    count = 0
    for kind in kinds:
        for each in ["innocent"] * INNOCENT + [kind]:
            await send(client, command(agent, "do"), {"kind": each, "n": count})
            count += each == "innocent"
    await send(client, command(agent, "do"), {"kind": "innocent", "n": count})
    return count + 1


async def verdict(server: NatsServer, agent: Agent, subject: str) -> tuple[Counter[int], dict[str, str]]:
    """What an independent reader finds: how often each innocent input had its effect, and the cause of each letter."""
    effects = Counter(payload_of(one)["n"] for one in await stored(server.url, EVENTS, subject))
    letters = await stored(server.url, "DLQ_REQUESTS", f"dlq_requests.{agent.name}")
    assert len(letters) == len({payload_of(one)["kind"] for one in letters})
    return effects, {payload_of(one)["kind"]: one.headers["Oncewire-Dlq-Cause"] for one in letters}


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("group", ["ERRORS", "RETRIES", "ENDS"])
async def test_a_guilty_handler_harms_only_its_own_input(
    shared_server: NatsServer, tmp_path: Path, store: str, form: str, group: str
) -> None:
    kinds: dict[str, Guilt] = getattr(guilty, group)
    subject = f"evt.default.demo.{unique('guilty')}"
    agent = judged(form, kinds, subject)
    async with prepared(shared_server.url) as client, run(agent, client, await new_store(store, tmp_path)) as runner:
        innocent = await sent(client, agent, kinds)
        await until(lambda: runner.counts.get("dead", 0) + runner.counts.get("terminated", 0) >= len(kinds))
        await until(lambda: runner.counts.get("done", 0) >= innocent)
        assert (innocent, len(kinds)) == (runner.counts["done"], runner.counts["dead"])
        assert "" == runner.trouble
        await send(client, command(agent, "do"), {"kind": "innocent", "n": innocent})
        await until(lambda: runner.counts["done"] == innocent + 1)
    effects, causes = await verdict(shared_server, agent, subject)

    assert effects == dict.fromkeys(range(innocent + 1), 1)
    assert set(causes) == set(kinds)
    assert [] == [(kind, cause) for kind, cause in causes.items() if not cause.startswith(kinds[kind].cause)]


@pytest.mark.parametrize("form", FORMS)
async def test_a_handler_that_ends_the_stores_session_harms_only_its_own_input(
    shared_server: NatsServer, tmp_path: Path, form: str
) -> None:
    """Its database is not away: it ends the session each time, as a statement may that crashes its backend."""
    agent, subject = new_agent(max_deliver=2), f"evt.default.demo.{unique('guilty')}"
    kill = "SELECT pg_terminate_backend(pg_backend_pid())"

    if form == "def":

        @agent.on("do")
        def at_once(ctx: Context, payload: dict[str, Any]) -> Any:
            ctx.tx.execute(kill if payload["kind"] == "kill" else "SELECT 1")
            return Effect(subject, payload)

    else:

        @agent.on("do")
        async def wait(ctx: Context, payload: dict[str, Any]) -> Any:
            async with ctx.tx as tx:
                tx.execute(kill if payload["kind"] == "kill" else "SELECT 1")
            return Effect(subject, payload)

    async with prepared(shared_server.url) as client:
        innocent = await sent(client, agent, {"kill": Guilt(lambda: None, "")})
        async with run(agent, client, await new_store("postgresql", tmp_path)) as runner:
            await until(lambda: runner.counts.get("dead", 0) == 1)
            await until(lambda: runner.counts.get("done", 0) == innocent)
            await until(lambda: "" == runner.trouble)
    effects, causes = await verdict(shared_server, agent, subject)

    assert effects == dict.fromkeys(range(innocent), 1)
    assert causes["kill"].startswith("NotConnected: PostgreSQL")


async def test_a_nak_that_fails_keeps_no_effect_of_its_batch_back(
    shared_server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kinds = {"again": Guilt(guilty.retrying(0.01), "Retry")}
    subject = f"evt.default.demo.{unique('guilty')}"
    agent = judged("def", kinds, subject, max_deliver=5)
    nak, failures = Pull.nak, list[float]()

    def failing(pull: Pull, messages: Any, delay_s: float = 0.0, **options: Any) -> None:
        if delay_s and not failures:
            failures.append(delay_s)
            raise TypeError("no such delay")
        nak(pull, messages, delay_s)

    monkeypatch.setattr(Pull, "nak", failing)
    async with prepared(shared_server.url) as client:
        innocent = await sent(client, agent, kinds)
        async with run(agent, client, await new_store("sqlite", tmp_path)) as runner:
            await until(lambda: runner.counts.get("done", 0) == innocent)
            await until(lambda: runner.counts.get("retried", 0) >= 2, "the retry, which comes back after ack_wait")
    effects, _ = await verdict(shared_server, agent, subject)

    assert effects == dict.fromkeys(range(innocent), 1)
    (record,) = [one for one in caplog.records if "asking for a redelivery failed: TypeError" in one.getMessage()]
    assert record.exc_info is not None


@pytest.mark.parametrize("error", [TypeError("a bug"), Refused("never")])
async def test_publishing_that_fails_in_an_odd_way_is_seen_by_readiness_and_swept(
    shared_server: NatsServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    subject = f"evt.default.demo.{unique('guilty')}"
    agent = judged("def", {}, subject)
    async with prepared(shared_server.url) as client, run(agent, client, await new_store("sqlite", tmp_path)) as runner:
        publish_many = client.publish_many

        async def failing(messages: Any, *rest: Any, **options: Any) -> Any:
            if any(one.subject == subject for one in messages):
                raise error
            return await publish_many(messages, *rest, **options)

        monkeypatch.setattr(client, "publish_many", failing)
        await send(client, command(agent, "do"), {"kind": "innocent", "n": 0})
        await until(lambda: f"{error}" in runner.trouble, "readiness to say it")
        assert str(error) in runner.last_error
        assert not runner.health()["is_ready"]
        agent_is_running = await until(lambda: not runner._tasks[0].done())
        monkeypatch.setattr(client, "publish_many", publish_many)
        await until(lambda: "" == runner.trouble, "the sweep")
        assert agent_is_running
    effects, _ = await verdict(shared_server, agent, subject)

    assert {0: 1} == effects
    if isinstance(error, TypeError):
        assert [one for one in caplog.records if "TypeError: a bug" in one.getMessage() and one.exc_info]


ODD_SUBJECTS = [b"a\xffb", b"\xed\xa0\x80", b"a\x01b", b"a\x7fb"]
ODD_HEADERS = [
    b"X-Odd: \xff\xfe",
    b"Nats-Msg-Id: %d\xff",
    b"traceparent: \xff",
    b"Oncewire-Replay-Ts: \xff",
    b"X\xff: 1",
]


@pytest.mark.parametrize("store", STORES)
async def test_subjects_and_headers_that_are_no_text_harm_only_their_own_input(
    server: NatsServer, tmp_path: Path, store: str
) -> None:
    """A producer may write any bytes there; a ledger, a header and a log may not hold them."""
    agent = new_agent(max_deliver=2)
    seen: list[str] = []

    @agent.on(f"{command(agent, '>')}")
    def do(ctx: Context, payload: dict[str, Any]) -> None:
        seen.append(ctx.subject)
        if "fails" in payload:
            raise ValueError(f"{ctx.subject} failed")

    bodies = [b'{"type": "T", "payload": {}}', b'{"type": "T", "payload": {"fails": "a\\u0000b"}}']
    subject = command(agent, "do").encode()
    frames = [pub(command(agent, "").encode() + odd, body) for odd in ODD_SUBJECTS for body in bodies]
    frames += [
        pub(subject, body, odd % at if b"%d" in odd else odd) for odd in ODD_HEADERS for at, body in enumerate(bodies)
    ]
    async with prepared(server.url) as client, run(agent, client, await new_store(store, tmp_path)) as runner:
        await write_raw(server, frames)
        await send(client, command(agent, "last"), {})
        await until(lambda: sum(runner.counts.get(name, 0) for name in SETTLED) >= len(frames) + 1)
        assert "" == runner.trouble
        await send(client, command(agent, "last"), {})
        await until(lambda: sum(runner.counts.get(name, 0) for name in SETTLED) >= len(frames) + 2)
        assert 2 == seen.count(command(agent, "last"))
        outcomes = {name: runner.counts[name] for name in SETTLED}
    letters = await stored(server.url, "DLQ_REQUESTS")
    causes = Counter(one.headers["Oncewire-Dlq-Cause"].partition(":")[0] for one in letters)
    assert {"contract_violation": outcomes["terminated"], "ValueError": outcomes["dead"]} == causes
    assert (len(frames) + 2, True) == (sum(outcomes.values()), outcomes["terminated"] >= 2 * len(ODD_SUBJECTS))
    shown = {one.headers["Oncewire-Dlq-Subject"] for one in letters}
    assert {f"{command(agent, '')}{odd}" for odd in (r"a\udcffb", r"a\x01b", r"a\x7fb")} <= shown


SETTLED = ("done", "dead", "terminated")


def pub(subject: bytes, body: bytes, header: bytes = b"") -> bytes:
    """A publish as a foreign client may write it."""
    if not header:
        return b"PUB %b %d\r\n%b\r\n" % (subject, len(body), body)
    block = b"NATS/1.0\r\n%b\r\n\r\n" % header
    return b"HPUB %b %d %d\r\n%b%b\r\n" % (subject, len(block), len(block) + len(body), block, body)


async def write_raw(server: NatsServer, frames: list[bytes]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b'CONNECT {"verbose":false,"headers":true}\r\n' + b"".join(frames) + b"PING\r\n")
    while (line := await reader.readline()) != b"PONG\r\n":
        assert not line.startswith(b"-ERR"), line
    writer.close()
    await writer.wait_closed()
