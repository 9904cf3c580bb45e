"""The exported permissions on a real nats-server: each service does its own work, and is denied what is not its own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import stat
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import nats
import pytest

from oncewire import outbox
from oncewire._ground import topology, users
from oncewire._ground.contracts import subjects
from oncewire._ground.contracts.broker import BrokerEnvelope, ProduceBody, RetryPolicy
from oncewire._ground.contracts.message import MessageEnvelope, new_message
from oncewire._ground.errors import NoResponders, NotFound, OncewireError, PermissionDenied
from oncewire._ground.jetstream import Client, Outgoing, Start
from oncewire._ground.jetstream.protocol import Message
from oncewire._ground.settings import Settings
from oncewire._ground.topology.model import BUCKET_PREFIX, EVERY, Service, Stream
from oncewire.agent import Agent, Context, Effect, Terminate
from oncewire.broker.engine import Consume, Limits, Settle
from oncewire.broker.jetstream.engine import JetStreamEngine, open_jetstream
from oncewire.dlq.letters import Filter
from oncewire.dlq.replay import Replay, ReplayOptions
from oncewire.pipeline import stream as spark_stream
from oncewire.pipeline import wire as spark_wire
from oncewire.pipeline.options import Access
from tests.support.access import Guarded, export, guarded
from tests.support.broker import Reader
from tests.support.brokerfences import asked
from tests.support.dlq import QUICK, service
from tests.support.gateway import guest, new_conversation, node, publish
from tests.support.outbox import ENQUEUE, drained, postgres
from tests.support.postgres import shared_postgres
from tests.support.running import counted, new_agent, run, send, sqlite_in
from tests.support.streams import unique
from tests.support.wait import until, until_async, within

SERVICES = [*sorted(one.name for one in topology.load(settings=Settings()).services), "biller", "teller"]
JS = "$JS.API."
AGENTS_BUCKETS = ("KV_OW_LEDGERS", "KV_OW_LOSSES", "KV_OW_INCARNATIONS")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with guarded(tmp_path_factory.mktemp("guarded")) as found:
        yield found


def declared(place: Guarded, name: str) -> Service:
    return next(one for one in place.declared.services if one.name == name)


def envelope(kind: str, payload: dict[str, Any], message_id: str) -> MessageEnvelope:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    return new_message(kind, payload, message_id=message_id, timestamp=now, actor_id="a", actor_kind="HUMAN")


def example(pattern: str) -> str:
    return pattern.replace("*", "x").replace(">", "x.y")


# ---- its own work


@pytest.mark.parametrize("name", SERVICES)
async def test_a_service_may_do_what_it_declares(place: Guarded, name: str) -> None:
    """Readiness, publishing, pulling and settling, reading, key-value: and nothing of it is denied."""
    told, before = declared(place, name), len(place.violations)
    async with place.connect(users.OPERATOR) as operator, place.connect(name) as client:
        assert [] == await topology.readiness(client, place.declared, name)
        for pattern in told.publishes:
            assert (await client.publisher.publish(Outgoing(example(pattern), b"{}"))).sequence
        await use_consumers(place, operator, client, name)
        for key in told.reads:
            await read(client, "BILLING" if key == EVERY else key)
        for bucket in told.buckets:
            assert await client.kv(bucket).put("a.b", b"1")
            entry = await client.kv(bucket).get("a.b")
            assert entry is not None
            assert await client.kv(bucket).entries()
    assert place.violations[before:] == []


async def use_consumers(place: Guarded, operator: Client, client: Client, name: str) -> None:
    for consumer in place.declared.consumers:
        if name in consumer.services and not consumer.stream.startswith("DLQ_ADV"):
            await operator.publisher.publish(Outgoing(example(consumer.filters[0]), b"{}"))
            async with client.pull(consumer.stream, consumer.name, batch=1, ahead=1) as pull:
                await pull.settle_confirmed(await within(pull.fetch(1)))


async def read(client: Client, stream: str) -> None:
    async with client.read(stream) as reader:
        found = await reader.fetch(timeout_s=0.1)
    for subject in {message.subject for message in found[:1]}:
        assert (await client.get_last(stream, subject)).subject == subject
    await client.get_batch(stream, count=1)


@pytest.mark.parametrize("user", ["biller", "agent"])
async def test_an_agent_runs_as_its_own_user_and_as_the_shared_one(place: Guarded, user: str, tmp_path: Path) -> None:
    """Durable, ledger, ownership, effects, a dead letter's request, a second start: nothing of it is denied."""
    agent = new_agent("biller", tenant="default", workspace="demo") if user == "biller" else new_agent()
    before = len(place.violations)

    @agent.on("charge")
    def charge(ctx: Context, order: dict[str, Any]) -> Effect:
        if order["n"] == 2:
            raise Terminate("no such account")
        return Effect("evt.default.demo.billing.charged", order)

    subject = f"cmd.{agent.tenant}.{agent.workspace}.{agent.name}.charge"
    async with place.connect(users.OPERATOR) as operator:
        for n in (1, 2, 3):
            await send(operator, subject, {"n": n})
        async with place.connect(user) as client, run(agent, client, sqlite_in(tmp_path)) as runner:
            await counted(runner, done=2, terminated=1)
        await send(operator, subject, {"n": 4})
        async with place.connect(user) as client, run(agent, client, sqlite_in(tmp_path)) as runner:
            await counted(runner, done=1)
        ledger = await operator.get_last("LEDGER", f"ledger.{agent.name}.*")
        assert ledger.sequence
    assert place.violations[before:] == []


