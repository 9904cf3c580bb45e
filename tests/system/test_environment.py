"""One rule for every way in: an argument, else the environment, else the default.

Each public entry point is asked what it makes of each variable that a specification names and that concerns it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import oncewire
from oncewire import Agent, Effect, outbox, tokens
from oncewire._ground import settings, topology
from oncewire._ground.errors import AuthenticationFailed, InvalidSetting
from oncewire._ground.jetstream import Client
from oncewire._ground.settings import Settings
from oncewire.agent import Runner
from oncewire.outbox import RelayOptions
from oncewire.testing import AgentTest
from tests.support.nats import NatsServer, nats_server
from tests.support.running import sqlite_in
from tests.support.streams import consumer_info

VALUES = {
    "NATS_STREAM_PREFIX": "acme",
    "NATS_CONSUMER_PREFIX": "acme-reads",
    "NATS_MESSAGE_TTL_SECS": "7200",
    "NATS_MAX_MSGS_PER_SUBJECT": "77",
    "NATS_DUPLICATE_WINDOW_SECS": "60",
    "NATS_STREAM_SUBJECT_PREFIX": "acme.events",
    "NATS_EVENTS_PREFIX": "acme.events",
    "NATS_TOKENS_PREFIX": "acme.tokens",
    "OUTBOX_POLL_INTERVAL_MS": "123",
    "OUTBOX_BATCH_SIZE": "7",
}
"""What the specifications name, each with another value than its default. NATS_URL is the server's."""
OF_THE_GATEWAY = {"GATEWAY_PORT", "GATEWAY_BACKLOG_SIZE"}
"""A process of its own, which the command line alone starts."""
SAME = {"NATS_STREAM_SUBJECT_PREFIX", "NATS_EVENTS_PREFIX"}
"""Two names for one setting."""

Seen = dict[str, Any]


async def by_init_streams(client: Client, _: Path, *, is_argued: bool) -> Seen:
    declared = topology.load(settings=Settings()) if is_argued else None
    await oncewire.init_streams(client, topology=declared)
    return await seen_in_streams(client)


async def seen_in_streams(client: Client) -> Seen:
    (name,) = (await client.api("STREAM.NAMES", {"subject": "sr.events.loop"}))["streams"]
    config = (await client.api(f"STREAM.INFO.{name}"))["config"]
    chat = (await client.api("STREAM.INFO.CHAT_EVENTS"))["config"]["subjects"]
    return {
        "NATS_STREAM_PREFIX": name.removesuffix("-events"),
        "NATS_MESSAGE_TTL_SECS": config["max_age"] // 10**9,
        "NATS_MAX_MSGS_PER_SUBJECT": config["max_msgs_per_subject"],
        "NATS_DUPLICATE_WINDOW_SECS": config["duplicate_window"] // 10**9,
        "NATS_EVENTS_PREFIX": chat[0].removesuffix(".*"),
        "NATS_TOKENS_PREFIX": chat[1].removesuffix(".*"),
    }


async def by_ensure_consumers(client: Client, _: Path, *, is_argued: bool) -> Seen:
    declared = topology.load(settings=Settings()) if is_argued else None
    await oncewire.init_streams(client, topology=declared)
    await oncewire.ensure_consumers(client, "gateway", topology=declared)
    found = [
        (await consumer_info(client, "CHAT_EVENTS", name))["config"]["filter_subject"].removesuffix(".*")
        for name in ("GATEWAY_FANOUT", "SSE_TOKEN_FANOUT")
    ]
    return dict(zip(("NATS_EVENTS_PREFIX", "NATS_TOKENS_PREFIX"), found, strict=True))


def reading_loops() -> Agent:
    agent = Agent("worker")
    agent.on("sr.events.loop")(lambda ctx, payload: None)
    return agent


async def by_agent_running(client: Client, folder: Path, *, is_argued: bool) -> Seen:
    options = {"settings": Settings()} if is_argued else {}
    await oncewire.init_streams(client, topology=topology.load(settings=Settings()) if is_argued else None)
    async with reading_loops().running(client, sqlite_in(folder), **options) as runner:
        return seen_by(runner)


