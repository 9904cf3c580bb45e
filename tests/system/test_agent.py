"""An agent on a real nats-server: what becomes of each input, and of what its handler returns or raises."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pydantic
import pytest

from oncewire._ground.contracts import blocks
from oncewire._ground.contracts.blocks import Announcement
from oncewire._ground.contracts.message import new_message
from oncewire._ground.errors import Conflict
from oncewire._ground.jetstream import Client
from oncewire.agent import Agent, Context, Effect, Retry, Terminate
from tests.support.nats import NatsServer
from tests.support.running import (
    COMMANDS,
    EVENTS,
    command,
    counted,
    new_agent,
    payload_of,
    prepared,
    run,
    send,
    sqlite_in,
    stored,
)
from tests.support.streams import consumer_info, unique
from tests.support.wait import until, until_async

OUT = "evt.default.demo.out"


@dataclass
class AsDataclass:
    order: int
    note: str = ""


class AsStruct(msgspec.Struct):
    order: int
    note: str = ""


class AsModel(pydantic.BaseModel):
    order: int
    note: str = ""


@pytest.mark.parametrize("kind", [AsDataclass, AsStruct, AsModel, dict])
async def test_a_payload_comes_as_the_type_that_the_handler_asks_for(
    shared_server: NatsServer, tmp_path: Path, kind: type
) -> None:
    agent = new_agent()
    seen: list[Any] = []

    def handle(ctx: Context, order: Any) -> None:
        seen.append(order)

    handle.__annotations__["order"] = kind
    agent.on("charge")(handle)
    async with prepared(shared_server.url) as client, run(agent, client, sqlite_in(tmp_path)) as runner:
        await send(client, command(agent, "charge"), {"order": 7, "note": "x"})
        await send(client, command(agent, "charge"), {"order": "seven"})
        await counted(runner, **{"done": 2} if kind is dict else {"done": 1, "terminated": 1})
    first = seen[0]
    assert (first if kind is dict else (first.order, first.note)) == (
        {"order": 7, "note": "x"} if kind is dict else (7, "x")
    )


async def test_an_effect_carries_trace_causation_and_correlation(shared_server: NatsServer, tmp_path: Path) -> None:
    agent, subject = new_agent(), f"{OUT}.{unique('t')}"

    @agent.on("go")
    async def go(ctx: Context, payload: dict[str, Any]) -> list[Effect]:
        return [Effect(subject, {"n": n}) for n in (1, 2)]

    trace_id = "0af7651916cd43dd8448eb211c80319c"
    async with prepared(shared_server.url) as client, run(agent, client, sqlite_in(tmp_path)) as runner:
        fields = {"id": "input-1", "trace_id": trace_id, "span_id": "b7ad6b7169203331", "correlation_id": "order-7"}
        await send(client, command(agent, "go"), {}, **fields)
        await counted(runner, done=1)
    messages = await stored(shared_server.url, EVENTS, subject)
    assert len(messages) == 2
    for message in messages:
        envelope = json.loads(message.data)
        assert (envelope["causation_id"], envelope["correlation_id"]) == ("input-1", "order-7")
        assert envelope["trace_id"] == trace_id
        assert message.headers["traceparent"].split("-")[1] == trace_id
        assert envelope["id"] == message.headers["Nats-Msg-Id"]
    assert len({json.loads(message.data)["span_id"] for message in messages}) == 2


@pytest.mark.parametrize("is_async", [False, True])
async def test_what_a_handler_raises_decides_what_follows(
    shared_server: NatsServer, tmp_path: Path, is_async: bool
) -> None:
    """Retry and the unexpected come again; Terminate and a broken contract are handed over and never come again."""
    agent = new_agent(max_deliver=3)
    tries: dict[str, int] = {}

    def handle(payload: dict[str, Any]) -> Effect | None:
        kind = payload["kind"]
        tries[kind] = tries.get(kind, 0) + 1
        match kind:
            case "retry" if tries[kind] == 1:
                raise Retry(after_s=0.01)
            case "unexpected" if tries[kind] == 1:
                raise ZeroDivisionError("once")
            case "always":
                raise Retry(after_s=0.01, reason="never works")
            case "terminate":
                raise Terminate("no such order")
            case "nonsense":
                return "not an effect"  # type: ignore[return-value]
        return None

    if is_async:

        @agent.on("go")
        async def wait(ctx: Context, payload: dict[str, Any]) -> Effect | None:
            await asyncio.sleep(0)
            return handle(payload)
    else:

        @agent.on("go")
        def at_once(ctx: Context, payload: dict[str, Any]) -> Effect | None:
            return handle(payload)

    async with prepared(shared_server.url) as client, run(agent, client, sqlite_in(tmp_path)) as runner:
        for kind in ("retry", "unexpected", "always", "terminate", "nonsense", "plain"):
            await send(client, command(agent, "go"), {"kind": kind})
        await counted(runner, done=3, dead=1, terminated=2)
        info = await until_async(
            lambda: _settled(client, COMMANDS, f"{agent.name}_consumer"), "everything to be settled at the server"
        )
        assert info["num_ack_pending"] == 0
    assert tries == {"retry": 2, "unexpected": 2, "always": 3, "terminate": 1, "nonsense": 1, "plain": 1}
    letters = await stored(shared_server.url, "DLQ_REQUESTS", f"dlq_requests.{agent.name}")
    causes = {payload_of(one)["kind"]: one.headers["Oncewire-Dlq-Cause"] for one in letters}
    assert set(causes) == {"always", "terminate", "nonsense"}
    assert "never works" in causes["always"]
    assert causes["terminate"] == "no such order"
    assert causes["nonsense"].startswith("contract_violation")


async def _settled(client: Client, stream: str, consumer: str) -> dict[str, Any] | None:
    info = await consumer_info(client, stream, consumer)
    return info if not info["num_ack_pending"] and not info["num_pending"] else None


async def test_the_request_for_a_dead_letter_stands_before_the_message_is_given_up(
    shared_server: NatsServer, tmp_path: Path
) -> None:
    agent = new_agent()
    seen: list[int] = []

    @agent.on("go")
    def go(ctx: Context, payload: dict[str, Any]) -> None:
        raise Terminate("no")

    async with prepared(shared_server.url) as client:
        consumer = f"{agent.name}_consumer"

        def look(step: str) -> None:
            if step == "published":
                seen.append(len(client.connection.listeners))

        async with run(agent, client, sqlite_in(tmp_path), at=look) as runner:
            advisories: list[bytes] = []
            subject = f"$JS.EVENT.ADVISORY.CONSUMER.MSG_TERMINATED.{COMMANDS}.{consumer}"
            client.subscribe(subject, lambda message: advisories.append(message.payload))
            await send(client, command(agent, "go"), {})
            await counted(runner, terminated=1)
            await until(lambda: advisories, "the server's advisory")
    assert seen, "TERM is written only after the step `published`"
    (letter,) = await stored(shared_server.url, "DLQ_REQUESTS", f"dlq_requests.{agent.name}")
    assert letter.headers["Oncewire-Dlq-Stream"] == COMMANDS
    assert letter.headers["Oncewire-Dlq-Consumer"] == consumer
    assert letter.headers["Oncewire-Dlq-Outcome"] == "terminated"


async def test_the_same_identity_at_another_position_is_a_duplicate_and_other_content_a_conflict(
    shared_server: NatsServer, tmp_path: Path
) -> None:
    agent, subject = new_agent(), f"{OUT}.{unique('t')}"

    @agent.on("go")
    def go(ctx: Context, payload: dict[str, Any]) -> Effect:
        return Effect(subject, payload)

    async with prepared(shared_server.url) as client, run(agent, client, sqlite_in(tmp_path)) as runner:
        await send(client, command(agent, "go"), {"cents": 1}, key="order-1")
        await counted(runner, done=1)
        await send(client, command(agent, "go"), {"cents": 1}, key="order-1")
        await send(client, command(agent, "go"), {"cents": 2}, key="order-1")
        await counted(runner, done=1, duplicate=1, dead=1)
    assert [payload_of(one) for one in await stored(shared_server.url, EVENTS, subject)] == [{"cents": 1}]
    (letter,) = await stored(shared_server.url, "DLQ_REQUESTS", f"dlq_requests.{agent.name}")
    assert letter.headers["Oncewire-Dlq-Cause"] == "identity_conflict"


@pytest.mark.parametrize("is_async", [False, True])
async def test_one_key_in_two_tenants_is_two_inputs_and_on_two_subjects_a_conflict(
    shared_server: NatsServer, tmp_path: Path, is_async: bool
) -> None:
    agent, subject, topic = new_agent(), f"{OUT}.{unique('t')}", unique("topic")

    def answer(ctx: Context, payload: dict[str, Any]) -> Effect:
        return Effect(subject, {"tenant": ctx.envelope.tenant})

    async def answer_later(ctx: Context, payload: dict[str, Any]) -> Effect:
        return answer(ctx, payload)

    agent.on(f"evt.*.demo.{topic}.>")(answer_later if is_async else answer)
    async with prepared(shared_server.url) as client:
        for place in (f"t1.demo.{topic}.charge", f"t2.demo.{topic}.charge", f"t2.demo.{topic}.refund"):
            await client.publish(f"evt.{place}", {"type": "x", "id": "1", "payload": {"cents": 5}})
        async with run(agent, client, sqlite_in(tmp_path)) as runner:
            await counted(runner, done=2, dead=1)
    assert {"t1", "t2"} == {payload_of(one)["tenant"] for one in await stored(shared_server.url, EVENTS, subject)}
    (letter,) = await stored(shared_server.url, "DLQ_REQUESTS", f"dlq_requests.{agent.name}")
    assert "identity_conflict" == letter.headers["Oncewire-Dlq-Cause"]
    assert "t2" == letter.headers["Oncewire-Dlq-Subject"].split(".")[1]


async def test_copies_of_one_input_in_async_handlers_call_outside_once(
    shared_server: NatsServer, tmp_path: Path
) -> None:
    agent, subject = new_agent(), f"{OUT}.{unique('t')}"
    calls: list[str] = []

    @agent.on("go")
    async def go(ctx: Context, payload: dict[str, Any]) -> Effect:
        async def call() -> str:
            calls.append(ctx.key("pay"))
            await asyncio.sleep(0.05)
            return "paid"

        return Effect(subject, {"result": await ctx.once("pay", call)})

    async with prepared(shared_server.url) as client:
        for _ in range(5):
            await send(client, command(agent, "go"), {}, key="order-1")
        async with run(agent, client, sqlite_in(tmp_path)) as runner:
            await counted(runner, done=1, duplicate=4)
    assert len(calls) == 1
    assert len(await stored(shared_server.url, EVENTS, subject)) == 1


async def test_a_call_is_recorded_before_the_handler_goes_on_and_survives_redelivery(
    shared_server: NatsServer, tmp_path: Path
) -> None:
    agent = new_agent()
    calls: list[str] = []
    keys: set[str] = set()

    @agent.on("go")
    async def go(ctx: Context, payload: dict[str, Any]) -> None:
        result = await ctx.once("pay", lambda: calls.append("x") or {"receipt": len(calls)})
        keys.add(ctx.key("pay"))
        assert result == {"receipt": 1}
        if ctx.deliveries == 1:
            raise Retry(after_s=0.01)

    async with prepared(shared_server.url) as client, run(agent, client, sqlite_in(tmp_path)) as runner:
        await send(client, command(agent, "go"), {})
        await counted(runner, retried=1, done=1)
    assert calls == ["x"]
    assert len(keys) == 1


async def test_rows_of_a_handler_stand_with_its_outcome_or_not_at_all(
    shared_server: NatsServer, tmp_path: Path
) -> None:
    agent = new_agent()

    @agent.on("sync")
    def sync(ctx: Context, payload: dict[str, Any]) -> None:
        ctx.tx.execute("CREATE TABLE IF NOT EXISTS charges (how TEXT, n INTEGER)")
        ctx.tx.execute("INSERT INTO charges VALUES ('sync', ?)", (payload["n"],))
        if ctx.deliveries == 1 and payload["n"] % 2:
            raise Retry(after_s=0.01)

    @agent.on("waits")
    async def waits(ctx: Context, payload: dict[str, Any]) -> None:
        async with ctx.tx as tx:
            tx.execute("CREATE TABLE IF NOT EXISTS charges (how TEXT, n INTEGER)")
            tx.execute("INSERT INTO charges VALUES ('async', ?)", (payload["n"],))
            if ctx.deliveries == 1 and payload["n"] % 2:
                raise Retry(after_s=0.01)

    store = sqlite_in(tmp_path)
    async with prepared(shared_server.url) as client, run(agent, client, store) as runner:
        for n in range(20):
            await send(client, command(agent, "sync"), {"n": n})
            await send(client, command(agent, "waits"), {"n": n})
        await counted(runner, done=40, retried=20)
        rows = await runner.db(lambda: store.connection.execute("SELECT how, n FROM charges ORDER BY 1, 2").fetchall())
    assert rows == [(how, n) for how in ("async", "sync") for n in range(20)]


@asynccontextmanager
async def refusing(server: NatsServer, tmp_path: Path, handler: Any) -> AsyncIterator[Any]:
    agent = new_agent(max_deliver=1)
    agent.on("go")(handler)
    async with prepared(server.url) as client, run(agent, client, sqlite_in(tmp_path)) as runner:
        await send(client, command(agent, "go"), {})
        await until(lambda: runner.counts.get("dead", 0) + runner.counts.get("terminated", 0))
        subject = f"dlq_requests.{agent.name}"
        letters = await until_async(lambda: stored(server.url, "DLQ_REQUESTS", subject), "its letter")
        yield letters[0].headers["Oncewire-Dlq-Cause"]


async def test_a_handler_may_not_end_the_transaction(shared_server: NatsServer, tmp_path: Path) -> None:
    def handler(ctx: Context, payload: dict[str, Any]) -> None:
        ctx.tx.execute("COMMIT")

    async with refusing(shared_server, tmp_path, handler) as cause:
        assert "may not end or begin the ledger's transaction" in cause


async def test_a_sync_handler_may_not_wait(shared_server: NatsServer, tmp_path: Path) -> None:
    def handler(ctx: Context, payload: dict[str, Any]) -> None:
        ctx.once("call", print).send(None)

    async with refusing(shared_server, tmp_path, handler) as cause:
        assert "async def" in cause


async def test_an_effect_to_a_subject_that_no_stream_captures_is_given_up(
    shared_server: NatsServer, tmp_path: Path
) -> None:
    def handler(ctx: Context, payload: dict[str, Any]) -> Effect:
        return Effect("nowhere.at.all", {})

    async with refusing(shared_server, tmp_path, handler) as cause:
        assert "no stream captures" in cause


@pytest.mark.parametrize(
    ("subject", "said"),
    [
        ("sr.queries.search", "its stream sr-queries is no_ack: it confirms nothing"),
        ("dlq.evt.default.demo", "where only Oncewire itself writes"),
        ("ledger.biller.l-1", "where only Oncewire itself writes"),
    ],
)
async def test_an_effect_that_would_never_be_confirmed_is_given_up(
    shared_server: NatsServer, tmp_path: Path, subject: str, said: str
) -> None:
    def handler(ctx: Context, payload: dict[str, Any]) -> Effect:
        return Effect(subject, {}, type="Search")

    async with refusing(shared_server, tmp_path, handler) as cause:
        assert said in cause


@pytest.mark.parametrize("headers", [None, {"X-A": "b"}])
async def test_an_effect_that_its_stream_takes_no_more_is_given_up(
    server: NatsServer, tmp_path: Path, headers: dict[str, str] | None
) -> None:
    """The last that fits goes out, one byte more is refused in the handler's transaction."""
    agent = new_agent(max_deliver=1)

    @agent.on("go")
    def go(ctx: Context, payload: dict[str, Any]) -> Effect:
        return Effect(OUT, {"text": "x" * payload["size"]}, headers=headers)

    async with prepared(server.url) as client:
        config = (await client.api(f"STREAM.INFO.{EVENTS}"))["config"]
        await client.api(f"STREAM.UPDATE.{EVENTS}", config | {"max_msg_size": 1_500})
        async with run(agent, client, sqlite_in(tmp_path)) as runner:
            for size in range(600, 1_000):
                await send(client, command(agent, "go"), {"size": size})
            await until(lambda: sum(runner.counts.values()) == 400)
            await until_async(lambda: _settled(client, COMMANDS, f"{agent.name}_consumer"), "everything to be settled")
            done = runner.counts["done"]
            assert runner.counts == {"done": done, "terminated": 400 - done}
    assert len(await stored(server.url, EVENTS)) == done > 50
    letters = await stored(server.url, "DLQ_REQUESTS", f"dlq_requests.{agent.name}")
    assert len(letters) == 400 - done > 50
    assert all("takes up to 1500" in one.headers["Oncewire-Dlq-Cause"] for one in letters)


