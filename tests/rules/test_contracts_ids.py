"""Ids and identities: stable, and different whenever any part differs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from oncewire._ground.contracts import ids
from oncewire._ground.errors import ContractViolation

pytestmark = pytest.mark.usefixtures("loops")

PART = st.text(max_size=6) | st.integers(-3, 10**12)
AWKWARD = st.text('01",[]\\:', max_size=6)
NAME = st.text("a/%.2F", max_size=5) | st.text(max_size=4)
ORIGIN = ids.Origin("S", 1, 2, 3)


@given(st.lists(AWKWARD | PART, max_size=4), st.lists(AWKWARD | PART, max_size=4))
@example(["a", "b"], ['a","b'])
@example(["1"], [1])
def test_different_parts_never_join_to_one_text(one: list[Any], other: list[Any]) -> None:
    assert (ids.joined("k", *one) == ids.joined("k", *other)) == (one == other)


@given(
    st.tuples(*[st.text(max_size=4)] * 4, st.integers(0, 9)), st.tuples(*[st.text(max_size=4)] * 4, st.integers(0, 9))
)
def test_effects_share_an_id_only_when_all_is_the_same(one: Any, other: Any) -> None:
    assert (ids.effect_id(*one) == ids.effect_id(*other)) == (one == other)


def test_moving_a_character_between_parts_changes_the_id() -> None:
    assert ids.effect_id("a", "bc", "d", "e", 1) != ids.effect_id("ab", "c", "d", "e", 1)
    assert ids.effect_id("a", "b", "c", "e1", 1) != ids.effect_id("a", "b", "c", "e", 11)
    assert ids.input_id("t", "w", "s", "k", b"\1") != ids.input_id("t", "w", "sk", "", b"\1")
    assert ids.letter_id(ORIGIN, "c") != ids.letter_id(ORIGIN._replace(stream="Sc"), "")
    assert ids.replay_id("dl.1", 1) != ids.replay_id("dl.11", 1) != ids.replay_id("dl.1", 11)


def test_every_part_of_an_origin_counts_for_its_letter() -> None:
    changed = [
        ORIGIN,
        *(
            ORIGIN._replace(**{name: value})
            for name, value in (("stream", "T"), ("created_ns", 9), ("sequence", 9), ("timestamp_ns", 9))
        ),
    ]
    assert len({ids.letter_id(origin, "c") for origin in changed}) == 5
    assert len({ids.origin_id(origin) for origin in changed}) == 5
    assert len({ids.position_identity(origin) for origin in changed}) == 5
    assert ids.letter_id(ORIGIN, "c") != ids.letter_id(ORIGIN, "d")


def test_ids_are_what_they_were_when_ledgers_were_written() -> None:
    identity = ids.key_identity(("default", "demo"), "ord-17")
    assert identity == "key:default/demo/ord-17"
    assert ids.effect_id("default", "demo", "shop", identity, 0) == "fx.458c6b83778c57791a372b325c777f24ed42e0d8"
    assert (
        ids.input_id("default", "demo", "evt.default.demo.x", "ord-17", bytes(32))
        == "in.cd9f7f323e360e2145e70d8d155f71cd2d1daa5b"
    )
    assert ids.letter_id(ORIGIN, "shop_consumer") == "dl.2a787033a38f68105f03cedaffbd8927005ae2e1"
    assert ids.replay_id("dl.0", 1) == "rp.706eb7ac0435bba15d47fdd85d7f78795036a517"
    assert ids.origin_id(ORIGIN) == "at.2c97cfed6747d34fa2b003c63975ee0cc3ebdbfc"


def test_a_lone_surrogate_cannot_be_part_of_an_id() -> None:
    with pytest.raises(ContractViolation, match="surrogate"):
        ids.effect_id("\ud800", "w", "a", "i", 0)


def test_identities_of_different_kinds_never_meet() -> None:
    forged = ids.position_identity(ORIGIN).removeprefix("at:")
    found = {
        ids.key_identity(("default", "default"), forged),
        ids.event_identity(("default", "default"), forged),
        ids.position_identity(ORIGIN),
        ids.produce_identity("", "t", "k"),
        ids.consume_identity("", "t", "k", ""),
    }
    assert len(found) == 5


@given(
    st.lists(st.tuples(st.tuples(NAME, NAME), NAME), min_size=2, max_size=2, unique=True),
    st.sampled_from([ids.key_identity, ids.event_identity]),
)
@example([(("a/b", "c"), "d"), (("a", "b"), "c/d")], ids.key_identity)
@example([(("a%2Fb", "c"), "d"), (("a/b", "c"), "d")], ids.event_identity)
def test_tenant_workspace_and_key_are_told_apart_whatever_is_in_them(
    parts: list[tuple[tuple[str, str], str]], identity: Callable[[tuple[str, str], str], str]
) -> None:
    one, other = parts
    assert identity(*one) != identity(*other)


def test_the_group_and_the_tenant_count_in_the_broker() -> None:
    assert ids.produce_identity("a", "t", "k") != ids.produce_identity("", "at", "k")
    assert ids.consume_identity("a", "t", "k", "g1") != ids.consume_identity("a", "t", "k", "g2")
