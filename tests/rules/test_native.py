"""What is compiled beside what is not: the same answers, also to what nobody should send."""

from __future__ import annotations

import hashlib
import itertools
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from oncewire._ground import native
from oncewire._ground.contracts import blocks, hashes, runtime
from oncewire._ground.contracts.codec import BODY_BYTES_MAX
from oncewire._ground.contracts.ids import Origin, effects_begin
from oncewire._ground.contracts.inputs import Input
from oncewire._ground.contracts.runtime import (
    NO_ACTOR,
    NO_SOURCE,
    TS_MS_MAX,
    Actor,
    RuntimeEnvelope,
    SecurityContext,
    Source,
    decode_runtime,
    encode_runtime,
    open_all_complete,
    principal_of,
)
from oncewire._ground.contracts.subjects import parse
from oncewire._ground.errors import ContractViolation, ProtocolViolation
from oncewire._ground.fields import columns, distinct
from oncewire._ground.jetstream import Outgoing
from oncewire._ground.jetstream.protocol import FRAME_BYTES_MAX, Parser
from oncewire._ground.jetstream.pull import Delivery, parse_replies, parse_reply
from oncewire._ground.ledger.rules import Ledger, Sending
from oncewire._ground.native import Columns
from oncewire.agent.effects import Effect, Plain, finished, message_of, sending_of
from oncewire.agent.outflow import outgoing
from tests.support.native import LOOPS

LEDGER = Ledger("l-1", "default", "w", "biller")
HEAD = b"$JS.ACK.ORDERS.biller"
pieces = st.one_of(st.binary(max_size=300), st.text(max_size=80), st.integers(0, 2**70), st.integers(-9, -1))
rows = st.integers(0, 9).flatmap(
    lambda count: st.tuples(st.lists(pieces, min_size=count, max_size=count), st.binary(max_size=9)).map(
        lambda pair: (pair[0], pair[1], pair[0][::-1])
    )
)
words = st.sampled_from(
    [
        b"MSG",
        b"HMSG",
        b"msg",
        b"a",
        b"a.b",
        b"7",
        b"0",
        b"07",
        b"5",
        b"12",
        b"-1",
        b"99999999999999999999",
        b"",
        b"\xff",
    ]
)
gaps = st.sampled_from([b" ", b" ", b" ", b"  ", b"\t", b"\n", b""])
garbage = st.one_of(
    st.binary(max_size=12),
    st.sampled_from([b"PING\r\n", b"+OK\r\n", b"-ERR 'x'\r\n", b"\r\n", b"\r", b'INFO {"a":1}\r\n', b"INFO x\r\n"]),
    st.lists(st.tuples(words, gaps), max_size=7).map(lambda all_: b"".join(a + b for a, b in all_) + b"\r\n"),
)


@st.composite
def message(draw: Any) -> bytes:
    subject = draw(st.sampled_from([b"a", b"evt.a.b", b"\xc3\xa4", b"x" * 300]))
    sid = draw(st.integers(0, 10**18 + 5))
    reply = draw(st.sampled_from([b"", b" r", b" 5", b" $JS.ACK.S.C.1.2.3.4.5"]))
    header = draw(st.sampled_from([b"", b"NATS/1.0\r\n\r\n", b"NATS/1.0\r\nA: b\r\n\r\n"]))
    payload = draw(st.one_of(st.binary(max_size=40), st.just(b"MSG a 1 1\r\nx\r\n")))
    wrong = draw(st.sampled_from([0, 0, 0, 0, 1, -1]))
    size = max(0, len(header) + len(payload) + wrong)
    if header:
        return b"HMSG %b %d%b %d %d\r\n%b%b\r\n" % (subject, sid, reply, len(header), size, header, payload)
    return b"MSG %b %d%b %d\r\n%b\r\n" % (subject, sid, reply, size, payload)


def both(ask: Callable[[], Any]) -> tuple[Any, Any]:
    with pytest.MonkeyPatch.context() as patched:
        compiled = ask()
        for name in LOOPS:
            patched.setattr(native, name, None)
        return compiled, ask()


def parsed(pieces: list[bytes]) -> Any:
    parser, events = Parser(), []
    try:
        for piece in pieces:
            events += parser.feed(piece)
    except ProtocolViolation as violation:
        return events, violation.message
    return events, parser.held_bytes


def test_it_is_compiled_wherever_that_can_be_done() -> None:
    can_be = shutil.which("cc") and (Path(sysconfig.get_paths()["include"]) / "Python.h").exists()
    assert not can_be or native.messages is not None, "make env compiles it"