async def test_inputs_whose_names_are_not_text_become_letters(shared_server: NatsServer, tmp_path: Path) -> None:
    """The server takes any bytes as a subject or a header; the ledger, which holds text, could not be written."""
    agent = new_agent(max_deliver=2)
    base = f"evt.default.demo.{unique('raw')}"

    @agent.on(f"{base}.>")
    def handle(ctx: Context, payload: dict[str, Any]) -> None:
        if payload["n"]:
            raise Terminate("no \ud800 order")

    header, broken = b"NATS/1.0\r\nX-A: \xff\r\n\r\n", base.encode() + b".\xff\xfe"
    async with prepared(shared_server.url) as client, run(agent, client, sqlite_in(tmp_path)) as runner:
        for number, subject in ((0, broken), (1, base.encode() + b".a"), (0, base.encode() + b".a")):
            body = b'{"type":"t","payload":{"n":%d}}' % number
            size = (len(header), len(header) + len(body))
            client.connection.write(b"HPUB %b %d %d\r\n%b%b\r\n" % (subject, *size, header, body))
        await counted(runner, done=1, terminated=2)
        subject = f"dlq_requests.{agent.name}"
        await until_async(lambda: _two(shared_server.url, subject), "their letters")
    letters = await stored(shared_server.url, "DLQ_REQUESTS", subject)
    told = {one.headers["Oncewire-Dlq-Cause"].partition(":")[0]: one.headers for one in letters}
    assert {"no order", "contract_violation"} == told.keys()
    assert told["no order"]["Oncewire-Dlq-Headers"] == "1", "one header could not be carried"
    assert told["contract_violation"]["Oncewire-Dlq-Subject"].startswith(f"{base}.\\")


