"""`oncewire dlq`: looking at letters and bringing them back, each once, without pretending."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from click.testing import CliRunner

import oncewire
from oncewire._ground.contracts import headers as carried
from oncewire._ground.contracts import ids
from oncewire._ground.contracts import letters as names
from oncewire._ground.jetstream import Client, Outgoing, losses
from oncewire._ground.jetstream.protocol import parse_time_ns
from oncewire._ground.topology import ensure
from oncewire.agent.effects import Terminate
from oncewire.cli import main
from oncewire.dlq.letters import Filter
from oncewire.dlq.replay import Replay, ReplayOptions
from tests.support.dlq import Found, failing, given_up, letters_of, read_stream, service, until_letters
from tests.support.dlq_agents import EVENTS, Work
from tests.support.nats import NatsServer, nats_server
from tests.support.streams import make_stream, state_of, unique
from tests.support.up import clean_environ
from tests.support.wait import until, until_async

ROOT = Path(__file__).parents[2]
STEPS = ["recorded", "published", "noted", "cleared"]
DAY_NS = 86_400 * 10**9


@pytest.fixture(scope="module")
def nats() -> Iterator[NatsServer]:
    with nats_server() as running_server:
        yield running_server


@pytest_asyncio.fixture
async def client(nats: NatsServer) -> AsyncIterator[Client]:
    async with oncewire.connect(nats.url) as connected:
        await ensure(connected)
        yield connected


class Tool:
    """The command line, in a thread of its own."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def __call__(self, *args: str, code: int = 0, **environ: str) -> Any:
        """What it prints with --json, its exit code checked."""
        done = await asyncio.to_thread(self._invoke, [*args, "--json"], environ)
        assert code == done.exit_code, done.output + done.stderr
        return json.loads(done.stdout or "null") if code < 2 else json.loads(done.stderr)["error"]

    async def text(self, *args: str) -> str:
        return str((await asyncio.to_thread(self._invoke, list(args), {})).output)

    def _invoke(self, args: list[str], environ: dict[str, str]) -> Any:
        return CliRunner().invoke(main, ["dlq", *args], env={"NATS_URL": self._url, **environ})


@pytest.fixture
def tool(nats: NatsServer) -> Tool:
    return Tool(nats.url)


async def dead(url: str, client: Client, count: int = 1, **config: Any) -> str:
    """A stream whose messages are all letters."""
    stream = await failing(client, count=count, max_deliver=1, **config)
    await given_up(client, stream, count)
    async with service(client):
        await until_letters(url, stream, count)
        if config.get("retention") == "workqueue":
            await until_async(lambda: _is_empty(client, stream), "an empty queue")
    return stream


async def _is_empty(client: Client, stream: str) -> bool:
    return bool((await state_of(client, stream))["messages"] == 0)


async def copies_of(url: str, stream: str) -> list[Found]:
    return [one for one in await read_stream(url, stream) if carried.REPLAY_FOR in one.headers]


async def request(client: Client, stream: str, **told: str) -> str:
    """A request as an agent hands it over; returns its subject."""
    subject = f"{stream}.x"
    facts = {
        names.STREAM: stream,
        names.CREATED: "5",
        names.SEQUENCE: "7",
        names.TIMESTAMP: str(time.time_ns()),
        names.CONSUMER: "w",
        names.DELIVERIES: "1",
        names.SUBJECT: subject,
        names.OUTCOME: "dead",
        names.CAUSE: "ValueError: no",
    }
    await client.publish("dlq_requests.test", b"body", headers=facts | told)
    return subject


# ---- replay


async def test_a_replayed_letter_stands_once_on_its_subject_and_is_cleared(
    nats: NatsServer, client: Client, tool: Tool
) -> None:
    """D5, D6: its own id, the original's headers without those that act, the consumer, the origin; a known gap."""
    stream = await dead(nats.url, client)
    (letter,) = await letters_of(nats.url, stream)
    report = await tool("replay", str(letter.sequence))
    assert (1, 1, 0) == (report["matched"], report["replayed"], report["refused"])
    (copy,) = await copies_of(nats.url, stream)
    id_ = letter.headers["Nats-Msg-Id"]
    assert (f"{stream}.x", b"body 0", "w") == (copy.subject, copy.data, copy.headers[carried.REPLAY_FOR])
    assert (ids.replay_id(id_, 1), "0") == (copy.headers["Nats-Msg-Id"], copy.headers["X-Mine"])
    assert [id_, stream] == json.loads(copy.headers[carried.REPLAY_ORIGIN])[:2]
    assert not any(name.startswith("Nats-Expected") for name in copy.headers)
    assert [] == await letters_of(nats.url, stream)
    record = json.loads((await client.get_last("DLQ_REPLAYS", f"dlq_replays.{id_[3:]}")).payload)
    assert ("published", letter.sequence, copy.sequence) == (
        record["state"],
        record["letter_sequence"],
        record["sequence"],
    )


