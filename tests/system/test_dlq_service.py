"""The dead-letter service on a real server: whoever failed and however, there is one letter, and it says why."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import oncewire
from oncewire._ground.contracts import ids
from oncewire._ground.contracts import letters as names
from oncewire._ground.jetstream import Client
from oncewire._ground.jetstream.protocol import parse_time_ns
from oncewire._ground.topology import ensure
from tests.support.dlq import (
    QUICK,
    TRACE,
    assert_one_letter_each,
    failing,
    given_up,
    letters_of,
    publish,
    read_stream,
    service,
    until_letters,
)
from tests.support.nats import NatsServer, nats_server
from tests.support.streams import consumer_info, make_consumer, state_of, unique
from tests.support.wait import until, until_async

PAYLOAD_MAX = 100_000


@pytest.fixture(scope="module")
def nats() -> Iterator[NatsServer]:
    with nats_server(f"max_payload: {PAYLOAD_MAX}") as running:
        yield running


@pytest_asyncio.fixture
async def client(nats: NatsServer) -> AsyncIterator[Client]:
    async with oncewire.connect(nats.url) as connected:
        await ensure(connected)
        yield connected


async def term(client: Client, stream: str, reason: str) -> None:
    """A consumer that ends one message."""
    async with client.pull(stream, "w", batch=1, ahead=0) as pull:
        pull.ask(1)
        pull.term(await pull.fetch(timeout_s=10), reason)
        await client.connection.flush()


# ---- what a letter is


async def test_a_consumer_that_dies_on_every_delivery_leaves_one_letter_with_its_story(
    nats: NatsServer, client: Client
) -> None:
    """D2, D3, D4: id, subject, body, headers."""
    stream = await failing(client, max_deliver=3)
    created = (await client.api(f"STREAM.INFO.{stream}"))["created"]
    stored = await client.get(stream, 1)
    async with service(client):
        await given_up(client, stream, 1)
        (letter,) = await until_letters(nats.url, stream, 1)
    origin = ids.Origin(stream, parse_time_ns(created), 1, stored.timestamp_ns)
    told = letter.headers
    assert (f"dlq.{stream}.x", b"body 0") == (letter.subject, letter.data)
    assert ids.letter_id(origin, "w") == told["Nats-Msg-Id"]
    assert ("max_deliveries", "3", "w", TRACE) == (
        letter.cause,
        told[names.DELIVERIES],
        told[names.CONSUMER],
        told[names.TRACE],
    )
    assert ("0", f"{stream}-0") == (told["Oncewire-Orig-X-Mine"], told["Oncewire-Orig-Nats-Msg-Id"])
    assert int(told[names.TIMESTAMP]) == stored.timestamp_ns
    await until_async(lambda: _is_settled(client, stream), "the given-up sequence to be acked")


async def _is_settled(client: Client, stream: str) -> bool:
    return bool((await consumer_info(client, stream, "w"))["num_redelivered"] == 0)


@pytest.mark.parametrize(
    ("subject", "expected"),
    [("platform.billing.low_balance_warning", "dlq.billing.low_balance_warning"), ("evt.a.b.c", "dlq.evt.a.b.c")],
)
async def test_the_subject_is_the_message_s_own_without_the_platform_s_prefix(
    nats: NatsServer, client: Client, subject: str, expected: str
) -> None:
    stream = "BILLING" if subject.startswith("platform") else "MESHFORGE_EVENTS"
    name = unique("foreign")
    ack = await client.publish(subject, b"{}", msg_id=name, raw=True)
    await make_consumer(client, stream, name, ack_wait=50_000_000, max_deliver=1, filter_subject=subject)
    async with service(client):
        await given_up(client, stream, 1, name)
        found = await until_letters(nats.url, stream, 1)
    assert [expected] == [one.subject for one in found if one.place == (stream, name, ack.sequence)]


async def test_a_terminated_message_carries_the_reason_of_its_consumer(nats: NatsServer, client: Client) -> None:
    stream = await failing(client)
    async with service(client):
        await term(client, stream, "no_such_order: 17 is not there")
        (letter,) = await until_letters(nats.url, stream, 1)
    assert ("no_such_order", "terminated") == (letter.cause, letter.headers[names.OUTCOME])
    assert "no_such_order: 17 is not there" == letter.headers[names.ERROR]
    assert b"body 0" == letter.data


# ---- work queues, trimmed originals, sizes


async def test_a_work_queue_is_emptied_once_the_letter_stands(nats: NatsServer, client: Client) -> None:
    stream = await failing(client, count=3, retention="workqueue")
    await given_up(client, stream, 3)
    async with service(client):
        found = await until_letters(nats.url, stream, 3)
        await until_async(lambda: _is_empty(client, stream), "an empty queue")
    assert_one_letter_each(found, stream, range(1, 4))
    assert {b"body 0", b"body 1", b"body 2"} == {one.data for one in found}


async def _is_empty(client: Client, stream: str) -> bool:
    return bool((await state_of(client, stream))["messages"] == 0)


async def test_an_original_that_is_gone_yields_a_letter_that_says_so_once(nats: NatsServer, client: Client) -> None:
    """A stranger ends a message of a work queue: the server removes it before anybody can look."""
    stream = await failing(client, retention="workqueue")
    await term(client, stream, "bad")
    async with service(client):
        (letter,) = await until_letters(nats.url, stream, 1)
        assert (names.GONE, b"") == (letter.headers[names.PAYLOAD], letter.data)
        await _tell_again(client, stream)
        await _is_quiet(client)
    assert 1 == len(await letters_of(nats.url, stream))


async def test_an_original_that_was_trimmed_yields_a_letter_that_says_so(nats: NatsServer, client: Client) -> None:
    stream = await failing(client)
    await given_up(client, stream, 1)
    await client.api(f"STREAM.PURGE.{stream}", {})
    async with service(client):
        (letter,) = await until_letters(nats.url, stream, 1)
    assert names.GONE == letter.headers[names.PAYLOAD]


async def test_a_letter_that_stands_is_not_written_again_when_its_original_goes(
    nats: NatsServer, client: Client
) -> None:
    """As after a death between the letter and the event's ack."""
    stream = await failing(client)
    async with service(client):
        await given_up(client, stream, 1)
        await until_letters(nats.url, stream, 1)
        await client.api(f"STREAM.PURGE.{stream}", {})
        await _tell_again(client, stream)
        await _is_quiet(client)
    assert 1 == len(await letters_of(nats.url, stream))


