"""The rules of the ledger: keys that never meet, sums that do not depend on order, blocks that chain."""

from __future__ import annotations

import hashlib
import random
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncewire._ground.contracts import blocks
from oncewire._ground.contracts.blocks import Confirmed, Outcome
from oncewire._ground.contracts.letters import ERROR_CHARS_MAX
from oncewire._ground.errors import ContractViolation
from oncewire._ground.jetstream.protocol import encode_headers
from oncewire._ground.ledger import rules
from oncewire._ground.ledger.rules import Content, Entry, Head, Ledger, Sending, Source
from tests.support.guilty import Numeric, Unreadable

pytestmark = pytest.mark.usefixtures("loops")

LEDGER = Ledger("abc-1", "default", "demo", "biller")
READ_EVENTS = Source("EVENTS", "2026-01-01T00:00:00Z", "biller_consumer", ("evt.>",), 1, False)
READ_COMMANDS = Source("COMMANDS", "2026-01-02T00:00:00Z", "biller_consumer", ("cmd.>",), 5, True)
SOURCES = {one.durable: one for one in (READ_EVENTS, READ_COMMANDS)}
NOTHING = Confirmed(0, {})


def entry(number: int, outcome: Outcome = Outcome.DONE, **changed: object) -> Entry:
    made = Entry(
        number.to_bytes(16, "big"),
        f"key:{number}",
        "evt.default.demo.t",
        f"body {number}".encode(),
        b"",
        outcome,
        "EVENTS",
        number,
        number * 1000,
        hashlib.sha256(str(number).encode()).digest(),
        0,
    )
    return msgspec.structs.replace(made, **changed)


def content(*entries: Entry, effects: int = 0) -> Content:
    return Content(list(entries), [Sending(f"fx.{at}", "s", b"", None, "S") for at in range(effects)], 0, {})


def grow(head: Head, *entries: Entry) -> tuple[Head, bytes]:
    return rules.next_block(LEDGER, head, rules.summed(LEDGER, content(*entries), SOURCES), NOTHING)


# ---- keys


texts = st.text(max_size=6)


@given(st.tuples(texts, texts), st.tuples(texts, texts))
def test_different_inputs_have_different_keys(one: tuple[str, str], two: tuple[str, str]) -> None:
    assert (one == two) == (rules.identity_key(*one) == rules.identity_key(*two))


places = st.tuples(texts, texts, texts, st.integers(0, 2**63))


@given(places, places)
def test_different_positions_have_different_keys(one: Any, two: Any) -> None:
    assert (one == two) == (rules.position_key(*one) == rules.position_key(*two))


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (("a", "1:b"), ("a1:", "b")),
        (("ab", "c"), ("a", "bc")),
        (("", "a"), ("a", "")),
        (("a", "1:b"), ("a3:", "b")),
    ],
)
def test_a_border_between_parts_is_part_of_the_key(one: tuple[str, str], two: tuple[str, str]) -> None:
    assert rules.identity_key(*one) != rules.identity_key(*two)
    assert rules.position_key(*one, "", 1) != rules.position_key(*two, "", 1)
    assert rules.position_key("a", *one, 1) != rules.position_key("a", *two, 1)
    assert blocks.announcement_id(*one, 1) != blocks.announcement_id(*two, 1)


def test_an_identity_never_passes_for_a_position() -> None:
    assert rules.identity_key("a", "1:s1:c7") != rules.position_key("a", "s", "c", 7)
    assert rules.KEY_BYTES == len(rules.identity_key("a", "b")) == len(rules.position_key("a", "s", "c", 7))


def test_a_recreated_stream_has_other_positions() -> None:
    assert rules.position_key("a", "s", "then", 7) != rules.position_key("a", "s", "now", 7)


def test_an_identity_with_a_lone_surrogate_has_a_key() -> None:
    assert rules.identity_key("a", "\ud800") != rules.identity_key("a", "\ud801")


# ---- sums


