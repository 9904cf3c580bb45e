"""The bytes of a block: there and back, small and large, damaged."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncewire._ground.contracts.blocks import Outcome
from oncewire._ground.errors import ContractViolation, Corrupt
from oncewire._ground.ledger.packed import COMPRESSED_FROM, pack, unpack
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
