"""What an audit concludes, without Spark: chains, buckets of positions, sums."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest

from oncewire._ground.contracts import blocks
from oncewire._ground.contracts.blocks import NO_HASH, NO_STATE
from oncewire._ground.errors import ContractViolation
from oncewire.pipeline.auditing import chains, rules, sums
from oncewire.pipeline.auditing.chains import Hole, Link
from oncewire.pipeline.auditing.excuses import Ranges
from oncewire.pipeline.auditing.rules import (
    BUCKET,
    Bucket,
    Claim,
    Facts,
    InSilver,
    Quarantined,
    Reader,
    Result,
    Rows,
)
from oncewire.pipeline.auditing.sums import Part

CHAIN = "t/w/a@ledger"
AGENT = "t/w/a"
PLACE = ("S", 1, 0)


def hashed(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


def state(number: int) -> bytes:
    return number.to_bytes(8, "little") + bytes(56)


def link(number: int, sequence: int = 0, **changed: Any) -> Link:
    previous = hashed(number - 1) if number > 1 else NO_HASH
    return Link(CHAIN, number, previous, hashed(number), state(number * 10), sequence or number)._replace(**changed)


def walked(
    links: Sequence[Link], confirmed: int = 0, gaps: Sequence[tuple[int, int]] = ()
) -> list[tuple[str, str, int]]:
    found = chains.walk(links, {CHAIN: Hole(confirmed, Ranges(gaps))})
    return [(one.what, one.problem, one.block) for one in found if one.what != "link"]


# ---- chains


def test_blocks_in_order_have_nothing_to_tell_but_what_they_add() -> None:
    found = list(chains.walk([link(1), link(2)], {CHAIN: Hole(0, Ranges(()))}))
    assert [("link", state(10)), ("link", state(10))] == [(one.what, one.state) for one in found]


def test_a_block_that_names_another_hash_breaks_the_chain() -> None:
    assert [("error", "broken", 2)] == walked([link(1), link(2, previous=hashed(7))])
    assert [("error", "broken", 1)] == walked([link(1, previous=hashed(7))])


def test_a_hole_is_wrong_once_it_is_confirmed_and_pending_before() -> None:
    """Two commits may be on their way at once, so a later block can be in the stream first."""
    assert [("count", "pending", 3)] == walked([link(1), link(3)], confirmed=1)
    assert [("error", "missing", 3)] == walked([link(1), link(3)], confirmed=2)


def test_a_hole_in_a_known_gap_of_the_stream_is_explained() -> None:
    far = [link(1, 10), link(5, 90)]
    assert [("note", "in_gap", 5)] == walked(far, confirmed=4, gaps=[(11, 80)])
    assert [("error", "missing", 5)] == walked(far, confirmed=4, gaps=[(1, 9), (90, 95)])


def test_a_gap_explains_as_many_blocks_as_it_covers_sequences() -> None:
    far = [link(1, 10), link(5, 90)]
    assert [("error", "missing", 5)] == walked(far, confirmed=4, gaps=[(50, 51)])
    assert [("note", "in_gap", 5)] == walked(far, confirmed=4, gaps=[(50, 51), (60, 60)])


def test_a_block_may_stand_twice_but_not_two_blocks_under_one_number() -> None:
    assert [("note", "republished", 1)] == walked([link(1), link(1, 9), link(2)])
    assert [("error", "forked", 1)] == walked([link(1), link(1, 9, hash=hashed(99)), link(2)])


def test_a_chain_whose_beginning_is_gone_is_told_from_its_oldest_block() -> None:
    first, second = (one for one in chains.walk([link(7), link(8)], {CHAIN: Hole(0, Ranges(()))}) if one.what == "link")
    assert (b"", state(10)) == (first.state, second.state)
    assert [("note", "begins_later", 7)] == walked([link(7), link(8)])


# ---- positions


def reader(**changed: Any) -> Reader:
    return Reader(AGENT, (("evt.a.>",),), 1, 0, 0)._replace(**changed)


def binary(values: Sequence[bytes | None]) -> pa.Array:
    return pa.array(values, pa.binary())


def in_silver(*found: tuple[int, bytes]) -> InSilver:
    """Rows of silver: sequence, and what stands for the row."""
    sequences, hashes = zip(*found, strict=True) if found else ((), ())
    return InSilver(pa.array(sequences, pa.int64()), families(len(found)), binary(hashes))


def in_quarantine(*found: tuple[int, bytes, str]) -> Quarantined:
    """Rows of quarantine: sequence, what stands for the row, and its reason."""
    sequences, hashes, reasons = zip(*found, strict=True) if found else ((), (), ())
    told = pa.array(reasons, pa.string())
    return Quarantined(pa.array(sequences, pa.int64()), families(len(found)), binary(hashes), told)


def families(count: int) -> pa.Array:
    return pa.array(["runtime"] * count, pa.string())


def rows(sequences: Sequence[int], subject: str = "evt.a.x", **columns: Any) -> Rows:
    count = len(sequences)
    plain = Rows(
        pa.array(sequences, pa.int64()),
        pa.array([1_000 * at for at in range(1, count + 1)], pa.int64()),
        pa.array([subject] * count, pa.string()),
        pa.nulls(count, pa.string()),
        pa.array([f"key:{one}" for one in sequences], pa.string()),
        binary([hashed(one) for one in sequences]),
        pa.nulls(count, pa.binary()),
        binary([blocks.position_element("S", one, b"%d" % one) for one in sequences]),
        families(count),
        binary([b"row %d" % one for one in sequences]),
        pa.nulls(count, pa.binary()),
        pa.nulls(count, pa.string()),
    )
    return plain._replace(**columns)


def checked(
    found: Rows,
    *,
    up_to: int = 0,
    claims: Sequence[Claim] = (),
    readers: Sequence[Reader] = (),
    number: int = 0,
    is_derived: bool = False,
    **facts: Any,
) -> list[Result]:
    low = number * BUCKET
    known = Facts([(low + 1, up_to)] if up_to else [], [], list(claims), [], in_silver(), in_quarantine())._replace(
        **facts
    )
    return list(Bucket(PLACE, number, found, known, readers).check(is_derived=is_derived))


def errors(found: list[Result]) -> list[tuple[str, int, int]]:
    return [(one.problem, one.first, one.last) for one in found if one.what == "error"]


def counts(found: list[Result]) -> dict[str, int]:
    return {f"{one.check}.{one.problem}": one.amount for one in found if one.what == "count"}


def claim(first: int, last: int, number: int = 1, outcome: str = "done") -> Claim:
    return Claim(CHAIN, number, outcome, first, last)


def test_every_sequence_is_there_once_or_in_a_gap() -> None:
    found = checked(rows([1, 2, 2, 5, 9]), up_to=7, gaps=[(3, 3)])
    assert [("missing", 4, 4), ("missing", 6, 7), ("doubled", 2, 2), ("beyond", 9, 9)] == errors(found)
    assert {"sequences.rows": 4, "sequences.in_gaps": 1} == counts(found)


def test_a_bucket_that_is_gone_as_a_whole_is_named_as_one_range() -> None:
    low = 3 * BUCKET
    assert [("missing", low + 1, low + BUCKET)] == errors(checked(rows([]), up_to=low + BUCKET, number=3))


def test_more_ranges_than_are_named_are_counted() -> None:
    found = checked(rows(range(1, 1001, 2)), up_to=1000)
    named = [one for one in found if one.what == "error"]
    assert rules.RANGES_MAX + 1 == len(named)
    assert 500 == sum(one.amount for one in named)


def test_an_input_without_an_outcome_is_in_progress_until_its_agent_calls_it_settled() -> None:
    some = rows([1, 2, 3, 4])
    found = checked(some, up_to=4, claims=[claim(1, 1), claim(3, 3)], readers=[reader(settled=1)])
    assert [] == errors(found)
    assert 2 == counts(found)["outcomes.in_progress"]
    found = checked(some, up_to=4, claims=[claim(1, 1), claim(3, 3)], readers=[reader(settled=3)])
    assert [("no_outcome", 2, 2)] == errors(found)
    assert 1 == counts(found)["outcomes.in_progress"]


@pytest.mark.parametrize(
    "changed",
    [
        {"start": 3},
        {"filters": (("evt.b.>",),)},
        {"filters": (("evt.a.>",), ("evt.b.>",))},
        {"since_us": 2_000},
    ],
    ids=["begins later", "other subject", "filter was changed", "blocks are gone"],
)
def test_what_may_never_have_been_meant_for_an_agent_is_not_lost(changed: dict[str, Any]) -> None:
    assert [] == errors(checked(rows([1, 2]), up_to=2, readers=[reader(settled=2, **changed)]))


def test_an_outcome_needs_its_message() -> None:
    found = checked(rows([1]), up_to=3, claims=[claim(1, 5)], readers=[reader()], gaps=[(2, 2)])
    assert [("missing", 3, 3), ("not_in_bronze", 3, 3)] == errors(found)
    told = counts(found)
    assert (1, 2, 1) == (told["outcomes.in_gaps"], told["outcomes.pending"], told["outcomes.done"])


def test_two_outcomes_and_an_outcome_for_somebody_elses_message_are_wrong() -> None:
    both = [claim(1, 2), claim(2, 2, 3, "dead")]
    assert [("two_outcomes", 2, 2)] == errors(checked(rows([1, 2]), up_to=2, claims=both, readers=[reader()]))
    other = rows([1], "evt.b.x")
    assert [("outside_filter", 1, 1)] == errors(checked(other, up_to=1, claims=[claim(1, 1)], readers=[reader()]))


def test_a_work_queue_has_outcomes_without_messages() -> None:
    found = checked(rows([]), listed=[claim(4, 5), claim(5, 5, 2)], readers=[reader()])
    assert [("two_outcomes", 5, 5)] == errors(found)
    assert {"outcomes.done": 2} == counts(found)


def test_sums_are_those_of_the_ledger() -> None:
    claims = [claim(1, 2), claim(3, 3, 2, "duplicate"), claim(4, 4, 2, "dead")]
    found = [
        one for one in checked(rows([1, 2, 3, 4]), up_to=4, claims=claims, readers=[reader()]) if one.what == "sum"
    ]

    def element(number: int, outcome: str) -> bytes:
        return blocks.element(AGENT, f"key:{number}", "evt.a.x", outcome, hashed(number))

    def position(*numbers: int) -> bytes:
        return blocks.add(NO_STATE, [blocks.position_element("S", one, b"%d" % one) for one in numbers])

    assert [(1, 2, position(1, 2)), (2, 2, position(3, 4))] == [(one.block, one.amount, one.position) for one in found]
    assert blocks.add(NO_STATE, [element(1, "done"), element(2, "done")]) == found[0].state
    assert element(4, "dead") == found[1].state  # a duplicate changes nothing


def keyed(*sequences: int | None) -> pa.Array:
    """Silver's keys; None for a message that silver refuses."""
    return binary([bytes([at]) * 16 if at is not None else None for at in sequences])


