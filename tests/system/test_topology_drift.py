"""Each kind of drift, made by hand on a real server: shown, then healed, or refused until a flag names it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import nats
import pytest
from msgspec.structs import replace
from nats.js.api import ConsumerConfig

import oncewire
from oncewire._ground.settings import Settings
from oncewire._ground.topology import Plan, Step, Topology, apply, compare, ensure_consumers, load
from oncewire._ground.topology.rules import Act, Need
from tests.support.nats import NatsServer
from tests.support.wait import until

STREAM, DURABLE = "BILLING", "billing_worker_usage_metered"
SUBJECT = "platform.billing.usage.metered"
STREAM_ITEM, CONSUMER_ITEM = f"stream:{STREAM}", f"consumer:{STREAM}/{DURABLE}"


@pytest.fixture(scope="module")
def topology() -> Topology:
    """One stream and its four durables are enough to drift."""
    whole = load((), Settings())
    return replace(
        whole,
        streams=tuple(one for one in whole.streams if one.name == STREAM),
        consumers=tuple(one for one in whole.consumers if one.stream == STREAM),
    )


@pytest.fixture
async def client(server: NatsServer, topology: Topology) -> AsyncIterator[oncewire.Client]:
    async with oncewire.connect(server.url) as open_client:
        await apply(open_client, topology)
        yield open_client


async def drift_stream(client: oncewire.Client, **drift: Any) -> None:
    config = (await client.api(f"STREAM.INFO.{STREAM}"))["config"]
    await client.api(f"STREAM.UPDATE.{STREAM}", {**config, **drift})


async def drift_consumer(client: oncewire.Client, **drift: Any) -> None:
    config = (await client.api(f"CONSUMER.INFO.{STREAM}.{DURABLE}"))["config"]
    body = {"stream_name": STREAM, "config": {**config, **drift}, "action": "update"}
    await client.api(f"CONSUMER.CREATE.{STREAM}.{DURABLE}", body)


def streams_folder(server: NatsServer) -> Path:
    return server.folder / "jetstream" / "jetstream" / "$G" / "streams"


async def remake_stream(client: oncewire.Client, **drift: Any) -> None:
    config = (await client.api(f"STREAM.INFO.{STREAM}"))["config"]
    await client.api(f"STREAM.DELETE.{STREAM}")
    await client.api(f"STREAM.CREATE.{STREAM}", {**config, **drift})


async def remake_consumer(client: oncewire.Client, **drift: Any) -> None:
    config = (await client.api(f"CONSUMER.INFO.{STREAM}.{DURABLE}"))["config"]
    await client.api(f"CONSUMER.DELETE.{STREAM}.{DURABLE}")
    body = {"stream_name": STREAM, "config": {**config, **drift}, "action": "create"}
    await client.api(f"CONSUMER.CREATE.{STREAM}.{DURABLE}", body)


async def deliver(client: oncewire.Client, count: int) -> None:
    """Publish and take some, so that there are messages and a position to lose."""
    for at in range(count):
        await client.publish(SUBJECT, b"%d" % at, raw=True)
    async with client.pull(STREAM, DURABLE) as pull:
        taken = 0
        while taken < count:
            taken += len(await pull.fetch())


async def position(client: oncewire.Client) -> int:
    info = await client.api(f"CONSUMER.INFO.{STREAM}.{DURABLE}")
    found: int = info["delivered"]["stream_seq"]
    return found


async def messages(client: oncewire.Client) -> int:
    found: int = (await client.api(f"STREAM.INFO.{STREAM}"))["state"]["messages"]
    return found


def only(left: Plan) -> Step:
    (step,) = left.steps
    return step


@pytest.mark.parametrize(
    "drift",
    [
        {"max_age": 3_600 * 10**9},
        {"max_bytes": 1_000_000_000},
        {"max_msgs": 1_000},
        {"max_msgs_per_subject": 1_000},
        {"max_msg_size": 100_000},
        {"max_consumers": 40},
        {"discard": "new"},
        {"duplicate_window": 10**9},
        {"allow_direct": False},
        {"allow_atomic": False},
        {"allow_batched": False},
        {"no_ack": True},
        {"subjects": ["platform.billing.>", "extra.>"]},
        {"subjects": ["elsewhere.>"]},
        {"allow_rollup_hdrs": True},
        {"compression": "s2"},
        {"sources": [{"name": "NOWHERE"}]},
        {"republish": {"src": ">", "dest": "again.>"}},
        {"subject_transform": {"src": "platform.>", "dest": "moved.>"}},
        {"description": "by hand"},
        {"retention": "interest"},
    ],
    ids=lambda drift: next(iter(drift)),
)
async def test_a_stream_that_drifted_is_healed_in_place(
    client: oncewire.Client, topology: Topology, drift: dict[str, Any]
) -> None:
    await deliver(client, 3)
    await drift_stream(client, **drift)
    step = only(await compare(client, topology))
    assert (step.item, step.act, step.need) == (STREAM_ITEM, Act.UPDATE, Need.NOTHING)
    assert [change.key for change in step.changes] == list(drift)
    kept = await messages(client), await position(client)
    assert (await apply(client, topology)).steps == ()
    assert (await messages(client), await position(client)) == kept


@pytest.mark.parametrize(
    "drift",
    [
        {"ack_wait": 5 * 10**9},
        {"max_deliver": 3},
        {"max_ack_pending": 5},
        {"headers_only": True},
        {"backoff": [10**9, 2 * 10**9]},
        {"inactive_threshold": 3_600 * 10**9},
        {"max_batch": 9},
        {"max_expires": 10**10},
        {"max_bytes": 10_000},
        {"sample_freq": "50"},
        {"description": "by hand"},
        {"num_replicas": 1},
        {"priority_policy": "overflow", "priority_groups": ["x"]},
    ],
    ids=lambda drift: next(iter(drift)),
)
async def test_a_durable_that_drifted_is_healed_in_place_and_keeps_its_position(
    client: oncewire.Client, topology: Topology, drift: dict[str, Any]
) -> None:
    await deliver(client, 3)
    await drift_consumer(client, **drift)
    step = only(await compare(client, topology))
    assert (step.item, step.act, step.need) == (CONSUMER_ITEM, Act.UPDATE, Need.NOTHING)
    assert (await apply(client, topology)).steps == ()
    assert await position(client) == 3


@pytest.mark.parametrize(
    "drift",
    [
        {"storage": "memory"},
        {"retention": "workqueue"},
        {"deny_delete": True},
        {"deny_purge": True},
        {"allow_msg_ttl": True},
        {"allow_msg_schedules": True},
        {"allow_msg_counter": True},
        {"persist_mode": "async", "allow_atomic": False, "allow_batched": False},
        {"mirror": {"name": "NOWHERE"}, "subjects": None, "allow_atomic": False, "allow_batched": False},
    ],
    ids=lambda drift: next(iter(drift)),
)
async def test_what_a_stream_cannot_change_is_refused_until_it_is_named(
    client: oncewire.Client, topology: Topology, drift: dict[str, Any]
) -> None:
    await remake_stream(client, **drift)
    for flags in ({}, {"accept": frozenset({STREAM_ITEM})}, {"recreate": frozenset({"stream:OTHER"})}):
        step = only(await apply(client, topology, **flags))
        assert (step.item, step.flag) == (STREAM_ITEM, f"--recreate {STREAM_ITEM}")
    config = (await client.api(f"STREAM.INFO.{STREAM}"))["config"]
    assert all(config.get(key) == value for key, value in drift.items() if value)
    assert (await apply(client, topology, recreate=frozenset({STREAM_ITEM}))).steps == ()


async def test_a_server_that_fails_once_is_asked_again(
    server: NatsServer, client: oncewire.Client, topology: Topology
) -> None:
    await client.api(f"STREAM.DELETE.{STREAM}")
    await until(lambda: not (streams_folder(server) / STREAM).exists(), "the stream's files to be removed")
    (streams_folder(server) / STREAM).write_bytes(b"in the way until the server removes it")
    assert (await apply(client, topology)).steps == ()


async def test_a_sealed_stream_is_refused_until_it_is_named(client: oncewire.Client, topology: Topology) -> None:
    await deliver(client, 3)
    await drift_stream(client, sealed=True)
    assert only(await apply(client, topology)).flag == f"--recreate {STREAM_ITEM}"
    assert await messages(client) == 3
    assert (await apply(client, topology, recreate=frozenset({STREAM_ITEM}))).steps == ()


async def test_a_recreated_stream_says_what_it_deletes_and_gets_its_consumers_back(
    client: oncewire.Client, topology: Topology
) -> None:
    await drift_stream(client, deny_purge=True)
    await deliver(client, 5)
    step = only(await compare(client, topology))
    assert step.cost.startswith("deletes 5 messages (")
    assert DURABLE in step.cost
    done: list[tuple[str, Act]] = []
    left = await apply(
        client,
        topology,
        recreate=frozenset({STREAM_ITEM}),
        on_step=lambda one: done.append((one.item, one.act)),
    )
    assert left.steps == ()
    assert done[0] == (STREAM_ITEM, Act.RECREATE)
    assert {act for _, act in done[1:]} == {Act.CREATE}
    assert len(done) == 5
    assert await messages(client) == 0


@pytest.mark.parametrize(
    "drift",
    [
        {"ack_policy": "none", "max_deliver": None, "ack_wait": None, "max_ack_pending": None},
        {"ack_policy": "all"},
        {"deliver_policy": "new"},
        {"deliver_policy": "by_start_sequence", "opt_start_seq": 2},
        {"deliver_policy": "by_start_time", "opt_start_time": "2026-01-01T00:00:00Z"},
        {"replay_policy": "original"},
        {"max_waiting": 7},
        {"mem_storage": True},
        {"deliver_subject": "push.here", "max_waiting": None},
    ],
    ids=lambda drift: next(iter(drift)),
)
async def test_what_a_durable_cannot_change_is_refused_until_it_is_named(
    client: oncewire.Client, topology: Topology, drift: dict[str, Any]
) -> None:
    await remake_consumer(client, **drift)
    for flags in ({}, {"accept": frozenset({CONSUMER_ITEM})}):
        step = only(await apply(client, topology, **flags))
        assert (step.item, step.flag) == (CONSUMER_ITEM, f"--recreate {CONSUMER_ITEM}")
    assert (await apply(client, topology, recreate=frozenset({CONSUMER_ITEM}))).steps == ()


async def test_a_recreated_durable_says_its_position_and_starts_over(
    client: oncewire.Client, topology: Topology
) -> None:
    await remake_consumer(client, max_waiting=7)
    await deliver(client, 4)
    step = only(await compare(client, topology))
    assert step.cost == ("loses its position (sequence 4 and 4 unacknowledged): it starts again at the first message")
    await apply(client, topology, recreate=frozenset({CONSUMER_ITEM}))
    assert await position(client) == 0


async def test_a_limit_that_would_drop_messages_is_refused_until_it_is_accepted(
    client: oncewire.Client, topology: Topology
) -> None:
    await drift_stream(client, max_bytes=-1)
    for _ in range(10):
        await client.publish(SUBJECT, b"x" * 1_000, raw=True)
    small = replace(topology, streams=(replace(topology.streams[0], max_bytes=5_000),))
    step = only(await apply(client, small))
    assert (step.flag, step.cost) == (f"--accept {STREAM_ITEM}", "drops messages beyond 5000 B")
    assert await messages(client) == 10
    assert only(await apply(client, small, recreate=frozenset({STREAM_ITEM}))).need is Need.ACCEPT
    assert (await apply(client, small, accept=frozenset({STREAM_ITEM}))).steps == ()
    assert 0 < await messages(client) < 10


async def test_a_filter_that_a_plain_create_moved_is_shown_and_never_moved_back_in_silence(
    server: NatsServer, client: oncewire.Client, topology: Topology
) -> None:
    """nats-py sends no action, so its create is an update of somebody else's durable."""
    await deliver(client, 3)
    connection = await nats.connect(server.url)
    moved = ConsumerConfig(durable_name=DURABLE, filter_subject="platform.billing.other", ack_policy="explicit")  # type: ignore[arg-type]
    await connection.jetstream().add_consumer(STREAM, moved)
    await connection.close()
    step = only(await apply(client, topology))
    assert "filter_subjects" in {change.key for change in step.changes}
    assert step.flag == f"--accept {CONSUMER_ITEM}"
    assert "before sequence 3 is skipped" in step.cost
    (problem,) = await ensure_consumers(client, "billing-worker", topology=topology)
    assert "platform.billing.other" in problem.text
    assert (await apply(client, topology, accept=frozenset({CONSUMER_ITEM}))).steps == ()
    assert await position(client) == 3


