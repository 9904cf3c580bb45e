"""Garbage of every kind gets one clear sentence: never a crash, never another exception, never a half-read value."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from oncewire._ground.contracts import codec, ids, inputs, message, runtime, schemas
from oncewire._ground.errors import ContractViolation, TooLarge

EXAMPLES = {one.kind: one.example.encode() for one in schemas.PUBLISHED}
CHECKS = {one.kind: one.check for one in schemas.PUBLISHED}
KINDS = list(CHECKS)


def refused(kind: str, body: bytes) -> ContractViolation:
    with pytest.raises(ContractViolation) as wrong:
        CHECKS[kind](body)
    assert wrong.value.__cause__ is None
    return wrong.value


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"\xef\xbb\xbf{}", "byte order mark"),
        (b"[]", "expected `object`, got `array`"),
        (b"null", "expected `object`, got `null`"),
        (b'"text"', "expected `object`, got `str`"),
        (b"17", "expected `object`, got `int`"),
        (b"{", "cut off"),
        (b'{"a": ', "cut off"),
        (b"{} x", "trailing characters"),
        (b"{}{}", "trailing characters"),
        (b"{'a': 1}", "is not JSON"),
        (b"{a: 1}", "is not JSON"),
        (b'{"a": 01}', "is not JSON"),
        (b'{"a": NaN}', "is not JSON"),
        (b'{"a": -Infinity}', "is not JSON"),
        (b'{"a": "\x01"}', "is not JSON"),
        (b'{"a": "\\x41"}', "is not JSON"),
        (b'{"a": 1,}', "is not JSON"),
        (b"\x00\x01\x02", "is not JSON"),
        (b"PUB evt.x 5\r\nhello\r\n", "is not JSON"),
    ],
)
def test_a_body_that_is_no_object_of_json_is_refused(kind: str, body: bytes, says: str) -> None:
    assert says in refused(kind, body).message


@pytest.mark.parametrize("kind", KINDS)
def test_every_cut_of_a_message_is_refused(kind: str) -> None:
    whole = EXAMPLES[kind]
    for length in range(len(whole)):
        refused(kind, whole[:length])


@pytest.mark.parametrize("kind", KINDS)
def test_every_byte_of_a_message_may_be_wrong_without_another_exception(kind: str) -> None:
    whole = EXAMPLES[kind]
    for at in range(len(whole)):
        for byte in (0x00, 0x22, 0x5C, 0x7B, 0xFF):
            with contextlib.suppress(ContractViolation):
                CHECKS[kind](whole[:at] + bytes([byte]) + whole[at + 1 :])


@given(st.sampled_from(KINDS), st.binary(max_size=200))
def test_bytes_by_chance_are_refused(kind: str, body: bytes) -> None:
    refused(kind, body)


def with_payload(kind: str, payload: bytes) -> bytes:
    """A message or runtime body around a payload that json.dumps could not write."""
    mark = json.dumps(json.loads(EXAMPLES[kind]) | {"payload": "HERE"}, separators=(",", ":")).encode()
    return mark.replace(b'"HERE"', payload)


PAYLOAD_KINDS = ["message", "runtime"]


@pytest.mark.parametrize("kind", PAYLOAD_KINDS)
@pytest.mark.parametrize(
    ("payload", "says"),
    [
        (b'{"x":1e400}', "out of range"),
        (b'{"x":' + b"9" * 5000 + b"}", "out of range"),
        (b'{"x":"\\ud800"}', "surrogate"),
        (b'{"x":"\\udc00 "}', "surrogate"),
        (b'{"x":"\\ud800\\ud800"}', "surrogate"),
        (b'{"\\ud800":1}', "surrogate"),
        (b'{"x":"\xff"}', "not UTF-8"),
        (b'{"x":"\xc0\xaf"}', "not UTF-8"),
        (b'{"x":"\xed\xa0\x80"}', "not UTF-8"),
        (b'{"\xff":1}', "not UTF-8"),
        (b"[]", "expected `object`"),
        (b'"x"', "expected `object`"),
    ],
)
def test_a_payload_that_other_readers_could_not_carry_is_refused(kind: str, payload: bytes, says: str) -> None:
    wrong = refused(kind, with_payload(kind, payload))
    assert says in wrong.message
    assert wrong.field.split(".")[0] in ("payload", "")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("unknown", [b"9e999", b'"\xff"', b'"\\ud800"', b'{"a":1,"a":2}', b"[" * 70 + b"]" * 70])
def test_fields_that_are_ignored_must_still_be_json(kind: str, unknown: bytes) -> None:
    body = EXAMPLES[kind].replace(b"{", b'{"not_known_to_us":%b,' % unknown, 1)
    refused(kind, body)


def nested(depth: int, opening: bytes, closing: bytes) -> bytes:
    return opening * depth + b"1" + closing * depth


NESTS = [(b"[", b"]"), (b'{"a":', b"}"), (b'[{"a.b":', b"}]")]


@pytest.mark.parametrize("kind", PAYLOAD_KINDS)
@pytest.mark.parametrize("nest", NESTS, ids=str)
@pytest.mark.parametrize("depth", [65, 500, 10_000, 200_000])
def test_what_is_nested_too_deep_is_refused(kind: str, nest: tuple[bytes, bytes], depth: int) -> None:
    payload = b'{"x":' + nested(depth, *nest) + b"}"
    assert "deeper than 64" in refused(kind, with_payload(kind, payload)).message
    assert "deeper than 64" in refused(kind, b'{"unknown":' + payload + b"," + with_payload(kind, b"{}")[1:]).message


@pytest.mark.parametrize("kind", ["broker", "delivery", "realtime"])
def test_depth_is_limited_where_there_is_no_payload_too(kind: str) -> None:
    refused(kind, b'{"x":' + nested(10_000, b"[", b"]") + b"}")


def test_the_deepest_payload_that_is_allowed_is_read() -> None:
    deep = b'{"x":' + nested(codec.DEPTH_MAX - 1, b"[", b"]") + b"}"
    assert message.decode_message(with_payload("message", deep)).payload["x"]
    with pytest.raises(ContractViolation, match="deeper"):
        message.decode_message(with_payload("message", b'{"x":' + nested(codec.DEPTH_MAX, b"[", b"]") + b"}"))


def test_brackets_inside_strings_are_not_depth() -> None:
    text = '[{"' * 100 + "\\" * 5 + '"]}' * 90
    body = json.dumps(json.loads(EXAMPLES["message"]) | {"unknown": text, "payload": {"x": text}}).encode()
    assert message.decode_message(body).payload == {"x": text}


def test_many_shallow_objects_are_not_depth() -> None:
    many = [{"a": [1]} for _ in range(500)]
    body = json.dumps(json.loads(EXAMPLES["message"]) | {"unknown": many, "payload": {"x": many}}).encode()
    assert message.decode_message(body).payload == {"x": many}


JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=20,
)


@given(JSON, st.integers(1, 6))
def test_depth_counted_on_bytes_is_the_depth_of_the_value(value: Any, depth: int) -> None:
    assert codec.is_within_depth(json.dumps(value).encode(), depth) == (_depth(value) <= depth)


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(_depth, inner), default=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_name_that_stands_twice_is_refused_at_the_top(kind: str) -> None:
    for name, value in json.loads(EXAMPLES[kind]).items():
        for given_twice in (value, None, 0, "", {}):
            twice = b"{%b:%b," % (json.dumps(name).encode(), json.dumps(given_twice).encode())
            for whole in (EXAMPLES[kind], json.dumps(json.loads(EXAMPLES[kind]), separators=(",", ":")).encode()):
                refused(kind, whole.replace(b"{", twice, 1))


@pytest.mark.parametrize("kind", PAYLOAD_KINDS)
@pytest.mark.parametrize(
    "payload",
    [
        b'{"a":1,"a":1}',
        b'{"a":1,"b":{"c":1,"c":2}}',
        b'{"a":[{"c":"","c":""}]}',
        b'{"a":1.5,"a":1.5}',
        b'{"a":"\\u0022","a":"\\\\"}',
        b'{"\\u0061":1,"a":2}',
        b'{"\xc3\xa9":1,"\\u00e9":2}',
        b'{"a": 1, "a": 1}',
        b'{"":0,"":1}',
        b'{"x":1e15,"a":1,"a":2}',
        b'{"x":1e-3,"":0,"":0}',
        b'{"x":1e7,"":0,"":0}',
        b'{"a":1e-3,"b":1e-3,"c":1e-3,"d":1e-3,"e":1e-3,"":0,"":0}',
    ],
)
def test_a_name_that_stands_twice_in_a_payload_is_refused_and_named(kind: str, payload: bytes) -> None:
    wrong = refused(kind, with_payload(kind, payload))
    assert "stands twice" in wrong.message


def test_a_repeat_cannot_hide_behind_a_longer_way_of_writing_the_rest() -> None:
    """The fast check compares lengths: nothing may grow by as much as a repeated member takes away."""
    base = json.loads(EXAMPLES["message"])
    for fraction in (".1Z", ".12Z", ".123456Z", "Z", "+00:00"):
        whole = json.dumps(base | {"timestamp": f"2024-01-15T14:30:00{fraction}"}, separators=(",", ":")).encode()
        for twice in (b'"actor_id":"",', b'"payload":{},', b'"payload":0,', b'"causation_id":0,'):
            refused("message", whole.replace(b"{", b"{" + twice, 1))


@pytest.mark.parametrize("kind", ["message", "runtime"])
def test_a_repeat_cannot_hide_behind_a_field_that_is_left_out(kind: str) -> None:
    """The other check compares the number of strings: nothing that is filled in may count."""
    whole = json.loads(EXAMPLES[kind])
    for left_out in whole:
        rest = json.dumps({name: value for name, value in whole.items() if name != left_out}).encode()
        for times in (2, 3, 4):
            refused(kind, rest.replace(b"{", b"{" + b'"payload":{},' * times, 1))
            refused(kind, rest.replace(b"{", b"{" + b'"payload":{"a":"b"},' * times, 1))


def test_a_repeat_cannot_hide_behind_a_body_that_had_to_be_mended() -> None:
    refused("broker", b'{"topic":"t","value":"v","key":1,"key":null,"envelope":{"deadline_ms":1000}}')
    refused("broker", b'{"topic":"t","value":"v","value":"v","envelope":{"deadline_ms":1000,"run_id":null}}')
    twice = b'"partition_override":1,"partition_override":1'  # as many strings fewer as the deadline gets more
    refused("broker", b'{"topic":"t","value":"v","envelope":{"deadline_ms":1000,%b}}' % twice)
    refused("message", EXAMPLES["message"].replace(b'"message_id"', b'"event_id":"x","event_id"'))


@pytest.mark.parametrize(
    "payload", [b'{"a":"\\u005c"}', b'{"a":"\\u005c\\u0022"}', b'{"\\u005c":"\\\\"}', b'{ "a" : "\\/" }']
)
@pytest.mark.parametrize("kind", PAYLOAD_KINDS)
def test_the_same_character_escaped_in_another_way_is_no_repeat(kind: str, payload: bytes) -> None:
    CHECKS[kind](with_payload(kind, payload))


@given(st.dictionaries(st.text(max_size=3), JSON, max_size=4), st.booleans(), st.booleans())
@example({"a": "\\", 'b"': '"'}, True, False)
def test_no_message_without_a_repeat_is_taken_for_one(payload: dict[str, Any], ascii_only: bool, spaced: bool) -> None:
    try:
        json.dumps(payload, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return  # a lone surrogate, which is refused for its own reason
    base = json.loads(EXAMPLES["message"]) | {"payload": payload, "unknown": payload}
    separators = (", ", ": ") if spaced else (",", ":")
    body = json.dumps(base, ensure_ascii=ascii_only, separators=separators).encode()
    assert message.decode_message(body).payload == payload


def test_a_body_over_the_limit_is_too_large() -> None:
    huge = b'{"x":"' + b"a" * codec.BODY_BYTES_MAX + b'"}'
    for kind in KINDS:
        with pytest.raises(TooLarge, match="8372224"):
            CHECKS[kind](huge)


def test_an_agent_gets_one_error_for_garbage_whatever_the_subject() -> None:
    origin = ids.Origin("S", 1, 2, 3)
    for subject in ("evt.t.w.x", "cmd.t.w.a.x", "sr.events.loop", "platform.billing.x", "chat.events.c", "??"):
        with pytest.raises(ContractViolation):
            inputs.read_input(b"\xff", subject=subject, origin=origin, carried={})
    with pytest.raises(ContractViolation, match="control character"):
        runtime.decode_runtime(
            b'{"type":"x","payload":{}}', subject="evt.t.w.x", origin=origin, carried={"Nats-Msg-Id": "\0"}
        )


WHOLE = runtime.encode_runtime(
    runtime.RuntimeEnvelope(
        id="1", ts=1, type="t", schema_version="1.0", trace_id="1" * 32, span_id="2" * 16, tenant="default",
        workspace="demo", actor=runtime.Actor("a", "user"), payload={"a": [1, "x"]}, idempotency_key="k",
        source=runtime.NO_SOURCE, security_context=runtime.SecurityContext("a", "user"),
    )
)  # fmt: skip
NEIGHBOURS = {
    "the same": WHOLE,
    "empty": b"",
    "a line break": b"\n",
    "null": b"null",
    "two in one": WHOLE + b"\n" + WHOLE,
    "in lines": json.dumps(json.loads(WHOLE), indent=1).encode(),
    "with an end": WHOLE + b"\n",
    "cut": WHOLE[:-3],
    "a name twice": WHOLE.replace(b'{"a":', b'{"a":1,"a":'),
    "one that is not known": WHOLE.replace(b'{"id"', b'{"more":1,"id"'),
    "with spaces": WHOLE.replace(b",", b" , "),
    "a repeat inside a line break": WHOLE.replace(b'{"a":', b'{"a":1,\n"a":'),
    "a beginning": WHOLE[:1],
    "the rest of it": WHOLE[1:],
    "two behind each other": WHOLE + WHOLE,
}


@given(st.lists(st.sampled_from(sorted(NEIGHBOURS)), max_size=5))
@example(["two in one", "empty"])
@example(["empty", "two in one"])
@example(["a line break", "in lines", "two in one"])
@example(["a beginning", "the rest of it", "two behind each other"])
def test_messages_that_are_read_together_are_read_as_each_alone(names: list[str]) -> None:
    """All bodies of a read become lines of one text: none may be taken for another, whatever it holds."""
    bodies = [NEIGHBOURS[name] for name in names]
    subject = "evt.default.demo.orders.placed"
    assert [inputs.read_complete(body, subject) for body in bodies] == inputs.read_all_complete(
        bodies, [subject] * len(bodies)
    )


def test_only_a_body_that_says_each_thing_once_is_read_at_a_glance() -> None:
    subject = "evt.default.demo.orders.placed"
    read = {name for name, body in NEIGHBOURS.items() if inputs.read_complete(body, subject) is not None}
    assert {"the same", "in lines", "with an end", "with spaces"} == read