def derived(found: Rows, up_to: int, **facts: Any) -> list[Result]:
    return checked(found, up_to=up_to, is_derived=True, **facts)


def test_silver_and_quarantine_say_what_follows_from_bronze() -> None:
    some = rows([1, 2, 3, 4], key=keyed(1, 2, None, None))
    silver = in_silver((1, b"row 1"), (2, b"another"))
    refused = in_quarantine((3, b"row 3", "contract"), (4, b"another", "contract"))
    found = derived(some, 4, silver=silver, quarantined=refused)
    assert [("differs", 2, 2), ("differs", 4, 4)] == errors(found)
    assert ["silver", "quarantine"] == [one.check for one in found if one.what == "error"]


def test_the_plain_reader_must_say_the_same_where_it_is_asked() -> None:
    silver = in_silver((1, b"row 1"), (2, b"row 2"), (3, b"row 3"))
    some = rows([1, 2, 3], key=keyed(1, 2, 3), plain=binary([b"row 1", None, b"another"]))
    found = derived(some, 3, silver=silver)
    assert [("disagree", 3, 3)] == errors(found)
    assert 1 == counts(found)["readers.agree"]


def test_each_message_stands_in_one_of_them_once() -> None:
    some = rows([1, 2, 3, 4, 5], key=keyed(1, None, 3, None, 5))
    silver = in_silver((1, b"row 1"), (1, b"row 1"), (2, b"row 2"), (3, b"row 3"), (9, b"row 9"))
    refused = in_quarantine((2, b"row 2", "contract"), (3, b"row 3", "contract"))
    found = derived(some, 5, silver=silver, quarantined=refused)
    assert [
        ("quarantine", "differs", 3, 3),  # its contract accepts it
        ("silver", "refused", 2, 3),
        ("quarantine", "missing", 4, 4),
        ("silver", "doubled", 1, 1),
        ("silver", "without_message", 9, 9),
    ] == [(one.check, one.problem, one.first, one.last) for one in found if one.what == "error"]