async def test_a_durable_that_a_service_may_not_make_is_made_by_the_operator(place: Guarded, tmp_path: Path) -> None:
    stream, durable = "PROVISIONING", "notification_relay_provision_active"
    relay = Agent("notification-relay", consumers={stream: durable})
    relay.on("gpuaas.provisioning.active")(lambda ctx, payload: None)
    async with place.connect(users.OPERATOR) as operator, place.connect("notification-relay") as client:
        await operator.api(f"CONSUMER.DELETE.{stream}.{durable}")
        with pytest.raises(NotFound, match="this user may not create it") as refused:
            async with run(relay, client, sqlite_in(tmp_path)):
                pass
        assert "oncewire topology apply" in refused.value.hint
    await place.apply()


async def test_dead_letters_are_kept_and_brought_back(place: Guarded) -> None:
    """A worker gives up, the dead-letter service writes the letter, the tool replays it: each as its own user."""
    before = len(place.violations)
    stream, consumer, subject = "BILLING", "billing_worker_usage_metered", "platform.billing.usage.metered"
    body = envelope("UsageMetered", {"tenant_id": "acme"}, uuid.uuid4().hex)
    async with (
        place.connect(users.OPERATOR) as operator,
        place.connect("billing-worker") as worker,
        place.connect("dlq") as dlq,
        place.connect("replay-tooling") as tool,
        service(dlq, QUICK),
        worker.pull(stream, consumer) as pull,
    ):
        first = await operator.publish(subject, body)
        pull.term(await within(pull.fetch(1)), "no such meter")
        chosen = Filter(stream=stream, consumer=consumer)
        await until_async(lambda: letters(operator), "the letter")
        report = await Replay(tool, chosen, ReplayOptions()).run()
        assert (1, 1) == (report.matched, report.replayed)
        (again,) = await within(pull.fetch(1))
        pull.ack([again])
        assert first.sequence
        assert not await letters(operator)
    assert place.violations[before:] == []


async def letters(client: Client) -> int:
    found = await client.api("STREAM.INFO.DLQ", {"subjects_filter": "dlq.billing.>"})
    return len(found["state"].get("subjects") or {})


async def test_the_relay_publishes_as_its_own_user(place: Guarded) -> None:
    """Conversations and messages, with a look into the streams for what may be there already."""
    before = len(place.violations)
    url, conversation = await shared_postgres().new_database(), uuid.uuid4()
    async with postgres(url) as connection, connection.transaction():
        await connection.fetch(ENQUEUE, conversation, "hello")
        message = envelope("LoopCreated", {}, uuid.uuid4().hex)
        await outbox.enqueue_message_async(connection, "sr.events.loop", message)
    async with place.connect("relay") as client:
        async with outbox.relaying(client, url, outbox.RelayOptions()):
            await drained(url)
        last = await client.get_last("CHAT_EVENTS", subjects.chat_events(str(conversation)))
        assert b"hello" in last.payload
        async with client.read("sr-events", subjects=["sr.events.loop"], start=Start(), headers_only=True) as reader:
            assert await within(reader.fetch())
    assert place.violations[before:] == []