async def _two(url: str, subject: str) -> bool:
    return len(await stored(url, "DLQ_REQUESTS", subject)) == 2


async def test_an_effect_that_is_too_large_is_given_up(shared_server: NatsServer, tmp_path: Path) -> None:
    def handler(ctx: Context, payload: dict[str, Any]) -> Effect:
        return Effect(f"{OUT}.large", {"text": "x" * 2_000_000})

    async with refusing(shared_server, tmp_path, handler) as cause:
        assert "bytes with headers" in cause


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_handler_that_takes_too_long_is_undone(
    shared_server: NatsServer, tmp_path: Path, is_async: bool
) -> None:
    agent = new_agent(max_deliver=1)

    if is_async:

        @agent.on("go", timeout_s=0.05)
        async def waits(ctx: Context, payload: dict[str, Any]) -> None:
            await asyncio.Event().wait()
    else:

        @agent.on("go", timeout_s=1e-9)
        def at_once(ctx: Context, payload: dict[str, Any]) -> None:
            sum(range(1_000))

    async with prepared(shared_server.url) as client, run(agent, client, sqlite_in(tmp_path)) as runner:
        await send(client, command(agent, "go"), {})
        await counted(runner, dead=1)
    (letter,) = await stored(shared_server.url, "DLQ_REQUESTS", f"dlq_requests.{agent.name}")
    assert "took longer than" in letter.headers["Oncewire-Dlq-Cause"]


