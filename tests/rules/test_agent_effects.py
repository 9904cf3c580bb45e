"""What handlers return and raise is checked where it is made, with a sentence that names argument and value."""

from __future__ import annotations

import enum
from collections import UserDict
from datetime import timedelta
from decimal import Decimal
from typing import Any

import msgspec
import pytest

from oncewire import Effect, Retry, Terminate
from oncewire._ground.contracts.ids import Origin
from oncewire._ground.contracts.inputs import Input, read_input
from oncewire._ground.errors import ContractViolation, Refused
from oncewire._ground.jetstream.pull import NAK_DELAY_S_MAX, nak_verb
from oncewire._ground.ledger.rules import Ledger
from oncewire.agent import effects
from oncewire.agent.effects import DELAY_S_MAX, check_target

OUT = "evt.default.demo.out"
CHAT = "chat.events.room"
LEDGER = Ledger("l-1", "default", "demo", "biller")


class Subject(enum.StrEnum):
    OUT = OUT


class Text(str):
    __slots__ = ()


class Unshowable:
    def __repr__(self) -> str:
        raise ZeroDivisionError


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"subject": 5}, "subject", "Effect: subject 5 is not text but int"),
    ({"subject": b"evt.a"}, "subject", "Effect: subject b'evt.a' is not text but bytes"),
    ({"subject": ["evt.a"]}, "subject", "Effect: subject ['evt.a'] is not text but list"),
    ({"subject": Unshowable()}, "subject", "Effect: subject (Unshowable) is not text but Unshowable"),
    ({"subject": "a\ud800"}, "subject", r"Effect: subject 'a\ud800' has a lone surrogate, which is not a character"),
    ({"subject": "a\nb"}, "subject", "Effect: subject has an empty token, a space or a control character"),
    ({"subject": "a.*"}, "subject", "Effect: subject has a wildcard: 'a.*'"),
    ({"subject": ""}, "subject", "Effect: subject has an empty token"),
    ({"type": None}, "type", "Effect: type None is not text but NoneType"),
    ({"type": "\udfff"}, "type", r"Effect: type '\udfff' has a lone surrogate"),
    ({"delay_s": float("nan")}, "delay_s", "Effect: delay_s nan is not a number of seconds from 0 to 31,622,400"),
    ({"delay_s": float("inf")}, "delay_s", "Effect: delay_s inf is not a number of seconds"),
    ({"delay_s": -0.1}, "delay_s", "Effect: delay_s -0.1 is not a number of seconds"),
    ({"delay_s": 1e12}, "delay_s", "Effect: delay_s 1000000000000.0 is not a number of seconds"),
    ({"delay_s": None}, "delay_s", "Effect: delay_s None is not a number of seconds"),
    ({"delay_s": "1"}, "delay_s", "Effect: delay_s '1' is not a number of seconds"),
    ({"delay_s": True}, "delay_s", "Effect: delay_s True is not a number of seconds"),
    ({"delay_s": timedelta(1)}, "delay_s", "Effect: delay_s datetime.timedelta(days=1) is not a number of seconds"),
    ({"delay_s": Decimal(1)}, "delay_s", "Effect: delay_s Decimal('1') is not a number of seconds"),
    ({"headers": "X: y"}, "headers", "Effect: headers 'X: y' is not a mapping of text to text"),
    ({"headers": [("X", "y")]}, "headers", "Effect: headers [('X', 'y')] is not a mapping of text to text"),
    ({"headers": {"X": b"abc"}}, "headers", "Effect: headers['X'] b'abc' is not text but bytes"),
    ({"headers": {"X": ["abc"]}}, "headers", "Effect: headers['X'] ['abc'] is not text but list"),
    ({"headers": {"X": None}}, "headers", "Effect: headers['X'] None is not text but NoneType"),
    ({"headers": {b"X": "abc"}}, "headers", "Effect: headers b'X' is not text but bytes"),
    ({"headers": {"X": "b\r\nc"}}, "headers", r"Effect: headers['X'] 'b\r\nc' has a line break or NUL"),
    ({"headers": {"X": "b\nc"}}, "headers", r"Effect: headers['X'] 'b\nc' has a line break or NUL"),
    ({"headers": {"X": "\0"}}, "headers", r"Effect: headers['X'] '\x00' has a line break or NUL"),
    ({"headers": {"X": "\ud800"}}, "headers", r"Effect: headers['X'] '\ud800' has a lone surrogate"),
    ({"headers": {"": "x"}}, "headers", "Effect: headers '' is not the name of a header"),
    ({"headers": {"X Y": "x"}}, "headers", "Effect: headers 'X Y' is not the name of a header"),
    ({"headers": {"Nats-TTL": "5"}}, "headers", "Effect: headers 'Nats-TTL' is a name that the server or the ledger"),
    ({"headers": {"nats-msg-id": "5"}}, "headers", "Effect: headers 'nats-msg-id' is a name that the server"),
    ({"headers": {"Oncewire-Replay-For": "x"}}, "headers", "Effect: headers 'Oncewire-Replay-For' is a name that"),
    ({"headers": {"X": "x" * 16_000}}, "headers", "Effect: headers take 16005 bytes, 15360 are allowed"),
    ({"type": "x" * 300, "headers": {"X": 5}}, "headers", "Effect: headers['X'] 5 is not text but int"),
]