@given(st.lists(st.binary(min_size=64, max_size=64), max_size=8), st.randoms(use_true_random=False))
def test_a_sum_depends_on_neither_order_nor_grouping(elements: list[bytes], chance: random.Random) -> None:
    whole = blocks.add(blocks.NO_STATE, elements)
    mixed = elements[:]
    chance.shuffle(mixed)
    cut = chance.randint(0, len(mixed))
    assert whole == blocks.add(blocks.add(blocks.NO_STATE, mixed[:cut]), mixed[cut:])
    assert whole == blocks.add(blocks.add(blocks.NO_STATE, mixed[:cut]), [blocks.add(blocks.NO_STATE, mixed[cut:])])


def test_lanes_do_not_carry_into_each_other() -> None:
    full = b"\xff" * 64
    assert blocks.add(full, [(1).to_bytes(8, "little") + bytes(56)]) == bytes(8) + full[8:]


def test_a_sum_tells_one_from_two() -> None:
    """Exclusive or would not."""
    once = blocks.add(blocks.NO_STATE, [rules.element("a", entry(1))])
    assert blocks.NO_STATE != blocks.add(once, [rules.element("a", entry(1))]) != once


@pytest.mark.parametrize(
    "changed",
    [{"identity": "other"}, {"subject": "evt.other"}, {"digest": bytes(32)}, {"outcome": Outcome.DEAD}],
)
def test_identity_subject_content_and_outcome_are_in_the_state(changed: dict[str, object]) -> None:
    assert rules.element("a", entry(1)) != rules.element("a", entry(1, **changed))
    assert rules.element("a", entry(1)) != rules.element("b", entry(1))


@pytest.mark.parametrize(
    "changed",
    [{"key": bytes(16)}, {"body": b"x"}, {"header": b"x"}, {"stream": "S"}, {"sequence": 9}, {"timestamp_ns": 9}],
)
def test_where_and_how_it_came_is_not_in_the_state(changed: dict[str, object]) -> None:
    assert rules.element("a", entry(1)) == rules.element("a", entry(1, **changed))


@pytest.mark.parametrize("changed", [{"stream": "S"}, {"sequence": 9}, {"body": b"x"}])
def test_stream_sequence_and_body_are_in_the_sum_over_positions(changed: dict[str, object]) -> None:
    assert rules.position_element(entry(1)) != rules.position_element(entry(1, **changed))


def test_a_border_between_stream_and_sequence_is_in_the_sum() -> None:
    one, two = entry(1, stream="S1", sequence=1), entry(1, stream="S", sequence=11)
    assert rules.position_element(one) != rules.position_element(two)


@given(st.permutations(list(range(6))), st.sets(st.integers(1, 5)))
def test_the_state_is_the_same_for_any_order_and_any_blocks(order: list[int], cuts: set[int]) -> None:
    head = rules.FIRST
    block: list[Entry] = []
    for at, number in enumerate(order):
        if at in cuts:
            head, _ = grow(head, *block)
            block = []
        block.append(entry(number))
    head, _ = grow(head, *block)
    assert head.state == blocks.add(blocks.NO_STATE, [rules.element(LEDGER.name, entry(one)) for one in range(6)])


def test_duplicates_and_replays_for_others_change_no_state() -> None:
    head, _ = grow(rules.FIRST, entry(1, Outcome.DUPLICATE), entry(2, Outcome.PASSED))
    assert blocks.NO_STATE == head.state
    for counted in (Outcome.DONE, Outcome.DEAD, Outcome.TERMINATED):
        assert blocks.NO_STATE != grow(rules.FIRST, entry(1, counted))[0].state


# ---- blocks


@given(st.sets(st.integers(0, 40)))
def test_ranges_cover_exactly_their_numbers(numbers: set[int]) -> None:
    found = blocks.ranges(list(numbers) * 2)
    assert sorted(numbers) == [number for first, last in found for number in range(first, last + 1)]
    assert all(last + 1 < first for (_, last), (first, _) in pairwise(found))


def test_each_block_names_the_hash_of_the_announcement_before_it() -> None:
    head, first = grow(rules.FIRST, entry(1))
    after, second = grow(head, entry(2))
    one, two = blocks.read_announcement(first), blocks.read_announcement(second)
    assert (1, "00" * 32) == (one.number, one.previous)
    assert (2, hashlib.sha256(first).hexdigest()) == (two.number, two.previous)
    assert hashlib.sha256(second).digest() == after.hash
    assert after.state.hex() == two.state