class Killed(BaseException):
    """The process is gone."""


async def replay_until(url: str, stream: str, step: str, visit: int = 1) -> None:
    """A replay that dies at a step."""
    visits: Counter[str] = Counter()

    def on_step(name: str) -> None:
        visits[name] += 1
        if name == step and visits[name] == visit:
            raise Killed

    async with oncewire.connect(url) as client:
        with pytest.raises((Killed, BaseExceptionGroup)):
            await Replay(client, Filter(stream=stream), ReplayOptions(rate_per_s=4_000, on_step=on_step)).run()


@pytest.mark.parametrize("step", STEPS)
async def test_a_replay_that_dies_at_a_step_and_is_run_again_publishes_each_letter_once(
    nats: NatsServer, client: Client, tool: Tool, step: str
) -> None:
    stream = await dead(nats.url, client, 30)
    await replay_until(nats.url, stream, step)
    report = await tool("replay", "--stream", stream)
    copies = await copies_of(nats.url, stream)
    assert {b"body %d" % n: 1 for n in range(30)} == Counter(one.data for one in copies)
    assert ([], 0) == (await letters_of(nats.url, stream), report["refused"])


async def test_a_replay_resumed_after_the_duplicate_window_looks_before_it_publishes(
    nats: NatsServer, client: Client, tool: Tool
) -> None:
    stream = await dead(nats.url, client, 5, duplicate_window=200_000_000)
    await replay_until(nats.url, stream, "published")
    again = f"{stream}-probe"

    async def is_forgotten() -> bool:
        return not (await client.publish(f"{stream}.x", b"probe", msg_id=again)).is_duplicate

    await is_forgotten()
    await until_async(is_forgotten, "the server to forget an id")
    report = await tool("replay", "--stream", stream)
    assert (5, 5) == (report["already_out"], len(await copies_of(nats.url, stream)))


async def test_a_dry_run_says_what_would_be_done_and_does_nothing(nats: NatsServer, client: Client, tool: Tool) -> None:
    stream = await dead(nats.url, client, 3)
    report = await tool("replay", "--stream", stream, "--dry-run", "--rate", "1000")
    assert (3, True) == (report["replayed"], report["is_dry_run"])
    assert (3, 0) == (len(await letters_of(nats.url, stream)), len(await copies_of(nats.url, stream)))
    assert "3 of 3 letters would be replayed" in await tool.text("replay", "--stream", stream, "--dry-run")


async def test_a_stranger_s_large_message_is_replayed_as_far_as_the_server_takes_it(tmp_path: Path) -> None:
    """Above what our publishers allow, and, as a pointer, above what a copy with its headers can be."""
    with nats_server("max_payload: 60000") as server:
        tool = Tool(server.url)
        async with oncewire.connect(server.url) as client:
            await ensure(client)
            stream = await failing(client, count=0, max_deliver=1, retention="workqueue")
            for size in (59_000, 60_000):
                await client.call(f"{stream}.x", b"b" * size)
            await given_up(client, stream, 2)
            async with service(client):
                await until_letters(server.url, stream, 2)
                await until_async(lambda: _holds(client, stream, 1), "the first to leave the queue")
            report = await tool("replay", "--stream", stream, code=1)
            assert (1, 1) == (report["replayed"], report["refused"])
            assert "60" in report["problems"][0]["reason"]
            assert [60_000, 59_000] == [len((await client.get(stream, at)).payload) for at in (2, 3)]
            await tool("drop", "--stream", stream, "--reason", "too large", "--yes")
            await until_async(lambda: _holds(client, stream, 1), "the pointer's original to leave the queue")


async def _holds(client: Client, stream: str, count: int) -> bool:
    return bool((await state_of(client, stream))["messages"] == count)