@pytest.mark.parametrize(("arguments", "field", "said"), WRONG)
def test_a_wrong_argument_is_refused_where_the_effect_is_made(arguments: dict[str, Any], field: str, said: str) -> None:
    for _ in range(2):  # what is remembered of subjects must not let it in
        with pytest.raises(ContractViolation) as caught:
            Effect(**{"subject": OUT, "payload": {}} | arguments)
        assert (field, caught.value.message[: len(said)]) == (caught.value.field, said)


def test_what_is_right_is_kept_as_it_is() -> None:
    headers = UserDict({"X-Trace": "é", "Oncewire-Epoch": "e1"})
    made = Effect(Subject.OUT, {"n": 1}, Text("Charged"), 1, headers)
    headers["X-Trace"] = b"later"  # type: ignore[assignment]
    assert (OUT, "Charged", 1, {"X-Trace": "é", "Oncewire-Epoch": "e1"}) == (
        made.subject, made.type, made.delay_s, made.headers,
    )  # fmt: skip
    assert {str} == {type(made.subject), type(made.type)} | set(map(type, made.headers or ()))
    assert Effect(Text(OUT), {"n": 1}) == Effect(OUT, {"n": 1})
    assert type(Effect(Text(OUT), {}).subject) is str
    with pytest.raises(ContractViolation, match="delay_s"):
        msgspec.structs.replace(made, delay_s=-1)


@pytest.mark.parametrize("subject", ["dlq.x", "dlq_requests.biller", "ledger.biller.l-1", "dlq_replays.x"])
def test_an_effect_goes_where_users_publish(subject: str) -> None:
    with pytest.raises(ContractViolation, match="where only Oncewire itself writes"):
        check_target(subject)
    for good in (OUT, CHAT, "sr.events.loop", "cmd.default.demo.a.b", "anything.else"):
        check_target(good)


# ---- payloads of messages without an envelope


def body_of(payload: Any, subject: str = CHAT) -> bytes:
    origin = Origin("EVENTS", 1, 1, 1)
    cause: Input = read_input(b'{"type":"t","payload":{}}', subject="evt.default.demo.in", origin=origin, carried={})
    return effects.sending_of(Effect(subject, payload), LEDGER, cause, 0, "CHAT_EVENTS").payload


class Struct(msgspec.Struct):
    members: set[str]