@given(st.lists(st.one_of(message(), message(), garbage), max_size=12), st.lists(st.integers(0, 2_000), max_size=4))
@example([b"MSG a 1 3\r\nabc\r\n", b"HMSG a 1 r 12 12\r\nNATS/1.0\r\n\r\n\r\n"], [5])
@example([b"HMSG a 1 4 2\r\nab\r\n"], [])
@example([b"MSG a 1 %d\r\n" % (FRAME_BYTES_MAX + 1)], [])
def test_frames_are_read_alike(frames: list[bytes], cuts: list[int]) -> None:
    data = b"".join(frames)
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    fed = [data[first:last] for first, last in itertools.pairwise(edges)]
    compiled, plain = both(lambda: parsed(fed))
    assert plain == compiled


def test_a_frame_larger_than_allowed_is_refused_even_when_all_of_it_came() -> None:
    too_much = FRAME_BYTES_MAX + 1
    compiled, plain = both(lambda: parsed([b"MSG a 1 %d\r\n" % too_much + bytes(too_much) + b"\r\n"]))
    assert plain == compiled
    assert "impossible size" in compiled[1]


numbers = st.one_of(st.integers(0, 2**63 - 1), st.integers(2**63, 2**70)).map(lambda one: b"%d" % one)
tokens = st.one_of(numbers, st.sampled_from([b"", b"+1", b"1_0", b" 1", b"01", b"x"]))


@given(st.lists(st.lists(tokens, min_size=4, max_size=6).map(b".".join), min_size=1, max_size=4), st.booleans())
def test_replies_are_read_alike(ends: list[bytes], is_mixed: bool) -> None:
    replies = [(b"$JS.ACK.OTHER.biller." if is_mixed and at else HEAD + b".") + end for at, end in enumerate(ends)]
    parse_reply(HEAD + b".1.1.1.1.1")  # a consumer that was seen before

    def read() -> Any:
        try:
            return parse_replies(replies)
        except ContractViolation as violation:
            return violation.message

    compiled, plain = both(read)
    assert plain == compiled


def as_bytes(part: Any) -> bytes:
    return part if isinstance(part, bytes) else str(part).encode("utf-8", "surrogatepass")


@given(st.text(max_size=200), rows, st.sampled_from([1, 16, 32, 64]))
@example("", (["\ud800"],), 16)
@example("\ud800", (["a", b"b"],), 16)
@example("x", ([bytes(128), bytes(127), bytes(129), b"", bytes(1_000)],), 64)
def test_hashes_are_those_of_the_library(begin: str, given_: Columns, size: int) -> None:
    rows_ = [[one[at] if isinstance(one, list) else one for one in given_] for at in range(len(given_[0]))]
    texts = [as_bytes(begin) + b"".join(map(as_bytes, row)) for row in rows_]
    compiled, plain = both(lambda: (hashes.blake2b_all(begin, given_, size), hashes.sha256_all(begin, given_)))
    assert [hashlib.blake2b(text, digest_size=size).digest() for text in texts] == compiled[0]
    assert [hashlib.sha256(text).digest() for text in texts] == compiled[1]
    assert plain == compiled


@given(rows)
def test_a_sum_is_the_sum_of_the_digests(given_: Columns) -> None:
    every = blocks.add(blocks.NO_STATE, hashes.blake2b_all("x", given_, blocks.STATE_BYTES))
    assert hashes.blake2b_sum("x", given_) in (every, None)
    compiled, plain = both(lambda: blocks.position_sum("S", [1, 2, 3], [b"a", b"b" * 500, b""]))
    assert plain == compiled


ADDRESS = parse("evt.default.w.a")
MEMBERS = {
    "id": "m-1", "ts": 5, "type": "T", "schema_version": "1.0", "trace_id": "a1" * 16, "span_id": "b2" * 8,
    "tenant": "default", "workspace": "w", "actor": {"id": "a", "role": "service"}, "payload": {"n": [1, {"m": "}"}]},
    "idempotency_key": "k-1", "source": {"agent": "a", "adapter": "b"},
    "security_context": {"principal_id": "p", "principal_type": "user"}, "causation_id": "c", "correlation_id": "d",
}  # fmt: skip
WHOLE = msgspec.json.encode(MEMBERS)
odd_values = st.sampled_from(
    [
        *(
            "",
            "x" * 256,
            "x" * 257,
            "x" * 512,
            "x" * 513,
            "ü",
            'a"b',
            "a\\b",
            "\n",
            "\x7f",
            "0" * 16,
            "0" * 32,
            "A" * 32,
        ),
        *(
            0,
            -1,
            10**15,
            TS_MS_MAX,
            TS_MS_MAX + 1,
            1.5,
            2**70,
            None,
            True,
            [],
            {},
            [[]],
            {"n": 1.5},
            {"n": {"m": 2**60}},
        ),
        *({"id": "a", "role": "r"}, {"agent": "z", "adapter": "b"}, {"principal_id": "p", "principal_type": "king"}),
    ]
)
pastes = st.sampled_from(
    [
        b"",
        b" ",
        b"\n",
        b"{",
        b"}",
        b'"',
        b"\\",
        b"\\u0041",
        b",",
        b'"id":"m-2",',
        b'"payload":{},',
        b"01",
        b"\xff",
        b"\0",
        b"{}",
    ]
)


