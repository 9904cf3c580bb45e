"""The declared topology on a real server, seen by nats-py, which knows nothing of us."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import nats
import pytest
from msgspec.structs import replace
from nats.js.api import AckPolicy, DeliverPolicy, DiscardPolicy, RetentionPolicy, StorageType

import oncewire
from oncewire._ground.errors import Conflict, NotFound, Refused
from oncewire._ground.settings import Settings
from oncewire._ground.topology import (
    Env,
    Plan,
    Topology,
    Trouble,
    apply,
    compare,
    ensure_consumers,
    init_streams,
    is_ready,
    load,
    readiness,
)
from oncewire._ground.topology import server as server_module
from tests.support.nats import NatsServer, nats_server

ROWS = json.loads((Path(__file__).parents[1] / "vectors" / "topology" / "platform-consumers.json").read_text())
DAY_S = 86_400
PLATFORM = {
    "BILLING": (["platform.billing.>"], 7),
    "PAYMENTS": (["platform.payments.>"], 30),
    "PROVISIONING": (["gpuaas.provisioning.>"], 7),
    "APPS": (["appplatform.>", "platform.artifact.>"], 7),
    "STORAGE": (["storage.>"], 7),
    "DLQ": (["dlq.>"], 30),
}


@pytest.fixture(scope="module")
def topology() -> Topology:
    return load((), Settings())


@pytest.fixture
async def client(server: NatsServer) -> AsyncIterator[oncewire.Client]:
    async with oncewire.connect(server.url) as open_client:
        yield open_client


@pytest.fixture
async def applied(server: NatsServer, client: oncewire.Client, topology: Topology) -> NatsServer:
    await apply(client, topology)
    return server


@pytest.fixture
async def witness(applied: NatsServer) -> AsyncIterator[Any]:
    connection = await nats.connect(applied.url)
    yield connection.jetstream()
    await connection.close()


async def test_after_apply_nothing_is_left_to_do_and_a_second_apply_does_nothing(
    client: oncewire.Client, topology: Topology
) -> None:
    """The server's own `did_create` says yes to both."""
    done: list[str] = []
    for _ in range(2):
        left = await apply(client, topology, on_step=lambda step: done.append(step.item))
        assert left == Plan(same=left.same)
        assert len(left.same) == len(topology.streams) + len(topology.consumers) == len(done) == 51
    assert (await compare(client, topology)).steps == ()


async def test_a_restart_of_the_server_is_no_drift(
    applied: NatsServer, client: oncewire.Client, topology: Topology
) -> None:
    applied.kill()
    applied.start()
    async with oncewire.connect(applied.url) as again:
        assert (await compare(again, topology)).steps == ()


@pytest.mark.parametrize("name", PLATFORM)
async def test_the_platform_streams_are_as_their_tables_say(witness: Any, name: str) -> None:
    config = (await witness.stream_info(name)).config
    subjects, days = PLATFORM[name]
    assert sorted(config.subjects) == sorted(subjects)
    assert (config.retention, config.storage) == (RetentionPolicy.LIMITS, StorageType.FILE)
    assert (config.max_age, config.max_bytes) == (days * DAY_S, 67_108_864)
    assert (config.discard, config.num_replicas) == (DiscardPolicy.OLD, 1)


async def test_all_23_platform_consumers_have_every_parameter_of_their_tables(witness: Any) -> None:
    assert len(ROWS) == 23
    for row in ROWS:
        config = (await witness.consumer_info(row["stream"], row["name"])).config
        assert config.durable_name == row["name"]
        assert config.filter_subject == row["filter"]
        assert (config.ack_wait, config.max_deliver) == (row["ack_wait_s"], row["max_deliver"])
        assert config.deliver_policy == DeliverPolicy.ALL
        assert config.ack_policy == AckPolicy.EXPLICIT
        assert config.deliver_subject is None


async def test_no_other_consumer_stands_on_a_platform_stream(witness: Any) -> None:
    for name in PLATFORM:
        found = {info.name for info in await witness.consumers_info(name)}
        assert found == {row["name"] for row in ROWS if row["stream"] == name}