async def test_payloads_at_the_limit_fit_and_larger_ones_become_a_pointer(nats: NatsServer, client: Client) -> None:
    stream = await failing(client, count=0, retention="workqueue")
    largest = PAYLOAD_MAX - 16 * 1024 - 200
    await client.publish(f"{stream}.x", b"a" * largest, msg_id="a" * 60)
    await client.connection.flush()
    reply = await client.call(f"{stream}.x", b"b" * PAYLOAD_MAX)  # a stranger's: ours would be refused
    assert b'"seq"' in reply.payload
    await given_up(client, stream, 2)
    async with service(client):
        first, second = await until_letters(nats.url, stream, 2)
        await until_async(lambda: _holds(client, stream, 1), "the first to be removed")
        await _is_quiet(client)
    assert (b"a" * largest, None) == (first.data, first.headers.get(names.PAYLOAD))
    assert (b"", names.POINTER, str(PAYLOAD_MAX)) == (
        second.data,
        second.headers[names.PAYLOAD],
        second.headers[names.BYTES],
    )
    assert PAYLOAD_MAX == len((await client.get(stream, 2)).payload)  # what the pointer points at stays


async def _holds(client: Client, stream: str, count: int) -> bool:
    return bool((await state_of(client, stream))["messages"] == count)


# ---- once, whatever is repeated


async def _tell_again(client: Client, stream: str, times: int = 3) -> None:
    """The advisories about a stream, as if the server sent them once more."""
    told = [one for one in await client.get_batch("DLQ_ADVISORIES") if f".{stream}." in one.subject]
    assert told
    for one in told * times:
        await client.publish(one.subject, one.payload)


async def _is_quiet(client: Client) -> None:
    """Every event has been handled."""

    async def is_quiet() -> bool:
        for stream, consumer in (
            ("DLQ_REQUESTS", "dlq_service_requests"),
            ("DLQ_ADVISORIES", "dlq_service_advisories"),
        ):
            info = await consumer_info(client, stream, consumer)
            if info["num_pending"] or info["num_ack_pending"]:
                return False
        return True

    await until_async(is_quiet, "all events to be handled")


