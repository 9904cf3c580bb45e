"""The parser and encoder of the NATS protocol: whole, byte by byte, cut anywhere, and fed with what is not NATS."""

from __future__ import annotations

import base64
import json
import random
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oncewire._ground.errors import ContractViolation, ProtocolViolation
from oncewire._ground.jetstream import protocol
from oncewire._ground.jetstream.protocol import (
    Event,
    Info,
    Message,
    Okay,
    Parser,
    Ping,
    Pong,
    ServerError,
    encode_acks,
    encode_filter,
    encode_headers,
    encode_pub,
    encode_sub,
    encode_subject,
    encode_unsub,
    parse_headers,
    parse_status,
)

pytestmark = pytest.mark.usefixtures("loops")

VECTORS: dict[str, list[dict[str, Any]]] = json.loads(
    (Path(__file__).parents[1] / "vectors" / "nats_frames.json").read_text()
)
STREAMS = VECTORS["streams"]
BROKEN = VECTORS["broken"]


def shown(event: Event) -> dict[str, Any]:
    """An event as the vector file writes it."""
    match event:
        case Message():
            raw = (event.subject_raw, event.reply, event.header_raw, event.payload)
            subject, reply, header, payload = (base64.b64encode(part).decode() for part in raw)
            return {
                "kind": "message",
                "sid": event.sid,
                "subject": subject,
                "reply": reply,
                "header": header,
                "payload": payload,
            }
        case Info():
            return {"kind": "info", "body": event.body}
        case ServerError():
            return {"kind": "error", "text": event.text}
        case Ping():
            return {"kind": "ping"}
        case Pong():
            return {"kind": "pong"}
        case Okay():
            return {"kind": "ok"}


def parse(*pieces: bytes) -> list[dict[str, Any]]:
    parser = Parser()
    return [shown(event) for piece in pieces for event in parser.feed(piece)]


def outcome(*pieces: bytes) -> tuple[list[dict[str, Any]], bool]:
    """The events up to the end, or up to the violation."""
    parser, events = Parser(), []
    try:
        for piece in pieces:
            events += [shown(event) for event in parser.feed(piece)]
    except ProtocolViolation:
        return events, True
    return events, False


def bytewise(data: bytes) -> list[bytes]:
    return [data[index : index + 1] for index in range(len(data))]


# ---- every frame, in every cut


@pytest.mark.parametrize("case", STREAMS, ids=lambda case: case["name"])
def test_a_stream_is_read_whole(case: dict[str, Any]) -> None:
    assert case["events"] == parse(base64.b64decode(case["bytes"]))


@pytest.mark.parametrize("case", STREAMS, ids=lambda case: case["name"])
def test_a_stream_is_read_byte_by_byte(case: dict[str, Any]) -> None:
    assert case["events"] == parse(*bytewise(base64.b64decode(case["bytes"])))


@pytest.mark.parametrize("case", STREAMS, ids=lambda case: case["name"])
def test_a_stream_may_be_cut_anywhere(case: dict[str, Any]) -> None:
    data = base64.b64decode(case["bytes"])
    for cut in range(len(data) + 1):
        assert case["events"] == parse(data[:cut], data[cut:]), f"cut at {cut}"


