"""Keys: the filter never denies what it was given, pages find each of their keys, places go there and back."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from oncewire._ground.ledger import keys as rules
from oncewire._ground.ledger.keys import Filter, Place

key = st.binary(min_size=16, max_size=16)
place = st.builds(Place, st.integers(0, 2**43 - 1), st.integers(0, 2**20 - 1))


def _encoded(items: dict[bytes, Place]) -> dict[bytes, int]:
    return {one: rules.encode_place(at) for one, at in items.items()}


@given(st.lists(key), st.lists(key))
def test_a_filter_never_denies_what_was_added(one_by_one: list[bytes], as_pages: list[bytes]) -> None:
    made = Filter(100)
    for each in one_by_one:
        made.add(each)
    for _, page in rules.pages({each: rules.encode_place(Place(1, 0)) for each in as_pages}):
        made.add_page(page)
    assert all(made.may_have(each) for each in (*one_by_one, *as_pages))
    assert [*one_by_one, *as_pages] == made.those_it_may_have([*one_by_one, *as_pages])
    assert made.count == len(one_by_one) + len(set(as_pages))


def test_a_full_filter_is_wrong_a_few_times_in_ten_thousand() -> None:
    chance = random.Random(7)
    made = Filter(1)
    for _ in range(made.capacity):
        made.add(chance.randbytes(16))
    others = [chance.randbytes(16) for _ in range(20_000)]
    wrong = [each for each in others if made.may_have(each)]
    assert 1 <= len(wrong) <= 40
    assert wrong == made.those_it_may_have(others)


def test_a_filter_holds_what_it_was_asked_for() -> None:
    assert all(Filter(asked).capacity >= asked for asked in (1, 32_768, 32_769, 100_000, 131_072, 131_073))


def test_an_empty_filter_has_nothing() -> None:
    assert not Filter(10).may_have(bytes(16))
    assert not Filter(10).those_it_may_have([bytes(16)])


@given(place)
def test_a_place_goes_there_and_back(one: Place) -> None:
    assert one == rules.decode_place(rules.encode_place(one))


@given(st.dictionaries(key, place, max_size=400), st.lists(key))
def test_a_run_finds_its_keys_and_no_others(items: dict[bytes, Place], others: list[bytes]) -> None:
    run = list(rules.pages(_encoded(items)))
    assert [first for first, _ in run] == sorted(first for first, _ in run)
    for each in (*items, *others):
        page = next((page for first, page in reversed(run) if first <= each), b"")
        assert items.get(each) == rules.find_in_page(page, each)


def test_a_key_is_not_found_across_two_items() -> None:
    """Bytes that straddle two items look like a key and are none."""
    items = {bytes([1] * 16): Place(7, 7), bytes([2] * 16): Place(8, 8)}
    (_, page), *_ = rules.pages(_encoded(items))
    straddling = [page[at : at + 16] for at in range(1, 24)]
    assert [None] * 23 == [rules.find_in_page(page, each) for each in straddling if each not in items]


@given(st.lists(key, unique=True, max_size=50), key)
def test_the_keys_of_a_block_are_found_at_their_places(found: list[bytes], other: bytes) -> None:
    assert found == rules.split_keys(b"".join(found))
    assert rules.places_of(9, found) == _encoded({one: Place(9, at) for at, one in enumerate(found)})
    assert (other in rules.places_of(9, found)) == (other in found)