async def test_repeated_advisories_and_a_late_term_give_no_second_letter(nats: NatsServer, client: Client) -> None:
    stream = await failing(client, count=20)
    async with service(client), service(client), service(client):
        await given_up(client, stream, 20)
        await until_letters(nats.url, stream, 20)
        await _tell_again(client, stream)
        await client.call(f"$JS.ACK.{stream}.w.2.1.3.0.0", b"+TERM too late")
        await _is_quiet(client)
    assert_one_letter_each(await letters_of(nats.url, stream), stream, range(1, 21))


async def test_two_consumers_of_one_message_have_a_letter_each(nats: NatsServer, client: Client) -> None:
    stream = await failing(client)
    await make_consumer(client, stream, "v", ack_wait=50_000_000, max_deliver=1)
    async with service(client):
        await given_up(client, stream, 1)
        await given_up(client, stream, 1, "v")
        found = await until_letters(nats.url, stream, 2)
    assert {(stream, "w", 1), (stream, "v", 1)} == {one.place for one in found}


async def test_what_failed_while_the_service_was_down_is_written_when_it_comes(
    nats: NatsServer, client: Client
) -> None:
    stream = await failing(client, count=300)
    await given_up(client, stream, 300)
    async with service(client), service(client):
        found = await until_letters(nats.url, stream, 300)
    assert_one_letter_each(found, stream, range(1, 301))


# ---- what nobody reported


async def test_missed_advisories_of_a_work_queue_are_found_by_the_sweep(nats: NatsServer, client: Client) -> None:
    stream = await failing(client, count=3, retention="workqueue")
    await given_up(client, stream, 3)
    await client.api("STREAM.PURGE.DLQ_ADVISORIES", {"filter": f"$JS.EVENT.ADVISORY.CONSUMER.*.{stream}.>"})
    async with service(client):
        found = await until_letters(nats.url, stream, 3)
        await until_async(lambda: _is_empty(client, stream), "an empty queue")
    assert_one_letter_each(found, stream, range(1, 4))


async def test_missed_advisories_of_a_foreign_consumer_are_an_alert(client: Client, tmp_path: Path) -> None:
    stream = await failing(client, count=2)
    await given_up(client, stream, 2)
    await client.api("STREAM.PURGE.DLQ_ADVISORIES", {"filter": f"$JS.EVENT.ADVISORY.CONSUMER.*.{stream}.>"})
    told = tmp_path / "alerts"
    async with service(client, replace(QUICK, alert_command=f"tee -a {told}")):
        (alert,) = await until(lambda: alerts_of(told, "exhausted", stream), "an alert")
    assert {"stream": stream, "consumer": "w", "exhausted": 2} == alert["items"][0]
    await client.api(f"STREAM.DELETE.{stream}")


def alerts(path: Path) -> list[dict[str, Any]]:
    """One JSON object after the other, as `tee -a` writes them; the last may be under way."""
    text = path.read_text() if path.exists() else ""
    found: list[dict[str, Any]] = []
    decoder = json.JSONDecoder()
    with contextlib.suppress(ValueError):
        while text:
            one, end = decoder.raw_decode(text)
            found.append(one)
            text = text[end:].lstrip()
    return found


def alerts_of(path: Path, kind: str, stream: str) -> list[dict[str, Any]]:
    return [one for one in alerts(path) if one["kind"] == kind and one["items"][0].get("stream") == stream]


async def test_messages_that_wait_while_nobody_pulls_are_an_alert(client: Client, tmp_path: Path) -> None:
    stream = await failing(client, count=5)
    told = tmp_path / "alerts"
    metrics = tmp_path / "metrics.prom"
    options = replace(QUICK, stalled_s=0.1, alert_command=f"tee -a {told}", metrics_file=str(metrics))
    async with service(client, options):
        (alert,) = await until(lambda: alerts_of(told, "nobody_pulls", stream), "an alert")
        line = f'oncewire_dlq_unattended{{consumer="w",stream="{stream}"}} 5'
        await until(lambda: metrics.exists() and line in metrics.read_text(), "a gauge")
    assert 5 == alert["items"][0]["waiting"]