async def test_the_gateway_serves_as_its_own_user(place: Guarded) -> None:
    """A room with a replay, what comes live, acks that are kept, presence, a request to stop that nobody answers."""
    before, conversation = len(place.violations), new_conversation()
    async with (
        place.connect("relay") as relay,
        place.connect("gateway") as client,
        node(client) as (gateway, url),
        guest(url) as one,
    ):
        await publish(relay, conversation, 1, 3)
        await one.join(conversation, 1, clientId="c1")
        assert [2, 3] == await one.sequences(2)
        await publish(relay, conversation, 4, 4)
        assert [4] == await one.sequences(1)
        await one.say("ack", conversation, sequence=4)
        await until_async(lambda: has_entries(client, "OW_ACKS"), "the ack")
        await one.say("presence", conversation, state="typing")
        await until_async(lambda: is_stored(client, subjects.chat_presence(conversation)), "presence")
        with pytest.raises(NoResponders):
            await client.call(subjects.chat_stop(conversation), b"{}")
        assert gateway.node.stream == "CHAT_EVENTS"
    assert place.violations[before:] == []


async def test_broker_nodes_serve_as_their_own_user(place: Guarded) -> None:
    """Topics, keys, deliveries, a dead letter, a node that hands over, one that dies, deleting: nothing is denied."""
    before, topic = len(place.violations), unique("served")
    kept = BrokerEnvelope(idempotency_key="k", retry_policy=RetryPolicy(max_attempts=1))
    moved = BrokerEnvelope(idempotency_key="m", target_topic=topic)
    async with contextlib.AsyncExitStack() as stack:

        async def node() -> JetStreamEngine:
            client = await stack.enter_async_context(place.connect("broker"))
            engine = await open_jetstream(client, limits=Limits(tick_ms=10), owner_lease_ms=500)
            stack.push_async_callback(engine.stop)
            return engine

        first, second = await node(), await node()
        for name in (topic, f"{topic}-named"):
            await asked(first.create_topic, "", name, 2)
        for name, value, envelope in ((topic, "once", kept), (f"{topic}-named", "v", moved), (topic, "v", None)):
            answer = await asked(second.produce, "", ProduceBody(topic=name, value=value, envelope=envelope))
            assert not isinstance(answer, OncewireError), answer
        reader = Reader()
        await asked(first.subscribe, "", Consume(topic, "g", "a", 60_000, 1_000), reader)
        await until(lambda: len(reader.got) == 3)
        dead = next(one for one in reader.got if one.value == "once")
        nack = Settle("nack", topic, "g", dead.partition, dead.offset, "a")
        assert None is await asked(second.settle, "", nack)
        await first.stop()
        await second.node.client.close()  # it dies
        third, reader = await node(), Reader()
        await asked(third.subscribe, "", Consume(topic, "g", "b", 60_000, 1_000), reader)
        await until(lambda: len(reader.got) == 2)
        assert {"v"} == set(reader.values)
        assert f"dlq.{topic}" in await asked(third.list_topics, "")
        assert None is await asked(third.delete_topic, "", topic)
    assert place.violations[before:] == []


async def test_what_one_message_asked_of_a_node_is_answered_in_several(place: Guarded) -> None:
    """A refusal at once, a produce when it is stored: the server lets who may only answer do so once."""
    before, topic = len(place.violations), unique("several")
    async with place.connect("broker") as one, place.connect("broker") as two:
        engines = [await open_jetstream(client, owner_lease_ms=500) for client in (one, two)]
        try:
            await asked(engines[0].create_topic, "", topic, 4)
            for _ in range(2):  # the first time finds who owns each partition
                asking = []
                for engine, partition in itertools.product(engines, range(4)):
                    stale = Settle("ack", topic, "g", partition, 1_000_000, "a")
                    chosen = BrokerEnvelope(partition_override=partition)
                    body = ProduceBody(topic=topic, value="v", envelope=chosen)
                    asking += [asked(engine.settle, "", stale), asked(engine.produce, "", body)]
                answers = await asyncio.gather(*asking)
        finally:
            await asyncio.gather(*(engine.stop() for engine in engines))
    assert ["ContractViolation", "Produced"] * 8 == [type(one).__name__ for one in answers]
    assert place.violations[before:] == []