def test_each_row_of_the_tables_is_declared_for_its_services(topology: Topology) -> None:
    declared = {(one.stream, one.name): one for one in topology.consumers}
    for row in ROWS:
        wanted = {part.strip().replace(" ", "-") for part in row["service"].split("/")}
        assert set(declared[row["stream"], row["name"]].services) == wanted


async def test_the_other_streams_are_as_decided(witness: Any) -> None:
    config = {
        name: (await witness.stream_info(name)).config
        for name in (
            "MESHFORGE_EVENTS",
            "MESHFORGE_COMMANDS",
            "LEDGER",
            "CHAT_EVENTS",
            "DLQ",
            "sr-events",
            "sr-queries",
        )
    }
    assert config["MESHFORGE_COMMANDS"].retention == RetentionPolicy.WORK_QUEUE
    assert config["LEDGER"].max_age == 30 * DAY_S
    assert config["CHAT_EVENTS"].max_msgs_per_subject == 10_000
    assert config["DLQ"].duplicate_window == config["DLQ"].max_age
    assert config["sr-events"].duplicate_window == 120
    assert config["sr-queries"].no_ack
    assert not config["sr-events"].no_ack


async def test_every_stream_of_record_allows_batches_fast_ingest_and_direct_reads(
    applied: NatsServer, client: oncewire.Client, topology: Topology
) -> None:
    for stream in topology.streams:
        if not stream.is_bucket:
            config = (await client.api(f"STREAM.INFO.{stream.name}"))["config"]
            assert all(config[f"allow_{key}"] for key in ("atomic", "batched", "direct"))


async def test_buckets_open_in_nats_py(witness: Any) -> None:
    for name in ("OW_LEDGERS", "OW_INCARNATIONS", "OW_LOSSES", "OW_ACKS", "OW_LEASES"):
        bucket = await witness.key_value(name)
        assert (await bucket.status()).history == 1
        revision = await bucket.create("a.b", b"1")
        await bucket.update("a.b", b"2", revision)
        assert (await bucket.get("a.b")).value == b"2"


async def test_a_query_is_answered_by_its_responder_and_not_by_the_stream(applied: NatsServer) -> None:
    connection = await nats.connect(applied.url)

    async def answer(message: Any) -> None:
        await message.respond(b"from the responder")

    await connection.subscribe("sr.queries.loop.get", cb=answer)
    for _ in range(20):
        reply = await connection.request("sr.queries.loop.get", b"?", timeout=5)
        assert reply.data == b"from the responder"
    await connection.close()


async def test_a_given_up_message_reaches_the_advisory_stream(applied: NatsServer, witness: Any) -> None:
    await witness.publish("platform.billing.usage.metered", b"{}")
    pull = await witness.pull_subscribe_bind("billing_worker_usage_metered", "BILLING")
    (message,) = await pull.fetch(1, timeout=5)
    await message.term()
    advisories = await witness.pull_subscribe_bind("dlq_service_advisories", "DLQ_ADVISORIES")
    (advisory,) = await advisories.fetch(1, timeout=5)
    assert json.loads(advisory.data)["consumer"] == "billing_worker_usage_metered"