async def test_a_durable_with_a_moved_filter_can_start_over_instead(
    client: oncewire.Client, topology: Topology
) -> None:
    await deliver(client, 3)
    await drift_consumer(client, filter_subject="platform.billing.other")
    assert (await apply(client, topology, recreate=frozenset({CONSUMER_ITEM}))).steps == ()
    assert await position(client) == 0


async def test_a_filter_that_was_widened_by_hand_is_narrowed_in_place(
    client: oncewire.Client, topology: Topology
) -> None:
    await deliver(client, 3)
    await drift_consumer(client, filter_subject="platform.billing.>")
    assert (await apply(client, topology)).steps == ()
    assert await position(client) == 3


async def test_what_was_deleted_comes_back(client: oncewire.Client, topology: Topology) -> None:
    await client.api(f"CONSUMER.DELETE.{STREAM}.{DURABLE}")
    assert only(await compare(client, topology)).act is Act.CREATE
    assert (await apply(client, topology)).steps == ()
    await client.api(f"STREAM.DELETE.{STREAM}")
    assert len((await compare(client, topology)).steps) == 5
    assert (await apply(client, topology)).steps == ()


async def test_what_operators_do_is_no_drift_and_survives_apply(client: oncewire.Client, topology: Topology) -> None:
    await drift_stream(client, metadata={"team": "blue"}, max_age=3_600 * 10**9)
    await client.api(f"CONSUMER.PAUSE.{STREAM}.{DURABLE}", {"pause_until": "2099-01-01T00:00:00Z"})
    assert only(await compare(client, topology)).item == STREAM_ITEM
    assert (await apply(client, topology)).steps == ()
    assert (await client.api(f"STREAM.INFO.{STREAM}"))["config"]["metadata"]["team"] == "blue"
    assert (await client.api(f"CONSUMER.INFO.{STREAM}.{DURABLE}"))["paused"]