def test_a_message_without_a_row_of_its_own_must_be_found_by_its_key() -> None:
    some = rows([1, 2, 3], key=keyed(1, 2, 3))
    refused = in_quarantine((2, b"row 2", "identity_conflict"))
    found = derived(some, 3, silver=in_silver((1, b"row 1")), quarantined=refused)
    assert [] == errors(found)
    assert [("conflict", 2, bytes([2]) * 16, hashed(2)), ("absent", 3, bytes([3]) * 16, hashed(3))] == [
        (one.what, one.first, one.position, one.state) for one in found if one.what in ("absent", "conflict")
    ]


def test_before_silver_has_begun_nothing_is_missed_there() -> None:
    assert [] == errors(checked(rows([1, 2], key=keyed(1, None)), up_to=2))


def test_rows_are_counted_by_family_for_the_balance() -> None:
    some = rows([1, 2, 3], key=keyed(1, None, 3))
    refused = in_quarantine((2, b"row 2", "contract"))
    found = derived(some, 3, silver=in_silver((1, b"row 1")), quarantined=refused)
    told = {(one.check, one.problem): one.amount for one in found if one.what == "balance"}
    assert {("runtime", "rows_in"): 3, ("runtime", "rows_out"): 1, ("runtime", "quarantined"): 1} == told