@st.composite
def body(draw: Any) -> bytes:
    """A complete message, mostly with something that is not as it should be, or not as we would write it."""
    members = dict(MEMBERS)
    for name in draw(st.lists(st.sampled_from([*MEMBERS, "reply_to", "entity_id", "extra"]), max_size=2)):
        members[name] = draw(odd_values)
    for name in draw(st.lists(st.sampled_from([*MEMBERS, "causation_id", "correlation_id"]), max_size=1)):
        members.pop(name, None)
    if draw(st.booleans()):
        members["payload"] = draw(
            st.dictionaries(st.text(max_size=3), st.one_of(odd_values, st.text(max_size=5)), max_size=3)
        )
    if draw(st.integers(0, 9)) == 0:
        members = dict(draw(st.permutations(list(members.items()))))
    text = msgspec.json.encode(members)
    if draw(st.booleans()):
        return text
    at = draw(st.integers(0, len(text)))
    return text[:at] + draw(pastes) + text[at + draw(st.sampled_from([0, 0, 1, 2, 9])) :]


@given(st.lists(st.one_of(body(), st.just(WHOLE)), max_size=6))
@example([b""])
@example([b"{}", b'{"id":"', WHOLE[:-1], WHOLE * 2])
@example([msgspec.json.encode(MEMBERS | {"payload": {"a": 1}}).replace(b'{"a":1}', b'{"a":1,"a":2}')])
@example([msgspec.json.encode(MEMBERS | {"payload": {}}).replace(b"{}", b'{"a":[}]}')])
@example([msgspec.json.encode(MEMBERS | {"ts": 0}), WHOLE.replace(b'"ts":5', b'"ts":05')])
def test_envelopes_are_read_alike(bodies: list[bytes]) -> None:
    compiled, plain = both(lambda: open_all_complete(bodies, [ADDRESS] * len(bodies)))
    assert plain == compiled
    assert [type(one) for one in plain[0]] == [type(one) for one in compiled[0]]


@pytest.mark.parametrize("more", [0, 1])
def test_the_largest_body_is_read_alike(more: int) -> None:
    room = BODY_BYTES_MAX - len(msgspec.json.encode(MEMBERS | {"payload": {"a": ""}}))
    text = msgspec.json.encode(MEMBERS | {"payload": {"a": "x" * (room + more)}})
    compiled, plain = both(lambda: open_all_complete([text], [ADDRESS]))
    assert plain == compiled
    assert (compiled[0] == [None]) == bool(more)


def test_each_message_has_its_own_members_where_the_next_producer_differs() -> None:
    """Texts that stay the same are made once."""
    two = parse("evt.other.w.a")
    members = [
        MEMBERS,
        MEMBERS | {"actor": {"id": "z", "role": "service"}},
        MEMBERS | {"tenant": "other"},
        MEMBERS | {"type": "U", "source": {"agent": "q", "adapter": "b"}},
        MEMBERS | {"causation_id": "e", "tenant": "other"},
        MEMBERS,
    ]
    where = [ADDRESS, ADDRESS, two, ADDRESS, ADDRESS, ADDRESS]
    compiled, plain = both(lambda: open_all_complete([msgspec.json.encode(one) for one in members], where))
    assert plain == compiled
    assert [one is None for one in compiled[0]] == [False, False, False, False, True, False]


