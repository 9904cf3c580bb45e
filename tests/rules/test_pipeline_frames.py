"""The bulk parser beside the exact one: the same vectors, the same cuts, the same messages."""

from __future__ import annotations

import base64
import json
import random
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oncewire._ground.errors import ProtocolViolation
from oncewire._ground.jetstream.protocol import Event, Message, Parser
from oncewire.pipeline.frames import Answers, Cuts, Expected, _number_before, _places, split, split_answers

pytestmark = pytest.mark.usefixtures("loops")

VECTORS: dict[str, list[dict[str, Any]]] = json.loads(
    (Path(__file__).parents[1] / "vectors" / "nats_frames.json").read_text()
)
PREFIX = b"$JS.ACK.ORDERS.ow-reader-5f6b"
EXPECTED = Expected.of(1, PREFIX + b".1.1.1.1.1")
TIME_NS = 1_763_123_456_789_012_345


def delivery(sequence: int, payload: bytes, header: bytes = b"", subject: bytes = b"orders.placed") -> bytes:
    """A message as a pull consumer sends it."""
    reply = b"%b.1.%d.%d.%d.%d" % (PREFIX, sequence, sequence, TIME_NS + sequence, 7)
    if header:
        return b"HMSG %b 1 %b %d %d\r\n%b%b\r\n" % (
            subject,
            reply,
            len(header),
            len(header) + len(payload),
            header,
            payload,
        )
    return b"MSG %b 1 %b %d\r\n%b\r\n" % (subject, reply, len(payload), payload)


def facts(message: Message) -> Any:
    """What both parsers must agree on; the reply stands for its numbers."""
    numbers = [int(token) if token.isdigit() else token for token in message.reply.split(b".")[-4:]]
    return message.subject_raw, numbers, message.header_raw, message.payload


def facts_of_cuts(buffer: bytes, cuts: Cuts) -> list[Any]:
    rows = zip(*(getattr(cuts, name).tolist() for name in vars(cuts)), strict=True)
    return [
        (buffer[a:b], [sequence, number, time_ns, pending], buffer[c:d], buffer[d:e])
        for a, b, c, d, e, sequence, number, time_ns, pending in rows
    ]


def bulk(pieces: list[bytes], expected: Expected | None = EXPECTED) -> tuple[list[Any], int]:
    """Everything that the bulk parser finds, and how many messages of it were proven."""
    found: list[Any] = []
    proven = 0
    rest = b""
    for piece in pieces:
        data = rest + piece
        parts, used = split(np.frombuffer(data, np.uint8), expected)
        for part in parts:
            if isinstance(part, Cuts):
                proven += len(part)
                found += facts_of_cuts(data, part)
            else:
                found += [facts(event) if isinstance(event, Message) else event for event in part]
        rest = data[used:]
    return found, proven


def exact(data: bytes) -> list[Any]:
    return [facts(event) if isinstance(event, Message) else event for event in Parser().feed(data)]


def cut(data: bytes, rng: random.Random, pieces: int) -> list[bytes]:
    edges = sorted(rng.randrange(len(data) + 1) for _ in range(pieces))
    return [data[a:b] for a, b in zip([0, *edges], [*edges, len(data)], strict=True)]


@pytest.mark.parametrize("vector", VECTORS["streams"], ids=lambda vector: vector["name"])
def test_every_vector_of_the_exact_parser_gives_the_same_events(vector: dict[str, Any]) -> None:
    data = base64.b64decode(vector["bytes"])
    assert exact(data) == bulk([data])[0] == bulk([data], None)[0]


@pytest.mark.parametrize("vector", VECTORS["broken"], ids=lambda vector: vector["name"])
def test_every_broken_vector_is_refused_also_behind_good_messages(vector: dict[str, Any]) -> None:
    good = delivery(1, b"a") + delivery(2, b"b")
    with pytest.raises(ProtocolViolation):
        bulk([good + base64.b64decode(vector["bytes"]) + b"x" * 300_000])


def test_ordinary_deliveries_are_all_proven() -> None:
    data = b"".join(delivery(n, b"x" * (n % 50), b"NATS/1.0\r\nA: b\r\n\r\n" if n % 3 else b"") for n in range(1, 500))
    found, proven = bulk([data])
    assert exact(data) == found
    assert 499 == proven


def test_deliveries_of_all_widths_are_proven() -> None:
    """Numbers, subjects and payloads grow over every width; the last frames end where the buffer does."""
    for size in (0, 9, 10, 63, 64, 999, 1_000, 12_345):
        rows = [
            delivery(10**digits, b"x" * size, subject=b"s" * length) for digits in range(18) for length in (1, 63, 90)
        ]
        found, proven = bulk([b"".join(rows)])
        assert exact(b"".join(rows)) == found
        assert len(rows) == proven