GARBAGE = [
    b"",
    b"null",
    b"[]",
    b"{",
    b"\xff\xfe\x00",
    b'{"type": 1, "payload": {}}',
    b'{"type": "T"}',
    b'{"type": "T", "payload": []}',
    b'{"type": "T", "payload": {}, "schema_version": "9.9"}',
    b'{"type": "T", "payload": {}, "tenant": "other"}',
    b'{"type": "T", "payload": {}, "ts": -1}',
    b'{"type": "T", "payload": {"x": 1e999}}',
    b'{"type": "T", "payload": {"x": "\\ud800"}}',
    b'{"type": "T", "type": "U", "payload": {}}',
    b'{"type": "T", "payload": {"n": ' + b"[" * 5_000 + b"]" * 5_000 + b"}}",
    b'{"type": "' + b"x" * 100_000 + b'", "payload": {}}',
]


async def test_garbage_never_stops_an_agent(shared_server: NatsServer, tmp_path: Path) -> None:
    agent = new_agent()

    @agent.on("go")
    def go(ctx: Context, order: AsDataclass) -> None:
        pass

    async with prepared(shared_server.url) as client, run(agent, client, sqlite_in(tmp_path)) as runner:
        for body in GARBAGE:
            await client.publish(command(agent, "go"), body, raw=True)
            odd = {"traceparent": "junk", "Oncewire-Replay-Ts": "x"}
            await client.publish(command(agent, "go"), body, headers=odd, raw=True)
        await send(client, command(agent, "go"), {"order": 1})
        await counted(runner, done=1, terminated=2 * len(GARBAGE))
    letters = await stored(shared_server.url, "DLQ_REQUESTS", f"dlq_requests.{agent.name}")
    assert len(letters) == 2 * len(GARBAGE)
    assert [one.data or b"" for one in letters[::2]] == GARBAGE, "dead letters hold the bytes as they came"