def test_what_bronze_adds_to_a_message_must_follow_from_it() -> None:
    wrong = pa.array([None, "tenant", "tenant and date"], pa.string())
    found = checked(rows([1, 2, 3], wrong=wrong), up_to=3)
    assert [("differs", 2, 3)] == errors(found)


def test_what_stood_in_files_that_cannot_be_read_is_not_called_wrong() -> None:
    silver = in_silver((1, b"row 1"), (2, b"row 2"))
    found = derived(rows([1], key=keyed(1)), 3, silver=silver, lost=[(2, 3)])
    assert [] == errors(found)
    assert 2 == counts(found)["sequences.unread"]


# ---- balance


def test_batches_must_balance_with_the_tables() -> None:
    told = {("runtime", "rows_in"): 5, ("runtime", "rows_out"): 4, ("", "quarantined"): 1}
    assert ["count"] * 3 == [one.what for one in sums.compare_balance(told, told)]
    found = list(sums.compare_balance(told, told | {("runtime", "rows_in"): 3, ("message", "rows_in"): 2}))
    assert [("error", "rows_in", 2), ("error", "rows_in", 2)] == [
        (one.what, one.problem, one.amount) for one in found if one.what == "error"
    ]
    assert "silver's batches name 5 rows of runtime, and bronze holds 3" in [one.detail for one in found]


# ---- sums of blocks


def part(what: str, amount: int = 0, position: bytes = b"", state: bytes = NO_STATE, block: int = 1) -> Part:
    return Part(CHAIN, block, what, *(PLACE if what != "link" else ("", 0, 0)), amount, position, state)


def test_a_block_is_proven_by_all_of_its_inputs() -> None:
    whole = [part("link", state=state(5)), part("inputs", 2, state(3), b""), part("sum", 1, state(1), state(2))]
    proven = [*whole, part("sum", 1, state(2), state(3))]
    assert ["inputs", "blocks"] == [one.problem for one in sums.compare(proven)]
    assert ["unproven", "unproven"] == [one.problem for one in sums.compare(whole)]


def test_what_an_agent_read_by_several_durables_of_a_stream_adds_up() -> None:
    told = [part("link", state=state(5)), part("inputs", 1, state(1), b""), part("inputs", 2, state(4), b"")]
    assert ["inputs", "blocks"] == [one.problem for one in sums.compare([*told, part("sum", 3, state(5), state(5))])]
    assert ["bodies", "blocks"] == [one.problem for one in sums.compare([*told, part("sum", 3, state(4), state(5))])]


def test_other_bytes_and_another_state_are_wrong_each_by_itself() -> None:
    told = [part("link", state=state(5)), part("inputs", 1, state(3), b"")]
    assert ["bodies", "blocks"] == [one.problem for one in sums.compare([*told, part("sum", 1, state(4), state(5))])]
    assert ["inputs", "differs"] == [one.problem for one in sums.compare([*told, part("sum", 1, state(3), state(6))])]


def test_a_closing_block_may_not_change_the_state() -> None:
    assert ["blocks"] == [one.problem for one in sums.compare([part("link")])]
    assert ["differs"] == [one.problem for one in sums.compare([part("link", state=state(1))])]


def test_listed_inputs_prove_the_state() -> None:
    told = [part("link", state=state(5)), part("inputs", 1, state(3), b"")]
    assert ["listed", "blocks"] == [one.problem for one in sums.compare([*told, part("listed", 1, b"", state(5))])]
    assert ["listed", "differs"] == [one.problem for one in sums.compare([*told, part("listed", 1, b"", state(6))])]


def test_a_lifetime_is_read_from_what_blocks_carry() -> None:
    assert ("S", 1_000_000_000, 2) == rules.lifetime_of("S", "1970-01-01T00:00:01Z#2")
    with pytest.raises(ContractViolation):
        rules.lifetime_of("S", "1970-01-01T00:00:01Z#x")