@pytest.mark.parametrize(
    ("payload", "body"),
    [
        ({"a": [1, 2.5, None, True, "é"]}, '{"a":[1,2.5,null,true,"é"]}'),
        ({"a": (1, 2)}, '{"a":[1,2]}'),
        ([1], "[1]"),
        ("text", '"text"'),
        (None, "null"),
        (b"\xff raw", b"\xff raw"),
        (bytearray(b"raw"), "raw"),
        (memoryview(b"raw"), "raw"),
        (Struct({"b", "a", "c"}), '{"members":["a","b","c"]}'),
    ],
)
def test_a_payload_is_json_or_bytes(payload: Any, body: str | bytes) -> None:
    assert (body.encode() if isinstance(body, str) else body) == body_of(payload)


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        ({"a": float("nan")}, "a is nan, which JSON does not have"),
        (float("inf"), "is inf, which JSON does not have"),
        ({"a": {1, 2}}, "a is not JSON: set"),
        ({"a": b"x"}, "a is not JSON: bytes"),
        ({"a": object()}, "a is not JSON: object"),
        ({1: 2}, "has a name that is not text: 1"),
        ({"a": "\ud800"}, "a has a lone surrogate"),
        ({"\ud800": 1}, "has a lone surrogate"),
        (object(), "cannot be written"),
    ],
)
@pytest.mark.parametrize("subject", [CHAT, OUT])
def test_a_payload_that_would_come_out_as_another_is_refused(subject: str, payload: Any, said: str) -> None:
    if subject == OUT and isinstance(payload, float):
        said = "must be an object"
    with pytest.raises(ContractViolation, match=said):
        body_of(payload, subject)


# ---- Retry and Terminate


@pytest.mark.parametrize(
    ("arguments", "after_s", "text"),
    [
        ((), None, "retry"),
        ((None, "later"), None, "later"),
        ((0,), 0.0, "retry"),
        ((2.5,), 2.5, "retry"),
        ((timedelta(minutes=5),), 300.0, "retry"),
        ((DELAY_S_MAX,), DELAY_S_MAX, "retry"),
        (("the bank is closed",), None, "the bank is closed"),
        (("5",), None, "5"),
        ((30, "the bank is closed"), 30.0, "the bank is closed"),
    ],
)
def test_a_retry_says_when_and_why(arguments: tuple[Any, ...], after_s: float | None, text: str) -> None:
    retry = Retry(*arguments)

    assert (after_s, text) == (retry.after_s, str(retry))


@pytest.mark.parametrize(
    "after_s",
    [
        float("nan"),
        float("inf"),
        -1,
        -0.001,
        True,
        DELAY_S_MAX + 1,
        1e300,
        timedelta(seconds=-1),
        timedelta.max,
        b"5",
        [],
    ],
    ids=repr,
)
def test_a_retry_refuses_a_delay_that_nobody_can_wait_for(after_s: Any) -> None:
    with pytest.raises(
        Refused, match=r"Retry: after_s is a number of seconds from 0 to 31622400 \(366 days\)"
    ) as caught:
        Retry(after_s)
    assert caught.value.message.endswith(f"not {after_s!r}")


def test_a_retry_refuses_its_arguments_the_other_way_round() -> None:
    wrong: Any = 0.2
    with pytest.raises(Refused, match=r"Retry: reason is text, not 0\.2"):
        Retry("again", wrong)
    with pytest.raises(Refused, match=r"Retry: after_s is a number of seconds .* not 'again'"):
        Retry("again", "later")


def test_a_long_value_is_cut_where_an_error_quotes_it() -> None:
    with pytest.raises(Refused) as caught:
        Retry(["x" * 1_000])  # type: ignore[arg-type]
    assert len(caught.value.message) < 250


def test_a_reason_to_terminate_is_text() -> None:
    with pytest.raises(Refused, match="Terminate: reason is text, not 5"):
        Terminate(5)  # type: ignore[arg-type]


@pytest.mark.parametrize("delay_s", [float("nan"), float("inf"), -1.0, NAK_DELAY_S_MAX + 1])
def test_a_delay_that_the_server_cannot_read_never_goes_out(delay_s: float) -> None:
    """It would redeliver at once, until the deliveries are used up."""
    with pytest.raises(ContractViolation, match="a nak's delay is from 0 to"):
        nak_verb(delay_s)


def test_every_delay_of_a_retry_can_be_sent() -> None:
    assert b'-NAK {"delay": 31622400000000000}' == nak_verb(Retry(DELAY_S_MAX).after_s or 0.0)