async def by_runner(client: Client, folder: Path, *, is_argued: bool) -> Seen:
    options = {"settings": Settings()} if is_argued else {}
    await oncewire.init_streams(client, topology=topology.load(settings=Settings()) if is_argued else None)
    async with Runner(reading_loops(), client, sqlite_in(folder), **options) as runner:
        return seen_by(runner)


def seen_by(runner: Runner) -> Seen:
    ((stream, consumer),) = runner.opened
    return {
        "NATS_STREAM_PREFIX": stream.removesuffix("-events"),
        "NATS_CONSUMER_PREFIX": consumer.removesuffix("-worker"),
    }


async def by_tokens_stream(client: Client, _: Path, *, is_argued: bool) -> Seen:
    options = {"events_prefix": "chat.events", "tokens_prefix": "chat.tokens"} if is_argued else {}
    await oncewire.init_streams(client, topology=topology.load(settings=Settings()) if is_argued else None)
    async with tokens.stream("c1", client=client, **options) as out:
        await out.send("word")
    first, *_, last = await client.get_batch("CHAT_EVENTS")
    chunk = await client.get("CHAT_EVENTS", last.sequence - 1)
    prefixes = [one.subject.removesuffix(".c1") for one in (first, chunk)]
    return dict(zip(("NATS_EVENTS_PREFIX", "NATS_TOKENS_PREFIX"), prefixes, strict=True))


async def by_relaying(client: Client, _: Path, *, is_argued: bool) -> Seen:
    options = outbox.options_of(Settings()) if is_argued else None
    async with outbox.relaying(client, "postgresql://127.0.0.1:1/nowhere", options) as relay:
        return seen_of(relay.options)


async def by_relay_options(_: Client, __: Path, *, is_argued: bool) -> Seen:
    return seen_of(RelayOptions(poll_ms=250, batch_size=25, prefix="chat.events") if is_argued else RelayOptions())


def seen_of(options: RelayOptions) -> Seen:
    return {
        "OUTBOX_POLL_INTERVAL_MS": options.poll_ms,
        "OUTBOX_BATCH_SIZE": options.batch_size,
        "NATS_EVENTS_PREFIX": options.prefix,
    }


async def by_agent_test(_: Client, __: Path, *, is_argued: bool) -> Seen:
    """What it takes as a stream's subject."""
    agent = Agent("worker")

    @agent.on("say")
    def say(ctx: Any, payload: dict[str, Any]) -> Effect:
        return Effect(f"{payload['prefix']}.c1", b"{}")

    with AgentTest(agent, topology=topology.load(settings=Settings()) if is_argued else None) as test:
        taken = [
            prefix
            for prefix in ("chat.events", "chat.tokens", "acme.events", "acme.tokens")
            if test.send("say", {"prefix": prefix}).outcome == "done"
        ]
    return {f"NATS_{prefix.partition('.')[2].upper()}_PREFIX": prefix for prefix in taken}


EntryPoint = Callable[..., Awaitable[Seen]]
CHAT = ("NATS_STREAM_SUBJECT_PREFIX", "NATS_EVENTS_PREFIX", "NATS_TOKENS_PREFIX")
ENTRY_POINTS: dict[EntryPoint, tuple[str, ...]] = {
    by_init_streams: tuple(set(VALUES) - {"NATS_CONSUMER_PREFIX", "OUTBOX_POLL_INTERVAL_MS", "OUTBOX_BATCH_SIZE"}),
    by_ensure_consumers: CHAT,
    by_agent_running: ("NATS_STREAM_PREFIX", "NATS_CONSUMER_PREFIX"),
    by_runner: ("NATS_STREAM_PREFIX", "NATS_CONSUMER_PREFIX"),
    by_tokens_stream: CHAT,
    by_relaying: ("OUTBOX_POLL_INTERVAL_MS", "OUTBOX_BATCH_SIZE", *CHAT[:2]),
    by_relay_options: ("OUTBOX_POLL_INTERVAL_MS", "OUTBOX_BATCH_SIZE", *CHAT[:2]),
    by_agent_test: CHAT,
}


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for row in settings.table():
        for name in row.variables:
            monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def default(variable: str) -> Any:
    return next(row.default for row in settings.table() if variable in row.variables)


