"""The bytes of a block: there and back, small and large, damaged."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncewire._ground.contracts.blocks import Outcome
from oncewire._ground.errors import ContractViolation, Corrupt
from oncewire._ground.ledger.packed import COMPRESSED_FROM, pack, pack_sending, unpack, unpack_sending
from oncewire._ground.ledger.rules import Content, Entry, Sending
from oncewire._ground.ledger.store import read_block

FRAME = b"\x28\xb5\x2f\xfd"


def content(count: int, body: bytes = b'{"type":"OrderPlaced"}') -> Content:
    entries = [
        Entry(bytes(16), f"key:{one}", "evt.a", body, b"", Outcome.DONE, "EVENTS", one, one, bytes(32), 1, "no_handler")
        for one in range(count)
    ]
    return Content(entries, [Sending("fx.1", "evt.b", body, {"a": "b"}, "EVENTS")], 1, {"EVENTS": 7})


@given(st.integers(0, 300), st.binary(max_size=200))
def test_content_goes_there_and_back(count: int, body: bytes) -> None:
    whole = content(count, body)
    assert whole == unpack(pack(whole, bytearray()))


def test_only_large_content_is_compressed() -> None:
    small, large = pack(content(1), bytearray()), pack(content(1_000), bytearray())
    assert (False, True) == (small.startswith(FRAME), large.startswith(FRAME))
    assert len(small) < COMPRESSED_FROM
    assert 5 * len(large) < len(msgspec.msgpack.encode(content(1_000)))


def test_what_cannot_be_compressed_grows_by_next_to_nothing() -> None:
    whole = content(1, random.Random(1).randbytes(100_000))
    assert len(pack(whole, bytearray())) < len(msgspec.msgpack.encode(whole)) + 1_000


def test_the_room_is_free_for_the_next_block() -> None:
    room = bytearray()
    first, second = pack(content(1_000), room), pack(content(1), room)
    assert (content(1_000), content(1)) == (unpack(first), unpack(second))


def test_every_flip_in_a_compressed_block_is_found() -> None:
    packed = pack(content(1_000), bytearray())
    for at in range(0, len(packed), max(1, len(packed) // 400)):
        damaged = bytearray(packed)
        damaged[at] ^= 0x10
        with pytest.raises(ContractViolation):
            unpack(bytes(damaged))


def test_a_block_that_ends_early_is_damage_that_is_named() -> None:
    packed = pack(content(1_000), bytearray())
    for end in (0, 1, 4, 20, len(packed) // 2, len(packed) - 1):
        with pytest.raises(Corrupt, match="block 7 of the ledger cannot be read"):
            read_block(7, packed[:end], b"")


class Text(str):
    """Text, and not quite."""

    __slots__ = ()


LONE = st.text(st.characters(categories=["L", "Cs", "Cc"]), max_size=5)
OUTSIDE = st.one_of(
    st.text(max_size=5), LONE, st.binary(max_size=5), st.none(), st.integers(), st.floats(), st.booleans(),
    st.lists(st.text(max_size=2), max_size=2), st.builds(Text, st.text(max_size=3)), st.just(bytearray(b"x")),
)  # fmt: skip
"""What somebody may hand in where text belongs."""
HEADERS = st.one_of(st.none(), OUTSIDE, st.dictionaries(st.one_of(st.text(max_size=3), LONE, st.binary()), OUTSIDE))


def mostly(right: st.SearchStrategy[object], wrong: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    return st.one_of(right, right, right, wrong)


SENDINGS = st.builds(
    Sending,
    id=mostly(st.text(max_size=5), OUTSIDE),  # type: ignore[arg-type]
    subject=mostly(st.text(max_size=5), OUTSIDE),  # type: ignore[arg-type]
    payload=mostly(st.binary(max_size=5), OUTSIDE),  # type: ignore[arg-type]
    headers=mostly(st.dictionaries(st.text(max_size=3), st.text(max_size=3)), HEADERS),  # type: ignore[arg-type]
    stream=st.text(max_size=3),
    trace=mostly(st.text(max_size=3), OUTSIDE),  # type: ignore[arg-type]
)
ENTRIES = st.builds(
    Entry,
    key=st.binary(max_size=16),
    identity=mostly(st.text(max_size=5), OUTSIDE),  # type: ignore[arg-type]
    subject=mostly(st.text(max_size=5), OUTSIDE),  # type: ignore[arg-type]
    body=st.binary(max_size=20),
    header=st.binary(max_size=20),
    outcome=st.sampled_from(Outcome),
    stream=st.text(max_size=3),
    sequence=st.integers(-(2**70), 2**70),
    timestamp_ns=st.integers(0, 2**64),
    digest=st.binary(max_size=32),
    effects=st.integers(0, 100),
    error=mostly(st.text(max_size=5), OUTSIDE),  # type: ignore[arg-type]
)


@given(st.lists(ENTRIES, max_size=3), st.lists(SENDINGS, max_size=3), st.integers())
def test_what_is_packed_is_unpacked_as_it_was_and_everything_else_is_refused(
    entries: list[Entry], effects: list[Sending], sent_ms: int
) -> None:
    """Whatever somebody hands in: what is committed and cannot be read is an agent that never starts again."""
    whole = Content(entries, effects, sent_ms, {})
    try:
        packed = pack(whole, bytearray())
    except ContractViolation:
        return
    assert whole == unpack(packed)


@given(SENDINGS)
def test_a_delayed_effect_is_read_as_it_was_or_refused(sending: Sending) -> None:
    try:
        packed = pack_sending(sending)
    except ContractViolation:
        return
    assert sending == unpack_sending(packed)


@pytest.mark.parametrize("headers", [{"X": b"bytes"}, {"X": ["list"]}, {b"X": "text"}, {"X": None}, [("X", "y")]])
def test_headers_that_are_no_text_are_never_packed(headers: object) -> None:
    sending = Sending("fx.1", "evt.b", b"{}", headers, "EVENTS")  # type: ignore[arg-type]
    with pytest.raises(ContractViolation, match="the ledger cannot hold this"):
        pack(Content([], [sending], 1, {}), bytearray())
    with pytest.raises(ContractViolation, match="the ledger cannot hold this"):
        pack_sending(sending)