def test_columns_are_read_alike() -> None:
    objects = [Delivery("S", "c", 1, n, n, b"$JS.ACK.S.c.1.1.1.1.1") for n in range(3)]
    compiled, plain = both(lambda: columns(objects, Delivery, "stream", "sequence", "consumer_sequence"))
    assert plain == compiled == [["S"] * 3, [0, 1, 2], [1] * 3]
    odd: list[Any] = [objects[0], SimpleNamespace(stream=5)]
    compiled, plain = both(lambda: columns(odd, Delivery, "stream"))
    assert plain == compiled == [["S", 5]]
    assert columns([], Delivery, "stream") == [[]]
    if native.columns is not None:
        assert native.columns(objects, Delivery, ("stream", "sequence")) == [["S"] * 3, [0, 1, 2]]
        assert native.columns(objects, Delivery, ("consumer_sequence",)) is None, "a property"
        assert native.columns(objects, Delivery, ("nothing",)) is None


def test_distinct_ones_keep_their_order() -> None:
    done, dead = blocks.Outcome.DONE, blocks.Outcome.DEAD
    assert distinct([dead, done, dead]) == [dead, done]


ids_ = st.one_of(st.text("abc-019.", min_size=1, max_size=20), st.text(min_size=1, max_size=20))


@st.composite
def caused(draw: Any) -> Plain:
    envelope = RuntimeEnvelope(
        id=draw(ids_), ts=draw(st.integers(0, TS_MS_MAX)), type="T", schema_version="1.0", trace_id="a1" * 16,
        span_id="b2" * 8, tenant="default", workspace="w", actor=NO_ACTOR, payload={}, idempotency_key="k",
        source=NO_SOURCE, security_context=principal_of(NO_ACTOR), correlation_id=draw(st.none() | ids_),
    )  # fmt: skip
    input_ = Input(envelope, f"key:{draw(ids_)}", bytes(32))
    effect = Effect(
        draw(st.sampled_from(["evt.default.w.a.b", "evt.default.w.a.ü"])), {"text": draw(st.text(max_size=9))}
    )
    plain = message_of(effect, LEDGER, input_, draw(st.integers(0, 3_000)), "EVENTS")
    assert plain is not None
    return plain


@given(
    st.recursive(
        st.one_of(odd_values, st.text(max_size=4), st.floats(), st.integers(-(2**70), 2**70), st.just("\ud800")),
        lambda inner: st.one_of(
            st.lists(inner, max_size=2), st.dictionaries(st.text(max_size=3), inner, max_size=2), st.tuples(inner)
        ),
        max_leaves=6,
    )
)
@example([[[[[1]]]]])
@example([[[[1]]]])
@example(float("nan"))
@example(1e15)
@example(-1.1e15)
@example(2**63 - 1)
@example(-(2**63) - 1)
@example(2**64)
@example(10**4_299)
def test_payloads_are_written_alike(value: Any) -> None:
    cause = decode_runtime(WHOLE, subject="evt.default.w.a", origin=Origin("S", 1, 2, 3), carried={})
    compiled, plain = both(lambda: runtime.write_plain({"a": value, "b": [value]}, cause))
    assert plain == compiled


@given(st.lists(caused(), max_size=6))
def test_effects_are_written_alike(effects: list[Plain]) -> None:
    compiled, plain = both(lambda: finished(LEDGER, effects))
    assert plain == compiled
    for made, effect in zip(compiled, effects, strict=True):
        alone = Effect(effect.subject, msgspec.json.decode(effect.payload))
        assert sending_of(alone, LEDGER, effect.cause, effect.index, "EVENTS") == made


def test_ordinary_messages_take_the_compiled_way() -> None:
    """Else nobody would notice that it is never taken."""
    if native.caused is None or native.frames is None:
        pytest.skip("oncewire was built without its compiled loops, or the processor has no SHA-256")
    envelope = decode_runtime(
        b'{"type":"T","payload":{}}', subject="evt.default.w.a", origin=Origin("S", 1, 2, 3), carried={}
    )
    plain = message_of(Effect("evt.default.w.x", {"a": "ü"}), LEDGER, Input(envelope, "key:a", b""), 0, "EVENTS")
    assert native.envelopes is not None
    assert native.is_plain is not None
    assert native.is_plain({"a": ["ü", 1, 1.5, None, True, {"b": {}}]})
    kinds = (RuntimeEnvelope, Actor, Source, SecurityContext)
    found, left = native.envelopes([encode_runtime(envelope)], [ADDRESS], lambda lines: [{}], runtime._MEMBERS, *kinds)
    assert (found, left) == ([envelope], [])
    begin = effects_begin("default", "w", "biller").encode()
    made = native.caused([plain], begin, Sending, Plain, Input, RuntimeEnvelope)
    assert made == finished(LEDGER, [plain])  # type: ignore[list-item]
    assert made
    assert native.frames(outgoing(made), Outgoing, b"evt.default.w.x", 1, None, None, 1) is not None
    read = native.replies([HEAD + b".1.2.3.4.5"], HEAD + b".", Delivery, "ORDERS", "biller")
    assert read == [parse_reply(HEAD + b".1.2.3.4.5")]


