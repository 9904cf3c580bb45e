"""One message, one trace: from a program's own span through outbox, stream, agent, effect and gateway into the lake."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, get_current_span, use_span

from oncewire import dlq, outbox
from oncewire._ground import topology
from oncewire._ground.contracts import trace
from oncewire._ground.contracts.headers import EPOCH, TRACEPARENT
from oncewire._ground.contracts.message import new_message
from oncewire._ground.database.postgres import connected
from oncewire._ground.errors import Refused
from oncewire._ground.jetstream import Client, connect
from oncewire._ground.settings import Settings
from oncewire._ground.tracing.otel import exporting
from oncewire.agent import Context, Effect
from oncewire.cli import broker as cli_broker
from oncewire.cli import gateway as cli_gateway
from oncewire.outbox import enqueue_async, enqueue_message_async
from oncewire.pipeline.decode import decode
from oncewire.pipeline.tables import BRONZE
from tests.support.collector import Collector, collecting
from tests.support.dlq import TRACE as GIVEN_UP_IN
from tests.support.dlq import failing
from tests.support.gateway import guest, message, new_conversation
from tests.support.http import post, wire
from tests.support.lakes import Lake
from tests.support.nats import NatsServer
from tests.support.postgres import shared_postgres
from tests.support.running import new_agent, run, sqlite_in
from tests.support.wait import until

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PRODUCER, CONSUMER = 4, 5


def caller() -> Any:
    """A span of a program's own, with whatever SDK it has."""
    return use_span(NonRecordingSpan(SpanContext(int(TRACE, 16), int(SPAN, 16), False, TraceFlags(1))))