@pytest.mark.parametrize("byte", [b" ", b"\t", b"\0", b"\x1f"])
@pytest.mark.parametrize("length", [3, 62, 63, 64, 65, 300])
def test_a_subject_of_several_words_is_for_the_exact_parser(byte: bytes, length: int) -> None:
    for place in (1, length // 2, length - 1):
        odd = delivery(2, b"y" * 200, subject=b"s" * place + byte + b"s" * (length - place - 1))
        data = delivery(1, b"x" * 200) + odd + delivery(3, b"z" * 200)
        assert outcome(lambda data=data: exact(data)) == outcome(lambda data=data: bulk([data])[0])


@pytest.mark.parametrize(
    ("good", "odd"),
    [
        (b"2.2.1763", b"2.:.1763"),
        (b"2.2.1763", b"/.2.1763"),
        (b"345.7 20", b"345.7 4 20"),
        (b"MSG orders", b"HMSG orders"),
        (b"orders.placed ", b" "),
        (b"orders.placed ", b""),
        (b"12 212\r\n", b"213 212\r\n"),
    ],
)
def test_a_line_that_is_nearly_a_delivery_is_for_the_exact_parser(good: bytes, odd: bytes) -> None:
    frames = [delivery(n, b"x" * 200, b"NATS/1.0\r\n\r\n" * (n > 3)).replace(b"012347", b"012345") for n in range(1, 7)]
    frames[1], frames[4] = frames[1].replace(good, odd), frames[4].replace(good, odd)
    data = b"".join(frames)
    assert odd in data
    assert outcome(lambda: exact(data)) == outcome(lambda: bulk([data])[0])


def test_the_shortest_deliveries_are_proven() -> None:
    expected = Expected.of(1, b"$JS.ACK.A.b.1.1.1.1.1")
    data = b"".join(b"MSG s 1 $JS.ACK.A.b.1.%d.%d.1.0 0\r\n\r\n" % (n, n) for n in range(1, 9))
    assert (exact(data), 8) == bulk([data], expected)


def test_what_is_expected_is_seen_in_the_first_line() -> None:
    def seen(data: bytes) -> Expected | None:
        return Expected.seen_in(np.frombuffer(data, np.uint8))

    assert EXPECTED == seen(delivery(7, b"x")) == seen(delivery(7, b"x", b"NATS/1.0\r\n\r\n") + b"PING\r\n")
    for other in (b"PING\r\n" + delivery(7, b"x"), delivery(7, b"x")[:40], b"MSG a 1 2\r\nab\r\n", b"\0" * 50, b""):
        assert seen(other) is None


@given(st.lists(st.integers(0, 400), max_size=40), st.integers(1, 30_000))
def test_few_places_of_many_are_found(steps: list[int], length: int) -> None:
    bits = np.zeros(length, np.bool_)
    bits[[place for place in accumulate(steps) if place < length]] = True
    assert np.flatnonzero(bits).tolist() == _places(bits).tolist()


def test_a_payload_that_looks_like_a_frame_is_a_payload() -> None:
    """Also one that holds a whole delivery of this very reader, with sizes that fit."""
    inner = delivery(99, b"inner")
    poison = [inner, b"\r\n" + inner, inner[:-1], b"\r\n" + inner + inner, b"\r\n" + delivery(98, inner), b"\r\n" * 40]
    data = b"".join(delivery(n, payload) for n, payload in enumerate(poison, 1)) + delivery(50, b"after")
    found, proven = bulk([data])
    assert exact(data) == found
    assert len(poison) + 1 == len(found) == proven


def test_a_ping_between_frames_does_not_stop_the_proof() -> None:
    data = (
        delivery(1, b"a") + b"PING\r\n" + delivery(2, b"b") + b"PING\r\nPING\r\n" + delivery(3, b"c") + delivery(4, b"")
    )
    found, proven = bulk([data])
    assert exact(data) == found
    assert 4 == proven


def test_odd_spellings_go_to_the_exact_parser() -> None:
    odd = delivery(2, b"b").replace(b" 1 $JS", b"  1\t$JS")
    data = delivery(1, b"a") + odd + delivery(3, b"c")
    found, proven = bulk([data])
    assert exact(data) == found
    assert 2 == proven


def test_an_incomplete_frame_waits_for_its_rest() -> None:
    data = delivery(1, b"a") + delivery(2, b"b" * 1000)
    for size in range(len(delivery(1, b"a")), len(data)):
        parts, used = split(np.frombuffer(data[:size], np.uint8), EXPECTED)
        assert len(delivery(1, b"a")) == used
        assert 1 == len(parts)


def test_a_frame_whose_payload_does_not_end_in_crlf_is_refused() -> None:
    data = delivery(1, b"aaaa") + delivery(2, b"bbbb")[:-2] + b"XX" + delivery(3, b"cccc")
    with pytest.raises(ProtocolViolation, match="not followed by CRLF"):
        bulk([data])


def test_numbers_that_do_not_fit_are_left_to_the_exact_parser() -> None:
    for number in (b"99999999999999999999", b"9999999999999999999", b"9223372036854775808"):
        big = delivery(1, b"a").replace(b".1.1.1763", b".1.%b.1763" % number)
        assert big != delivery(1, b"a")
        assert 1 == bulk([delivery(2, b"b") + big])[1]


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("message"), st.binary(max_size=60), st.booleans()),
            st.tuples(st.just("long"), st.integers(60, 2_000), st.booleans()),
            st.tuples(st.just("frame"), st.integers(1, 10**9), st.booleans()),
            st.tuples(st.just("ping"), st.none(), st.booleans()),
            st.tuples(st.just("other"), st.binary(max_size=20), st.booleans()),
        ),
        max_size=30,
    ),
    st.randoms(use_true_random=False),
)
@settings(max_examples=300, deadline=None)
def test_any_mixture_in_any_cut_gives_what_the_exact_parser_gives(parts: list[Any], rng: random.Random) -> None:
    data = b""
    for number, (kind, value, is_headed) in enumerate(parts, 1):
        header = b"NATS/1.0\r\nNats-Msg-Id: x\r\n\r\n" if is_headed else b""
        if kind == "message":
            data += delivery(number, value, header)
        elif kind == "long":
            data += delivery(number, b"x" * value, header, b"s" * (value % 150 + 1))
        elif kind == "frame":
            data += delivery(number, b"\r\n" * (value % 2) + delivery(value, b"y"), header)
        elif kind == "ping":
            data += b"PING\r\n"
        else:
            data += b"MSG _INBOX.x 2 %d\r\n%b\r\n" % (len(value), value)
    assert exact(data) == bulk(cut(data, rng, rng.randrange(6)))[0]