def chosen(variable: str) -> Any:
    return type(default(variable))(VALUES[variable])


def cases() -> list[Any]:
    return [
        pytest.param(ask, variable, id=f"{ask.__name__}-{variable}")
        for ask, variables in ENTRY_POINTS.items()
        for variable in sorted(variables)
    ]


@pytest.mark.parametrize(("ask", "variable"), cases())
async def test_an_entry_point_takes_what_the_environment_says(
    server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask: EntryPoint, variable: str
) -> None:
    monkeypatch.setenv(variable, VALUES[variable])
    meant = SAME if variable in SAME else {variable}
    async with oncewire.connect(server.url) as client:
        seen = await ask(client, tmp_path, is_argued=False)
    assert seen == {name: chosen(name) if name in meant else default(name) for name in seen}
    assert meant & set(seen)


@pytest.mark.parametrize("ask", ENTRY_POINTS, ids=lambda ask: ask.__name__)
async def test_an_argument_counts_before_the_environment(
    server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask: EntryPoint
) -> None:
    for name, value in VALUES.items():
        monkeypatch.setenv(name, value)
    async with oncewire.connect(server.url) as client:
        seen = await ask(client, tmp_path, is_argued=True)
    assert seen == {name: default(name) for name in seen}


def test_every_variable_that_a_specification_names_is_a_setting_and_has_its_entry_points() -> None:
    known = {name for row in settings.table() for name in row.variables}
    tried = {name for variables in ENTRY_POINTS.values() for name in variables}
    assert {*VALUES, *OF_THE_GATEWAY, "NATS_URL"} <= known
    assert set(VALUES) == tried


# ---- connecting


async def test_a_client_goes_where_the_environment_says_unless_it_is_told(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NATS_URL", server.url)
    async with oncewire.connect() as client:
        assert client.connection.is_ready
    monkeypatch.setenv("NATS_URL", "nats://127.0.0.1:1")
    async with oncewire.connect(server.url) as client, oncewire.connect([server.url]) as other:
        assert client.connection.is_ready
        assert other.connection.is_ready
    monkeypatch.delenv("NATS_URL")
    assert ("nats://localhost:4222",) == oncewire.connect()._options.servers


async def test_credentials_come_from_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the environment are not mixed with a password that was passed, nor sent where a token was."""
    with nats_server("authorization { user: jade, password: wren }") as server:
        monkeypatch.setenv("NATS_URL", server.url)
        monkeypatch.setenv("NATS_USER", "jade")
        monkeypatch.setenv("NATS_PASSWORD", "wren")
        async with oncewire.connect():
            pass
        for passed in ({"token": "t"}, {"user": "jade"}, {"user": "", "password": ""}):
            with pytest.raises(AuthenticationFailed):
                async with oncewire.connect(**passed):
                    pass
        monkeypatch.setenv("NATS_PASSWORD", "other")
        async with oncewire.connect(user="jade", password="wren"):
            pass


def test_several_ways_to_authenticate_are_refused() -> None:
    with pytest.raises(InvalidSetting, match="several ways"):
        oncewire.connect(user="jade", password="wren", token="t")


def test_a_client_has_the_inbox_and_the_trust_that_the_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NATS_INBOX_PREFIX", "_INBOX_biller")
    assert "_INBOX_biller" == oncewire.connect()._options.inbox_prefix
    assert "_INBOX_teller" == oncewire.connect(inbox_prefix="_INBOX_teller")._options.inbox_prefix
    monkeypatch.setenv("NATS_CA", str(tmp_path / "missing.pem"))
    with pytest.raises(InvalidSetting, match="TLS files"):
        oncewire.connect()