@pytest.mark.parametrize("case", STREAMS, ids=lambda case: case["name"])
def test_trailing_data_is_kept_and_continued(case: dict[str, Any]) -> None:
    """An incomplete frame behind complete ones gives no event, is held, and is completed by the next read."""
    data, tail = base64.b64decode(case["bytes"]), b"MSG tail 9 4\r\nPI"
    parser = Parser()

    assert case["events"] == [shown(event) for event in parser.feed(data + tail)]
    assert len(tail) == parser.held_bytes
    assert [Message(9, b"tail", b"", b"", b"PING")] == parser.feed(b"NG\r\n")
    assert parser.held_bytes == 0


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case["name"])
def test_what_breaks_the_protocol_is_refused_by_name(case: dict[str, Any]) -> None:
    data = base64.b64decode(case["bytes"])
    with pytest.raises(ProtocolViolation) as caught:
        Parser().feed(data)
    assert case["says"] in caught.value.message
    assert len(caught.value.message) < 300


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case["name"])
def test_what_breaks_the_protocol_is_refused_in_pieces_too(case: dict[str, Any]) -> None:
    data = base64.b64decode(case["bytes"])
    for cut in range(0, len(data), max(1, len(data) // 64)):
        assert outcome(data[:cut], data[cut:])[1], f"cut at {cut}"


# ---- payloads


@pytest.mark.parametrize(
    "payload", [b"PING\r\n", b"MSG a 1 3\r\nabc\r\n", b"-ERR 'x'\r\n", b"\r\n", b"\r\n\r\n", b"\r", b"\n", b"\x00" * 7]
)
def test_a_payload_that_looks_like_a_frame_is_a_payload(payload: bytes) -> None:
    data = b"MSG a 7 %d\r\n%b\r\nPONG\r\n" % (len(payload), payload)

    for pieces in ([data], bytewise(data)):
        parser = Parser()
        events = [event for piece in pieces for event in parser.feed(piece)]
        assert [Message(7, b"a", b"", b"", payload), Pong()] == events


def test_a_large_message_in_small_reads_is_copied_once() -> None:
    """8 MiB in 64 KiB reads: joining on each read would copy 512 MiB."""
    payload = random.Random(1).randbytes(8 * 1024 * 1024)
    data = b"MSG big 2 %d\r\n%b\r\n" % (len(payload), payload)
    parser, events = Parser(), []
    tracemalloc.start()
    try:
        for start in range(0, len(data), 65_536):
            events += parser.feed(data[start : start + 65_536])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert [Message(2, b"big", b"", b"", payload)] == events
    assert peak < 4 * len(payload)


def test_a_line_that_never_ends_is_refused_before_it_fills_the_memory() -> None:
    parser = Parser()
    while parser.held_bytes <= protocol.LINE_BYTES_MAX - 1024:
        parser.feed(b"INFO" + b"x" * 1020)
    parser.feed(b"x" * (protocol.LINE_BYTES_MAX - parser.held_bytes))

    with pytest.raises(ProtocolViolation, match="a line is longer than"):
        parser.feed(b"x")


def test_a_long_line_in_single_bytes_costs_no_more_than_its_length() -> None:
    """A quadratic parser needs minutes for this one."""
    data = b'INFO {"version":"' + b"x" * (protocol.LINE_BYTES_MAX - 4_096) + b'"}\r\n'
    began = time.process_time()

    events = parse(*bytewise(data))

    assert [event["kind"] for event in events] == ["info"]
    assert time.process_time() - began < 10


def test_a_frame_over_the_limit_is_refused_at_its_line() -> None:
    """Not after its bytes were collected."""
    with pytest.raises(ProtocolViolation, match="impossible size"):
        Parser().feed(b"MSG a 1 %d\r\n" % (protocol.FRAME_BYTES_MAX + 1))


def test_huge_headers_are_read() -> None:
    header = b"NATS/1.0\r\n" + b"".join(b"Name-%d: %b\r\n" % (i, b"v" * 900) for i in range(1_000)) + b"\r\n"
    data = b"HMSG a 1 %d %d\r\n%bx\r\n" % (len(header), len(header) + 1, header)
    [event] = Parser().feed(data)

    assert isinstance(event, Message)
    assert len(event.headers) == 1_000
    assert event.headers["Name-999"] == "v" * 900


# ---- fuzz


def _valid_stream(chance: random.Random) -> bytes:
    """A stream of frames as a server could send them."""
    frames = []
    for _ in range(chance.randint(1, 8)):
        payload = chance.randbytes(chance.choice([0, 1, 2, 7, 64, 300]))
        reply = chance.choice([b"", b" _INBOX.a.1"])
        header = chance.choice([b"NATS/1.0\r\nA: b\r\n\r\n", b"NATS/1.0 503\r\n\r\n"])
        frames.append(
            chance.choice(
                [
                    b"PING\r\n",
                    b"PONG\r\n",
                    b"+OK\r\n",
                    b"-ERR 'Stale Connection'\r\n",
                    b'INFO {"version":"2.15.1","max_payload":1048576}\r\n',
                    b"MSG a.b.c 12%b %d\r\n%b\r\n" % (reply, len(payload), payload),
                    b"HMSG a.b 3%b %d %d\r\n%b%b\r\n"
                    % (reply, len(header), len(header) + len(payload), header, payload),
                ]
            )
        )
    return b"".join(frames)


def _mutated(chance: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(out) + 1)
        match chance.randrange(5):
            case 0:
                del out[at : at + chance.randint(1, 9)]
            case 1:
                out[at:at] = chance.randbytes(chance.randint(1, 9))
            case 2:
                out[at:at] = chance.choice([b"\r\n", b" ", b"-1", b"999999999", b"MSG ", b"{", b"\xff", b"0"])
            case 3 if at < len(out):
                out[at] ^= 1 << chance.randrange(8)
            case _:
                other = chance.randrange(len(out) + 1)
                out[at:at] = out[min(at, other) : max(at, other)]
    return bytes(out)


def _pieces(chance: random.Random, data: bytes) -> list[bytes]:
    pieces, at = [], 0
    while at < len(data):
        size = chance.choice([1, 2, 3, 17, 200])
        pieces.append(data[at : at + size])
        at += size
    return pieces


@pytest.mark.parametrize("seed", range(40))
def test_mutated_streams_give_the_same_events_in_any_cut_or_are_refused(seed: int) -> None:
    """Never another exception. How it was cut decides neither the events nor whether it is refused."""
    chance = random.Random(seed)
    for _ in range(100):
        data = _mutated(chance, _valid_stream(chance))
        pieces = _pieces(chance, data)
        whole_events, is_refused = outcome(data)
        cut_events, is_cut_refused = outcome(*pieces)
        assert is_refused == is_cut_refused, data
        if not is_refused:
            assert whole_events == cut_events, data


@settings(max_examples=300, deadline=None)
@given(st.lists(st.binary(max_size=200), max_size=10))
def test_any_bytes_are_events_or_a_violation(pieces: list[bytes]) -> None:
    outcome(*pieces)


_word = st.text(st.characters(min_codepoint=33, max_codepoint=0x2FFF, exclude_characters=".*>\x7f"), min_size=1)
_subject = st.lists(_word, min_size=1, max_size=5).map(".".join).filter(lambda text: len(text.encode()) < 4_000)


@settings(max_examples=200, deadline=None)
@given(_subject, st.binary(max_size=2_000), st.integers(1, 10**9), st.integers(1, 7))
def test_a_message_survives_the_way_through_encoder_and_parser(
    subject: str, payload: bytes, sid: int, size: int
) -> None:
    """What we publish is what a server that echoes it would deliver."""
    header = encode_headers({"Nats-Msg-Id": "1", "Empty": ""})
    sent = encode_pub(encode_subject(subject), b"_INBOX.x.1", payload, header)
    line, _, body = sent.partition(b"\r\n")
    _, wire_subject, reply, head, total = line.split(b" ")
    delivered = b"HMSG %b %d %b %b %b\r\n%b" % (wire_subject, sid, reply, head, total, body)

    parser, events = Parser(), []
    for start in range(0, len(delivered), size):
        events += parser.feed(delivered[start : start + size])

    assert [Message(sid, subject.encode(), b"_INBOX.x.1", header, payload)] == events
    assert isinstance(events[0], Message)
    assert subject == events[0].subject
    assert events[0].headers == {"Nats-Msg-Id": "1", "Empty": ""}


# ---- headers


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"", (0, "")),
        (b"NATS/1.0\r\n\r\n", (0, "")),
        (b"NATS/1.0 503\r\n\r\n", (503, "")),
        (b"NATS/1.0 404 No Messages\r\n\r\n", (404, "No Messages")),
        (b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer: 1\r\n\r\n", (100, "Idle Heartbeat")),
        (b"NATS/1.0 abc\r\n\r\n", (0, "")),
        (b"NATS/1.0 9999999\r\n\r\n", (0, "")),
        (b"NATS/1.0 -1 x\r\n\r\n", (0, "x")),
        (b"NATS/1.0 503", (50, "")),
    ],
)
def test_the_status_of_a_header_block(raw: bytes, status: tuple[int, str]) -> None:
    assert status == parse_status(raw)