@contextlib.contextmanager
def collected(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A collector, and spans on their way to it as the standard variables say."""
    with collecting() as found:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", found.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        with exporting("otlp") as spans:
            assert spans is not None
            yield found, spans.tracer


async def test_one_trace_goes_from_a_row_through_an_agent_to_a_browser_and_into_the_lake(
    shared_server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, conversation = await shared_postgres().new_database(), new_conversation()
    settings = Settings(nats_url=shared_server.url, postgres_url=url, data=tmp_path)
    agent, inside = new_agent(), list[SpanContext]()
    answer = message(conversation, 1)

    @agent.on("sr.events.loop")
    async def react(_: Context, payload: dict[str, Any]) -> Effect:
        inside.append(get_current_span().get_span_context())
        return Effect(answer.subject, answer.payload, headers={EPOCH: "e1"})

    with collected(monkeypatch) as (collector, tracer):
        async with connect(settings.nats_url) as client, contextlib.AsyncExitStack() as stack:
            await topology.ensure(client, topology=topology.load(settings=settings))
            options = outbox.RelayOptions(tracer=tracer("relay"))
            await stack.enter_async_context(outbox.relaying(client, url, options))
            store = sqlite_in(tmp_path)
            await stack.enter_async_context(run(agent, client, store, settings=settings, tracer=tracer("agent")))
            _, at = await stack.enter_async_context(
                cli_gateway.serving(client, settings, "127.0.0.1", 0, tracer=tracer("gateway"))
            )
            browser = await stack.enter_async_context(guest(at))
            await browser.join(conversation)
            await enqueue(url)
            while (await browser.next()).get("sequence") != 1:
                """Presence comes first."""
            lake = await lake_of(client, tmp_path)
            names = {"send messages", "process sr.events.loop", "send CHAT_EVENTS", "process chat.events"}
            await until(lambda: names <= {one.name for one in collector.spans}, "all spans")
    check_spans(collector, inside)
    found = decode(pa.Table.from_pylist(lake.rows, BRONZE.schema))
    assert [TRACE, TRACE] == [one for part in found.parts.values() for one in part["trace_id"].to_pylist()]
    assert 0 == found.quarantine.num_rows


async def enqueue(url: str) -> None:
    """A service commits a message, in a span of its own."""
    who: Any = {"actor_id": "svc", "actor_kind": "SYSTEM"}
    envelope = new_message("LoopCreated", {"loop": 1}, message_id="m-1", timestamp=datetime.now(UTC), **who)
    async with connected(url) as database, database.transaction():
        with caller():
            await enqueue_message_async(database, "sr.events.loop", envelope)


def check_spans(collector: Collector, inside: list[SpanContext]) -> None:
    relayed, handled, effect, shown = (
        collector.named(name)
        for name in ("send messages", "process sr.events.loop", "send CHAT_EVENTS", "process chat.events")
    )
    assert {TRACE} == {one.trace_id for one in collector.spans}
    assert [SPAN, SPAN, handled.span_id, effect.span_id] == [one.parent_id for one in (relayed, handled, effect, shown)]
    assert [PRODUCER, CONSUMER, PRODUCER, CONSUMER] == [one.kind for one in (relayed, handled, effect, shown)]
    assert ["oncewire-relay", "oncewire-agent", "oncewire-agent", "oncewire-gateway"] == [
        one.service for one in (relayed, handled, effect, shown)
    ]
    assert [(int(TRACE, 16), int(handled.span_id, 16))] == [(one.trace_id, one.span_id) for one in inside]
    assert {"nats"} == {one.attributes["messaging.system"] for one in collector.spans}
    assert ("process", "sr.events.loop") == (
        handled.attributes["messaging.operation.type"],
        handled.attributes["messaging.destination.name"],
    )
    assert "send" == effect.attributes["messaging.operation.type"]
    assert effect.attributes["messaging.destination.name"].startswith("chat.events.")
    assert not any(one.is_error or one.took_ns < 0 for one in collector.spans)


async def lake_of(client: Client, tmp_path: Path) -> Lake:
    """Both messages as the pipeline finds them in their streams."""
    lake = Lake(tmp_path / "lake")
    for stream, subject in (("sr-events", "sr.events.loop"), ("CHAT_EVENTS", "chat.events.*")):
        found = await client.get_last(stream, subject)
        lake.add(stream, found.subject, found.payload, dict(found.headers))
    return lake


async def test_a_row_of_a_conversation_keeps_the_trace_it_was_enqueued_in_into_the_lake(
    shared_server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One enqueued in a span, one in none, and one in none whose relay does not trace."""
    url, conversation = await shared_postgres().new_database(), new_conversation()
    settings = Settings(nats_url=shared_server.url, data=tmp_path)
    spoken: list[str] = []
    with collected(monkeypatch) as (collector, tracer):
        async with connect(settings.nats_url) as client:
            await topology.ensure(client, topology=topology.load(settings=settings))
            async with cli_gateway.serving(client, settings, "127.0.0.1", 0, tracer=tracer("gateway")) as (_, at):
                async with guest(at) as browser:
                    await browser.join(conversation)
                    for span, relay in ((caller(), tracer("relay")), (None, tracer("relay")), (None, None)):
                        spoken.append(await speak(url, conversation, span))
                        async with outbox.relaying(client, url, outbox.RelayOptions(tracer=relay)):
                            while (await browser.next()).get("sequence") != len(spoken):
                                """Presence comes in between."""
                await until(lambda: len(collector.spans) == 4, "two spans of relays, two of the gateway")
            lake = Lake(tmp_path / "lake")
            for one in await client.get_batch(
                "CHAT_EVENTS", count=9, sequence=1, subject=f"chat.events.{conversation}"
            ):
                lake.add("CHAT_EVENTS", one.subject, one.payload, dict(one.headers))
    derived = [trace.begun_by(id_).trace_id for id_ in spoken]
    found = decode(pa.Table.from_pylist(lake.rows, BRONZE.schema)).parts["realtime"].to_pylist()
    told = [one["trace_id"] for one in found if one["type"] == "chat.message.created"]
    assert [TRACE, derived[1], derived[2]] == told
    by_trace = {one.trace_id: one for one in collector.spans if one.name == "send conversations"}
    assert {TRACE: SPAN, derived[1]: ""} == {id_: one.parent_id for id_, one in by_trace.items()}
    shown = [(one.trace_id, one.parent_id) for one in collector.spans if one.name == "process chat.events"]
    assert [(TRACE, SPAN), (derived[1], by_trace[derived[1]].span_id)] == shown


async def speak(url: str, conversation: str, span: Any) -> str:
    """A service commits a message of a conversation; its id."""
    async with connected(url) as database, database.transaction():
        with span or contextlib.nullcontext():
            done = await enqueue_async(database, conversation, role="user", content="hello")
    return done.message_id


async def test_what_is_produced_over_http_is_a_child_of_its_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(broker_listen="127.0.0.1:0", data=tmp_path)
    with collected(monkeypatch) as (collector, tracer):
        async with cli_broker.serving(settings, tracer("broker")) as (server, _), wire(server.port) as client:
            await client.ask(post("/v1/topics?name=orders", b""))
            sent = await client.ask(post("/v1/produce?topic=orders&value=x", b"", f"traceparent: 00-{TRACE}-{SPAN}-01"))
            plain = await client.ask(post("/v1/produce?topic=orders&value=x", b""))
            lines = b'{"topic":"orders","value":"x"}\n{"topic":"none","value":"x"}\n'
            words = ("Content-Type: application/x-ndjson", f"traceparent: 00-{TRACE}-{SPAN}-01")
            many = await client.ask(post("/v1/produce", lines, *words))
            assert [200, 200, 200] == [sent.status, plain.status, many.status]
            await until(lambda: len(collector.spans) == 2, "a span for each that was stored and belongs to a trace")
    span, other = collector.spans
    assert (other.trace_id, other.parent_id, other.name) == (TRACE, SPAN, "send orders")
    assert ("send orders", TRACE, SPAN, PRODUCER) == (span.name, span.trace_id, span.parent_id, span.kind)
    assert "oncewire" == span.attributes["messaging.system"]


async def test_a_handler_that_fails_is_an_error_and_each_attempt_a_span(
    shared_server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a `def` handler, and of a message without a context: its trace is derived from its id."""
    agent, tries = new_agent(), list[int]()

    @agent.on("charge")
    def charge(_: Context, payload: dict[str, Any]) -> None:
        tries.append(get_current_span().get_span_context().span_id)
        if len(tries) == 1:
            from oncewire import Retry

            raise Retry(after_s=0.01, reason="not yet")

    with collected(monkeypatch) as (collector, tracer):
        async with connect(shared_server.url) as client:
            await topology.init_streams(client)
            async with run(agent, client, sqlite_in(tmp_path), tracer=tracer("agent")):
                body = {"type": "Charge", "payload": {}}
                await client.publish(f"cmd.default.default.{agent.name}.charge", body, msg_id=agent.name)
                await until(lambda: len(collector.spans) == 2, "two spans")
    first, second = collector.spans
    assert (True, False) == (first.is_error, second.is_error)
    assert "Retry" == first.attributes["error.type"]
    assert first.trace_id == second.trace_id
    assert first.parent_id == second.parent_id
    assert tries == [int(first.span_id, 16), int(second.span_id, 16)]


async def test_a_message_that_is_given_up_leaves_a_span_and_a_line_in_its_trace(
    shared_server: NatsServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with collected(monkeypatch) as (collector, tracer):
        async with connect(shared_server.url) as client:
            await topology.ensure(client, topology=topology.load(settings=Settings()))
            async with dlq.serving(client, dlq.DlqOptions(sweep_s=60, tracer=tracer("dlq"))):
                stream = await failing(client)
                async with client.pull(stream, "w", batch=1, ahead=0) as pull:
                    pull.ask(1)
                    pull.term(await pull.fetch(timeout_s=10), "no_such_order: 17")
                    await client.connection.flush()
                await until(lambda: [one for one in collector.spans if one.name == "send DLQ"], "a span")
    span = collector.named("send DLQ")
    _, trace_id, span_id, _ = GIVEN_UP_IN.split("-")
    assert (trace_id, span_id, "oncewire-dlq") == (span.trace_id, span.parent_id, span.service)
    assert {trace_id} == {
        one.__dict__["trace_id"] for one in caplog.records if one.getMessage().startswith("dead letter ")
    }


async def test_publish_continues_the_callers_trace_and_only_that(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client:
        await topology.init_streams(client)
        with caller():
            ours = await client.publish("evt.default.default.t.a", {"type": "A", "payload": {}})
            given = {TRACEPARENT: f"00-{'1' * 32}-{'2' * 16}-01"}
            theirs = await client.publish("evt.default.default.t.a", {"type": "A", "payload": {}}, headers=given)
        none = await client.publish("evt.default.default.t.a", {"type": "A", "payload": {}})
        found = [(await client.get("MESHFORGE_EVENTS", one.sequence)).headers for one in (ours, theirs, none)]
    assert [f"00-{TRACE}-{SPAN}-01", given[TRACEPARENT], None] == [one.get(TRACEPARENT) for one in found]


def test_spans_go_to_a_file_as_one_line_each(tmp_path: Path) -> None:
    from oncewire._ground.contracts.trace import TraceContext

    with exporting(f"file:{tmp_path / 'spans'}") as spans:
        assert spans is not None
        context = TraceContext(TRACE, SPAN)
        spans.tracer("relay").sent("a\nb\x1b[2J", context, None, (1, 2), message_id="m")
    (line,) = (tmp_path / "spans").read_text().splitlines()
    assert line.isprintable()
    assert f"0x{TRACE}" == json.loads(line)["context"]["trace_id"]


def test_a_trace_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampler of the standard variables decides by the trace id: the same in every process."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    kept = []
    for _ in range(2):
        with exporting(f"file:{tmp_path / 'spans'}") as spans:
            assert spans is not None
            kept.append(
                [spans.is_sampled(f"{number * 0x9E3779B97F4A7C15 % (1 << 64) + 1:032x}") for number in range(64)]
            )
    assert kept[0] == kept[1]
    assert 0 < sum(kept[0]) < 64


def test_without_the_extra_traces_are_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    with pytest.raises(Refused, match="OpenTelemetry"), exporting("console"):
        pass


def test_services_do_not_load_opentelemetry_unless_asked() -> None:
    code = "import sys, oncewire.cli.up, oncewire.cli.agent; print([m for m in sys.modules if m.startswith('opentel')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "[]" == done.stdout.strip()