def test_an_announcement_says_what_an_auditor_needs() -> None:
    entries = [entry(1), entry(2), entry(3, Outcome.DEAD), entry(5, Outcome.DUPLICATE), entry(7, stream="COMMANDS")]
    block = rules.summed(LEDGER, content(*entries, effects=2), SOURCES)
    _, made = rules.next_block(LEDGER, rules.FIRST, block, Confirmed(3, {"EVENTS": 9}))
    announced = blocks.read_announcement(made)
    commands, events = announced.inputs
    assert (["fx.0", "fx.1"], Confirmed(3, {"EVENTS": 9})) == (announced.effects, announced.confirmed)
    assert ("abc-1", "default", "demo", "biller") == (
        announced.ledger,
        announced.tenant,
        announced.workspace,
        announced.agent,
    )
    assert ([(1, 2)], [(3, 3)], [(5, 5)], [], []) == (
        events.done,
        events.dead,
        events.duplicate,
        events.terminated,
        events.passed,
    )
    assert ("EVENTS", "biller_consumer", ("evt.>",), 1) == (
        events.stream,
        events.consumer,
        events.filters,
        events.start,
    )
    assert events.sum == blocks.add(blocks.NO_STATE, [rules.position_element(one) for one in entries[:4]]).hex()
    assert ([], [(7, "key:7", entries[4].digest.hex())]) == (events.listed, commands.listed)
    assert ([], [entries[4].subject]) == (events.subjects, commands.subjects)


def test_an_announcement_says_where_effects_go_and_how_far_every_input_is_settled() -> None:
    """What an auditor cannot see (a work queue) must not pass for lost, nor what is lost for in progress."""
    sendings = [Sending(f"fx.{at}", "s", b"", None, stream) for at, stream in enumerate(["A", "B", "A", "A"])]
    sources = SOURCES | {READ_EVENTS.durable: msgspec.structs.replace(READ_EVENTS, settled=41)}
    made = rules.summed(LEDGER, Content([], sendings, 0, {}), sources)
    announced = blocks.read_announcement(rules.next_block(LEDGER, rules.FIRST, made, NOTHING)[1])
    assert {"A": [(0, 0), (2, 3)], "B": [(1, 1)]} == announced.targets
    assert [("EVENTS", READ_EVENTS.created, 41)] == announced.settled
    assert {"A": [(0, 1)]} == rules.targets_of([sendings[0], sendings[2]])


def test_every_effect_of_an_announcement_has_a_target() -> None:
    sendings = [Sending(f"fx.{at}", "s", b"", None, stream) for at, stream in enumerate(["A", "B", "A"])]
    block = rules.summed(LEDGER, Content([], sendings, 0, {}), SOURCES)
    announced = blocks.read_announcement(rules.next_block(LEDGER, rules.FIRST, block, NOTHING)[1])
    assert ["A", "B", "A"] == blocks.effect_targets(announced)
    for targets, missing in (({}, 0), ({"A": [(0, 0), (2, 2)]}, 1), ({"A": [(-9, 1), (3, 1 << 60)]}, 2)):
        with pytest.raises(ContractViolation, match=f"effect {missing} has no target"):
            blocks.effect_targets(msgspec.structs.replace(announced, targets=targets))


def test_a_block_tells_the_inputs_of_each_durable_of_a_stream_apart() -> None:
    """Each names all that the agent reads there: what it left out of a part is no less meant for it."""
    one = msgspec.structs.replace(READ_EVENTS, consumer="a", filters=("evt.a",), settled=9)
    other = msgspec.structs.replace(READ_EVENTS, consumer="b", filters=("evt.b.>",), start=7)
    entries = [entry(1, subject="evt.b.x"), entry(2, subject="evt.a"), entry(3, Outcome.DEAD, subject="evt.b.y")]
    sources = {source.durable: source for source in (one, other)}
    found = rules.inputs_of(entries, sources)
    assert [("a", [(2, 2)], []), ("b", [(1, 1)], [(3, 3)])] == [(told.consumer, told.done, told.dead) for told in found]
    assert {(("evt.a", "evt.b.>"), 7)} == {(told.filters, told.start) for told in found}
    assert [] == rules.settled_up_to(sources.values())
    settled = [one, msgspec.structs.replace(other, settled=4)]
    assert [("EVENTS", READ_EVENTS.created, 4)] == rules.settled_up_to(settled)


