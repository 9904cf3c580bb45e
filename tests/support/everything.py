"""A lake with a message of every family, right and wrong ones: what every reader of bronze must agree about."""

from __future__ import annotations

import json
from pathlib import Path

from oncewire._ground.contracts.headers import EPOCH, MSG_ID, TENANT
from tests.spark.lakes import chat, event, metered
from tests.support.brokerlakes import FakeTopic
from tests.support.lakes import EVENTS, FakeAgent, Lake

BAD = (b"", b"\xff\xfe", b'{"type":"a","payload":{},"schema_version":"9.9"}', b'{"type":"a","payload":[]}')
ADVISORY = {"type": "t", "stream": EVENTS, "consumer": "c", "stream_seq": 3, "id": "a1", "deliveries": 5}


def everything(path: Path) -> Lake:
    lake = Lake(path)
    agent = FakeAgent(lake, "biller")
    orders = agent.orders(4)
    agent.settle(orders[:3], effects=1)
    queue = FakeAgent(lake, "queue", is_work_queue=True)
    command = b'{"type":"Do","payload":{"n":1},"idempotency_key":"do"}'
    queue.settle([1], bodies={1: ("cmd.default.demo.queue.do", command)})
    agent.letter(orders[3])
    agent.close()
    for message in (event(1), event(2, actor={"id": "u", "role": "user"}, expected_version=3), event(1)):
        lake.add(EVENTS, message.subject, message.payload)
    edited = {MSG_ID: "rp.1", "Oncewire-Replay-Replaces": "00" * 32, "Oncewire-Replay-For": "c"}
    lake.add(EVENTS, event(1).subject, event(1).payload, edited)
    lake.add(EVENTS, event(2).subject, event(2, payload={"order": "another"}).payload, {MSG_ID: "in.conflict"})
    for body in BAD:
        lake.add(EVENTS, "evt.acme.main.bad", body, {MSG_ID: "in.bad"})
    lake.add("BILLING", metered(1).subject, metered(1).payload, {"traceparent": f"00-{'1' * 32}-{'2' * 16}-01"})
    lake.add("BILLING", metered(2).subject, metered(2).payload)
    lake.add("CHAT", chat(1).subject, chat(1).payload, {TENANT: "acme", EPOCH: "e1"})
    lake.add("REQUESTS", "dlq_requests.biller", b"body", {"Oncewire-Dlq-Cause": "Broken: it is", TENANT: "acme"})
    lake.add("DLQ_REPLAYS", "dlq_replays.ab", b'{"letter":"dl.ab"}')
    subject = "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.MESHFORGE_EVENTS.c"
    lake.add("DLQ_ADVISORIES", subject, json.dumps(ADVISORY).encode())
    lake.add("DLQ_ADVISORIES", subject, json.dumps(ADVISORY | {"id": "a2", "stream_seq": 2**70}).encode())
    lake.add("OTHER", "strange.subject", b"{}")
    topic, graves = FakeTopic(lake, "orders", 1), FakeTopic(lake, "dlq.orders", 2)
    topic.produce("v", run_id="r", step_id="s", tenant_id="acme")
    topic.bury(topic.produce("w"), graves)
    lake.add(topic.stream, f"owb.acme.orders.{topic.number}.0.fence", b"{}")
    topic.fail(0)
    topic.ack(0)
    topic.trim(0)
    return lake
