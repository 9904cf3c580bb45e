"""The console's data and acts over HTTP, against a real server: rights, hostile data, garbage, and what it costs."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from oncewire._ground.contracts import letters as names
from oncewire._ground.errors import AuthenticationFailed
from oncewire._ground.http import OPEN
from oncewire._ground.jetstream import Outgoing, losses
from oncewire._ground.jetstream.losses import Cause, Loss
from oncewire._ground.settings import resolve
from oncewire._ground.trust.keys import KeyFile
from oncewire.broker.client import BrokerClient
from oncewire.cli import broker, observe
from oncewire.cli import console as cli_console
from oncewire.console.routes import ConsoleRoutes
from oncewire.pipeline.lake.hold import write_state
from tests.support.console import SUBJECT, Events, Served, kill_off, make_lake, served
from tests.support.nats import NatsServer
from tests.support.tls import Authority
from tests.support.wait import until

VIEWS = ["/", "/streams", "/streams/DLQ", "/topics", "/topics/a%2Fb", "/letters", "/letters/1", "/runs", "/pipeline"]
READING = ["/api/live", "/api/streams/DLQ", "/api/topics/t", "/api/letters", "/api/letters/1", "/api/runs"]
READING += ["/api/runs/r", "/report"]
ACTING = ["/api/letters/replay", "/api/letters/drop", "/api/losses/acknowledge"]


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def open_console(shared_server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    async with served(shared_server, tmp_path_factory.mktemp("console")) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def console(open_console: Served) -> AsyncIterator[Served]:
    """The one of all tests that need no settings of their own; without letters."""
    await open_console.client.api("STREAM.PURGE.DLQ", {})
    yield open_console


# ---- the page


async def test_every_view_is_an_address(console: Served) -> None:
    for path in VIEWS:
        answer = await console.ask("GET", path)
        assert (200, "text/html; charset=utf-8") == (answer.status, answer.headers["content-type"]), path
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        told = (answer.headers["x-content-type-options"], answer.headers["referrer-policy"])
        assert ("nosniff", "no-referrer") == told


async def test_what_is_no_view_says_so_in_its_status(console: Served) -> None:
    assert 404 == (await console.ask("GET", "/nonsense")).status
    assert 404 == (await console.ask("GET", "/streams/a/b")).status
    assert b'{"error"' in (await console.ask("GET", "/api/nothing")).body
    assert b'{"error"' in (await console.ask("GET", "/assets/../../secret")).body
    assert "text/javascript; charset=utf-8" == (await console.ask("GET", "/assets/app.js")).headers["content-type"]


async def test_another_host_is_refused(console: Served) -> None:
    """A page that rebinds its name to this machine gets nothing."""
    assert 403 == (await console.ask("GET", "/api/session", headers={"Host": "evil.example:80"})).status


# ---- what is shown


async def test_a_watcher_sees_streams_and_what_differs_from_the_declaration(console: Served) -> None:
    config = (await console.client.api("STREAM.INFO.STORAGE"))["config"]
    await console.client.api("STREAM.UPDATE.STORAGE", config | {"max_age": 3_600 * 10**9})
    try:
        async with console.watching() as events:
            rows = {row["name"]: row for row in await events.next("streams")}
            assert "max_age is 1h" in rows["STORAGE"]["drift"]
            assert "" == rows["DLQ"]["drift"]
            assert {"dlq_inspector"} == {one["name"] for one in rows["DLQ"]["consumers"]}
            overview = await events.next("overview")
            assert "STORAGE is not as declared" in [one["title"] for one in overview["notices"]]
        told = await console.get("/api/streams/STORAGE")
        assert [["max_age"]] == [[change["key"] for change in step["changes"]] for step in told["steps"]]
        assert "oncewire topology apply" == told["steps"][0]["command"]
    finally:
        await console.client.api("STREAM.UPDATE.STORAGE", config)


async def test_what_is_published_is_seen_at_once_by_all_from_one_look(console: Served) -> None:
    async with console.watching() as one, console.watching() as other:
        await one.next("point")
        for number in range(20):
            await console.client.publish(SUBJECT, {"type": "Seen", "payload": {"n": number}}, msg_id=f"seen-{number}")
        seen = await one.until("point", lambda point: point["published"] > 0)
        same = await other.until("point", lambda point: point["published"] > 0)
        assert seen == same
        assert seen["streams"]["MESHFORGE_EVENTS"] > 0


async def test_nobody_watching_costs_nothing(console: Served, shared_server: NatsServer, tmp_path: Path) -> None:
    """Another console, which is watched, looks several times; this one does not."""
    async with console.watching() as events:
        await events.next("streams")
    await until(lambda: not console.watch.is_watched, "the watcher to be gone")
    looks = console.watch.looks
    async with served(shared_server, tmp_path) as busy, busy.watching() as events:
        for _ in range(3):
            await events.next("point")
        assert busy.watch.looks >= 3
    assert looks == console.watch.looks


async def test_topics_come_from_the_broker_with_owners_and_lag(shared_server: NatsServer, tmp_path: Path) -> None:
    flags = {"broker_listen": "127.0.0.1:0", "broker_engine": "jetstream", "nats_url": shared_server.url}
    async with broker.serving(resolve(flags, {}, {}).settings) as (front, _):
        url = f"http://127.0.0.1:{front.port}"
        async with BrokerClient(url) as client, served(shared_server, tmp_path, url) as console:
            await client.create_topic("jobs/<b>", partitions=2)
            for _ in range(3):
                await client.produce("jobs/<b>", "x")
            assert 1 == len(await client.take("jobs/<b>", "workers", wait_s=5.0))
            async with console.watching() as events:
                told = await events.until("topics", lambda told: told["count"])
            (row,) = told["topics"]
            assert (3, [3], [1]) == (
                row["messages"], [one["lag"] for one in row["groups"]], [one["in_flight"] for one in row["groups"]],
            )  # fmt: skip
            assert {True} == {bool(one["owner"]) for one in row["partitions"]}
            assert row["partitions"] == (await console.get("/api/topics/jobs%2F%3Cb%3E"))["partitions"]
            await console.get("/api/topics/none", 404)


async def test_a_broker_that_is_away_is_said_with_what_to_do(shared_server: NatsServer, tmp_path: Path) -> None:
    async with served(shared_server, tmp_path, "http://127.0.0.1:9") as console, console.watching() as events:
        tick = await events.until("tick", lambda tick: tick["backends"]["broker"]["state"] == "broken")
        assert "oncewire broker run" in tick["backends"]["broker"]["hint"]
        await events.until("tick", lambda tick: tick["backends"]["nats"]["state"] == "ok")


async def test_a_broker_behind_tls_is_looked_at_where_its_certificate_is_trusted(
    shared_server: NatsServer, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.issue("broker")
    flags = {"broker_listen": "127.0.0.1:0", "broker_engine": "jetstream", "nats_url": shared_server.url}
    flags |= {"http_tls_cert": str(cert), "http_tls_key": str(key)}
    async with broker.serving(resolve(flags, {}, {}).settings) as (front, _):
        named = {"console_broker_url": f"https://127.0.0.1:{front.port}"}
        url = named["console_broker_url"]
        trusted = named | {"console_broker_ca": str(authority.path)}
        async with served(shared_server, tmp_path, url, **trusted) as console, console.watching() as events:
            assert url == (await events.next("topics"))["url"]
        async with served(shared_server, tmp_path, url, **named) as console, console.watching() as events:
            tick = await events.until("tick", lambda tick: tick["backends"]["broker"]["state"] == "broken")
            assert "certificate" in tick["backends"]["broker"]["text"]
            assert "console.broker_ca" in tick["backends"]["broker"]["hint"]


async def test_how_long_things_took_comes_from_what_the_parts_have_counted(
    shared_server: NatsServer, tmp_path: Path
) -> None:
    flags = {"broker_listen": "127.0.0.1:0", "broker_engine": "jetstream", "nats_url": shared_server.url}
    settings = resolve(flags, {}, {}).settings
    async with broker.serving(settings) as (front, routes):
        url, observer = f"http://127.0.0.1:{front.port}", observe.Observer(settings)
        observer.watch(broker.watched(routes))
        async with BrokerClient(url) as client, served(shared_server, tmp_path, url, observer.histograms) as console:
            await client.create_topic("timed")
            await client.produce("timed", "before anybody looked")
            async with console.watching() as events:
                (quiet,) = await events.next("latency")
                assert ("produce to its answer", 0, None) == (quiet["name"], quiet["count"], quiet["p95_ms"])
                await client.produce("timed", "x")
                await client.produce("timed", "y")
                (told,) = await events.until("latency", lambda told: told[0]["count"] == 2)
                assert 0 < told["p50_ms"] <= told["p95_ms"] <= told["p99_ms"]
                point = await events.until("point", lambda point: point["latency_ms"])
                assert told["p95_ms"] == point["latency_ms"]


async def test_the_broker_of_the_same_settings_is_known_by_its_certificate(tmp_path: Path) -> None:
    """Whatever name stands in it; and no other certificate of the same authority is taken for it."""
    authority = Authority(tmp_path)
    (cert, key), other = authority.issue("mine", "10.0.0.1"), authority.issue("other")
    known = resolve({"http_tls_cert": str(cert), "http_tls_key": str(key)}, {}, {}).settings
    for shown in ((cert, key), other):
        flags = {"broker_listen": "127.0.0.1:0", "http_tls_cert": str(shown[0]), "http_tls_key": str(shown[1])}
        async with broker.serving(resolve(flags, {}, {}).settings) as (front, _):
            url = f"https://127.0.0.1:{front.port}"
            async with BrokerClient(url, tls=lambda: cli_console.trust_of(known)) as client:
                if shown == (cert, key):
                    assert [] == await client.topics()
                else:
                    with pytest.raises(AuthenticationFailed, match="not trusted"):
                        await client.topics()


async def test_a_loss_is_acknowledged_as_it_was_seen(console: Served) -> None:
    """What is found after somebody looked stays open, and every page sees what was decided."""
    first = Loss("SEEN", "2026-11-01T00:00:00Z", "reader", Cause.TRIMMED, 1, 4, found_ms=1_000)
    await losses.record(console.client, first)

    def states(told: dict[str, Any]) -> list[bool]:
        return [one["is_open"] for one in told["losses"] if one["stream"] == "SEEN"]

    async with console.watching() as events:
        await events.until("overview", lambda told: states(told) == [True])
        await losses.record(console.client, msgspec.structs.replace(first, first=9, last=9, found_ms=2_000))
        seen = {"stream": "SEEN", "until_ms": 1_000}
        assert {"stream": "SEEN", "acknowledged": 1} == await console.post("/api/losses/acknowledge", seen)
        told = await events.until("overview", lambda told: states(told) == [True, False])
        assert ["SEEN lost messages"] == [one["title"] for one in told["notices"] if "SEEN" in one["title"]]
        await console.post("/api/losses/acknowledge", seen, 404)
        await console.post("/api/losses/acknowledge", seen | {"until_ms": 2_000})
        await events.until("overview", lambda told: states(told) == [False, False])


async def test_runs_are_found_in_the_newest_messages(console: Served) -> None:
    for id_, cause in (("r1-a", None), ("r1-b", "r1-a"), ("r1-c", "r1-b")):
        body = {"type": f"Step{id_[-1]}", "id": id_, "correlation_id": "r1-a", "causation_id": cause, "payload": {}}
        await console.client.publish(SUBJECT, {name: one for name, one in body.items() if one is not None}, msg_id=id_)
    told = await console.get("/api/runs")
    (run,) = [one for one in told["runs"] if one["run"] == "r1-a"]
    assert ("live", 3, 2) == (told["source"], run["steps"], run["depth"])
    steps = (await console.get("/api/runs/r1-a?tenant=default"))["steps"]
    assert [("r1-a", 0, ""), ("r1-b", 1, "r1-a"), ("r1-c", 2, "r1-b")] == [
        (one["step"], one["depth"], one["parent"]) for one in steps
    ]
    await console.get("/api/runs/none", 404)


async def test_where_there_is_a_lake_runs_and_verdict_come_from_it(shared_server: NatsServer, tmp_path: Path) -> None:
    make_lake(tmp_path / "lake", is_good=False)
    write_state(tmp_path / "lake", {"topics": {"stopped": {"OWB+jobs": "it went back"}}})
    async with served(shared_server, tmp_path) as console:
        async with console.watching() as events:
            told = await events.until("pipeline", lambda told: told is not None)
            assert {"OWB+jobs": "it went back"} == told["topics"]["stopped"]
            wanted = "the pipeline stopped reading topic OWB+jobs"
            await events.until("overview", lambda seen: wanted in [one["title"] for one in seen["notices"]])
        assert (False, 2) == (told["verdict"]["is_good"], told["verdict"]["errors"])
        assert {"bronze": 0, "gold/runs": 1, "gold/steps": 8} == {
            one["name"]: one["rows"] for one in told["tables"] if one["name"] in ("bronze", "gold/runs", "gold/steps")
        }
        assert ["01JCORDER"] == [one["run"] for one in (await console.get("/api/runs"))["runs"]]
        assert 8 == len((await console.get("/api/runs/01JCORDER?tenant=acme"))["steps"])
        report = await console.ask("GET", "/report")
        assert (200, "sandbox" in report.headers["content-security-policy"]) == (report.status, True)


# ---- dead letters


async def ended(events: Events, begun: dict[str, Any]) -> dict[str, Any]:
    """A job at its end."""

    def found(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [one for one in jobs if one["id"] == begun["id"] and one["state"] != "running"]

    (job,) = found(await events.until("jobs", found))
    return job


HOSTILE = {
    "script": b'{"note": "<script>document.title = 1</script><img src=x onerror=alert(1)>"}',
    "controls": b"a\x00\x1b[2Jb\r\n",
    "direction": '{"file": "\u202egnp.exe"}'.encode(),
    "bytes": b"\xff\xfe\x00\x01" * 100,
    "large": b'{"x": "' + b"y" * 1_000_000 + b'"}',
    "deep": b"[" * 20_000,
}


async def test_hostile_letters_are_listed_and_shown_within_bounds(console: Served) -> None:
    for name, body in HOSTILE.items():
        await kill_off(console.client, body, f"{name}: </script><b>{'z' * 2_000}")
    broken = {"Nats-Msg-Id": "foreign", names.CAUSE: "\udcff\udcfe", names.SEQUENCE: "９" * 30}
    await console.client.publisher.publish(Outgoing("dlq.foreign", b"{", "foreign", broken))
    page = await console.ask("GET", "/api/letters?limit=200")
    assert 7 == len(page.json["letters"])
    assert len(page.body) < 100_000
    for row in page.json["letters"]:
        answer = await console.ask("GET", f"/api/letters/{row['sequence']}")
        assert 200 == answer.status
        assert len(answer.body) < 700_000
        assert answer.json["payload"]["kind"] in ("json", "text", "hex")
    async with console.watching() as events:
        told = await events.next("letters")
    assert (7, 7) == (told["total"], len(told["groups"])), "what was asked for before changes nothing here"


async def test_letters_are_replayed_by_cause_and_those_after_the_question_stay(console: Served) -> None:
    for number in range(5):
        await kill_off(console.client, json.dumps({"type": "A", "payload": {"n": number}}).encode(), "TimeoutError: x")
    await kill_off(console.client, b'{"type": "A", "payload": {}}', "other: y")
    rows = (await console.get("/api/letters?cause=TimeoutError"))["letters"]
    wanted = {"cause": "TimeoutError", "until_ms": rows[0]["at_ms"] + 1}
    tried = await console.post("/api/letters/replay", wanted | {"is_dry_run": True})
    assert "5 of 5 letters would be replayed" == tried["text"]
    async with console.watching() as events:
        job = await ended(events, await console.post("/api/letters/replay", wanted))
        assert ("done", 5, "5 of 5 letters replayed") == (job["state"], job["done"], job["text"])
        told = await events.until("letters", lambda told: told["total"] == 1)
    assert ["other"] == [one["cause"] for one in told["groups"]]


async def test_an_edited_body_that_is_another_input_is_refused_and_said(console: Served) -> None:
    await kill_off(console.client, b'{"type": "A", "id": "one", "payload": {}}', "broken: z")
    (row,) = (await console.get("/api/letters"))["letters"]
    other = '{"type": "A", "id": "one", "payload": {}, "idempotency_key": "two"}'
    wanted = {"ids": [str(row["sequence"])], "body": other}
    async with console.watching() as events:
        job = await ended(events, await console.post("/api/letters/replay", wanted))
        assert ("failed", True) == (job["state"], "another input" in job["text"])
        same = wanted | {"body": '{"type": "A", "id": "one", "payload": {"n": 1}}'}
        job = await ended(events, await console.post("/api/letters/replay", same))
        assert "done" == job["state"]
        await console.post("/api/letters/drop", {"ids": wanted["ids"], "reason": "edited"})
        await events.until("letters", lambda told: told["total"] == 0)
    await console.get(f"/api/letters/{row['sequence']}", 404)


# ---- garbage


@pytest.mark.parametrize(
    "path",
    ["/api/letters/0", "/api/letters/99999999999999999999", "/api/letters/%00", "/api/letters/dl.none", "/api/runs/%FF",
     "/api/streams/%3Cscript%3E", "/api/letters?before=x", "/api/letters?limit=-1", "/api/topics/x"],
)  # fmt: skip
async def test_what_means_nothing_is_refused_in_the_one_shape(console: Served, path: str) -> None:
    answer = await console.ask("GET", path)
    assert answer.status in (400, 404), answer.body
    assert {"error", "message"} <= answer.json.keys()


@pytest.mark.parametrize("path", ACTING)
@pytest.mark.parametrize(
    ("body", "headers"),
    [
        ({}, {}),
        ({"ids": "all"}, {}),
        ({"cause": "x", "unknown": 1}, {}),
        (b"{", {}),
        (b"\xff", {}),
        ({"cause": "x"}, {"Content-Type": "text/plain"}),
        ({"cause": "x"}, {"Origin": "https://evil.example"}),
        ({"cause": "x"}, {"Sec-Fetch-Site": "cross-site"}),
    ],
)
async def test_acts_come_whole_and_from_the_own_page(
    console: Served, path: str, body: Any, headers: dict[str, str]
) -> None:
    before = console.watch.jobs.section()
    assert (await console.ask("POST", path, body, headers)).status in (400, 403)
    assert before == console.watch.jobs.section()


# ---- rights


async def test_with_credentials_every_route_asks_for_its_right(shared_server: NatsServer, tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys.json")
    reader, replayer = (keys.create("k", "ops", grants, 1)[1] for grants in (("read",), ("read", "replay")))
    stranger = keys.create("k", "acme", ("*",), 1)[1]
    more = {"auth_keys": str(keys.path), "console_tenant": "ops"}
    async with served(shared_server, tmp_path, **more) as console:
        assert (await console.get("/api/session"))["needs_login"]
        routes = ConsoleRoutes(console.client, console.watch, None).routes()
        driven = {("GET" if path in READING else "POST", path) for path in (*READING, *ACTING)}
        rules = {one for one, action in routes.rules.items() if action != OPEN and one[0] != "HEAD"}
        assert len(rules) == len(driven), "a new route is driven too"
        for method, path in driven:
            methods, _ = routes.find(path.encode())
            assert methods is not None
            assert methods[method.encode()] in routes.guarded, path
        for path in READING:
            assert 401 == (await console.ask("GET", path)).status, path
            assert 403 == (await console.ask("GET", path, headers={"X-Api-Key": stranger})).status, path
        for path in ACTING:
            is_loss = "losses" in path
            wanted = {"stream": "NONE", "until_ms": 1} if is_loss else {"cause": "nothing", "is_dry_run": True}
            assert 401 == (await console.ask("POST", path, wanted)).status, path
            for key in (reader, stranger):
                assert 403 == (await console.ask("POST", path, wanted, {"X-Api-Key": key})).status, path
            allowed = await console.ask("POST", path, wanted, {"X-Api-Key": replayer})
            assert (404 if is_loss else 200) == allowed.status, "nothing is lost, so there is nothing to acknowledge"
        for path in VIEWS:
            assert 200 == (await console.ask("GET", path)).status, "the page itself holds nothing"


async def test_a_login_is_a_cookie_that_ends_with_its_key(shared_server: NatsServer, tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys.json")
    key, text = keys.create("me", "ops", ("read",), 1)
    more = {"auth_keys": str(keys.path), "console_tenant": "ops"}
    async with served(shared_server, tmp_path, **more) as console:
        await console.post("/api/login", {"key": "ow_000000000000_" + "x" * 43}, 401)
        await console.post("/api/login", {"key": text}, 403, Origin="https://evil.example")
        made = await console.ask("POST", "/api/login", {"key": text})
        line = made.headers["set-cookie"]
        assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(line.split("; "))
        cookie = line.partition(";")[0]
        assert text not in line
        assert not (await console.get("/api/session", Cookie=cookie))["needs_login"]
        async with console.watching(Cookie=cookie) as events:
            await events.next("streams")
            keys.revoke(key.id, 2)
            assert await events.is_over()
        assert (await console.get("/api/session", Cookie=cookie))["needs_login"]


async def test_logging_out_ends_the_session(shared_server: NatsServer, tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys.json")
    _, text = keys.create("me", "ops", ("read",), 1)
    async with served(shared_server, tmp_path, auth_keys=str(keys.path), console_tenant="ops") as console:
        cookie = (await console.ask("POST", "/api/login", {"key": text})).headers["set-cookie"].partition(";")[0]
        await console.get("/api/letters", Cookie=cookie)
        await console.post("/api/logout", {}, Cookie=cookie)
        await console.get("/api/letters", 401, Cookie=cookie)


async def test_without_a_tenant_for_it_the_console_opens_to_nobody(shared_server: NatsServer, tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys.json")
    _, text = keys.create("me", "acme", ("*",), 1)
    async with served(shared_server, tmp_path, auth_keys=str(keys.path)) as console:
        refused = await console.post("/api/login", {"key": text}, 403)
        assert "console.tenant" in refused["message"]