async def test_an_agent_reads_message_envelopes(shared_server: NatsServer, tmp_path: Path) -> None:
    agent = new_agent()
    seen: list[Any] = []

    @agent.on(f"sr.commands.{agent.name}.start")
    def start(ctx: Context, payload: dict[str, Any]) -> Effect:
        seen.append((payload, ctx.envelope.actor.role, ctx.tenant))
        return Effect(f"sr.events.{agent.name}", {"started": True}, type="LoopStarted")

    async with prepared(shared_server.url) as client, run(agent, client, sqlite_in(tmp_path)) as runner:
        envelope = new_message("StartLoop", {"tenant_id": "acme"}, message_id=unique("m"), **_human())
        await client.publish(f"sr.commands.{agent.name}.start", envelope)
        await counted(runner, done=1)
    assert seen == [({"tenant_id": "acme"}, "user", "acme")]
    (message,) = await stored(shared_server.url, "sr-events", f"sr.events.{agent.name}")
    sent = json.loads(message.data)
    assert (sent["message_type"], sent["payload"]) == ("LoopStarted", {"started": True})
    assert sent["causation_id"] == envelope.message_id


def _human() -> dict[str, Any]:
    from datetime import UTC, datetime

    return {"timestamp": datetime(2026, 1, 1, tzinfo=UTC), "actor_id": "ann", "actor_kind": "HUMAN"}