async def has_entries(client: Client, bucket: str) -> bool:
    return bool([one for one in await client.kv(bucket).entries() if one.key != "a.b"])


async def is_stored(client: Client, subject: str, stream: str = "CHAT_EVENTS") -> bool:
    try:
        return bool((await client.get_last(stream, subject)).sequence)
    except NotFound:
        return False


def test_spark_reads_as_its_own_user(place: Guarded) -> None:
    """The source's connection: facts, single messages, a reader's consumer from creation to removal."""
    before = len(place.violations)
    seed = users.key_path(place.keys, "pipeline").read_text().strip()
    access = Access((place.server.url,), nkey=seed, inbox_prefix=users.inbox_prefix("pipeline"))
    wire = spark_wire.connect(access, 5.0)
    try:
        assert "BILLING" == spark_stream.facts_of(wire, "BILLING").name
        name, _ = spark_stream.create_consumer(wire, "BILLING", 1, ())
        spark_stream.delete_consumer(wire, "BILLING", name)
        assert place.violations[before:] == []
        with pytest.raises(PermissionDenied, match=r"platform\.billing"):
            wire.request("platform.billing.x")
    finally:
        wire.close()


# ---- what is not its own


def foreign(place: Guarded, name: str) -> list[str]:
    """Subjects that this service has no business with."""
    told, found = declared(place, name), place.declared
    acts = ["$SYS.REQ.SERVER.PING", f"{JS}ACCOUNT.PURGE.$G", f"{JS}SERVER.REMOVE", "_INBOX.x"]
    acts += [] if told.lists else [f"{JS}STREAM.LIST"]
    acts += [f"{users.inbox_prefix(one)}.x" for one in (*SERVICES, users.OPERATOR) if one != name]
    own = [*told.publishes, *(f"$KV.{bucket}.>" for bucket in told.buckets), *agents_own(told)]
    for stream in found.streams:
        own += stream.subjects if forwards_to(told, stream) else ()
    for stream in found.streams:
        subjects_there = [example(subject) for subject in stream.subjects]
        acts += [one for one in subjects_there if not any(subjects.covers(pattern, one) for pattern in own)]
        acts += on_stream(told, stream)
    for consumer in found.consumers:
        acts += on_consumer(told, consumer.stream, consumer.name, name in consumer.services)
    for agent, queue in (("biller", "MESHFORGE_COMMANDS"), ("teller", "MESHFORGE_EVENTS")):
        if agent != name:
            acts += on_consumer(told, queue, f"default_demo_{agent}_consumer", is_own=False)
    return acts


def agents_own(told: Service) -> list[str]:
    agent = told.agent.rpartition("/")[2]
    return [f"ledger.{agent}.*", f"dlq_requests.{agent}", f"cmd.default.demo.{agent}.tick.*"] if agent else []


def forwards_to(told: Service, stream: Stream) -> bool:
    return told.forwards and not (stream.internal or stream.is_bucket or stream.no_ack)


def on_stream(told: Service, stream: Stream) -> list[str]:
    name = stream.name
    verbs = ("CREATE", "UPDATE", "DELETE", "SNAPSHOT", "RESTORE", "LEADER.STEPDOWN")
    acts = [f"STREAM.{verb}.{name}" for verb in verbs]
    acts += [f"STREAM.PURGE.{name}"] * (name not in told.purges)
    is_its_queue = told.name == "biller" and name == "MESHFORGE_COMMANDS"
    acts += [f"STREAM.MSG.DELETE.{name}"] * (name not in told.deletes and not is_its_queue)
    acts += [f"CONSUMER.CREATE.{name}", f"CONSUMER.DURABLE.CREATE.{name}.mine"]
    reader = f"{name}.{subjects.READER_PREFIX}1"
    if not is_read_by(told, stream):
        acts += [f"CONSUMER.DELETE.{reader}"]
        if name not in told.durables:
            acts += [f"CONSUMER.CREATE.{reader}", f"CONSUMER.MSG.NEXT.{reader}"]
            acts += [] if is_its_queue else [f"DIRECT.GET.{name}", f"STREAM.MSG.GET.{name}"]
    return [JS + act for act in acts]


