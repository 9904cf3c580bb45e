"""A letter that DLQ refuses is not forgotten, and of two who replay one letter at once only one does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import oncewire
from oncewire._ground.contracts import letters as names
from oncewire._ground.jetstream import Client, Outgoing
from oncewire._ground.topology import ensure
from oncewire.dlq.letters import Filter
from oncewire.dlq.replay import Replay, ReplayOptions, Report
from tests.support.dlq import failing, given_up, letters_of, read_stream, service, until_letters
from tests.support.nats import NatsServer
from tests.support.streams import consumer_info, make_stream
from tests.support.wait import until, until_async


async def hand_over(client: Client, stream: str, sequence: int) -> None:
    """A request for a letter, as an agent writes it."""
    facts = {
        names.STREAM: stream,
        names.CREATED: "5",
        names.SEQUENCE: str(sequence),
        names.TIMESTAMP: "1790000000000000000",
        names.CONSUMER: "w",
        names.DELIVERIES: "1",
        names.SUBJECT: f"{stream}.x",
        names.OUTCOME: "dead",
        names.CAUSE: "ValueError: no",
    }
    await client.publish("dlq_requests.test", b"body %d" % sequence, headers=facts)


async def test_a_letter_that_dlq_has_no_room_for_is_written_once_there_is_room(server: NatsServer) -> None:
    """The request waits: without it nobody would know of the message any more."""
    async with oncewire.connect(server.url) as client:
        await ensure(client)
        stream = await make_stream(client)
        config = (await client.api("STREAM.INFO.DLQ"))["config"]
        await client.api("STREAM.UPDATE.DLQ", config | {"max_msgs": 1, "discard": "new"})
        async with service(client) as running:
            await hand_over(client, stream, 1)
            await until_letters(server.url, stream, 1)
            await hand_over(client, stream, 2)
            await until(lambda: "maximum messages" in running.problem, "the refusal")
            await client.api("STREAM.UPDATE.DLQ", config)
            letters = await until_letters(server.url, stream, 2)

            async def is_settled() -> bool:
                info = await consumer_info(client, "DLQ_REQUESTS", "dlq_service_requests")
                return not info["num_ack_pending"] and not info["num_pending"]

            await until_async(is_settled, "the requests to be settled")
            await until(lambda: not running.problem, "a service that is well")
    assert [b"body 1", b"body 2"] == [letter.data for letter in letters]


async def test_two_who_replay_a_letter_at_once_leave_one_record_and_one_copy(server: NatsServer) -> None:
    """Both have seen that nobody has begun, and write it down at the same moment: the second one is refused."""
    async with oncewire.connect(server.url) as one, oncewire.connect(server.url) as other:
        await ensure(one)
        stream = await failing(one, max_deliver=1)
        await given_up(one, stream, 1)
        async with service(one):
            await until_letters(server.url, stream, 1)

        both = asyncio.Barrier(2)
        reports = await asyncio.gather(*(replay_together(client, stream, both) for client in (one, other)))
        copies = [found for found in await read_stream(server.url, stream) if found.sequence > 1]
        records = [json.loads(found.data) for found in await read_stream(server.url, "DLQ_REPLAYS")]

    assert [0, 1] == sorted(report.replayed for report in reports)
    [refused] = [report for report in reports if report.refused]
    assert ["somebody else is replaying this letter"] == [problem.reason for problem in refused.problems]
    assert (["sent", "published"], 1) == ([record["state"] for record in records], len(copies))
    assert [] == await letters_of(server.url, stream)


async def replay_together(client: Client, stream: str, both: asyncio.Barrier) -> Report:
    """A replay that writes its first record when the other one is about to."""
    publish_all, is_first = client.publish_all, True

    async def publish_when_both_are_there(messages: Sequence[Outgoing], *args: Any, **more: Any) -> Any:
        nonlocal is_first
        if is_first:
            is_first = False
            async with asyncio.timeout(30):
                await both.wait()
        return await publish_all(messages, *args, **more)

    client.publish_all = publish_when_both_are_there  # type: ignore[method-assign]
    return await Replay(client, Filter(stream=stream), ReplayOptions()).run()