async def test_the_ledgers_blocks_chain_and_their_sums_follow_from_the_stream(
    server: NatsServer, tmp_path: Path
) -> None:
    """An independent reader (nats-py, hashlib) recomputes what the announcements say."""
    agent = new_agent(batch=7)
    out = f"{OUT}.{unique('t')}"

    @agent.on("evt.default.demo.in")
    def go(ctx: Context, payload: dict[str, Any]) -> Effect:
        if payload["n"] == 13:
            raise Terminate("unlucky")
        return Effect(out, payload)

    async with prepared(server.url) as client:
        for n in range(50):
            await send(client, "evt.default.demo.in", {"n": n}, key=f"k{n % 45}")
        async with run(agent, client, sqlite_in(tmp_path)) as runner:
            await until(lambda: sum(runner.counts.values()) >= 50)
    raw = [message.data for message in await stored(server.url, "LEDGER")]
    blocks = [msgspec.json.decode(data, type=Announcement) for data in raw]
    assert [block.number for block in blocks] == list(range(1, len(blocks) + 1))
    expected = [bytes(32), *(hashlib.sha256(data).digest() for data in raw[:-1])]
    assert [block.previous for block in blocks] == [one.hex() for one in expected]
    bodies = {one.seq: one for one in await stored(server.url, EVENTS)}
    seen: dict[int, str] = {}
    for block in blocks:
        for inputs in block.inputs:
            here = _positions(inputs)
            assert not here.keys() & seen.keys(), "one outcome per position"
            seen |= here
            assert inputs.sum == _sum(inputs.stream, {seq: bodies[seq].data for seq in here})
    effects = [id_ for block in blocks for id_ in block.effects]
    sent = {one.headers["Nats-Msg-Id"] for one in [*bodies.values(), *await stored(server.url, "DLQ_REQUESTS")]}
    assert set(effects) <= sent
    assert len(effects) == len(set(effects)) == 45 + 5  # 5 keys come again with other content: conflicts
    inputs_seen = {seq for seq, one in bodies.items() if one.subject == "evt.default.demo.in"}
    assert seen.keys() == inputs_seen
    assert blocks[-1].confirmed.block == blocks[-1].number - 1, "the closing block says that all before it is confirmed"