def is_read_by(told: Service, stream: Stream) -> bool:
    """By its own word, or because it looks there for what it has published."""
    named = {*told.reads, *(BUCKET_PREFIX + one for one in told.buckets)}
    named |= {"LEDGER", "DLQ_REQUESTS", "MESHFORGE_EVENTS", *AGENTS_BUCKETS} if told.agent else set()
    return bool(named & {stream.name, EVERY}) or (forwards_to(told, stream) and stream.retention != "workqueue")


def on_consumer(told: Service, stream: str, consumer: str, is_own: bool) -> list[str]:
    place = f"{stream}.{consumer}"
    acts = [f"CONSUMER.CREATE.{place}", f"CONSUMER.CREATE.{place}.x", f"CONSUMER.DELETE.{place}"]
    acts += [f"CONSUMER.DURABLE.CREATE.{place}", f"CONSUMER.PAUSE.{place}", f"CONSUMER.LEADER.STEPDOWN.{place}"]
    acts += [f"CONSUMER.MSG.NEXT.{place}"] * (not is_own)
    settles = [f"$JS.ACK.{place}.1.1.1.1.0"] * (not is_own and not told.settles)
    return [JS + act for act in acts] + settles


@pytest.mark.parametrize("name", SERVICES)
async def test_a_service_is_denied_what_is_not_its_own(place: Guarded, name: str) -> None:
    """Each act is refused at once and by name, no matter whether anything would have come of it."""
    async with place.connect(name) as client:
        acts = foreign(place, name)
        assert len(acts) > 300
        outcomes = await asyncio.gather(*(refused(client, act) for act in acts))
        assert [] == [act for act, is_refused in zip(acts, outcomes, strict=True) if not is_refused]


async def refused(client: Client, subject: str) -> bool:
    try:
        await client.requests.call(subject, b"{}", timeout_s=10)
    except PermissionDenied as error:
        return f'"{subject}"' in error.message
    except OncewireError:
        return False
    return False


async def test_the_reply_subject_of_a_request_is_not_checked(place: Guarded) -> None:
    """The limit of all permissions here, and why docs/security.md calls them no protection against an attacker."""
    before, target = len(place.violations), "platform.payments.balance_credited"
    key, inbox = users.key_path(place.keys, "agent"), users.inbox_prefix("agent").encode()
    agent = await nats.connect(place.server.url, nkeys_seed=str(key), inbox_prefix=inbox)
    try:
        stored = await agent.jetstream().publish("evt.default.demo.forged", b'{"forged": true}')
        request = json.dumps({"seq": stored.seq}).encode()
        await agent.publish(f"{JS}DIRECT.GET.MESHFORGE_EVENTS", request, reply=target)
        async with place.connect(users.OPERATOR) as operator:
            await until_async(lambda: is_stored(operator, target, "PAYMENTS"), "the forged payment")
            assert b'{"forged": true}' == (await operator.get_last("PAYMENTS", target)).payload
    finally:
        await agent.close()
    assert place.violations[before:] == []


@pytest.mark.parametrize("name", SERVICES)
async def test_a_service_hears_nothing_but_its_own_answers(place: Guarded, name: str) -> None:
    wanted = [">", "*.>", "_INBOX.>", "evt.>", "$JS.API.>", "$JS.ACK.>", "$KV.>", "$SYS.>", "sr.queries.>"]
    wanted += [f"{users.inbox_prefix(one)}.>" for one in (*SERVICES, users.OPERATOR) if one != name]
    denied: list[str] = []
    async with place.connect(name) as client:
        for subject in wanted:
            client.subscribe(subject, lambda _: None, denied=lambda error: denied.append(error.message.split('"')[1]))
        await client.connection.flush()
        await client.api("INFO")
    assert wanted == denied