async def test_what_is_gone_or_forgotten_is_refused_by_name(nats: NatsServer, client: Client, tool: Tool) -> None:
    """E16: older than ledgers must remember, it could happen twice."""
    stream = await make_stream(client, unique("F"), max_age=DAY_NS)
    old = str(time.time_ns() - 40 * DAY_NS)
    async with service(client):
        await request(client, stream, **{names.PAYLOAD: names.GONE})
        await request(client, stream, **{names.SEQUENCE: "8", names.TIMESTAMP: old})
        await until_letters(nats.url, stream, 2)
    report = await tool("replay", "--stream", stream, code=1)
    reasons = [one["reason"] for one in report["problems"]]
    assert (2, 0) == (report["refused"], report["replayed"])
    assert ("payload is gone" in reasons[0], "it could happen twice" in reasons[1]) == (True, True)
    assert 2 == len(await letters_of(nats.url, stream))


# ---- agents


async def agent_letter(nats: NatsServer, client: Client, work: Work, n: int = 1) -> Found:
    """A letter of an agent whose handler gave up."""
    work.problem = Terminate("not_yet: later")
    async with service(client), work.running(client):
        sequence = await work.publish(client, n)

        async def is_there() -> list[Found]:
            return [one for one in await letters_of(nats.url, EVENTS) if one.place[1:] == (work.consumer, sequence)]

        (letter,) = await until_async(is_there, "a letter")
    work.problem = None
    return letter  # type: ignore[no-any-return]


async def test_the_named_agent_runs_a_replay_and_others_pass_over_it(
    nats: NatsServer, client: Client, tool: Tool, tmp_path: Path
) -> None:
    work = Work(tmp_path)
    letter = await agent_letter(nats, client, work)
    other = Work(tmp_path, event=work.event)
    async with work.running(client), other.running(client) as beside:
        await until(lambda: other.seen, "the other to do the original")
        await tool("replay", str(letter.sequence))
        await until(lambda: work.seen, "the replay")
        await until(lambda: beside.counts.get("passed"), "the other to pass over it")
    assert ([{"n": 1}], [{"n": 1}]) == (work.seen, other.seen)


async def test_what_is_done_by_now_is_said_and_not_replayed(
    nats: NatsServer, client: Client, tool: Tool, tmp_path: Path
) -> None:
    """By the ledger that is named, and by what agents announced."""
    work = Work(tmp_path)
    letter = await agent_letter(nats, client, work)
    body = json.loads(letter.data) | {"idempotency_key": f"{work.event}-1"}
    async with work.running(client):
        await client.publish(work.subject, body, msg_id="the same under another id")
        await until(lambda: work.seen, "the input to be done")
    ledger = ("--store", f"sqlite:///{work.path}", "--agent", work.full_name)
    report = await tool("replay", str(letter.sequence), *ledger, code=1)
    assert (0, 1) == (report["replayed"], report["done"])
    assert "done by now" in report["problems"][0]["reason"]
    assert 1 == len([one for one in await letters_of(nats.url, EVENTS) if one.sequence == letter.sequence])


async def test_a_letter_whose_input_was_done_after_all_is_withdrawn(
    nats: NatsServer, client: Client, tool: Tool, tmp_path: Path
) -> None:
    work = Work(tmp_path)
    async with work.running(client) as runner:
        sequence = await work.publish(client, 1)
        await until(lambda: work.seen, "the input to be done")
        created_ns = str((await client.api(f"STREAM.INFO.{EVENTS}"))["created"])
        assert runner.opened[EVENTS, work.consumer].source.created == created_ns
    stored = await client.get(EVENTS, sequence)
    told = {
        names.SEQUENCE: str(sequence),
        names.TIMESTAMP: str(stored.timestamp_ns),
        names.CONSUMER: work.consumer,
        names.SUBJECT: work.subject,
        names.CREATED: str(parse_time_ns(created_ns)),
    }
    async with service(client):
        await request(client, EVENTS, **told)

        async def is_there() -> list[Found]:
            return [one for one in await letters_of(nats.url, EVENTS) if one.place[1] == work.consumer]

        (letter,) = await until_async(is_there, "a letter")
    (group,) = (await tool("ls", "--consumer", work.consumer, code=1))["groups"]
    assert (1, 1) == (group["count"], group["withdrawn"])
    assert (await tool("show", str(letter.sequence)))["is_withdrawn"]
    report = await tool("replay", str(letter.sequence), code=1)
    assert (0, 1) == (report["replayed"], report["done"])