def test_listed_inputs_name_each_subject_unless_it_is_the_same() -> None:
    entries = [entry(1, stream="COMMANDS"), entry(2, stream="COMMANDS", subject="cmd.other")]
    [listed] = rules.inputs_of(entries, SOURCES)
    assert [entries[0].subject, "cmd.other"] == listed.subjects == blocks.listed_subjects(listed)
    [same] = rules.inputs_of([entry(at, stream="COMMANDS") for at in (1, 2, 3)], SOURCES)
    assert [entries[0].subject] * 3 == blocks.listed_subjects(same)
    for subjects in ([], ["cmd.a", "cmd.b"]):
        with pytest.raises(ContractViolation, match="3 inputs are listed"):
            blocks.listed_subjects(msgspec.structs.replace(same, subjects=subjects))


def test_announcements_have_ids_of_their_own() -> None:
    ids = {blocks.announcement_id(ledger, agent, number) for ledger in "ab" for agent in "cd" for number in range(3)}
    assert 12 == len(ids)
    assert all(one.startswith("bl.") for one in ids)


# ---- what is confirmed


ranges = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 5)).map(lambda one: (one[0], one[0] + one[1])))


@given(st.integers(0, 12), ranges)
def test_holes_are_exactly_what_is_not_covered(count: int, covered: list[tuple[int, int]]) -> None:
    missing = [at for first, last in rules.holes(count, covered) for at in range(first, last + 1)]
    assert missing == [at for at in range(count) if not any(first <= at <= last for first, last in covered)]


def test_a_range_within_another_opens_no_hole() -> None:
    assert [] == rules.holes(6, [(0, 5), (1, 2)])


def test_confirmed_goes_up_to_the_first_hole() -> None:
    blocks = [(4, 1), (5, 0), (6, 2), (7, 0)]
    marks = {4: [(0, 1)], 5: [(0, 0)], 6: [(0, 1)], 7: [(0, 0)]}
    assert 5 == rules.confirmed_up_to(3, blocks, marks)
    assert 7 == rules.confirmed_up_to(3, blocks, marks | {6: [(0, 1), (2, 2)]})
    assert 3 == rules.confirmed_up_to(3, blocks, {})


def test_confirmed_never_jumps_over_a_block_that_is_not_there() -> None:
    assert 3 == rules.confirmed_up_to(3, [(5, 0)], {5: [(0, 0)]})


# ---- retries


def test_retries_wait_longer_each_time_and_then_the_same() -> None:
    assert [1.0, 1.0, 5.0, 10.0, 30.0, 30.0, 30.0] == [rules.retry_delay_s(one) for one in (0, 1, 2, 3, 4, 5, 1000)]


def test_an_error_is_one_line_that_fits() -> None:
    assert "ValueError: a b" == rules.short_error(ValueError("a\n  b"))
    assert "ValueError" == rules.short_error(ValueError())
    assert ERROR_CHARS_MAX == len(rules.short_error(ValueError("x" * 5_000)))


@given(st.text(st.characters(exclude_categories=())))
def test_an_error_is_text_that_every_store_and_header_can_hold(text: str) -> None:
    """PostgreSQL takes no NUL, UTF-8 no halves of characters, a header no line break."""
    error = rules.short_error(ValueError(text))

    assert error.isprintable()
    assert b"NATS/1.0\r\nCause: %b\r\n\r\n" % error.encode() == encode_headers({"Cause": error})


def test_an_error_whose_text_cannot_be_read_is_named_by_its_type() -> None:
    assert ["Unreadable", "Numeric"] == [rules.short_error(one) for one in (Unreadable(), Numeric())]
