"""The four envelopes: round trips, the rules of each spec, filling-in, and the one shape that handlers see."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncewire._ground.contracts import broker, headers, ids, inputs, message, realtime, runtime, schemas, trace
from oncewire._ground.errors import ContractViolation, UnsupportedVersion

pytestmark = pytest.mark.usefixtures("loops")

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
ID = st.text(st.characters(categories=["L", "N", "P"]), min_size=1, max_size=20).filter(str.isprintable)
TOKEN = st.from_regex(r"\A[A-Za-z0-9_-]{1,20}\Z")
UTC_TIMES = st.datetimes(min_value=datetime(1970, 1, 1), timezones=st.just(UTC))
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53) + 1, 2**53 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
OBJECT = st.dictionaries(TEXT, JSON, max_size=4)
ORIGIN = ids.Origin("MESHFORGE_EVENTS", 1_700_000_000_000_000_000, 17, 1_705_329_000_123_456_789)
SUBJECT = "evt.default.demo.order.placed"

MESSAGES = st.builds(
    message.MessageEnvelope,
    schema_version=st.just("1.0"),
    message_type=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20),
    message_id=ID,
    timestamp=UTC_TIMES,
    actor_id=ID,
    actor_kind=st.sampled_from(["HUMAN", "AGENT", "SYSTEM"]),
    idempotency_key=ID,
    payload=OBJECT,
    correlation_id=st.none() | ID,
    causation_id=st.none() | ID,
)
RUNTIMES = st.builds(
    runtime.RuntimeEnvelope,
    id=ID,
    ts=st.integers(0, runtime.TS_MS_MAX),
    type=ID,
    schema_version=st.just("1.0"),
    trace_id=st.from_regex(r"\A[0-9a-f]{31}1\Z"),
    span_id=st.from_regex(r"\A[0-9a-f]{15}1\Z"),
    tenant=TOKEN,
    workspace=TOKEN,
    actor=st.builds(runtime.Actor, ID, ID),
    payload=OBJECT,
    idempotency_key=ID,
    source=st.builds(runtime.Source, ID, ID),
    security_context=st.builds(runtime.SecurityContext, ID, st.sampled_from(["service", "agent", "user", "system"])),
    causation_id=st.none() | ID,
    correlation_id=st.none() | ID,
    reply_to=st.none() | TOKEN,
    entity_id=st.none() | ID,
    expected_version=st.none() | st.integers(0, 2**53 - 1),
)
EVENTS: st.SearchStrategy[realtime.Event] = st.one_of(
    st.builds(
        realtime.MessageCreated,
        message_id=ID,
        dedupe_id=ID,
        role=st.sampled_from(["user", "assistant", "system"]),
        content=TEXT,
        model=st.none() | TEXT,
        citations=JSON,
        metadata=st.none() | OBJECT,
    ),
    st.builds(
        realtime.TokenChunk, message_id=ID, chunk_id=ID, token=TEXT, is_final=st.booleans(), metadata=st.none() | OBJECT
    ),
    st.builds(
        realtime.StreamLifecycle,
        message_id=ID,
        status=st.sampled_from(["started", "blocked", "completed", "errored"]),
        detail=JSON,
    ),
    st.builds(
        realtime.Presence,
        user_id=ID,
        state=st.sampled_from(["online", "offline", "typing", "idle"]),
        metadata=st.none() | OBJECT,
    ),
    st.builds(realtime.AckRequested, up_to_sequence=st.integers(0, 2**53 - 1)),
)
REALTIMES = st.builds(
    realtime.RealtimeEnvelope,
    version=st.just("2024-12-01"),
    conversation_id=TOKEN,
    sequence=st.integers(0, 2**53 - 1),
    issued_at=UTC_TIMES,
    contract=st.builds(
        realtime.DeliveryContract, guarantee=st.sampled_from(["at-least-once", "exactly-once-emulated"]), dedupe_key=ID
    ),
    event=EVENTS,
    replay=st.booleans(),
)
COUNT = st.integers(0, 2**53 - 1)
ENVELOPE_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "run_id": TEXT,
    "step_id": TEXT,
    "parent_step_id": TEXT,
    "tenant_id": TEXT,
    "idempotency_key": TEXT,
    "target_topic": st.just("") | TOKEN,
    "partition_override": st.none() | COUNT,
    "deadline": st.none() | UTC_TIMES,
    "retry_policy": st.none()
    | st.builds(broker.RetryPolicy, max_attempts=st.integers(1, 99), backoff_ms=COUNT, max_backoff_ms=COUNT),
}
PRODUCES = st.builds(
    broker.ProduceBody,
    topic=TOKEN,
    value=st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
    key=TEXT,
    envelope=st.none() | st.builds(broker.BrokerEnvelope, **ENVELOPE_FIELDS),
)
LETTERS = st.builds(
    broker.DeadLetter,
    original_topic=TOKEN,
    original_partition=COUNT,
    original_offset=COUNT,
    attempts=COUNT,
    last_error=TEXT,
    routed_at_ms=COUNT,
)
DELIVERIES = st.builds(
    broker.Delivery,
    partition=COUNT,
    offset=COUNT,
    attempts=COUNT,
    key=TEXT,
    value=TEXT,
    last_error=TEXT,
    routing=st.none() | st.builds(broker.Routing, label=TEXT, meta=st.dictionaries(TEXT, TEXT, max_size=2)),
    envelope=st.none() | st.builds(broker.DeliveredEnvelope, **ENVELOPE_FIELDS, dlq=st.none() | LETTERS),
)


def example(kind: str) -> dict[str, Any]:
    found = next(one for one in schemas.PUBLISHED if one.kind == kind)
    return dict(json.loads(found.example))


def body(kind: str, **changed: Any) -> bytes:
    """The example of a contract with fields changed; `...` takes one away."""
    fields = {name: value for name, value in (example(kind) | changed).items() if value is not ...}
    return json.dumps(fields).encode()


@given(MESSAGES)
def test_a_message_reads_back_as_it_was_written(envelope: message.MessageEnvelope) -> None:
    assert message.decode_message(message.encode_message(envelope)) == envelope


@given(RUNTIMES)
def test_a_complete_runtime_envelope_reads_back_whatever_carries_it(envelope: runtime.RuntimeEnvelope) -> None:
    carried = {headers.MSG_ID: "other", headers.TRACEPARENT: trace.begun_by("other").traceparent}
    subject = f"evt.{envelope.tenant}.{envelope.workspace}.x"
    written = runtime.encode_runtime(envelope)
    assert runtime.decode_runtime(written, subject=subject, origin=ORIGIN, carried=carried) == envelope


@given(REALTIMES)
def test_a_realtime_envelope_reads_back_as_it_was_written(envelope: realtime.RealtimeEnvelope) -> None:
    assert realtime.decode_realtime(realtime.encode_realtime(envelope)) == envelope


@given(PRODUCES)
def test_a_produce_reads_back_as_it_was_written(sent: broker.ProduceBody) -> None:
    assert broker.decode_produce(broker.encode_produce(sent)) == sent


@given(DELIVERIES)
def test_a_delivery_reads_back_as_it_was_written(delivery: broker.Delivery) -> None:
    assert broker.decode_delivery(broker.encode_delivery(delivery)) == delivery


@pytest.mark.parametrize("published", schemas.PUBLISHED, ids=lambda one: one.kind)
def test_the_examples_of_the_specs_are_read(published: schemas.Published) -> None:
    published.check(published.example.encode())


@pytest.mark.parametrize(
    "field",
    [
        "message_type",
        "message_id",
        "timestamp",
        "actor_id",
        "actor_kind",
        "payload",
        "idempotency_key",
        "schema_version",
    ],
)
def test_every_required_field_of_a_message_is_required_by_name(field: str) -> None:
    with pytest.raises(ContractViolation) as refused:
        message.decode_message(body("message", **{field: ...}))
    assert (refused.value.field, refused.value.message) == (field, f"MessageEnvelope: {field}: is required")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("actor_kind", "ROBOT"),
        ("actor_kind", "human"),
        ("message_id", ""),
        ("message_id", 7),
        ("message_id", "a\r\nNats-Rollup: all"),
        ("idempotency_key", "a\nb"),
        ("idempotency_key", "x" * 513),
        ("payload", []),
        ("payload", "text"),
        ("payload", None),
        ("timestamp", "2024-01-15T14:30:00"),
        ("timestamp", "2024-01-15T14:30:00+02:00"),
        ("timestamp", "yesterday"),
        ("timestamp", 1705329000),
        ("correlation_id", ""),
    ],
)
def test_a_wrong_field_of_a_message_is_named(field: str, value: Any) -> None:
    with pytest.raises(ContractViolation) as refused:
        message.decode_message(body("message", **{field: value}))
    assert refused.value.field == field


@pytest.mark.parametrize("written", ["2024-01-15T14:30:00Z", "2024-01-15T14:30:00+00:00", "2024-01-15T14:30:00.000Z"])
def test_utc_may_be_written_in_each_of_its_ways(written: str) -> None:
    envelope = message.decode_message(body("message", timestamp=written))
    assert envelope.timestamp == datetime(2024, 1, 15, 14, 30, tzinfo=UTC)


def test_unknown_fields_of_a_message_are_ignored() -> None:
    expected = message.decode_message(body("message"))
    assert message.decode_message(body("message", added_in_1_0={"deep": [1, {"x": "y"}]})) == expected


@pytest.mark.parametrize(
    ("kind", "field"), [("message", "schema_version"), ("runtime", "schema_version"), ("realtime", "version")]
)
def test_another_version_is_reported_before_anything_else(kind: str, field: str) -> None:
    check = next(one.check for one in schemas.PUBLISHED if one.kind == kind)
    with pytest.raises(UnsupportedVersion) as refused:
        check(json.dumps({field: "2.0", "all": "different"}).encode())
    assert (refused.value.version, refused.value.field) == ("2.0", field)
    with pytest.raises(UnsupportedVersion):
        check(body(kind, **{field: "1.1"}))


def test_a_version_that_is_no_text_is_a_violation_and_no_version() -> None:
    with pytest.raises(ContractViolation) as refused:
        message.decode_message(body("message", schema_version=1.0))
    assert not isinstance(refused.value, UnsupportedVersion)
    assert refused.value.field == "schema_version"


def test_the_platforms_event_id_is_read_as_message_id() -> None:
    expected = message.decode_message(body("message", message_id="e-1"))
    assert message.decode_message(body("message", message_id=..., event_id="e-1")) == expected
    assert message.decode_message(body("message", message_id="e-1", event_id="other")) == expected


def test_encoding_refuses_what_decoding_would_refuse() -> None:
    good = message.decode_message(body("message"))
    for wrong in (
        {"payload": {"x": float("nan")}},
        {"payload": {"x": "\ud800"}},
        {"payload": [1]},
        {"timestamp": datetime(2024, 1, 1)},
        {"timestamp": datetime(2024, 1, 1, tzinfo=timezone(timedelta(hours=2)))},
        {"actor_kind": "ROBOT"},
        {"message_id": "a\nb"},
        {"message_id": b"bytes"},
        {"message_id": object()},
        {"schema_version": "2.0"},
        {"payload": {"x": object()}},
        {"payload": {1: 2}},
    ):
        with pytest.raises(ContractViolation):
            message.encode_message(msgspec.structs.replace(good, **wrong))


def test_a_new_message_derives_its_key_from_type_id_and_payload() -> None:
    def made(**changed: Any) -> str:
        named = {"message_type": "LoopCreated", "payload": {"a": 1}, "message_id": "m"} | changed
        when = datetime(2024, 1, 1, tzinfo=UTC)
        return message.new_message(**named, timestamp=when, actor_id="a", actor_kind="AGENT").idempotency_key

    keys = [made(), made(message_id="n"), made(message_type="X"), made(payload={"a": 2})]
    assert len(set(keys)) == 4
    assert made() == keys[0]


def test_types_of_a_payload_survive_the_wire() -> None:
    good = message.decode_message(body("message"))
    sent = {"whole": 1, "fraction": 1.0, "large": 1e20, "zero": -0.0, "whole and large": 10**20}
    read = message.decode_message(message.encode_message(msgspec.structs.replace(good, payload=sent))).payload
    assert {name: repr(value) for name, value in read.items()} == {name: repr(value) for name, value in sent.items()}


@pytest.mark.parametrize("number", [2**53 + 1, 1_705_329_000_123_456_789, 2**64 - 1, -(2**63), 10**100])
@pytest.mark.parametrize("kind", ["message", "runtime"])
def test_a_large_whole_number_is_read_and_told_from_its_neighbour(kind: str, number: int) -> None:
    """A producer with 64-bit ids or nanoseconds: RFC 8785 would give both one digest."""
    subject = "sr.events.loop" if kind == "message" else SUBJECT
    one, other = (taken(subject, body(kind, payload={"n": value})) for value in (number, number + 1))
    assert one.envelope.payload == {"n": number}
    assert one.digest != other.digest
    if kind == "message":
        sent = inputs.as_message(one.envelope)
        assert sent.payload == message.decode_message(message.encode_message(sent)).payload
        assert sent.idempotency_key != inputs.as_message(other.envelope).idempotency_key
    else:
        assert one.envelope == runtime.decode_runtime(
            runtime.encode_runtime(one.envelope), subject=SUBJECT, origin=ORIGIN, carried={}
        )


def test_a_tuple_goes_out_as_an_array() -> None:
    good = message.decode_message(body("message"))
    sent = message.encode_message(msgspec.structs.replace(good, payload={"x": (1, 2)}))
    assert message.decode_message(sent).payload == {"x": [1, 2]}


def test_peeking_does_not_look_at_the_payload() -> None:
    raw = message.peek_message(body("message", payload={"n": 2**60 + 1}))
    assert json.loads(bytes(raw.payload)) == {"n": 2**60 + 1}
    assert runtime.peek_runtime(b'{"type":"x","payload":[1]}').type == "x"


LEAN = b'{"type":"order.placed","payload":{"order":17}}'


def read(
    sent: bytes = LEAN, subject: str = SUBJECT, origin: ids.Origin = ORIGIN, **carried: str
) -> runtime.RuntimeEnvelope:
    named = {name.replace("_", "-"): value for name, value in carried.items()}
    return runtime.decode_runtime(sent, subject=subject, origin=origin, carried=named)


def test_what_a_lenient_producer_leaves_out_is_filled_from_the_message_alone() -> None:
    filled = read()
    assert filled == read()
    begun = trace.begun_by(filled.id)
    assert filled == runtime.RuntimeEnvelope(
        id=ids.origin_id(ORIGIN),
        ts=1_705_329_000_123,
        type="order.placed",
        schema_version="1.0",
        trace_id=begun.trace_id,
        span_id=begun.span_id,
        tenant="default",
        workspace="demo",
        actor=runtime.Actor("unknown", "unknown"),
        payload={"order": 17},
        idempotency_key=ids.origin_id(ORIGIN),
        source=runtime.Source("unknown", "unknown"),
        security_context=runtime.SecurityContext("unknown", "service"),
    )


def test_null_is_filled_like_absent() -> None:
    empty = dict.fromkeys(name for name in runtime.RuntimeOnWire.__struct_fields__ if name not in ("type", "payload"))
    assert read(json.dumps({"type": "order.placed", "payload": {"order": 17}} | empty).encode()) == read()


def test_the_id_comes_from_the_body_then_the_replay_then_the_msg_id_then_the_position() -> None:
    with_id = b'{"type":"x","payload":{},"id":"own"}'
    carried = {"Nats_Msg_Id": "rp.1", "Oncewire_Replay_Id": "first"}
    assert read(with_id, **carried).id == "own"
    assert read(**carried).id == "first"
    assert read(Nats_Msg_Id="mine").id == "mine"
    assert (
        len({read(origin=ORIGIN._replace(**{name: 3})).id for name in ("created_ns", "sequence", "timestamp_ns")}) == 3
    )


def test_a_replay_is_filled_as_its_original_was() -> None:
    original = read(Nats_Msg_Id="first")
    replayed = read(
        origin=ids.Origin("OTHER", 1, 2, 3),
        Nats_Msg_Id="rp.abc",
        Oncewire_Replay_Id=original.id,
        Oncewire_Replay_Idempotency_Key=original.idempotency_key,
        Oncewire_Replay_Ts=str(original.ts),
    )
    assert replayed == original


def test_a_replay_time_that_is_no_time_does_not_count() -> None:
    for wrong in ("", "x", "-1", "1" * 400, "١"):
        assert read(Oncewire_Replay_Ts=wrong).ts == read().ts


def test_the_key_is_the_id_unless_someone_says_otherwise() -> None:
    assert read(Nats_Msg_Id="mine").idempotency_key == "mine"
    assert read(b'{"type":"x","payload":{},"idempotency_key":"k"}', Nats_Msg_Id="mine").idempotency_key == "k"


@pytest.mark.parametrize("field", ["tenant", "workspace"])
def test_a_body_cannot_claim_another_owner_than_its_subject(field: str) -> None:
    for sent in (json.dumps({"type": "x", "payload": {}, field: "else"}).encode(), body("runtime", **{field: "else"})):
        with pytest.raises(ContractViolation) as refused:
            read(sent)
        assert refused.value.field == field


PARENT = trace.TraceContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")


def traced(trace_id: Any, span_id: Any, **carried: str) -> tuple[str, str]:
    sent = {"type": "x", "payload": {}, "id": "m", "trace_id": trace_id, "span_id": span_id}
    envelope = read(json.dumps(sent).encode(), **carried)
    return envelope.trace_id, envelope.span_id


def test_a_trace_is_continued_and_never_invented_over_an_existing_one() -> None:
    begun = trace.begun_by("m")
    own = ("a" * 32, "b" * 16)
    header = PARENT.traceparent
    assert traced(*own, traceparent=header) == own
    assert traced(None, None, traceparent=header) == PARENT[:2]
    assert traced(PARENT.trace_id, None, traceparent=header) == PARENT[:2]
    assert traced(own[0], None, traceparent=header) == (own[0], begun.span_id)
    assert traced(own[0], None) == (own[0], begun.span_id)
    assert traced("not-a-trace", "x", traceparent=header) == PARENT[:2]
    assert traced("0" * 32, "0" * 16) == begun[:2]
    assert traced(None, None, traceparent="00-garbage") == begun[:2]


def test_a_complete_envelope_whose_trace_is_none_gets_one() -> None:
    for wrong in ({"trace_id": "nope"}, {"span_id": "0" * 16}):
        assert trace.are_ids(*(getattr(read(body("runtime", **wrong)), name) for name in ("trace_id", "span_id")))


def test_the_principal_is_the_actor_when_only_that_is_known() -> None:
    def principal(role: str) -> runtime.SecurityContext:
        return read(
            json.dumps({"type": "x", "payload": {}, "actor": {"id": "u", "role": role}}).encode()
        ).security_context

    assert principal("user") == runtime.SecurityContext("u", "user")
    assert principal("admin") == runtime.SecurityContext("u", "service")


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"type": ...}, "type"),
        ({"type": ""}, "type"),
        ({"payload": ...}, "payload"),
        ({"payload": []}, "payload"),
        ({"ts": -1}, "ts"),
        ({"ts": 1.5}, "ts"),
        ({"ts": 10**30}, "ts"),
        ({"actor": {"id": "x"}}, "actor.role"),
        ({"security_context": {"principal_id": "x", "principal_type": "robot"}}, "security_context.principal_type"),
        ({"expected_version": -1}, "expected_version"),
        ({"reply_to": "a.*"}, "reply_to"),
        ({"id": "a\nb"}, "id"),
        ({"idempotency_key": "a\x00"}, "idempotency_key"),
    ],
)
def test_a_wrong_field_of_a_runtime_message_is_named(changed: dict[str, Any], field: str) -> None:
    with pytest.raises(ContractViolation) as refused:
        read(body("runtime", **changed))
    assert refused.value.field == field


def test_an_encoded_runtime_envelope_refuses_what_readers_would() -> None:
    good = read(body("runtime"))
    for wrong in ({"reply_to": "a.>"}, {"ts": -1}, {"payload": {"x": float("inf")}}, {"type": ""}):
        with pytest.raises(ContractViolation):
            runtime.encode_runtime(msgspec.structs.replace(good, **wrong))


def test_handlers_see_a_message_in_the_shape_of_the_runtime() -> None:
    sent = message.decode_message(body("message", payload={"tenant_id": "acme", "n": 1}))
    seen = inputs.view(sent, {headers.TRACEPARENT: PARENT.traceparent})
    assert seen == runtime.RuntimeEnvelope(
        id=sent.message_id,
        ts=1_705_329_000_000,
        type="LoopCreated",
        schema_version="1.0",
        trace_id=PARENT.trace_id,
        span_id=PARENT.span_id,
        tenant="acme",
        workspace="default",
        actor=runtime.Actor(sent.actor_id, "user"),
        payload={"tenant_id": "acme", "n": 1},
        idempotency_key=sent.idempotency_key,
        source=runtime.Source("unknown", "unknown"),
        security_context=runtime.SecurityContext(sent.actor_id, "user"),
        correlation_id=sent.correlation_id,
    )


@pytest.mark.parametrize(("kind", "role"), [("HUMAN", "user"), ("AGENT", "agent"), ("SYSTEM", "system")])
def test_actor_kinds_map_both_ways(kind: str, role: str) -> None:
    seen = inputs.view(message.decode_message(body("message", actor_kind=kind)), {})
    assert seen.actor.role == seen.security_context.principal_type == role
    assert inputs.as_message(seen).actor_kind == kind


def test_a_service_goes_out_as_system_and_times_survive_the_way_back() -> None:
    seen = read(body("runtime", security_context={"principal_id": "s", "principal_type": "service"}))
    sent = inputs.as_message(seen)
    assert sent.actor_kind == "SYSTEM"
    assert inputs.view(sent, {}).ts == seen.ts
    assert message.decode_message(message.encode_message(sent)) == sent


@pytest.mark.parametrize(("tenant", "seen"), [(None, "default"), ("", "default"), (..., "default"), ("t", "t")])
def test_a_message_without_a_tenant_belongs_to_the_default_one(tenant: Any, seen: str) -> None:
    payload = {} if tenant is ... else {"tenant_id": tenant}
    assert inputs.view(message.decode_message(body("message", payload=payload)), {}).tenant == seen


def test_a_tenant_that_is_no_text_is_refused_rather_than_mixed_into_another() -> None:
    with pytest.raises(ContractViolation) as refused:
        inputs.view(message.decode_message(body("message", payload={"tenant_id": 7})), {})
    assert refused.value.field == "payload.tenant_id"


def taken(subject: str, sent: bytes) -> inputs.Input:
    return inputs.read_input(sent, subject=subject, origin=ORIGIN, carried={})


DEEP: dict[str, Any] = {}
for _ in range(64):
    DEEP = {"n": DEEP}


def test_an_input_is_read_by_the_contract_of_its_subject() -> None:
    seen = taken("sr.events.loop", body("message"))
    assert seen.envelope == inputs.view(message.decode_message(body("message")), {})
    assert seen.identity == "key:default/default/sha256:abc123def456..."
    assert taken("platform.billing.usage.metered", body("message", message_id="m")).identity == "id:default/default/m"
    assert taken(SUBJECT, body("runtime")).identity == "key:default/demo/ord-17"
    for foreign in ("chat.events.c1", "dlq.sr.events.loop", "nobody.knows"):
        with pytest.raises(ContractViolation, match="no envelope for agents"):
            taken(foreign, body("message"))


def test_the_digest_sees_type_and_payload_and_nothing_else() -> None:
    digest = taken("sr.events.loop", body("message")).digest
    moved = body("message", message_id="other", timestamp="2025-01-01T00:00:00Z", extra=1)
    payload = dict(reversed(example("message")["payload"].items()))
    assert (
        digest
        == taken("sr.events.other", moved).digest
        == taken("sr.events.loop", body("message", payload=payload)).digest
    )
    assert digest != taken("sr.events.loop", body("message", message_type="LoopClosed")).digest
    assert digest != taken("sr.events.loop", body("message", payload={})).digest
    lean = json.dumps({"type": "LoopCreated", "payload": payload}).encode()
    assert digest == taken(SUBJECT, lean).digest


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"conversationId": "a.b"}, "conversationId"),
        ({"sequence": -1}, "sequence"),
        ({"sequence": 2**53}, "sequence"),
        ({"issuedAt": "2025-01-01T12:00:00+01:00"}, "issuedAt"),
        ({"contract": {"guarantee": "exactly-once", "dedupeKey": "x"}}, "contract.guarantee"),
        ({"event": {"type": "chat.unheard.of"}}, "event.type"),
        ({"event": {"type": "chat.presence", "userId": "u", "state": "asleep"}}, "event.state"),
        ({"event": {"type": "chat.token.chunk", "messageId": "m", "chunkId": "c"}}, "event.token"),
        ({"event": {"type": "chat.stream.lifecycle", "messageId": "m", "status": "paused"}}, "event.status"),
        ({"event": {"type": "chat.presence", "userId": "u", "state": "idle", "metadata": DEEP}}, "event.metadata"),
    ],
)
def test_a_wrong_field_of_a_realtime_envelope_is_named(changed: dict[str, Any], field: str) -> None:
    with pytest.raises(ContractViolation) as refused:
        realtime.decode_realtime(body("realtime", **changed))
    assert refused.value.field == field


def test_unknown_fields_of_a_realtime_envelope_are_ignored() -> None:
    assert realtime.decode_realtime(body("realtime", later=[1])) == realtime.decode_realtime(body("realtime"))


def test_realtime_identities_follow_the_kind_of_event() -> None:
    created = realtime.decode_realtime(body("realtime"))

    def of(event: realtime.Event, epoch: str = "e1", origin: ids.Origin = ORIGIN, sequence: int = 42) -> str:
        return realtime.identity(
            msgspec.structs.replace(created, event=event, sequence=sequence), epoch=epoch, origin=origin
        )

    elsewhere = ORIGIN._replace(sequence=18)
    chunk = realtime.TokenChunk(message_id="m", chunk_id="1", token="x")
    started = realtime.StreamLifecycle(message_id="m", status="started")
    present = realtime.Presence(user_id="u", state="online")
    assert of(created.event) == of(created.event, origin=elsewhere)
    assert len({of(created.event), of(created.event, epoch="e2"), of(created.event, sequence=43)}) == 3
    assert of(chunk) == of(msgspec.structs.replace(chunk, token="y"), origin=elsewhere, sequence=1)
    assert of(started) != of(msgspec.structs.replace(started, status="completed"))
    assert of(present) != of(present, origin=elsewhere)


def test_a_deadline_is_read_under_each_of_its_names() -> None:
    when = datetime(2025, 12, 21, 12, tzinfo=UTC)
    for sent in (
        {"deadline": "2025-12-21T12:00:00Z"},
        {"deadline": "2025-12-21T14:00:00+02:00"},
        {"deadline_rfc3339": "2025-12-21T12:00:00Z"},
        {"deadline_ms": 1766318400000},
        {"deadline_ms": 1766318400000, "deadline": "2025-12-21T12:00:00Z", "deadline_rfc3339": None},
    ):
        read_back = broker.decode_produce(body("broker", envelope=sent))
        assert read_back.envelope == broker.BrokerEnvelope(deadline=when)


def test_fields_that_are_null_are_as_if_left_out() -> None:
    lenient = {"run_id": None, "retry_policy": {"max_attempts": 3, "backoff_ms": None}, "partition_override": None}
    sent = broker.decode_produce(body("broker", key=None, envelope=lenient))
    assert sent.key == ""
    assert sent.envelope == broker.BrokerEnvelope(retry_policy=broker.RetryPolicy(max_attempts=3))
    assert broker.decode_produce(body("broker", envelope=None)).envelope is None


def test_names_of_topics_are_trimmed() -> None:
    sent = broker.decode_produce(body("broker", topic=" t1 ", envelope={"target_topic": " t2\t"}))
    assert sent.topic == "t1"
    assert sent.envelope == broker.BrokerEnvelope(target_topic="t2")


@pytest.mark.parametrize(
    "changed", [{"topic": ...}, {"topic": ""}, {"topic": "  "}, {"value": ""}, {"value": ...}, {"topic": None}]
)
def test_a_produce_without_topic_or_value_says_the_sentence_that_clients_match_on(changed: dict[str, Any]) -> None:
    with pytest.raises(ContractViolation, match=r"\Atopic and value are required\Z"):
        broker.decode_produce(body("broker", **changed))


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"extra": 1}, "extra"),
        ({"envelope": {"labels": {}}}, "envelope.labels"),
        ({"envelope": {"dlq": {"original_topic": "t"}}}, "envelope.dlq"),
        ({"envelope": {"retry_policy": {"tries": 1}}}, "envelope.retry_policy.tries"),
        ({"envelope": {"retry_policy": {"backoff_ms": 5}}}, "envelope.retry_policy.max_attempts"),
        ({"envelope": {"partition_override": -1}}, "envelope.partition_override"),
        ({"envelope": {"partition_override": "1"}}, "envelope.partition_override"),
        ({"envelope": {"deadline": "soon"}}, "envelope.deadline"),
        ({"envelope": {"deadline": "2025-12-21T12:00:00"}}, "envelope.deadline"),
        ({"envelope": {"deadline_ms": "x"}}, "envelope.deadline_ms"),
        ({"envelope": {"deadline_ms": 10**30}}, "envelope.deadline_ms"),
        ({"envelope": {"deadline_ms": 1, "deadline": "2025-12-21T12:00:00Z"}}, "envelope.deadline"),
        ({"envelope": {"target_topic": "a\nb"}}, "envelope.target_topic"),
        ({"topic": "t" * 201}, "topic"),
        ({"topic": "a\x00b"}, "topic"),
        ({"value": 7}, "value"),
        ({"value": {"not": "text"}}, "value"),
    ],
)
def test_a_wrong_field_of_a_produce_is_named(changed: dict[str, Any], field: str) -> None:
    with pytest.raises(ContractViolation) as refused:
        broker.decode_produce(body("broker", **changed))
    assert refused.value.field == field


def test_a_delivery_keeps_the_order_of_its_fields_and_leaves_out_what_is_empty() -> None:
    plain = broker.Delivery(partition=0, offset=1, attempts=1, key="", value="v", last_error="")
    assert broker.encode_delivery(plain) == (
        b'{"partition":0,"offset":1,"attempts":1,"key":"","value":"v","last_error":""}'
    )
    letter = broker.DeadLetter(
        original_topic="t", original_partition=0, original_offset=1, attempts=3, last_error="x", routed_at_ms=5
    )
    routed = msgspec.structs.replace(
        plain, routing=broker.Routing(label="l"), envelope=broker.DeliveredEnvelope(run_id="r", dlq=letter)
    )
    assert broker.encode_delivery(routed).endswith(
        b'"routing":{"label":"l"},"envelope":{"run_id":"r","dlq":{"original_topic":"t","original_partition":0,'
        b'"original_offset":1,"attempts":3,"last_error":"x","routed_at_ms":5}}}'
    )


text = st.text(max_size=20)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)


WHO = runtime.Actor("biller\0", "agent")
SHARED: dict[str, Any] = {
    "tenant": "default",
    "workspace": "de\\mo",
    "actor": WHO,
    "source": runtime.Source("biller", "o"),
    "security_context": runtime.SecurityContext("biller", "agent"),
}


def caused(payload: dict[str, Any], id_: str, correlation_id: str | None, ts: int = 1) -> list[bytes | None]:
    """The message as it is written into a frame, and as `encode_runtime` writes it; None: not by this way."""
    fixed: dict[str, Any] = {"schema_version": "1.0", "trace_id": "1" * 32}
    cause = runtime.RuntimeEnvelope(
        id=id_, ts=ts, type="c", span_id="3" * 16, payload={}, idempotency_key="k", correlation_id=correlation_id,
        **fixed, **SHARED,
    )  # fmt: skip
    frame = runtime.frame("t", **SHARED)
    assert frame is not None
    plain = runtime.write_plain(payload, cause)
    if plain is None:
        return [None, None]
    follower = runtime.RuntimeEnvelope(
        id="fx.1", ts=ts, type="t", span_id="2" * 16, payload=payload, idempotency_key="fx.1", causation_id=id_,
        correlation_id=correlation_id or id_, **fixed, **SHARED,
    )  # fmt: skip
    return [*runtime.write_all_caused([(frame, plain, "fx.1", "2" * 16, cause)]), runtime.encode_runtime(follower)]


@given(st.dictionaries(text, anything, max_size=4), text, st.none() | text, st.integers(0, runtime.TS_MS_MAX))
def test_what_is_written_into_a_frame_is_what_the_whole_envelope_would_be(
    payload: dict[str, Any], cause: str, correlation: str | None, ts: int
) -> None:
    framed, whole = caused(payload, cause or "x", correlation or None, ts)
    assert whole == framed


def test_messages_that_are_written_together_keep_their_own_causes() -> None:
    frame = runtime.frame("t", **SHARED)
    assert frame is not None
    fixed: dict[str, Any] = {"schema_version": "1.0", "trace_id": "1" * 32, "span_id": "3" * 16, "payload": {}}
    causes = [
        runtime.RuntimeEnvelope(
            id=f"c\n{at}", ts=at, type="c", idempotency_key="k", correlation_id=f"r{at}" if at % 2 else None,
            **fixed, **SHARED,
        )
        for at in range(5)
    ]  # fmt: skip
    messages: list[runtime.Caused] = [(frame, b"{}", f"fx.{one.ts}", "2" * 16, one) for one in causes]

    together = runtime.write_all_caused(messages)

    assert [runtime.write_all_caused([one])[0] for one in messages] == together
    read = [msgspec.json.decode(body) for body in together]
    assert [one.id for one in causes] == [one["causation_id"] for one in read]
    assert [one.correlation_id or one.id for one in causes] == [one["correlation_id"] for one in read]


def test_a_frame_writes_what_is_plain_and_leaves_the_rest_to_the_whole_way() -> None:
    def written(payload: dict[str, Any], cause: str = "c", correlation: str = "c") -> bytes | None:
        return caused(payload, cause, correlation)[0]

    assert written({"order": 17, "lines": [{"cents": 1}], "note": "ä\0\n", "rate": 0.5}) is not None
    assert [None] * 5 == [written({"a": one}) for one in (float("nan"), 10**4_300, b"raw", object(), "\ud800")]
    assert written({"a": "x" * runtime.PLAIN_BYTES_MAX}) is None
    assert written({}, cause="x" * 600) is written({}, correlation="x" * 600) is None


def test_no_frame_makes_a_message_longer_than_is_promised() -> None:
    """Whoever has room for FRAMED_BYTES_MAX need not look at each."""
    longest = {"a": "x" * (runtime.PLAIN_BYTES_MAX - 8)}
    body, _ = caused(longest, "\0" * 512, "\1" * 512, runtime.TS_MS_MAX)
    assert body is not None
    around = runtime.frame("t", **SHARED)
    assert around is not None
    assert len(body) - len("".join(around)) + runtime.FRAME_BYTES_MAX <= runtime.FRAMED_BYTES_MAX
    assert runtime.frame("t", **SHARED | {"workspace": "w" * runtime.FRAME_BYTES_MAX}) is None


def test_a_frame_refuses_what_no_envelope_may_have() -> None:
    with pytest.raises(ContractViolation):
        runtime.frame(
            "",
            tenant="default",
            workspace="demo",
            actor=runtime.NO_ACTOR,
            source=runtime.NO_SOURCE,
            security_context=runtime.SecurityContext("x", "service"),
        )