async def test_an_edited_replay_keeps_the_letter_and_names_what_it_replaces(
    nats: NatsServer, client: Client, tool: Tool, tmp_path: Path
) -> None:
    """E11: the agent takes the edited content for the same input."""
    work = Work(tmp_path)
    letter = await agent_letter(nats, client, work)
    fixed = tmp_path / "fixed.json"
    fixed.write_text('{"type": "Made", "payload": {"n": 100}}')
    wrong = tmp_path / "wrong.json"
    wrong.write_text('{"type": "Made", "payload": {"n": 100}, "idempotency_key": "another"}')
    refused = await tool("replay", str(letter.sequence), "--body", str(wrong), code=2)
    assert "another input" in refused["message"]
    async with work.running(client):
        await tool("replay", str(letter.sequence), "--body", str(fixed))
        await until(lambda: work.seen, "the edited input")
    (copy,) = [one for one in await copies_of(nats.url, EVENTS) if one.headers[carried.REPLAY_FOR] == work.consumer]
    digest = ids.content_digest("Made", b'{"n":1}').hex()
    assert ([{"n": 100}], digest) == (work.seen, copy.headers[carried.REPLAY_REPLACES])
    shown = await tool("show", str(letter.sequence))
    assert ({"n": 1}, "published") == (json.loads(shown["body"])["payload"], shown["replay"]["state"])
    report = await tool("replay", str(letter.sequence), code=1)
    assert "another content" in report["problems"][0]["reason"]


# ---- looking, dropping, injecting


async def test_letters_are_grouped_and_filtered(nats: NatsServer, client: Client, tool: Tool) -> None:
    stream = await make_stream(client, unique("F"))
    async with service(client):
        for at in range(3):
            await request(client, stream, **{names.SEQUENCE: str(at + 1)})
        await request(client, stream, **{names.SEQUENCE: "4", names.CAUSE: "no_handler"})
        tenant = {names.SUBJECT: "evt.acme.demo.x", names.SEQUENCE: "5"}
        await request(client, stream, **tenant)
        await until_letters(nats.url, stream, 5)
    found = await tool("ls", "--stream", stream, code=1)
    shown = [(one["count"], one["consumer"], one["subject"], one["cause"]) for one in found["groups"]]
    assert [
        (3, "w", f"{stream}.x", "ValueError"),
        (1, "w", f"{stream}.x", "no_handler"),
        (1, "w", "evt.acme.demo.x", "ValueError"),
    ] == shown
    for flags, count in [
        (("--cause", "no_handler"), 1),
        (("--tenant", "acme"), 1),
        (("--subject", f"{stream}.*"), 4),
        (("--since", "1h"), 5),
        (("--until", "1h"), 0),
        (("--since", "2999-01-01T00:00Z"), 0),
        (("--consumer", "v"), 0),
    ]:
        letters = await tool("ls", "--letters", "--stream", stream, *flags, code=1 if count else 0)
        assert count == len(letters), flags
    assert "ValueError" in await tool.text("ls", "--stream", stream)
    assert "5 letters" in await tool.text("ls", "--letters", "--stream", stream)


async def test_show_finds_a_letter_by_id_begin_or_number(nats: NatsServer, client: Client, tool: Tool) -> None:
    stream = await dead(nats.url, client)
    (letter,) = await letters_of(nats.url, stream)
    id_ = letter.headers["Nats-Msg-Id"]
    for name in (id_, id_[:20], str(letter.sequence)):
        shown = await tool("show", name)
        assert (id_, "body 0", {"X-Mine": "0"}) == (
            shown["id"],
            shown["body"],
            {name: value for name, value in shown["headers"].items() if name == "X-Mine"},
        )
    assert "max_deliveries" in await tool.text("show", id_)
    assert "not_found" == (await tool("show", "dl.nothing", code=2))["code"]
    assert "not_found" == (await tool("show", "999999", code=2))["code"]


async def test_dropped_letters_are_recorded_before_they_go(nats: NatsServer, client: Client, tool: Tool) -> None:
    stream = await dead(nats.url, client, 2)
    letter, _ = await letters_of(nats.url, stream)
    assert "nobody is there" in (await tool("drop", "--stream", stream, "--reason", "x", code=2))["message"]
    assert {"dropped": 2} == await tool("drop", "--stream", stream, "--reason", "test data", "--yes")
    assert [] == await letters_of(nats.url, stream)
    subject = f"dlq_replays.{letter.headers['Nats-Msg-Id'][3:]}"
    record = json.loads((await client.get_last("DLQ_REPLAYS", subject)).payload)
    assert ("dropped", "test data", letter.sequence) == (
        record["state"],
        record["reason"],
        record["letter_sequence"],
    )