@given(st.binary(max_size=200), st.integers(0, 400), st.integers(1, 255))
@settings(max_examples=400, deadline=None)
def test_a_flipped_byte_is_seen_by_both_parsers_alike(payload: bytes, position: int, change: int) -> None:
    data = bytearray(delivery(1, payload) + delivery(2, b"second", b"NATS/1.0\r\n\r\n") + delivery(3, b"third"))
    data[position % len(data)] ^= change
    assert outcome(lambda: exact(bytes(data))) == outcome(lambda: bulk([bytes(data)])[0])


def outcome(parse: Any) -> list[Event] | str:
    try:
        events: list[Event] = parse()
    except ProtocolViolation:
        return "refused"
    return events


@given(st.binary(min_size=40, max_size=80), st.from_regex(rb"[0-9]{0,24}", fullmatch=True), st.sampled_from([8, 19]))
@settings(max_examples=400, deadline=None)
def test_a_number_is_read_backwards_whatever_stands_before_it(before: bytes, digits: bytes, digits_max: int) -> None:
    data = before + b"x" + digits
    values, starts, fits = _number_before(np.frombuffer(data, np.uint8), np.array([len(data)]), digits_max)
    if digits and len(digits) <= digits_max and int(digits) < 2**63:
        assert (int(digits), len(before) + 1, True) == (values[0], starts[0], fits[0])
    else:  # the caller finds a digit where the number should begin
        assert not fits[0] or data[starts[0] - 1 : starts[0]].isdigit()


# ---- answers to publishes

INBOX = b"_INBOX.ow5f"


def answer(number: int, payload: bytes, inbox: bytes = INBOX) -> bytes:
    return b"MSG %b.%d 1 %d\r\n%b\r\n" % (inbox, number, len(payload), payload)


def answered(data: bytes) -> tuple[list[Any], int]:
    """Number and payload of each answer, and how many were proven."""
    pieces, used = split_answers(np.frombuffer(data, np.uint8), INBOX)
    found: list[Any] = []
    proven = 0
    for piece in pieces:
        if isinstance(piece, Answers):
            proven += len(piece.number)
            rows = zip(piece.number.tolist(), piece.payload_start.tolist(), piece.payload_end.tolist(), strict=True)
            found += [(number, data[start:end]) for number, start, end in rows]
        else:
            found += [shown_answer(event) for event in piece]
    assert used == len(data)
    return found, proven


def shown_answer(event: Event) -> Any:
    if not isinstance(event, Message):
        return event
    number = event.subject_raw.rpartition(b".")[2]
    return int(number) if number.isdigit() else number, event.payload


def test_pub_acks_are_proven_and_everything_else_is_left_to_the_exact_parser() -> None:
    good = b"".join(answer(10**9 + n, b'{"stream":"S","seq":%d}' % n) for n in range(300))
    refused = answer(10**9 + 300, b'{"error":{"code":400},"stream":"S","seq":0}')
    data = good + b"PING\r\n" + refused + good + answer(7, b'{"stream":"S"}', b"_INBOX.other")
    found, proven = answered(data)
    assert [shown_answer(event) for event in Parser().feed(data)] == found
    assert 600 == proven


@given(st.lists(st.tuples(st.integers(0, 10**11), st.binary(max_size=40), st.booleans()), min_size=1, max_size=20))
@settings(max_examples=300, deadline=None)
def test_any_answers_give_what_the_exact_parser_gives(answers: list[tuple[int, bytes, bool]]) -> None:
    data = b"".join(
        answer(number, b'{"stream":"S","seq":1}' + payload if is_ack else payload)
        for number, payload, is_ack in answers
    )
    assert [shown_answer(event) for event in Parser().feed(data)] == answered(data)[0]
