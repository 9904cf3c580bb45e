"""What the dead-letter service decides, sentence by sentence."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncewire._ground.contracts import headers as carried
from oncewire._ground.contracts import ids, letters
from oncewire._ground.errors import ContractViolation
from oncewire._ground.jetstream import StoredMessage
from oncewire.dlq import rules
from oncewire.dlq.letters import Filter, group, read_letter
from oncewire.dlq.rules import Act, Failure, Limits, Next, Original, Record, Stand, State

LIMITS = Limits(1 << 20)
FAILURE = Failure(
    stream="S", sequence=7, consumer="w", kind=rules.MAX_DELIVERIES, deliveries=5, reason="max_deliveries: 5 deliveries"
)
ORIGINAL = Original("evt.acme.demo.x", b"body", {"Nats-Msg-Id": "m", "traceparent": "00-a-b-01"}, 99)


def decided(kind: str, *, is_agents: bool, stream: str = "S") -> Act:
    return rules.decide(msgspec.structs.replace(FAILURE, kind=kind, stream=stream), is_agents=is_agents)


# ---- decisions


@pytest.mark.parametrize("stream", sorted(rules.OWN_STREAMS))
@pytest.mark.parametrize("kind", [rules.MAX_DELIVERIES, rules.TERMINATED])
def test_advisories_about_the_service_s_own_streams_are_counted(stream: str, kind: str) -> None:
    assert {Act.COUNT} == {decided(kind, is_agents=is_agents, stream=stream) for is_agents in (False, True)}


@pytest.mark.parametrize("kind", [rules.MAX_DELIVERIES, rules.TERMINATED])
def test_a_foreign_consumer_s_failure_is_a_letter(kind: str) -> None:
    assert Act.LETTER is decided(kind, is_agents=False)


@pytest.mark.parametrize("kind", [rules.MAX_DELIVERIES, rules.TERMINATED])
def test_what_an_agent_gives_up_it_hands_over_itself(kind: str) -> None:
    """Before it ends a delivery; and of what the server gave up only its ledger knows whether it began."""
    assert Act.COUNT is decided(kind, is_agents=True)


# ---- letters


def letter(failure: Failure = FAILURE, original: Original | None = ORIGINAL, limits: Limits = LIMITS) -> rules.Letter:
    return rules.letter_of(failure, original, 5, 1_000, limits)


def test_the_same_failure_is_the_same_letter_whoever_tells_of_it() -> None:
    """D2: stream, creation time, sequence, message timestamp, consumer; nothing else."""
    told = msgspec.structs.replace(FAILURE, kind="request", reason="other", deliveries=1, created_ns=5)
    assert letter().id == letter(told).id == ids.letter_id(ids.Origin("S", 5, 7, 99), "w")


@pytest.mark.parametrize("change", [{"stream": "T"}, {"sequence": 8}, {"consumer": "v"}, {"created_ns": 6}])
def test_another_place_is_another_letter(change: dict[str, object]) -> None:
    assert letter().id != letter(msgspec.structs.replace(FAILURE, **change)).id


def test_a_letter_carries_the_body_the_story_and_the_original_s_headers_out_of_reach() -> None:
    made = letter()
    assert (b"body", "dlq.evt.acme.demo.x", "max_deliveries") == (made.payload, made.subject, made.cause)
    assert ("acme", "00-a-b-01", "5", "99") == tuple(
        made.headers[name] for name in (letters.TENANT, letters.TRACE, letters.DELIVERIES, letters.TIMESTAMP)
    )
    assert "m" == made.headers["Oncewire-Orig-Nats-Msg-Id"]
    assert not any(name.startswith("Nats-") for name in made.headers)


@pytest.mark.parametrize(
    ("subject", "expected"),
    [
        ("platform.billing.x", "dlq.billing.x"),
        ("gpuaas.provisioning.x", "dlq.provisioning.x"),
        ("a" * 1_030, "dlq._unnamed.S"),
        ("", "dlq._unnamed.S"),
    ],
)
def test_the_subject_of_a_letter(subject: str, expected: str) -> None:
    assert expected == letter(original=msgspec.structs.replace(ORIGINAL, subject=subject)).subject


def test_a_letter_without_its_original_says_so() -> None:
    made = letter(original=None)
    assert (letters.GONE, b"") == (made.headers[letters.PAYLOAD], made.payload)


@given(st.integers(0, 40_000), st.integers(0, 60))
def test_a_letter_always_fits_whatever_the_original(size: int, count: int) -> None:
    limits = Limits(32_000)
    headers = {f"X-{at}": "v" * 700 for at in range(count)}
    made = letter(original=Original("s.x", b"b" * size, headers, 1), limits=limits)
    total = rules.block_bytes(made.headers) + len(made.payload)
    assert total <= limits.payload_bytes_max
    assert made.is_pointer == (made.headers.get(letters.PAYLOAD) == letters.POINTER)
    assert made.payload == (b"" if made.is_pointer else b"b" * size)


def test_a_pointer_says_how_large_the_original_is() -> None:
    made = letter(original=Original("s.x", b"b" * 2_000, {}, 1), limits=Limits(1_500))
    assert ("2000", True) == (made.headers[letters.BYTES], made.is_pointer)


@given(st.dictionaries(st.text(max_size=150), st.text(max_size=40), max_size=20))
def test_no_header_of_an_original_can_leave_its_place(headers: dict[str, str]) -> None:
    found = letters.carry(headers)
    assert len(headers) == len(found.headers) + found.dropped
    for name, value in found.headers.items():
        assert name.startswith(carried.ORIGINAL_PREFIX)
        assert not set(name + value) & set("\r\n\x00")
        assert ":" not in name
    kept = letters.originals(found.headers)
    assert kept.items() <= headers.items()


@given(st.text(max_size=3_000))
def test_a_reason_is_one_line_that_fits(text: str) -> None:
    line = letters.one_line(text)
    assert len(line) <= letters.ERROR_CHARS_MAX
    assert line.isprintable() or not line


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ("no_handler", "no_handler"),
        ("ValueError: bad", "ValueError"),
        ("a whole sentence", "dead"),
        ("two words: x", "dead"),
        ("", "dead"),
        (": x", "dead"),
    ],
)
def test_the_cause_is_the_word_before_the_colon(reason: str, cause: str) -> None:
    assert cause == letters.cause_of(reason, "dead")


# ---- garbage


@given(st.binary(max_size=200))
def test_no_bytes_pass_for_an_advisory_or_break_the_reader(payload: bytes) -> None:
    with pytest.raises(ContractViolation):
        rules.read_advisory(payload)


REQUEST = {
    letters.STREAM: "S",
    letters.CREATED: "5",
    letters.SEQUENCE: "7",
    letters.TIMESTAMP: "99",
    letters.CONSUMER: "w",
    letters.DELIVERIES: "5",
    letters.SUBJECT: "evt.acme.demo.x",
    letters.OUTCOME: "dead",
    letters.CAUSE: "ValueError: bad",
}


def test_a_request_is_read_as_it_was_written() -> None:
    failure, original = rules.read_request(b"body", REQUEST | {"Oncewire-Orig-X": "1", "Other": "2"})
    place = (failure.stream, failure.sequence, failure.consumer, failure.created_ns, failure.timestamp_ns)
    assert ("S", 7, "w", 5, 99) == place
    assert original is not None
    assert ({"X": "1"}, b"body") == (original.headers, original.payload)


@given(st.sampled_from(sorted(REQUEST)), st.text(max_size=30))
def test_no_request_breaks_the_reader(name: str, value: str) -> None:
    """Read, or refused with the field."""
    try:
        failure, original = rules.read_request(b"body", REQUEST | {name: value})
    except ContractViolation:
        return
    made = rules.letter_of(failure, original, 5, 1_000, LIMITS)
    assert made.subject.startswith("dlq.")


# ---- replays


def test_a_replay_carries_what_the_original_was_resolved_to() -> None:
    body = b'{"type": "T", "payload": {"n": 1}}'
    origin = ids.Origin("S", 5, 7, 99_000_000)
    headers = {"Nats-Msg-Id": "m", "Nats-Expected-Stream": "S", "Nats-TTL": "1s", "X": "1"}
    resolved = rules.resolve("evt.a.b.x", body, headers, origin)
    told = rules.replay_headers("w", "dl.1", origin, headers, resolved)
    assert ("w", "m", "m", "99", "1") == tuple(
        told[name]
        for name in (
            carried.REPLAY_FOR,
            carried.REPLAY_ID,
            carried.REPLAY_IDEMPOTENCY_KEY,
            carried.REPLAY_TS,
            "X",
        )
    )
    assert not any(name.startswith("Nats-") for name in told)
    moved = ids.Origin("S", 5, 70, 990_000_000)
    assert resolved == rules.resolve("evt.a.b.x", body, told | {"Nats-Msg-Id": "rp.1"}, moved)


RECORD = Record("dl.1", State.SENT, 1, "rp.1", "S", "s.x", 3, 1_000, letter_sequence=7)


@pytest.mark.parametrize(
    ("known", "sequence", "now_ms", "expected"),
    [
        (None, 7, 1_000, Next.FRESH),
        (RECORD, 8, 1_000, Next.FRESH),
        (RECORD, 7, 1_000 + 59_999, Next.AGAIN),
        (RECORD, 7, 1_000 + 60_000, Next.LOOK),
        (msgspec.structs.replace(RECORD, state=State.PUBLISHED), 7, 10**9, Next.OUT),
        (msgspec.structs.replace(RECORD, state=State.DROPPED), 7, 1_000, Next.FRESH),
    ],
)
def test_where_a_copy_stands_that_somebody_may_have_sent(
    known: Record | None, sequence: int, now_ms: int, expected: Next
) -> None:
    """E2: within half the window the server refuses a repeat, after that the target is read first."""
    assert expected is rules.next_step(known, sequence, now_ms, window_s=120)


# ---- durables


STAND = Stand("S", "c", 5, 0, 0, 0, 9, 9, 5, (">",))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, False),
        ({"redelivered": 2}, True),
        ({"redelivered": 2, "in_flight": 1}, False),
        ({"redelivered": 2, "max_deliver": -1}, False),
    ],
)
def test_given_up_is_what_was_redelivered_and_is_not_in_flight(change: dict[str, object], expected: bool) -> None:
    assert expected is msgspec.structs.replace(STAND, **change).has_exhausted


def test_messages_that_wait_while_nobody_pulls_count_from_when_it_began() -> None:
    first = rules.watch({}, [STAND], 10.0)
    assert 10.0 == rules.watch(first, [STAND], 20.0)["S/c"].since_s
    moved = msgspec.structs.replace(STAND, delivered=10)
    assert 20.0 == rules.watch(first, [moved], 20.0)["S/c"].since_s
    given_up = msgspec.structs.replace(STAND, pending=0, redelivered=2)
    assert 2 == rules.watch({}, [given_up], 20.0)["S/c"].stand.waits
    for gone in ({"waiting": 1}, {"pending": 0}, {"consumer": "dlq_inspector"}):
        assert {} == rules.watch(first, [msgspec.structs.replace(STAND, **gone)], 20.0)


# ---- reading letters


def stored(sequence: int = 1, **headers: str) -> StoredMessage:
    told = {name.replace("_", "-"): value for name, value in headers.items()}
    return StoredMessage("DLQ", "dlq.x", sequence, "2026-11-15T08:00:00Z", told, b"body")


def test_a_letter_of_a_stranger_is_read_without_a_story() -> None:
    found = read_letter(stored(Oncewire_Dlq_Sequence="x" * 40))
    assert ("unknown", 0, "", 4) == (found.cause, found.of_sequence, found.stream, found.bytes)


def test_groups_are_by_consumer_subject_and_cause_the_largest_first() -> None:
    def one(number: int, cause: str) -> StoredMessage:
        return stored(number, Oncewire_Dlq_Cause=cause, Oncewire_Dlq_At=str(number), Nats_Msg_Id=f"dl.{number}")

    read = [read_letter(one(at, cause)) for at, cause in enumerate(["a", "b", "b"], 1)]
    found = group(read, {"dl.3": True})
    assert [("b", 2, 2, 3, 1), ("a", 1, 1, 1, 0)] == [
        (item.cause, item.count, item.first_ms, item.last_ms, item.withdrawn) for item in found
    ]


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (Filter(), True),
        (Filter(cause="a"), True),
        (Filter(cause="b"), False),
        (Filter(since_ms=6), False),
        (Filter(until_ms=5), False),
        (Filter(since_ms=5, until_ms=6), True),
        (Filter(subject="s.>"), True),
        (Filter(subject="t.>"), False),
        (Filter(ids=frozenset({"dl.1"})), True),
        (Filter(ids=frozenset({"1"})), True),
        (Filter(ids=frozenset({"2"})), False),
        (Filter(tenant="acme"), False),
    ],
)
def test_a_filter_takes_what_fits_all_of_it(chosen: Filter, expected: bool) -> None:
    told = {"Oncewire_Dlq_Cause": "a", "Oncewire_Dlq_At": "5", "Oncewire_Dlq_Subject": "s.x", "Nats_Msg_Id": "dl.1"}
    assert expected is chosen.takes(read_letter(stored(**told)))
