"""What users hand over as arguments: text that cannot be sent and numbers that are none get our errors, at once."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

import oncewire
from oncewire import BrokerClient, SyncBrokerClient, outbox, tokens
from oncewire._ground.arguments import check_count, check_number, check_secret, check_text, shown
from oncewire._ground.contracts.broker import BrokerEnvelope
from oncewire._ground.contracts.canonical import has_no_number
from oncewire._ground.errors import ContractViolation, Refused
from oncewire._ground.jetstream.client import encode_payload
from oncewire._ground.jetstream.publish import Outgoing
from oncewire._ground.jetstream.unwritable import wrong_message
from oncewire.broker.client import calls
from oncewire.broker.client.calls import Lease, Message

LONE = "a\ud800"
NAN, INF = float("nan"), float("inf")
LEASE = Lease("t", "g", "o", 0, 0)


class Rate(msgspec.Struct):
    rate: float
    note: str | None = None


def test_a_number_is_one() -> None:
    assert (1, 2.5) == (check_count("f", "n", 1, 1, 1), check_number("f", "n", 2.5, 0, 3))
    for wrong in (NAN, INF, -INF, True, "1", None, 4, -1, 10**400):
        with pytest.raises(ContractViolation, match=r"f: n .* is not a number from 0 to 3"):
            check_number("f", "n", wrong, 0, 3)
    for wrong in (1.5, NAN, True, "1", None, 0, 10**400):
        with pytest.raises(ContractViolation, match=r"f: n .* is not a whole number from 1 to 3"):
            check_count("f", "n", wrong, 1, 3)


def test_text_is_what_utf_8_can_write_and_a_secret_is_not_shown() -> None:
    assert check_text("f", "n", "é\0") == "é\0"
    for wrong in (b"x", None, 5, LONE):
        with pytest.raises(ContractViolation, match="f: n "):
            check_text("f", "n", wrong)
        with pytest.raises(ContractViolation, match=r"f: n is not text that can be sent$"):
            check_secret("f", "n", wrong)
    assert ("'x'", 81) == (shown("x"), len(shown("x" * 1_000)))


@pytest.mark.parametrize(
    ("value", "is_lost"),
    [
        (1.5, False), (NAN, True), (INF, True), (-INF, True), (1.7976931348623157e308, False), (10**400, False),
        ({"a": [1, (2.0, {"b": -INF})]}, True), ({"a": [None, "nan", True]}, False),
    ],
)  # fmt: skip
def test_a_number_that_json_lacks_is_found_wherever_it_is(value: Any, is_lost: bool) -> None:
    assert is_lost is has_no_number(value)


@pytest.mark.parametrize("payload", [{"amount": NAN}, {"a": {"b": [INF]}}, Rate(NAN), Rate(-INF, "null")])
def test_a_payload_with_a_number_that_json_lacks_is_refused(payload: Any) -> None:
    """The encoder writes null in its place, and the server confirms it."""
    with pytest.raises(ContractViolation, match="NaN or an infinite number"):
        encode_payload(payload)


def test_a_payload_with_null_is_none_of_these() -> None:
    assert (b'{"a":null,"b":"null"}', b'{"rate":1.0,"note":null}') == (
        encode_payload({"a": None, "b": "null"}), encode_payload(Rate(1.0)),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (Outgoing("s", b"x", headers={"a": 5}), "headers {'a': 5} is not a mapping of text to text"),  # type: ignore[dict-item]
        (Outgoing("s", b"x", headers="a"), "headers 'a' is not a mapping"),  # type: ignore[arg-type]
        (Outgoing("s", b"x", msg_id=5), "msg_id 5 is not text but int"),  # type: ignore[arg-type]
        (Outgoing("s", b"x", msg_id=LONE), r"msg_id 'a\ud800' has a lone surrogate"),
        (Outgoing(5, b"x"), "subject 5 is not text but int"),  # type: ignore[arg-type]
        (Outgoing("s", "x"), "payload 'x' is not bytes"),  # type: ignore[arg-type]
        (Outgoing("s", None), "payload None is not bytes"),  # type: ignore[arg-type]
        ({"subject": "s"}, "is not an Outgoing"),
    ],
)
def test_a_message_that_can_never_be_written_is_told_by_argument_and_value(message: Any, said: str) -> None:
    assert said in str(wrong_message(message, Outgoing))
    assert wrong_message(Outgoing("s", b"x", headers={"a": "b"}), Outgoing) is None


@pytest.mark.parametrize(
    "use",
    [
        lambda: calls.create_topic(LONE, 1),
        lambda: calls.show_topic(LONE),
        lambda: calls.delete_topic(LONE),
        lambda: calls.show_topic(5),  # type: ignore[arg-type]
        lambda: calls.produce(Message("t", LONE)),
        lambda: calls.produce(Message(LONE, "v")),
        lambda: calls.produce(Message("t", "v", LONE)),
        lambda: calls.produce(Message("t", "v", envelope=BrokerEnvelope(idempotency_key=LONE))),
        lambda: calls.produce_many([Message("t", "v"), Message("t", LONE)]),
        lambda: calls.take("t", LONE, "o", 1, 0, None),
        lambda: calls.take("t", "g", LONE, 1, 0, None),
        lambda: LEASE.settle("nack", reason=LONE),
        lambda: LEASE.idempotency("begin", "t", LONE),
        lambda: calls.settle_many("ack", [Lease(LONE, "g", "o", 0, 0)]),
        lambda: BrokerClient("http://127.0.0.1:1", token=LONE),
        lambda: BrokerClient("http://127.0.0.1:1", token="a\r\nX-Other: b"),
        lambda: BrokerClient(f"http://{LONE}:1"),
        lambda: SyncBrokerClient("http://127.0.0.1:1", token=LONE),
        lambda: oncewire.connect(name=LONE),
        lambda: oncewire.connect(name=5),  # type: ignore[arg-type]
        lambda: oncewire.connect(f"nats://{LONE}:4222"),
        lambda: oncewire.connect([f"nats://u:{LONE}@127.0.0.1:4222"]),
        lambda: oncewire.connect(password=LONE),
        lambda: oncewire.connect(token=LONE),
        lambda: oncewire.connect(user=LONE),
        lambda: oncewire.connect(creds=LONE),
        lambda: outbox.enqueue(None, uuid.uuid4(), role="user", content=LONE),
        lambda: outbox.enqueue(None, uuid.uuid4(), role=LONE, content="x"),  # type: ignore[arg-type]
        lambda: outbox.enqueue(None, uuid.uuid4(), role="user", content="x", model=LONE),
        lambda: outbox.enqueue(None, uuid.uuid4(), role="user", content="x", tenant=LONE),
        lambda: outbox.enqueue(None, uuid.uuid4(), role="user", content="x", traceparent=LONE),
        lambda: outbox.enqueue(None, uuid.uuid4(), role="user", content="x", metadata={"a": LONE}),
        lambda: outbox.enqueue(None, uuid.uuid4(), role="user", content="x", metadata={"a": NAN}),
        lambda: outbox.enqueue_message(None, "sr.events.loop", {"a": 1}),  # type: ignore[arg-type]
        lambda: outbox.enqueue_message(None, f"sr.events.{LONE}", {"a": 1}),  # type: ignore[arg-type]
        lambda: tokens.stream("room", client=None, tenant=LONE),  # type: ignore[arg-type]
        lambda: tokens.stream("room", client=None, message_id=LONE),  # type: ignore[arg-type]
    ],
)
def test_text_that_cannot_be_sent_gets_our_error(use: Callable[[], Any]) -> None:
    with pytest.raises(Refused) as caught:
        use()
    assert caught.value.message.isascii(), "an error that cannot be printed says nothing"
    assert "Other" not in caught.value.message


async def test_a_streamed_answer_takes_text_alone() -> None:
    answer = tokens.stream("room", client=None)  # type: ignore[arg-type]
    for wrong in (LONE, b"bytes", 5):
        with pytest.raises(Refused, match="send: text is not text that can be sent"):
            await answer.send(wrong)  # type: ignore[arg-type]