async def test_the_operator_hears_no_answers_to_others(place: Guarded) -> None:
    heard: list[str] = []

    def note(message: Message) -> None:
        heard.append(message.subject)

    async with place.connect(users.OPERATOR) as operator, place.connect("relay") as relay:
        operator.subscribe(">", note)
        await operator.connection.flush()
        await relay.publish("chat.events.x", b"{}", raw=True)
        await relay.api("INFO")
        await until_async(lambda: operator_heard(operator, heard), "what the relay published")
    assert not [one for one in heard if one.startswith("_INBOX_relay")]


async def operator_heard(operator: Client, heard: list[str]) -> bool:
    await operator.connection.flush()
    return "chat.events.x" in heard


async def test_a_service_may_answer_who_asks_it(place: Guarded) -> None:
    """And only who asked: the answer is the one thing that it may publish into another's inbox."""
    asked = envelope("Question", {}, "q")

    async def answer(request: Any) -> Any:
        return envelope("Answer", {"to": request.message_id}, "a")

    async with place.connect(users.OPERATOR) as operator, place.connect("teller") as teller:
        teller.respond("sr.queries.told", answer)
        await teller.connection.flush()
        assert {"to": "q"} == (await operator.request("sr.queries.told", asked)).payload


@pytest.mark.parametrize("way", ["publish", "many", "atomic", "all", "fast", "get", "batch", "read", "pull", "kv"])
async def test_every_way_to_use_the_client_says_that_it_is_denied(place: Guarded, way: str) -> None:
    """With the subject, at once, instead of a timeout."""
    async with place.connect("tokens") as client:
        with pytest.raises(PermissionDenied) as caught:
            await within(attempt(client, way), 20)
    assert '"' in caught.value.message
    assert caught.value.hint


async def attempt(client: Client, way: str) -> None:
    two = [Outgoing("storage.x", b"1", "1"), Outgoing("storage.y", b"2", "2")]
    if way == "publish":
        await client.publish("storage.x", b"1", raw=True)
    elif way in ("many", "all"):
        send_all = client.publish_many if way == "many" else client.publish_all
        outcomes = await send_all(two, raw=True)
        assert all(isinstance(one, PermissionDenied) for one in outcomes)
        raise outcomes[0]  # type: ignore[misc]
    elif way == "atomic":
        await client.publish_atomic(two, raw=True)
    elif way == "fast":
        await client.publish_fast(two, raw=True)
    elif way == "get":
        await client.get("BILLING", 1)
    elif way == "batch":
        await client.get_batch("BILLING")
    elif way == "read":
        async with client.read("BILLING"):
            pass
    elif way == "pull":
        async with client.pull("BILLING", "billing_worker_usage_metered") as pull:
            await pull.fetch()
    else:
        await client.kv("OW_LEDGERS").get("a")


# ---- the export


def test_the_document_is_stable_and_holds_no_secret(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    first, second = export(tmp_path, "--keys", str(keys)), export(tmp_path, "--keys", str(keys))
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout
    made = sorted(keys.iterdir())
    assert [*SERVICES[:-2], users.OPERATOR] == sorted((one.stem for one in made), key=[*SERVICES, users.OPERATOR].index)
    for one in made:
        assert 0o600 == stat.S_IMODE(one.stat().st_mode)
        assert one.read_text().strip() not in first.stdout
    assert 0o700 == stat.S_IMODE(keys.stat().st_mode)


def test_without_keys_the_document_names_variables(tmp_path: Path) -> None:
    told = export(tmp_path)
    assert "nkey: $OW_NKEY_REPLAY_TOOLING\n" in told.stdout
    assert [] == list(tmp_path.iterdir())


def test_the_document_fits_into_an_account(tmp_path: Path) -> None:
    async def use(place: Guarded) -> None:
        async with place.connect("gateway") as client:
            assert await client.kv("OW_ACKS").put("a", b"1")

    with guarded(tmp_path, 'accounts { SHOP { jetstream: enabled, include "oncewire-users.conf" } }') as place:
        asyncio.run(use(place))