async def test_a_dlq_at_four_fifths_is_an_alert(tmp_path: Path) -> None:
    with nats_server() as server:
        async with oncewire.connect(server.url) as client:
            await ensure(client)
            config = (await client.api("STREAM.INFO.DLQ"))["config"] | {"max_bytes": 10_000}
            await client.api("STREAM.UPDATE.DLQ", config)
            told = tmp_path / "alerts"
            async with service(client, replace(QUICK, alert_command=f"tee -a {told}")):
                stream = await failing(client, count=17)
                await given_up(client, stream, 17)
                await until(lambda: [one for one in alerts(told) if one["kind"] == "dlq_full"], "an alert")


# ---- telling


async def test_each_letter_is_a_log_line_a_metric_and_a_call_of_the_hook(
    client: Client, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stream = await failing(client)
    told, metrics = tmp_path / "alerts", tmp_path / "metrics.prom"
    posted: list[bytes] = []
    async with _hook(posted) as url:
        options = replace(QUICK, alert_command=f"tee -a {told}", alert_url=url, metrics_file=str(metrics))
        async with service(client, options):
            await term(client, stream, "no_such_order: 17")
            (alert,) = await until(lambda: alerts_of(told, "dead_letters", stream), "the command")
            await until(lambda: alert in bodies(posted), "the address")
            line = f'oncewire_dlq_letters_total{{cause="no_such_order",consumer="w",stream="{stream}"}} 1'
            await until(lambda: metrics.exists() and line in metrics.read_text(), "a counter")
    assert ("dead_letters", 1, "no_such_order", "no_such_order: 17", stream) == (
        alert["kind"],
        alert["count"],
        *(alert["items"][0][key] for key in ("cause", "error", "stream")),
    )
    assert any(stream in one.getMessage() and "no_such_order: 17" in one.getMessage() for one in caplog.records)


def bodies(posted: list[bytes]) -> list[dict[str, Any]]:
    return [json.loads(one.rpartition(b"\r\n\r\n")[2]) for one in posted]


@contextlib.asynccontextmanager
async def _hook(posted: list[bytes]) -> AsyncIterator[str]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        posted.append(await reader.readuntil(b"}]}"))
        writer.write(b"HTTP/1.0 204 No Content\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/alerts"


async def test_a_hook_that_fails_holds_nothing_up(nats: NatsServer, client: Client, tmp_path: Path) -> None:
    stream = await failing(client, count=3)
    metrics = tmp_path / "metrics.prom"
    options = replace(QUICK, alert_command="/no/such/command", metrics_file=str(metrics))
    async with service(client, options):
        await given_up(client, stream, 3)
        await until_letters(nats.url, stream, 3)
        line = "\noncewire_dlq_alert_hook_failures_total "
        await until(lambda: metrics.exists() and line in metrics.read_text(), "a counter")


# ---- what is never a letter, and what nobody can read


async def test_advisories_about_dlq_itself_are_counted_and_never_dead_lettered(
    nats: NatsServer, client: Client
) -> None:
    stream = await failing(client)
    async with service(client) as running:
        await given_up(client, stream, 1)
        await until_letters(nats.url, stream, 1)
        before = len(await read_stream(nats.url, "DLQ"))
        body = {"type": "io.nats.jetstream.advisory.v1.max_deliver", "stream": "DLQ", "consumer": "dlq_inspector"}
        subject = "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.DLQ.dlq_inspector"
        await client.publish(subject, body | {"stream_seq": 1, "deliveries": 1})
        await until(lambda: running.seen.counts["max_deliveries", "count"], "a count")
        assert before == len(await read_stream(nats.url, "DLQ"))


GARBAGE = [
    b"",
    b"\x00\xff",
    b"[]",
    b'{"type": "io.nats.jetstream.advisory.v1.max_deliver"}',
    b'{"type": "io.nats.jetstream.advisory.v1.max_deliver", "stream": "a.b", "consumer": "c", "stream_seq": 1}',
    b'{"type": "io.nats.jetstream.advisory.v1.max_deliver", "stream": "S", "consumer": "c", "stream_seq": -1}',
    b'{"type": "other", "stream": "S", "consumer": "c", "stream_seq": 1}',
    b"[" * 10_000,
]


async def test_garbage_advisories_are_passed_over_and_the_rest_goes_on(nats: NatsServer, client: Client) -> None:
    stream = await failing(client)
    for payload in GARBAGE:
        await client.publish("$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.S.c", payload)
    async with service(client) as running:
        await given_up(client, stream, 1)
        await until_letters(nats.url, stream, 1)
        await until(lambda: running.seen.counts["garbage", "count"] == len(GARBAGE), "the count")


GOOD_REQUEST = {
    names.STREAM: "S",
    names.CREATED: "1",
    names.SEQUENCE: "7",
    names.TIMESTAMP: "9",
    names.CONSUMER: "c",
    names.DELIVERIES: "1",
    names.SUBJECT: "evt.a.b.c",
    names.OUTCOME: "terminated",
    names.CAUSE: "bad: it is",
}


@pytest.mark.parametrize(
    "wrong",
    [
        dict.fromkeys(GOOD_REQUEST, ""),
        {names.SEQUENCE: "-1"},
        {names.SEQUENCE: "９"},
        {names.TIMESTAMP: "9" * 30},
        {names.STREAM: "a.b"},
        {names.STREAM: "DLQ"},
        {names.CONSUMER: "*"},
        {names.SUBJECT: "dlq.>"},
        {names.SUBJECT: ""},
    ],
    ids=str,
)
async def test_a_request_that_cannot_be_read_is_kept_as_a_letter_of_its_own(
    nats: NatsServer, client: Client, wrong: dict[str, str]
) -> None:
    agent = unique("a")
    await client.publish(f"dlq_requests.{agent}", b"what it was", headers=GOOD_REQUEST | wrong)
    async with service(client):
        found = await until_letters_on(nats.url, f"dlq.dlq_requests.{agent}")
    assert ("bad_request", b"what it was") == (found.cause, found.data)


async def until_letters_on(url: str, subject: str):  # type: ignore[no-untyped-def]
    found = []

    async def is_there() -> bool:
        found[:] = [one for one in await read_stream(url, "DLQ") if one.subject == subject]
        return bool(found)

    await until_async(is_there, subject)
    (one,) = found
    return one


async def test_hostile_headers_of_an_original_cannot_break_out_of_their_place(nats: NatsServer, client: Client) -> None:
    """Names that we cannot carry are counted, headers of ours are only the original's, expectations do not act."""
    stream = await failing(client, count=0)
    hostile = (
        (
            "NATS/1.0\r\nOncewire-Dlq-Stream: DLQ\r\nNats-Rollup: none\r\nNats-Expected-Stream: " + stream + "\r\n"
            "Bad Name: x\r\n" + "L" * 200 + ": y\r\nX: \xe4\r\n\r\n"
        )
        .encode("latin-1")
        .replace(b"Nats-Rollup: none\r\n", b"")
    )
    reply = await client.requests.call(f"{stream}.x", b"body", header=hostile)
    assert b'"seq"' in reply.payload, reply.payload
    await given_up(client, stream, 1)
    async with service(client):
        (letter,) = await until_letters(nats.url, stream, 1)
    assert (stream, "DLQ", "2", stream) == (
        letter.headers[names.STREAM],
        letter.headers["Oncewire-Orig-Oncewire-Dlq-Stream"],
        letter.headers[names.HEADERS],
        letter.headers["Oncewire-Orig-Nats-Expected-Stream"],
    )


async def test_the_service_works_again_after_the_server_was_killed(tmp_path: Path) -> None:
    with nats_server() as server:
        async with oncewire.connect(server.url) as client:
            await ensure(client)
            async with service(client) as running:
                stream = await failing(client, count=5)
                await given_up(client, stream, 5)
                await until_letters(server.url, stream, 5)
                server.kill()
                await until(lambda: running.problem, "a problem")
                server.start()
                await until(lambda: client.connection.is_ready, "the connection")
                await publish(client, stream, 5, start=5)
                await given_up(client, stream, 10)
                found = await until_letters(server.url, stream, 10)
                await until(lambda: not running.problem, "all well")
    assert_one_letter_each(found, stream, range(1, 11))