def _positions(inputs: blocks.Inputs) -> dict[int, str]:
    names = ("done", "duplicate", "terminated", "dead", "passed")
    return {seq: name for name in names for first, last in getattr(inputs, name) for seq in range(first, last + 1)}


def _sum(stream: str, bodies: dict[int, bytes]) -> str:
    """Written from the description alone: eight lanes of 64 bits, little endian, added up."""
    lanes = [0] * 8
    for sequence, body in bodies.items():
        element = hashlib.blake2b(f"{len(stream)}:{stream}{sequence}:".encode() + body, digest_size=64).digest()
        for lane in range(8):
            lanes[lane] = (lanes[lane] + int.from_bytes(element[lane * 8 : lane * 8 + 8], "little")) % 2**64
    return b"".join(lane.to_bytes(8, "little") for lane in lanes).hex()


async def test_a_subject_without_a_handler_waits_for_a_process_that_knows_it(
    shared_server: NatsServer, tmp_path: Path
) -> None:
    """A rolling deploy: the filter already has the new subject, this process does not know it yet."""
    old, new = new_agent("rolling", max_deliver=3), new_agent("rolling", max_deliver=3)

    def handle(ctx: Context, payload: dict[str, Any]) -> None:
        pass

    old.on("one")(handle)
    new.on("one")(handle)
    new.on("two")(handle)
    async with prepared(shared_server.url) as client:
        async with run(old, client, sqlite_in(tmp_path)) as runner:
            with pytest.raises(Conflict, match="agent handles"):
                async with run(new, client, sqlite_in(tmp_path)):
                    pass
            from oncewire.agent import sources

            changed = await sources.apply(client, new, runner.settings)
            assert changed == {f"{COMMANDS}/rolling_consumer": ["filters"]}
            assert await sources.apply(client, new, runner.settings) == {f"{COMMANDS}/rolling_consumer": []}
            await send(client, command(new, "two"), {})
            await counted(runner, retried=1)
            assert "dead" not in runner.counts
        async with run(new, client, sqlite_in(tmp_path)) as runner:
            await counted(runner, done=1)


async def test_an_agent_bound_to_a_consumer_of_the_catalog_changes_nothing(
    shared_server: NatsServer, tmp_path: Path
) -> None:
    from oncewire._ground.topology import ensure_consumers, load

    subject = next(one for one in load().consumers if one.name == "billing_worker_usage_metered").filters[0]
    agent = Agent("metering", consumers={"BILLING": "billing_worker_usage_metered"})

    @agent.on(subject)
    def meter(ctx: Context, payload: dict[str, Any]) -> None:
        pass

    async with prepared(shared_server.url) as client:
        await ensure_consumers(client, "billing-worker")
        before = (await consumer_info(client, "BILLING", "billing_worker_usage_metered"))["config"]
        async with run(agent, client, sqlite_in(tmp_path)) as runner:
            assert runner.opened["BILLING", "billing_worker_usage_metered"].max_deliver == before["max_deliver"]
            payload = {"tenant_id": "t", "resource_id": "r", "meter": "m", "quantity": 1, "unit": "u"}
            await client.publish(subject, new_message("usage.metered", payload, message_id=unique("m"), **_human()))
            await counted(runner, done=1)
        assert (await consumer_info(client, "BILLING", "billing_worker_usage_metered"))["config"] == before
