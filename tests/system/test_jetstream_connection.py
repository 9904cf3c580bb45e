"""The connection against real servers: state, reconnect, keep-alive, limits, drain, and nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from oncewire._ground.errors import (
    NoResponders,
    NotConnected,
    OncewireError,
    OutcomeUnknown,
    Overloaded,
    PermissionDenied,
    TimedOut,
    TooLarge,
    Unavailable,
)
from oncewire._ground.jetstream import Client, Message, Options, Outgoing, State, connect
from tests.support.fakes import Peer, Proxy, fake
from tests.support.nats import NatsServer, nats_server
from tests.support.ports import free_port
from tests.support.streams import make_consumer, make_stream, outgoing, state_of
from tests.support.wait import until, within

QUICK = {"reconnect_delay_min_s": 0.01, "reconnect_delay_max_s": 0.05}


def quick(*urls: str, **changes: Any) -> Client:
    """A client that reconnects without long pauses."""
    return Client(Options(servers=urls, **(QUICK | changes)))


def open_sockets() -> set[str]:
    links = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if os.path.lexists(path)]
    return {link for link in links if link.startswith("socket:")}


# ---- state


async def test_each_change_of_state_is_told_with_its_reason(server: NatsServer) -> None:
    changes: list[tuple[State, str]] = []
    client = quick(server.url, on_change=lambda state, reason: changes.append((state, reason)))
    assert client.state is State.CONNECTING
    async with client:
        assert client.state is State.CONNECTED
        server.kill()
        await until(lambda: client.state is State.RECONNECTING)
        server.start()
        await until(lambda: client.state is State.CONNECTED)
        await client.drain()

    assert [state for state, _ in changes] == [
        State.CONNECTED,
        State.RECONNECTING,
        State.CONNECTED,
        State.DRAINING,
        State.CLOSED,
    ]
    assert all(reason for _, reason in changes)
    assert str(server.port) in changes[0][1]


async def test_a_change_callback_that_raises_stops_nothing(
    server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(state: State, reason: str) -> None:
        raise RuntimeError("from the user's callback")

    async with quick(server.url, on_change=broken) as client:
        server.kill()
        await until(lambda: client.state is State.RECONNECTING)
        server.start()
        await until(lambda: client.state is State.CONNECTED)
        assert (await client.api("INFO"))["streams"] == 0
    assert "from the user's callback" in caplog.text


async def test_a_connect_that_no_server_takes_names_each_of_them() -> None:
    first, second = free_port(), free_port()
    with pytest.raises(NotConnected) as caught:
        await within(connect(f"127.0.0.1:{first},127.0.0.1:{second}").open())
    assert f"127.0.0.1:{first}" in caught.value.message
    assert f"127.0.0.1:{second}" in caught.value.message
    assert "oncewire up" in caught.value.hint


async def test_the_next_server_of_the_list_is_taken_when_one_is_down(server: NatsServer) -> None:
    async with connect([f"nats://127.0.0.1:{free_port()}", server.url]) as client:
        assert client.server.jetstream


async def test_a_host_that_is_none_is_a_clear_error() -> None:
    with pytest.raises(NotConnected, match="no NATS server can be reached"):
        await within(connect("nats://xn--.invalid:4222").open())


@pytest.mark.parametrize(
    "use",
    [
        lambda client: client.publish("a", b""),
        lambda client: client.api("INFO"),
        lambda client: client.call("a"),
        lambda client: client.get("S", 1),
        lambda client: client.get_batch("S"),
    ],
    ids=["publish", "api", "call", "get", "get_batch"],
)
async def test_a_closed_client_says_so(server: NatsServer, use: Callable[[Client], Awaitable[Any]]) -> None:
    client = connect(server.url)
    await client.open()
    await client.close()
    await client.close()

    with pytest.raises(NotConnected, match="closed"):
        await within(use(client))


async def test_a_client_that_was_never_opened_says_so() -> None:
    with pytest.raises(OncewireError, match="not open"):
        await connect().publish("a", b"")


# ---- nothing is left behind


async def _use_everything(url: str) -> None:
    async with quick(url) as client:
        stream = await make_stream(client)
        await make_consumer(client, stream)
        await client.publish_many(outgoing(stream, 600))
        await client.publish_all(outgoing(stream, 100, prefix="b"))
        await client.publish_fast(outgoing(stream, 100, prefix="f"))
        pull = client.pull(stream, "c")  # never closed by its user
        assert await pull.fetch(10)
        async with client.read(stream) as reader:
            assert await reader.fetch(10)
        with pytest.raises(NoResponders):
            await client.call("nobody.there")
        client.serve("echo", _echo)
        assert (await client.call("echo", b"hi")).payload == b"hi"
        with pytest.raises(OncewireError):
            await client.publish("no.stream.takes.this", b"")
        publishing = asyncio.create_task(client.publish(f"{stream}.x", b"late"))
        waiting = asyncio.create_task(pull.fetch(10_000, timeout_s=60))
        await asyncio.sleep(0)
    await asyncio.gather(publishing, waiting, return_exceptions=True)


async def _echo(message: Message) -> bytes:
    return message.payload


def _runs_clean(body: Coroutine[Any, Any, None], *, loop_factory: Any) -> None:
    """Run, then look for tasks, timers and sockets that outlived the client."""

    async def main() -> None:
        gc.collect()
        before = open_sockets()
        await body
        assert asyncio.all_tasks() == {asyncio.current_task()}
        timers = getattr(asyncio.get_running_loop(), "_scheduled", [])
        assert [timer for timer in timers if not timer.cancelled()] == []
        assert open_sockets() - before == set()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_close_leaves_no_task_timer_or_socket_behind(shared_server: NatsServer, loop_factory: Any) -> None:
    _runs_clean(_use_everything(shared_server.url), loop_factory=loop_factory)


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_close_while_reconnecting_leaves_nothing_behind(server: NatsServer, loop_factory: Any) -> None:
    async def body() -> None:
        async with quick(server.url) as client:
            stream = await make_stream(client)
            pull = client.pull(stream, "c")
            publishing = asyncio.create_task(client.publish(f"{stream}.x", b"", msg_id="1"))
            fetching = asyncio.create_task(pull.fetch())
            await asyncio.sleep(0)
            server.kill()
            await until(lambda: client.state is State.RECONNECTING)
        outcomes = await asyncio.gather(publishing, fetching, return_exceptions=True)
        assert all(isinstance(outcome, Unavailable) for outcome in outcomes), outcomes

    _runs_clean(body(), loop_factory=loop_factory)


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_close_to_a_server_that_stopped_reading_leaves_nothing_behind(loop_factory: Any) -> None:
    """What waits in the socket's buffer must not keep the socket alive."""

    async def body() -> None:
        async def stops_reading(peer: Peer) -> None:
            await peer.greet()
            peer.reader._transport.pause_reading()  # type: ignore[attr-defined]
            await asyncio.Event().wait()

        async with fake(stops_reading) as server:
            async with quick(server.url) as client:
                for _ in range(200):
                    client.connection.write(b"PUB a 65536\r\n" + b"x" * 65_536 + b"\r\n")
                wire = client.connection._wire
            assert wire is not None
            assert wire.is_lost
        await asyncio.sleep(0)

    _runs_clean(body(), loop_factory=loop_factory)