@pytest.mark.skipif(native.gather is None, reason="oncewire was built without its compiled loops")
@pytest.mark.parametrize(
    ("starts", "ends", "room"),
    [([0], [9], 9), ([-1], [2], 3), ([3], [2], 0), ([0, 2], [2, 4], 3), ([0], [2], 5), ([2**62], [2**62 + 1], 1)],
)
def test_pieces_outside_of_the_buffer_are_not_copied(starts: list[int], ends: list[int], room: int) -> None:
    assert native.gather is not None
    offsets, values = np.zeros(len(starts) + 1, np.int32), np.zeros(room, np.uint8)
    with pytest.raises(ValueError, match="not in the buffer"):
        native.gather(b"12345678", np.array(starts), np.array(ends), offsets, values)


def anything(*_: object, **__: object) -> object:
    return object()


@pytest.mark.skipif(native.messages is None, reason="oncewire was built without its compiled loops")
@pytest.mark.parametrize(
    "call",
    [
        lambda: native.messages("text", 0, bytes, []),  # type: ignore[misc, arg-type]
        lambda: native.messages(b"MSG a 1 1\r\nx\r\n", 0, lambda: None, []),  # type: ignore[misc]
        lambda: native.replies((b"x",), b"", bytes, "s", "c"),  # type: ignore[misc]
        lambda: native.replies([b"1.1.1.1.1"], b"", lambda: None, "s", "c"),  # type: ignore[misc]
        lambda: native.blake2b_all(b"", ([None],), 16),  # type: ignore[misc]
        lambda: native.blake2b_all(b"", 5, 16),  # type: ignore[misc, arg-type]
        lambda: native.blake2b_all(b"", ([1], [1, 2]), 16),  # type: ignore[misc]
        lambda: native.blake2b_all(b"", (b"x",), 16),  # type: ignore[misc]
        lambda: native.blake2b_all(b"", ([1],), 65),  # type: ignore[misc]
        lambda: native.blake2b_sum(b"", ([(2, 3)],)),  # type: ignore[misc]
        lambda: native.columns(5, Delivery, ("stream",)),  # type: ignore[misc, arg-type]
        lambda: native.columns([], Delivery, (5,)),  # type: ignore[misc, arg-type]
        lambda: native.columns([], Delivery, ("stream",) * 17),  # type: ignore[misc]
        lambda: native.caused([1], b"", bytes, 5, 5, 5),  # type: ignore[misc]
        lambda: native.frames([1], Outgoing, b"x", 1, None, None, 0),  # type: ignore[misc]
        lambda: native.frames([1], Outgoing, b"x", -1, None, None, 1),  # type: ignore[misc]
        lambda: native.frames([1], Outgoing, b"x", 2**70, None, None, 1),  # type: ignore[misc]
        lambda: native.frames([1], Outgoing, b"x", 1, ("a",), None, 1),  # type: ignore[misc]
        lambda: native.frames([1], Outgoing, b"x", 1, None, ("a", "b", "c", 4), 1),  # type: ignore[misc]
        lambda: native.envelopes([b""], [ADDRESS], len, (), *"1234"),  # type: ignore[misc]
        lambda: native.envelopes(["{}"], [ADDRESS], len, runtime._MEMBERS, *"1234"),  # type: ignore[misc]
        lambda: native.envelopes([b"{}"], [()], len, runtime._MEMBERS, *"1234"),  # type: ignore[misc]
        lambda: native.envelopes([b"{}"], [ADDRESS], len, runtime._MEMBERS, *"1234"),  # type: ignore[misc]
        lambda: native.envelopes([WHOLE], [ADDRESS], lambda _: [], runtime._MEMBERS, *[anything] * 4),  # type: ignore[misc]
        lambda: native.envelopes([WHOLE], [ADDRESS], lambda _: [{}], runtime._MEMBERS, *[len] * 4),  # type: ignore[misc]
        lambda: native.envelopes([WHOLE], [ADDRESS] * 2, len, runtime._MEMBERS, *[dict] * 4),  # type: ignore[misc]
        lambda: native.deliveries(b"", b"", bytes(88)),  # type: ignore[misc]
    ],
)
def test_what_no_caller_may_pass_is_an_error(call: Callable[[], Any]) -> None:
    with pytest.raises((TypeError, ValueError, BufferError, OverflowError)):
        call()