async def test_letters_are_injected_for_tests_only(nats: NatsServer, client: Client, tool: Tool) -> None:
    stream = await make_stream(client, unique("F"))
    what = ("inject", f"{stream}.x", "hello")
    assert "refused" == (await tool(*what, code=2))["code"]
    assert "prod" in (await tool(*what, "--testing", "--env", "prod", code=2))["message"]
    id_ = (await tool(*what, "--testing"))["letter"]
    (letter,) = await letters_of(nats.url, stream)
    assert (id_, "1", b"hello") == (letter.headers["Nats-Msg-Id"], letter.headers[names.INJECTED], letter.data)
    assert 1 == (await tool("replay", id_))["replayed"]
    (copy,) = await copies_of(nats.url, stream)
    assert b"hello" == copy.data


async def test_what_somebody_else_wrote_to_dlq_is_shown_and_not_replayed(
    nats: NatsServer, client: Client, tool: Tool
) -> None:
    subject = f"dlq.{unique('stranger')}"
    ack = await client.publisher.publish(Outgoing(subject, b"\xff\x00", headers={names.SEQUENCE: "x" * 50}))
    shown = await tool("show", str(ack.sequence))
    assert ("unknown", "\\xff\x00") == (shown["cause"], shown["body"])
    report = await tool("replay", str(ack.sequence), code=1)
    assert "no story" in report["problems"][0]["reason"]
    assert {"dropped": 1} == await tool("drop", str(ack.sequence), "--reason", "a stranger's", "--yes")


async def test_losses_are_listed_and_acknowledged_in_the_same_place(client: Client, tool: Tool) -> None:
    """E18: a stream that went back begins a new incarnation with it."""
    stream = unique("L")
    loss = losses.Loss(stream, "2026-11-15T08:00:00Z", "w", losses.Cause.WENT_BACK, 8, 10, 1_000)
    await losses.record(client, loss)
    (listed,) = await tool("losses", code=1)
    assert (stream, "went_back", 8, 10) == tuple(listed[name] for name in ("stream", "cause", "first", "last"))
    assert "open" in await tool.text("losses")
    (told,) = await tool("losses", "--acknowledge", stream)
    assert (1, True) == (told["incarnation"], told["acknowledged_ms"] > 0)
    assert "not_found" == (await tool("losses", "--acknowledge", stream, code=2))["code"]


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("replay",), "which letters"),
        (("drop", "--reason", "x", "--yes"), "which letters"),
        (("ls", "--since", "yesterday"), "not a time"),
        (("replay", "--all", "--store", "sqlite:///x.db"), "belong together"),
        (("replay", "--all", "--store", "sqlite:///x.db", "--agent", "biller"), "TENANT/WORKSPACE/AGENT"),
        (("replay", "1", "--body", "/no/such/file"), "cannot be read"),
        (("inject", "a..b", "x", "--testing"), "empty token"),
        (("inject", "no.stream.here", "x", "--testing"), "no stream captures"),
    ],
)
async def test_wrong_arguments_are_refused_with_what_is_wrong(tool: Tool, args: tuple[str, ...], told: str) -> None:
    assert told in (await tool(*args, code=2))["message"]


async def test_the_script_of_an_environment_replays(nats: NatsServer, client: Client, tmp_path: Path) -> None:
    stream = await dead(nats.url, client, 2)
    script = [str(ROOT / "scripts" / "replay-dlq.sh")]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    def call(*args: str, **environ: str) -> subprocess.CompletedProcess[str]:
        environ = clean_environ(PATH=path, **environ)
        return subprocess.run([*script, *args], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60)

    assert (2, 2, 2) == (call().returncode, call("staging").returncode, call("prod", "--all").returncode)
    (tmp_path / ".env.prod").write_text(f"NATS_URL={nats.url}\n")
    done = await asyncio.to_thread(call, "prod", "--stream", stream)
    assert (0, "2 of 2 letters replayed\n") == (done.returncode, done.stdout), done.stderr
    assert 2 == len(await copies_of(nats.url, stream))