async def test_what_nobody_declared_is_listed_and_left_alone(client: oncewire.Client, topology: Topology) -> None:
    await client.api("STREAM.CREATE.THEIRS", {"name": "THEIRS", "subjects": ["theirs.>"]})
    theirs = {"durable_name": "shop_consumer", "ack_policy": "explicit"}
    body = {"stream_name": STREAM, "config": theirs, "action": "create"}
    await client.api(f"CONSUMER.CREATE.{STREAM}.shop_consumer", body)
    async with client.read(STREAM):
        left = await apply(client, topology)
    assert left.steps == ()
    assert set(left.extras) == {"stream:THEIRS", f"consumer:{STREAM}/shop_consumer"}
    assert await client.api("STREAM.INFO.THEIRS")
    assert await client.api(f"CONSUMER.INFO.{STREAM}.shop_consumer")


async def test_a_stream_that_somebody_made_anew_since_the_plan_is_not_deleted(
    client: oncewire.Client, topology: Topology
) -> None:
    """Two people recreate at once: the second must not delete what was published in between."""
    from oncewire._ground.topology.server import _is_done

    await drift_stream(client, deny_purge=True)
    stale = only(await compare(client, topology))
    await apply(client, topology, recreate=frozenset({STREAM_ITEM}))
    await client.publish(SUBJECT, b"new", raw=True)
    assert not await _is_done(client, stale)
    assert await messages(client) == 1