APPLY = """
import asyncio, sys
import oncewire
from oncewire._ground.settings import Settings
from oncewire._ground.topology import apply, ensure_consumers, init_streams, load

async def main(url, way):
    topology = load((), Settings())
    async with oncewire.connect(url) as client:
        print("ready", flush=True)
        sys.stdin.readline()
        if way == "apply":
            assert (await apply(client, topology)).steps == ()
        else:
            assert await init_streams(client, topology=topology) == []
            assert await ensure_consumers(client, "billing-worker", topology=topology) == []

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("is_slow", [False, True], ids=["quick", "syncs-always"])
async def test_ten_processes_at_once_on_an_empty_server_all_succeed(topology: Topology, is_slow: bool) -> None:
    with nats_server(sync_always=is_slow) as server:
        command = [sys.executable, "-c", APPLY, server.url]
        ways = ["apply"] * 6 + ["service"] * 4
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        running = [subprocess.Popen([*command, way], text=True, **pipes) for way in ways]
        for process in running:
            assert process.stdout is not None
            assert await asyncio.to_thread(process.stdout.readline) == "ready\n"
        for process in running:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        ended = [await asyncio.to_thread(process.communicate, timeout=120) for process in running]
        assert [(process.returncode, err) for process, (_, err) in zip(running, ended, strict=True)] == [(0, "")] * 10
        async with oncewire.connect(server.url) as client:
            assert (await compare(client, topology)).steps == ()


async def test_many_at_once_in_one_process_succeed_too(client: oncewire.Client, topology: Topology) -> None:
    plans = await asyncio.gather(*(apply(client, topology) for _ in range(8)))
    assert all(left.steps == () for left in plans)


async def test_a_service_makes_its_own_part_and_no_more(client: oncewire.Client, topology: Topology) -> None:
    assert await ensure_consumers(client, "billing-worker", topology=topology) == []
    left = await compare(client, topology)
    made = set(left.same)
    assert {item for item in made if item.startswith("consumer:")} == {
        f"consumer:{row['stream']}/{row['name']}" for row in ROWS if row["service"] == "billing-worker"
    }
    assert {"stream:BILLING", "stream:PAYMENTS", "stream:PROVISIONING"} == {
        item for item in made if item.startswith("stream:")
    }


async def test_consumers_of_two_services_are_made_by_either(client: oncewire.Client, topology: Topology) -> None:
    await ensure_consumers(client, "storage-worker", topology=topology)
    part = topology.for_service("provisioning-worker")
    assert {one.name for one in part.consumers} >= {"storage_worker_attachment_requested"}
    left = await compare(client, topology, service="provisioning-worker")
    assert "consumer:STORAGE/storage_worker_attachment_requested" in left.same


async def test_a_service_that_nobody_declared_is_refused(client: oncewire.Client, topology: Topology) -> None:
    with pytest.raises(NotFound, match="no service is called 'nobody'"):
        await ensure_consumers(client, "nobody", topology=topology)


async def test_init_streams_makes_all_streams_and_no_consumer(client: oncewire.Client, topology: Topology) -> None:
    assert await init_streams(client) == []
    left = await compare(client, topology)
    assert {item.partition(":")[0] for item in left.same} == {"stream"}
    assert len(left.same) == len(topology.streams)


async def test_a_service_starts_on_drift_with_a_warning_and_changes_nothing(
    applied: NatsServer, client: oncewire.Client, topology: Topology, caplog: pytest.LogCaptureFixture
) -> None:
    config = (await client.api("STREAM.INFO.BILLING"))["config"]
    await client.api("STREAM.UPDATE.BILLING", {**config, "max_age": 3_600 * 10**9})
    (problem,) = await init_streams(client, topology=topology)
    assert (problem.item, problem.trouble) == ("stream:BILLING", Trouble.DRIFT)
    assert problem.text == "is not as declared: max_age is 1h, not 7d"
    assert is_ready([problem])
    assert "max_age is 1h, not 7d" in caplog.text
    assert (await client.api("STREAM.INFO.BILLING"))["config"]["max_age"] == 3_600 * 10**9


async def test_ready_means_that_everything_declared_is_there(client: oncewire.Client, topology: Topology) -> None:
    missing = await readiness(client, topology, "ops")
    assert [(one.item, one.trouble) for one in missing] == [
        ("stream:DLQ", Trouble.MISSING),
        ("consumer:DLQ/dlq_inspector", Trouble.MISSING),
    ]
    assert not is_ready(missing)
    await apply(client, topology, service="ops")
    assert await readiness(client, topology, "ops") == []


async def test_without_jetstream_nothing_is_ready(topology: Topology) -> None:
    with nats_server("accounts { X { users = [{user: x, password: x}] } }\nno_auth_user: x") as server:
        async with oncewire.connect(server.url) as client:
            (problem,) = await readiness(client, topology)
            assert problem.trouble is Trouble.JETSTREAM
            assert problem.remedy
            assert not is_ready([problem])


async def test_a_stream_that_is_nearly_full_is_a_warning(client: oncewire.Client, topology: Topology) -> None:
    small = replace(
        topology,
        streams=tuple(replace(one, max_bytes=10_000) for one in topology.streams if one.name == "BILLING"),
        consumers=(),
    )
    await apply(client, small)
    await client.publish("platform.billing.x", b"x" * 7_500, raw=True)
    assert await readiness(client, small) == []
    await client.publish("platform.billing.x", b"x" * 1_000, raw=True)
    (problem,) = await readiness(client, small)
    assert (problem.trouble, is_ready([problem])) == (Trouble.FILLING, True)
    assert "8" in problem.text


async def test_three_copies_on_one_server_are_refused_with_a_hint(client: oncewire.Client) -> None:
    with pytest.raises(Refused, match="replicas > 1 not supported") as caught:
        await apply(client, load((), Settings(), Env.PROD))
    assert "--env dev" in caught.value.hint


async def test_a_service_that_finds_its_subjects_taken_is_told(client: oncewire.Client, topology: Topology) -> None:
    await client.api("STREAM.CREATE.OTHER", {"name": "OTHER", "subjects": ["cmd.x"]})
    with pytest.raises(Conflict, match="subjects overlap"):
        await init_streams(client, topology=topology)
    left = await apply(client, topology)
    assert [step.item for step in left.steps] == ["stream:MESHFORGE_COMMANDS"]
    assert "OTHER captures cmd.x" in left.steps[0].cost


async def test_mirrors_and_sources_are_as_declared_too(client: oncewire.Client) -> None:
    topology = _declared("""
        [streams.COPY]
        mirror = "BILLING"
        [streams.JOINED]
        sources = ["BILLING", "PAYMENTS"]
        [buckets.sessions]
        max_age = "1m"
        history = 3
    """)
    assert (await apply(client, topology)).steps == ()
    assert (await apply(client, topology)).steps == ()


async def test_more_streams_and_consumers_than_one_page_are_all_seen(client: oncewire.Client) -> None:
    own = "[streams.MANY]\nsubjects = ['many.>']\n[services.w]\n"
    own += "".join(
        f"[consumers.MANY.c{at}]\nfilters = ['many.{at}']\nservices = ['w']\ndlq_subject = 'dlq.many.{at}'\n"
        for at in range(300)
    )
    topology = _declared(own)
    assert (await apply(client, topology, service="w")).steps == ()
    assert len((await compare(client, topology, service="w")).same) == 301


def _declared(text: str) -> Topology:
    from oncewire._ground.topology.declared import shipped
    from oncewire._ground.topology.files import Source, declare

    topology, findings = declare(shipped(), [Source("own.toml", text)], Settings())
    assert findings == ()
    return topology.for_env(Env.DEV)


async def test_a_question_that_nobody_answers_is_asked_again(
    tmp_path: Path, topology: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a cluster that elects: what reaches it meanwhile is lost, and what comes afterwards is answered."""
    monkeypatch.setattr(server_module, "STEP_TIMEOUT_S", 0.3)
    answers = {"$JS.API.INFO": {"api": {"level": 3}}, "$JS.API.STREAM.LIST": {"streams": [], "total": 0}}
    asked: list[str] = []

    async def answer_the_second(message: Any) -> None:
        asked.append(message.subject)
        if asked.count(message.subject) == 2:
            await message.respond(json.dumps(answers[message.subject]).encode())

    server = NatsServer(tmp_path)
    server.jetstream = False
    server.start()
    try:
        leader = await nats.connect(server.url)
        await leader.subscribe("$JS.API.>", cb=answer_the_second)
        await leader.flush()
        async with oncewire.connect(server.url) as client:
            found = await server_module.look(client, topology)
        await leader.close()
    finally:
        server.stop()
    assert 3 == found.api_level
    assert asked == [subject for subject in answers for _ in range(2)]