def test_of_a_repeated_header_the_first_counts() -> None:
    assert parse_headers(b"NATS/1.0\r\nA: 1\r\nA:2\r\nB:\r\n\r\n") == {"A": "1", "B": ""}


def test_a_header_line_without_colon_is_passed_over() -> None:
    assert parse_headers(b"NATS/1.0\r\nnonsense\r\nA:1\r\n\r\n") == {"A": "1"}


_value = st.text(st.characters(exclude_characters="\x00\r\n", exclude_categories=["Cs"])).map(str.strip)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.from_regex(r"[A-Za-z0-9-]{1,20}", fullmatch=True), _value, max_size=8))
def test_headers_survive_the_way_through_encoder_and_parser(headers: dict[str, str]) -> None:
    assert headers == parse_headers(encode_headers(headers))


@pytest.mark.parametrize("value", ["a\r\nB: c", "a\nb", "\r", "\n", "\x00", "x\r", "\r\nNats-Msg-Id: forged"])
def test_a_header_value_cannot_break_out_of_its_line(value: str) -> None:
    with pytest.raises(ContractViolation, match="line break or NUL"):
        encode_headers({"A": value})


@pytest.mark.parametrize("name", ["", "A:", "A B", "A\r\nB", "Ä", "A\x00", "a" * 129, ":", "A\n"])
def test_a_header_name_is_a_plain_token(name: str) -> None:
    with pytest.raises(ContractViolation, match="is not a header name"):
        encode_headers({name: "x"})


