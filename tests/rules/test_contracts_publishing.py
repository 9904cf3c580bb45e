"""What may be published where, and under which id."""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime
from typing import Any

import pytest

from oncewire._ground.contracts import ids, inputs, publishing
from oncewire._ground.contracts.message import encode_message, new_message
from oncewire._ground.contracts.runtime import encode_runtime
from oncewire._ground.errors import ContractViolation, Refused, TooLarge, UnsupportedVersion
from tests.rules.test_contracts_envelopes import body, example

pytestmark = pytest.mark.usefixtures("loops")

EVENT = "evt.default.demo.order.placed"
WHEN = datetime(2026, 1, 15, 14, 30, tzinfo=UTC)


def lean(**fields: Any) -> bytes:
    return json.dumps({"type": "OrderPlaced", "payload": {"cents": 5}, **fields}).encode()


def by_decision(key: str, subject: str = EVENT) -> str:
    """E3, from its words."""
    digest = hashlib.sha256(b'{"payload":{"cents":5},"type":"OrderPlaced"}').hexdigest()
    _, tenant, workspace, *_ = subject.split(".")
    text = json.dumps(["in", tenant, workspace, subject, key, digest], separators=(",", ":"))
    return "in." + hashlib.sha256(text.encode()).hexdigest()[:40]


@pytest.mark.parametrize(
    ("sent", "key"), [({"idempotency_key": "k"}, "k"), ({"id": "i"}, "i"), ({"id": "i", "idempotency_key": "k"}, "k")]
)
def test_a_lenient_event_gets_an_id_of_its_key_or_its_id(sent: dict[str, str], key: str) -> None:
    assert by_decision(key) == publishing.message_id(EVENT, lean(**sent))


def test_an_event_without_a_key_has_nothing_that_tells_it_from_another() -> None:
    assert "" == publishing.message_id(EVENT, lean())


def test_the_same_key_has_another_id_on_another_subject_and_with_another_content() -> None:
    found = {
        publishing.message_id(EVENT, lean(id="o1")),
        publishing.message_id("evt.default.demo.order.refunded", lean(id="o1")),
        publishing.message_id("evt.acme.demo.order.placed", lean(id="o1")),
        publishing.message_id(EVENT, lean(id="o1", payload={"cents": 6})),
    }
    assert len(found) == 4


@pytest.mark.parametrize("subject", ["sr.events.loop", "sr.commands.oracle.run", "platform.billing.usage.metered"])
def test_a_message_goes_out_under_its_idempotency_key(subject: str) -> None:
    assert example("message")["idempotency_key"] == publishing.message_id(subject, body("message"))


def test_what_no_contract_names_is_taken_as_it_is() -> None:
    assert not publishing.has_contract("orders.placed")
    assert "" == publishing.message_id("orders.placed", b"\xff")
    assert "" == publishing.message_id("chat.events.c1", body("realtime"))


WRONG = [
    (EVENT, b"garbage", ContractViolation),
    (EVENT, b"{}", ContractViolation),
    (EVENT, lean(tenant="other"), ContractViolation),
    (EVENT, lean(id="a\u0001"), ContractViolation),
    (EVENT, lean(schema_version="9.9"), UnsupportedVersion),
    (EVENT, b'{"type":"T","payload":{"n":' + b"[" * 5_000 + b"]" * 5_000 + b"}}", ContractViolation),
    (EVENT, lean(payload={"x": "y" * (9 << 20)}), TooLarge),
    ("evt.only", lean(), ContractViolation),
    ("sr.events.loop", b'{"schema_version":"9.9"}', UnsupportedVersion),
    ("sr.events.loop", b'{"x":1}', ContractViolation),
    ("sr.events.loop", lean(), ContractViolation),
    ("sr.events.loop", body("message", payload={"tenant_id": 7}), ContractViolation),
    ("storage.attachment.requested", b"garbage", ContractViolation),
    ("chat.events.c1", b'{"version":"1"}', ContractViolation),
]


@pytest.mark.parametrize(("subject", "sent", "error"), WRONG, ids=range(len(WRONG)))
def test_what_readers_would_refuse_is_refused_before_it_goes_out(
    subject: str, sent: bytes, error: type[Refused]
) -> None:
    with pytest.raises(error):
        publishing.message_id(subject, sent)


def test_many_are_checked_as_each_alone() -> None:
    complete = [encode_runtime(inputs.view(_message(at), {})) for at in range(3)]
    complete = [one.replace(b'"workspace":"default"', b'"workspace":"demo"') for one in complete]
    given = [
        *[(EVENT, one) for one in complete],
        (EVENT, lean(id="o1")),
        ("evt.default.demo.order.refunded", complete[0]),
        ("sr.events.loop", body("message")),
        ("orders.placed", b"\xff"),
        *[(subject, sent) for subject, sent, _ in WRONG],
    ]
    subjects, bodies = [subject for subject, _ in given], [sent for _, sent in given]
    assert [str(one) for one in map(_outcome, subjects, bodies)] == list(
        map(str, publishing.message_ids(subjects, bodies))
    )
    assert [] == publishing.message_ids([], [])


def _message(at: int) -> Any:
    return new_message("T", {"n": at}, message_id=f"m{at}", timestamp=WHEN, actor_id="a", actor_kind="AGENT")


def _outcome(subject: str, sent: bytes) -> str | Refused:
    try:
        return publishing.message_id(subject, sent)
    except Refused as wrong:
        return wrong


def test_an_envelope_is_held_against_its_subject() -> None:
    sent = _message(1)
    seen = inputs.view(sent, {})
    written = encode_runtime(seen)
    assert sent.idempotency_key == publishing.envelope_id("sr.events.loop", sent, encode_message(sent))
    subject = "evt.default.default.x"
    assert publishing.message_id(subject, written) == publishing.envelope_id(subject, seen, written)
    assert publishing.id_of("orders.x", seen) == publishing.envelope_id("orders.x", seen, written)
    for wrong, envelope, text in (
        ("evt.default.default.x", sent, encode_message(sent)),
        ("sr.events.loop", seen, written),
        ("evt.acme.default.x", seen, written),
    ):
        with pytest.raises(ContractViolation):
            publishing.envelope_id(wrong, envelope, text)


def test_ids_of_many_inputs_are_those_of_each() -> None:
    keys, digests = ["a", 'b"c', "ü"], [bytes([at]) * 32 for at in range(3)]
    each = [ids.input_id("t", "w", "s", key, digest) for key, digest in zip(keys, digests, strict=True)]
    assert each == ids.input_ids("t", "w", "s", keys, digests)


@pytest.mark.parametrize("subject", ["dlq.billing.x", "dlq.>", "dlq"])
def test_dead_letters_are_nobodys_to_publish(subject: str) -> None:
    with pytest.raises(ContractViolation, match="dead-letter service alone"):
        publishing.refuse_reserved(subject)


def test_what_only_begins_like_a_dead_letter_is_free() -> None:
    publishing.refuse_reserved("dlqx.a")
    publishing.refuse_reserved("dlq_requests.a")
