"""What a relay decides, without a database and without a stream."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from oncewire._ground.contracts import decode_realtime
from oncewire._ground.contracts.realtime import MessageCreated
from oncewire.outbox import rules
from oncewire.outbox.rules import Claim, Key, Pace, Row, Stored, resolved, started

CONVERSATION = "7c0f3a52-6a53-4b0e-8a55-0d3f1f1e7f10"
ROW = Row(
    id=1,
    conversation_id=CONVERSATION,
    sequence=1,
    dedupe_id="d1",
    epoch="e",
    tenant="",
    message_id="m1",
    role="user",
    content="hello",
    model=None,
    citations=None,
    metadata=None,
    void_reason=None,
    created_at=datetime(2025, 1, 1, 12, tzinfo=UTC),
)


def rows(first: int, count: int, epoch: str = "e") -> tuple[Row, ...]:
    return tuple(
        replace(ROW, id=n, sequence=n, dedupe_id=f"d{n}", message_id=f"m{n}", epoch=epoch)
        for n in range(first, first + count)
    )


def claim(first: int, count: int, expected: int = 0) -> rules.Progress:
    return started(Claim(CONVERSATION, expected, rows(first, count)))


def stored(place: int, row: Row) -> Stored:
    return Stored(place, row.key)


# ---- the envelope

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(
    content=st.text(st.characters(codec="utf-8", exclude_characters="\0")),
    model=st.none() | st.text(st.characters(codec="utf-8")),
    citations=st.none() | JSON,
    metadata=st.none() | st.dictionaries(st.text(st.characters(codec="utf-8")), JSON, max_size=3),
    role=st.sampled_from(["user", "assistant", "system"]),
    void_reason=st.none() | st.text(st.characters(codec="utf-8"), max_size=20),
)
def test_every_body_that_the_relay_builds_is_an_envelope_of_the_contract(
    content: str, model: str | None, citations: Any, metadata: Any, role: str, void_reason: str | None
) -> None:
    row = replace(
        ROW,
        content=content,
        model=model,
        role=role,
        citations=None if citations is None else json.dumps(citations, ensure_ascii=False),
        metadata=None if metadata is None else json.dumps(metadata, ensure_ascii=False),
        void_reason=void_reason,
    )
    envelope = decode_realtime(rules.body_of(row))
    assert isinstance(envelope.event, MessageCreated)
    assert (envelope.conversation_id, envelope.sequence, envelope.contract.dedupe_key) == (CONVERSATION, 1, "d1")
    if void_reason is None:
        assert (content, model, citations, metadata) == (
            envelope.event.content,
            envelope.event.model,
            envelope.event.citations,
            envelope.event.metadata,
        )
    else:
        assert ("", {"voided": True, "reason": void_reason}) == (envelope.event.content, envelope.event.metadata)


def test_the_envelope_looks_like_the_example_of_the_protocol() -> None:
    body = json.loads(rules.body_of(replace(ROW, role="assistant", model="meditron:7b", sequence=42)))
    assert body == {
        "version": "2024-12-01",
        "conversationId": CONVERSATION,
        "sequence": 42,
        "issuedAt": "2025-01-01T12:00:00Z",
        "contract": {"guarantee": "at-least-once", "dedupeKey": "d1"},
        "event": {
            "type": "chat.message.created",
            "messageId": "m1",
            "dedupeId": "d1",
            "role": "assistant",
            "content": "hello",
            "model": "meditron:7b",
        },
    }


def test_a_relays_message_is_known_by_its_headers() -> None:
    assert ROW.key == rules.key_in(rules.headers_of(ROW))


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Oncewire-Epoch": "e", "Oncewire-Sequence": "1"},
        {"Oncewire-Epoch": "e", "Oncewire-Sequence": "one", "Oncewire-Dedupe-Id": "d"},
        {"Oncewire-Epoch": "e", "Oncewire-Sequence": "²", "Oncewire-Dedupe-Id": "d"},
        {"Oncewire-Sequence": "1", "Oncewire-Dedupe-Id": "d"},
    ],
)
def test_other_messages_are_nobodys_row(headers: dict[str, str]) -> None:
    assert rules.key_in(headers) is None


# ---- claims


def test_rows_are_grouped_by_conversation_and_ordered_by_sequence() -> None:
    other = replace(ROW, conversation_id="other", sequence=7)
    given_rows = [rows(1, 3)[2], other, rows(1, 3)[0], rows(1, 3)[1]]
    found = rules.grouped(given_rows, {CONVERSATION: 5, "other": 0})
    assert [(one.conversation_id, one.expected, [row.sequence for row in one.rows]) for one in found] == [
        (CONVERSATION, 5, [1, 2, 3]),
        ("other", 0, [7]),
    ]


FLAWED = f'{{"n": {"9" * 4_301}}}'


def test_a_claim_ends_before_a_row_that_readers_would_refuse() -> None:
    first, second, third = rows(1, 3)
    found = started(Claim(CONVERSATION, 7, (first, replace(second, metadata=FLAWED), third)))
    assert ((first,), 7, "") == (found.claim.rows, found.expected, found.refused)


def test_a_conversation_stops_at_a_first_row_that_readers_would_refuse() -> None:
    first, second = rows(1, 2)
    found = started(Claim(CONVERSATION, 0, (replace(first, citations=FLAWED), second)))
    assert (True, 1) == (found.is_over, found.next_row.sequence)
    assert "integer value out of range" in found.refused


def test_a_voided_row_is_published_whatever_it_holds() -> None:
    found = started(Claim(CONVERSATION, 0, (replace(ROW, metadata=FLAWED, void_reason="r"),)))
    assert "" == found.refused


# ---- after a refusal


def test_a_row_that_stands_in_the_stream_under_its_key_was_published() -> None:
    one = claim(5, 2, expected=40)
    found = resolved(one, [stored(41, rows(5, 1)[0]), stored(44, rows(6, 1)[0])], last=44)
    assert (found.confirmed, found.stream_sequence, found.is_over) == (2, 44, True)


def test_what_was_not_published_goes_behind_the_last_message_seen() -> None:
    """Lifecycle envelopes of others stand on the subject too."""
    found = resolved(claim(5, 2, expected=40), [Stored(43, None), Stored(48, None)], last=48)
    assert (found.confirmed, found.expected, found.is_over, found.renumber_above) == (0, 48, False, 0)


def test_half_of_the_rows_may_have_been_published() -> None:
    found = resolved(claim(5, 3, expected=40), [stored(41, rows(5, 1)[0]), Stored(42, None)], last=42)
    assert (found.confirmed, found.expected, found.next_row.sequence) == (1, 42, 6)


def test_rows_published_beyond_the_claim_are_left_for_the_next_pass() -> None:
    """Two passes whose marks were lost: the claim holds the first rows only, and the cursor must not skip the rest."""
    found = resolved(claim(1, 2), [stored(10 + row.sequence, row) for row in rows(1, 4)], last=14)
    assert (found.confirmed, found.stream_sequence) == (2, 12)


def test_a_subject_without_messages_expects_zero() -> None:
    found = resolved(claim(5, 1, expected=40), [], last=0)
    assert (found.confirmed, found.expected, found.is_over) == (0, 0, False)


def test_the_same_number_under_another_dedupe_id_means_a_restored_database() -> None:
    foreign = [Stored(41, Key("e", 5, "other")), Stored(42, Key("e", 6, "another"))]
    found = resolved(claim(5, 1, expected=40), foreign, last=42)
    assert (found.confirmed, found.renumber_above, found.stream_sequence, found.is_over) == (0, 6, 42, True)


def test_the_same_number_under_another_epoch_means_that_too() -> None:
    """A database that was restored twice: sequences on a subject must never go back."""
    found = resolved(
        claim(16, 1, expected=40), [Stored(41, Key("e2", 16, "x")), Stored(45, Key("e2", 20, "y"))], last=45
    )
    assert found.renumber_above == 20


def test_marks_that_came_back_with_a_restore_are_found_before_new_numbers_are_given() -> None:
    """5 and 6 were published from this very database, 7 was not."""
    lost = [stored(41, rows(5, 1)[0]), stored(42, rows(6, 1)[0]), Stored(43, Key("e", 7, "other"))]
    found = resolved(claim(5, 3, expected=40), lost, last=43)
    assert (found.confirmed, found.next_row.sequence, found.renumber_above) == (2, 7, 7)


def test_lower_numbers_of_others_are_history() -> None:
    found = resolved(claim(5, 1, expected=40), [Stored(41, Key("older", 4, "x"))], last=41)
    assert (found.renumber_above, found.expected) == (0, 41)


# ---- how much, and how soon


@pytest.mark.parametrize(
    ("sizes", "rounds"),
    [([], []), ([1], [1]), ([1] * 17, [17]), ([4, 4], [2, 2, 2, 2]), ([1, 3, 2, 1], [4, 2, 1])],
)
def test_one_row_of_each_conversation_goes_in_a_round(sizes: list[int], rounds: list[int]) -> None:
    assert rounds == rules.rounds_of([Claim("c", 0, rows(1, size)) for size in sizes])


@pytest.mark.parametrize(
    ("found", "conversations", "wanted"),
    [(0, 0, 200), (1_000, 40, 40), (200, 200, 1_000), (500, 100, 200), (1_000, 1_000, 1_000)],
)
def test_as_many_conversations_are_wanted_as_fill_a_batch(found: int, conversations: int, wanted: int) -> None:
    assert wanted == rules.conversations_wanted(found, conversations, batch_size=25)


def test_the_pause_grows_with_the_work_between_two_bounds() -> None:
    assert [rules.pause_ms(took) for took in (0, 5, 60, 500)] == [20.0, 20.0, 30.0, 100.0]


def test_a_relay_is_idle_after_a_quiet_while_and_awake_with_the_first_row() -> None:
    pace = Pace().after(False, now=1_000).after(False, now=1_100)
    assert not pace.is_idle(1_199)
    assert pace.is_idle(1_200)
    assert not pace.after(True, now=1_300).is_idle(9_999)


def test_the_wait_for_a_server_doubles_up_to_a_limit() -> None:
    assert [rules.retry_ms(n) for n in (1, 2, 3, 10, 1_000)] == [100, 200, 400, 5_000, 5_000]