def test_a_header_value_that_is_no_text_is_refused() -> None:
    """A lone surrogate cannot be written as UTF-8."""
    with pytest.raises(ContractViolation):
        encode_headers({"A": "\ud800"})


def test_headers_over_their_limit_are_refused() -> None:
    with pytest.raises(ContractViolation, match="are allowed"):
        encode_headers({"A": "x" * protocol.HEADER_BYTES_MAX})


def test_bytes_that_are_no_utf8_survive_in_values() -> None:
    """Other clients may write Latin-1: what we read and write again stays the same bytes."""
    headers = parse_headers(b"NATS/1.0\r\nA: caf\xe9\r\n\r\n")

    assert encode_headers(headers) == b"NATS/1.0\r\nA: caf\xe9\r\n\r\n"


# ---- subjects


@pytest.mark.parametrize("subject", ["a", "a.b", "ä.ö", "$JS.API.INFO", "a*b.c", "a>b", "x" * 4_000, "_INBOX.1"])
def test_a_subject_to_publish_on(subject: str) -> None:
    assert subject.encode() == encode_subject(subject)


@pytest.mark.parametrize(
    "subject",
    ["", ".", "a.", ".a", "a..b", "a b", "a\tb", "a\r\nPING", "a\n", "a\x00", "a\x7f", "x" * 4_001, "\ud800"],
)
def test_what_is_no_subject_is_refused(subject: str) -> None:
    with pytest.raises(ContractViolation):
        encode_subject(subject)
    with pytest.raises(ContractViolation):
        encode_filter(subject)


@pytest.mark.parametrize("subject", ["*", ">", "a.*", "a.>", "*.b"])
def test_wildcards_are_for_filters_only(subject: str) -> None:
    assert subject.encode() == encode_filter(subject)
    with pytest.raises(ContractViolation, match="wildcard"):
        encode_subject(subject)


def test_the_greater_sign_stands_only_at_the_end_of_a_filter() -> None:
    with pytest.raises(ContractViolation, match="before its end"):
        encode_filter("a.>.b")


# ---- frames that we send


def test_the_frames_that_a_client_sends() -> None:
    assert encode_sub(b"a.*", 3) == b"SUB a.* 3\r\n"
    assert encode_sub(b"a.*", 3, b"q") == b"SUB a.* q 3\r\n"
    assert encode_unsub(3) == b"UNSUB 3\r\n"
    assert encode_unsub(3, 5) == b"UNSUB 3 5\r\n"
    assert encode_pub(b"a", b"r", b"hi") == b"PUB a r 2\r\nhi\r\n"
    assert encode_pub(b"a", b"r", b"hi", b"NATS/1.0\r\n\r\n") == b"HPUB a r 12 14\r\nNATS/1.0\r\n\r\nhi\r\n"
    assert encode_acks([b"x", b"y"]) == b"PUB x 4\r\n+ACK\r\nPUB y 4\r\n+ACK\r\n"
    assert encode_acks([]) == b""
    assert protocol.encode_connect({"verbose": False}) == b'CONNECT {"verbose":false}\r\n'