@pytest.mark.parametrize("is_prompt", [True, False])
async def test_who_wants_it_promptly_is_told_before_what_came_later(is_prompt: bool) -> None:
    """Others get all that one read brought at once, behind the replies."""

    async def session(peer: Peer) -> None:
        await peer.greet()
        while not (line := await peer.line()).startswith(b"SUB watched"):
            pass
        sid = line.split()[-1]
        await peer.send(
            b"MSG watched.a %b 1\r\na\r\nMSG %b7 1 1\r\nb\r\nMSG watched.c %b 1\r\nc\r\n" % (sid, inbox, sid)
        )
        await peer.gone()

    told: list[bytes] = []
    async with fake(session) as server, quick(server.url) as client:
        inbox = client.connection.inbox
        client.connection.replies[7] = lambda _, message: told.append(message.payload)
        client.connection.subscribe(
            "watched.*", lambda messages: told.extend(one.payload for one in messages), is_prompt=is_prompt
        )
        await until(lambda: len(told) == 3)
    assert told == ([b"a", b"b", b"c"] if is_prompt else [b"b", b"a", b"c"])


async def test_a_cancelled_publish_leaves_nothing_behind(shared_server: NatsServer) -> None:
    async with Proxy(shared_server.port) as proxy, quick(proxy.url) as client:
        stream = await make_stream(client)
        proxy.swallow_answers = True
        tasks = [
            asyncio.create_task(client.publish(f"{stream}.x", b"1", msg_id="1")),
            asyncio.create_task(client.publish_many(outgoing(stream, 700))),
            asyncio.create_task(client.publish_atomic(outgoing(stream, 10, prefix="a"))),
            asyncio.create_task(client.call(f"{stream}.x", b"")),
            asyncio.create_task(client.get_batch(stream)),
        ]
        await until(lambda: proxy.swallowed_bytes > 0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

        assert all(task.cancelled() for task in tasks)
        assert client.connection.replies == {}
        assert client.publisher.in_flight() == 0
        assert client.publisher._pending_bytes == 0
        assert client.publisher._windows == {}


async def test_nothing_grows_over_many_messages(shared_server: NatsServer) -> None:
    async with quick(shared_server.url) as client:
        stream = await make_stream(client, max_msgs=10)
        listeners = len(client.connection.listeners)
        for _ in range(20):
            await client.publish_many(outgoing(stream, 1_000, has_id=False))
            async with client.read(stream) as reader:
                await reader.fetch(5)
        await client.publish_fast(outgoing(stream, 1_000, has_id=False))

        assert client.connection.replies == {}
        assert client.connection._subs == {}
        assert len(client.connection.listeners) == listeners
        assert client.publisher.in_flight() == 0
        assert client.publisher._pending_bytes == 0


# ---- reconnect


async def test_a_reconnect_renews_subscriptions(server: NatsServer) -> None:
    got: list[bytes] = []
    async with quick(server.url) as client, quick(server.url) as other:
        client.subscribe("news.*", lambda message: got.append(message.payload))
        client.subscribe("work", lambda message: got.append(message.payload), queue="q")
        dropped = client.subscribe("news.*", lambda message: got.append(b"dropped"))
        client.unsubscribe(dropped)
        await client.connection.flush()
        server.kill()
        await until(lambda: client.state is State.RECONNECTING and other.state is State.RECONNECTING)
        server.start()
        await until(lambda: client.state is State.CONNECTED and other.state is State.CONNECTED)
        await client.connection.flush()
        other.connection.write(b"PUB news.1 1\r\na\r\nPUB work 1\r\nb\r\n")
        await until(lambda: len(got) == 2)
        await other.connection.flush()
        await client.connection.flush()

    assert sorted(got) == [b"a", b"b"]


async def test_what_is_called_during_an_outage_waits_for_its_end(server: NatsServer) -> None:
    async with quick(server.url) as client:
        stream = await make_stream(client)
        server.kill()
        await until(lambda: client.state is State.RECONNECTING)
        calls = [
            asyncio.create_task(client.publish(f"{stream}.x", b"1", msg_id="1")),
            asyncio.create_task(client.api(f"STREAM.INFO.{stream}", timeout_s=20)),
        ]
        await asyncio.sleep(0)
        server.start()

        ack, info = await within(asyncio.gather(*calls))

    assert ack.sequence == 1
    assert info["config"]["name"] == stream


async def test_what_is_called_during_an_outage_ends_at_its_deadline(server: NatsServer) -> None:
    async with quick(server.url) as client:
        server.kill()
        await until(lambda: client.state is State.RECONNECTING)

        for use in (client.publish("a.b", b"", timeout_s=0.2), client.api("INFO", timeout_s=0.2)):
            with pytest.raises(TimedOut, match="reconnecting"):
                await within(use)


async def test_a_request_that_may_not_be_repeated_is_unknown_when_the_connection_breaks(server: NatsServer) -> None:
    async with Proxy(server.port) as proxy, quick(proxy.url) as client:
        proxy.swallow_answers = True
        once = asyncio.create_task(client.api("INFO", repeat=False))
        again = asyncio.create_task(client.api("INFO", repeat=True))
        await until(lambda: proxy.swallowed_bytes > 0)
        proxy.swallow_answers = False
        proxy.cut()

        with pytest.raises(OutcomeUnknown, match="broke before the answer"):
            await within(once)
        assert "streams" in await within(again)


async def test_the_pauses_between_attempts_grow_and_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backoff with jitter, up to the limit: a thousand clients must not knock in step."""
    port, pauses = free_port(), []
    sleep = asyncio.sleep

    async def noted(delay: float, *_: object) -> None:
        pauses.append(delay)
        await sleep(0)

    with nats_server() as server:
        async with quick(server.url, f"nats://127.0.0.1:{port}", reconnect_delay_max_s=1.0) as client:
            monkeypatch.setattr("oncewire._ground.jetstream.connection.asyncio.sleep", noted)
            server.kill()
            await until_count(pauses, 40, sleep)
            monkeypatch.undo()
            assert client.state is State.RECONNECTING

    assert all(0 < pause <= 1.0 for pause in pauses)
    assert max(pauses[:3]) <= 0.04
    assert min(pauses[-20:]) >= 0.5
    assert len(set(pauses[-20:])) > 10


async def until_count(items: list[float], count: int, sleep: Callable[[float], Awaitable[None]]) -> None:
    async with asyncio.timeout(30):
        while len(items) < count:
            await sleep(0.001)


async def test_an_unforeseen_failure_does_not_end_the_reconnect(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> dict[str, str]:
        monkeypatch.undo()
        raise ZeroDivisionError("a bug")

    async with Proxy(server.port) as proxy, quick(proxy.url) as client:
        monkeypatch.setattr("oncewire._ground.jetstream.handshake.credentials", broken)
        proxy.cut()
        await until(lambda: client.connection.reconnects == 1)
        assert "a bug" in caplog.text


# ---- keep-alive


async def test_a_server_that_falls_silent_is_left(server: NatsServer) -> None:
    """SIGSTOP: the socket stays open, nothing answers. Pings notice it."""
    changes: list[str] = []
    options = {"ping_interval_s": 0.1, "connect_timeout_s": 0.3}
    async with quick(server.url, on_change=lambda _, reason: changes.append(reason), **options) as client:
        stream = await make_stream(client)
        server.signal(signal.SIGSTOP)
        try:
            waiting = asyncio.create_task(client.publish(f"{stream}.x", b"1", msg_id="1"))
            await until(lambda: client.state is State.RECONNECTING)
        finally:
            server.signal(signal.SIGCONT)
        ack = await within(waiting)

        assert ack.sequence == 1
        assert (await state_of(client, stream))["messages"] == 1
    assert any("did not answer 2 pings" in reason for reason in changes)


async def test_the_servers_ping_is_answered() -> None:
    answered = asyncio.Event()

    async def session(peer: Peer) -> None:
        await peer.greet()
        await peer.send(b"PING\r\n")
        while line := await peer.line():
            if line == b"PONG\r\n":
                answered.set()

    async with fake(session) as server, quick(server.url):
        await within(answered.wait())


# ---- limits


async def test_a_message_over_max_payload_is_refused_and_the_connection_stays(server: NatsServer) -> None:
    async with quick(server.url) as client:
        stream = await make_stream(client)
        limit = client.server.max_payload
        with pytest.raises(TooLarge, match="are allowed"):
            await client.publish(f"{stream}.x", b"x" * (limit + 1))
        with pytest.raises(TooLarge):
            await client.call(f"{stream}.x", b"x" * (limit + 1))
        with pytest.raises(TooLarge):
            await client.publish(f"{stream}.x", b"x" * (limit - 100), headers={"A": "b" * 200})

        assert (await client.publish(f"{stream}.x", b"ok")).sequence == 1
        assert client.connection.reconnects == 0


async def test_what_waits_for_a_server_that_stopped_reading_is_bounded() -> None:
    async def stops_reading(peer: Peer) -> None:
        await peer.greet()
        peer.reader._transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.Event().wait()

    async with fake(stops_reading) as server, quick(server.url, write_bytes_max=4 * 1024 * 1024) as client:
        chunk = b"PUB a 65536\r\n" + b"x" * 65_536 + b"\r\n"
        with pytest.raises(Overloaded, match="wait for the NATS server"):
            await _write_for_ever(client, chunk)
        transport = client.connection._wire.transport  # type: ignore[union-attr]
        assert transport is not None
        assert transport.get_write_buffer_size() < 5 * 1024 * 1024
        with pytest.raises(Unavailable):
            await within(client.publish("a.b", b"x" * 1_000, timeout_s=0.3))
        with pytest.raises(TimedOut):
            await within(client.call("a.b", b"", timeout_s=0.3))
        subscription = client.subscribe("a.b", lambda _: None)
        client.unsubscribe(subscription)
        assert client.connection._subs == {}


async def _write_for_ever(client: Client, chunk: bytes) -> None:
    while True:
        client.connection.write(chunk)
        await asyncio.sleep(0)


async def test_publishing_to_a_server_that_never_confirms_is_bounded() -> None:
    """Windows wait for room; the caller gets its answer at its deadline."""

    async def reads_only(peer: Peer) -> None:
        await peer.greet()
        await peer.gone()

    async with fake(reads_only) as server, quick(server.url) as client:
        messages = [Outgoing("a.b", b"x" * 100) for _ in range(20_000)]
        outcomes = await within(client.publish_many(messages, timeout_s=0.5))
        assert client.publisher.in_flight() == 0
        assert client.connection.replies == {}
        assert len(outcomes) == 20_000
        assert all(isinstance(outcome, Unavailable) for outcome in outcomes)


# ---- requests


async def test_nobody_answering_is_told_at_once(server: NatsServer) -> None:
    async with quick(server.url) as client:
        with pytest.raises(NoResponders, match=r"nobody answers on a\.b"):
            await client.call("a.b", timeout_s=600)


async def test_requests_are_answered_by_one_of_those_who_serve(server: NatsServer) -> None:
    async with quick(server.url) as client, quick(server.url) as first, quick(server.url) as second:
        for one in (first, second):
            one.serve("echo", _echo)
            await one.connection.flush()
        replies = await within(asyncio.gather(*(client.call("echo", b"%d" % n) for n in range(200))))

    assert [reply.payload for reply in replies] == [b"%d" % n for n in range(200)]


async def test_a_late_answer_reaches_nobody_else(server: NatsServer) -> None:
    gate = asyncio.Event()

    async def slow(message: Message) -> bytes:
        if message.payload == b"slow":
            await gate.wait()
        return message.payload

    async with quick(server.url) as client:
        client.serve("echo", slow)
        with pytest.raises(TimedOut, match="no answer on echo"):
            await client.call("echo", b"slow", timeout_s=0.1)
        gate.set()
        assert (await client.call("echo", b"quick")).payload == b"quick"


# ---- permissions

PERMISSIONS = """
    authorization { users: [ { user: "u", password: "p", permissions: {
        publish: { deny: [
            "secret.>", "$JS.API.STREAM.DELETE.>", "$JS.API.CONSUMER.MSG.NEXT.>", "$JS.API.DIRECT.GET.>"
        ] }
        subscribe: { deny: ["hidden.>"] }
    } } ] }
"""


async def test_who_lacks_a_permission_is_told_and_the_connection_stays() -> None:
    with nats_server(PERMISSIONS) as server:
        async with connect(server.url, user="u", password="p") as client:
            stream = await make_stream(client, subjects=["secret.>", "open.>"])
            await make_consumer(client, stream)
            for use in (
                client.publish("secret.a", b"", msg_id="1"),
                client.publish_atomic([Outgoing("open.a", b""), Outgoing("secret.a", b"")]),
                client.call("secret.b", b""),
                client.api(f"STREAM.DELETE.{stream}"),
                client.get_batch(stream, timeout_s=600),
                client.get(stream, 1),
            ):
                with pytest.raises(PermissionDenied, match=r"secret|STREAM\.DELETE|DIRECT\.GET"):
                    await within(use)
            async with client.pull(stream, "c") as pull:
                with pytest.raises(PermissionDenied):
                    await within(pull.fetch())
            denied: list[PermissionDenied] = []
            client.subscribe("hidden.a", lambda _: None, denied=denied.append)
            await until(lambda: denied)

            [bad, good] = await client.publish_many([Outgoing("secret.a", b""), Outgoing("open.a", b"")])
            assert isinstance(bad, PermissionDenied)
            assert not isinstance(good, OncewireError)
            assert client.connection.reconnects == 0


async def test_a_user_without_an_inbox_is_told_so() -> None:
    """Without its inbox the client hears no answer: it says so instead of timing out for ever."""
    config = """
        authorization { users: [ { user: "u", password: "p", permissions: { subscribe: { deny: ["_INBOX.>"] } } } ] }
    """
    with nats_server(config) as server:
        client = connect(server.url, user="u", password="p")
        with pytest.raises(PermissionDenied, match="_INBOX"):
            await within(_open_and_ask(client))
        await client.close()


async def _open_and_ask(client: Client) -> None:
    await client.open()
    await client.connection.flush()
    await client.api("INFO", timeout_s=60)


# ---- drain


async def test_a_drain_waits_for_confirmations_and_takes_no_new_work(server: NatsServer) -> None:
    async with Proxy(server.port) as proxy:
        client = quick(proxy.url)
        await client.open()
        stream = await make_stream(client)
        proxy.hold()
        waiting = asyncio.create_task(client.publish(f"{stream}.x", b"1"))
        await until(lambda: client.publisher.in_flight() == 1)
        draining = asyncio.create_task(client.drain())
        await until(lambda: client.state is State.DRAINING)
        with pytest.raises(NotConnected, match="draining"):
            await client.publish(f"{stream}.x", b"2")
        proxy.release()

        assert (await within(waiting)).sequence == 1
        await within(draining)
        assert client.state is State.CLOSED


async def test_a_drain_ends_at_its_deadline(server: NatsServer) -> None:
    async with Proxy(server.port) as proxy:
        client = quick(proxy.url)
        await client.open()
        stream = await make_stream(client)
        proxy.hold()
        waiting = asyncio.create_task(client.publish(f"{stream}.x", b"1", msg_id="1"))
        await until(lambda: client.publisher.in_flight() == 1)

        await within(client.drain(timeout_s=0.2))
        with pytest.raises(OutcomeUnknown):
            await within(waiting)
