"""Finding an input among all that were ever settled, at a cost that does not grow.

An index on random keys dirties a page of its own for each new key, which halves the rate at a million rows. So keys
are kept the way a log-structured store keeps them: the newest (those of the blocks since the last spill) in memory,
all older ones in sorted runs on disk, behind a filter that says "surely not there" for all but a few in ten thousand.

The filter is a bitmap with three probes, 32 bits per key: it is rebuilt from the runs when a ledger is opened.
PostgreSQL has no need of it: there the unique index that finds a key also lets the first of two processes win.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from oncewire._ground.ledger.rules import KEY_BYTES

ITEM: Final = struct.Struct(">16sQ")
ITEM_BYTES: Final = ITEM.size
PAGE_ITEMS: Final = 160
"""Items in one page of a run: just under 4 KiB."""
SPILL_KEYS: Final = 65_536
BITS_PER_KEY: Final = 32
_PROBES: Final = struct.Struct(">III")
_PROBES_OF_ITEM: Final = struct.Struct(">III12x")
_FIRST_PROBE: Final = struct.Struct(">I12x")
_BITS: Final = tuple(1 << bit for bit in range(8))


class Place(NamedTuple):
    """Where an entry stands: the block's number and its place in it."""

    block: int
    at: int


def encode_place(place: Place) -> int:
    return place.block << 20 | place.at


def decode_place(number: int) -> Place:
    return Place(number >> 20, number & 0xFFFFF)


class Filter:
    """A set that may say yes wrongly, and never no."""

    def __init__(self, capacity: int) -> None:
        size = 1 << max(20, (capacity * BITS_PER_KEY - 1).bit_length())
        self._mask = size - 1
        self._bits = bytearray(size >> 3)
        self.capacity = size // BITS_PER_KEY
        self.count = 0

    def add(self, key: bytes) -> None:
        bits, mask = self._bits, self._mask
        for probe in _PROBES.unpack_from(key):
            place = probe & mask
            bits[place >> 3] |= 1 << (place & 7)
        self.count += 1

    def add_page(self, page: bytes) -> None:
        """All keys of a page of a run."""
        bits, mask = self._bits, self._mask
        for first, second, third in _PROBES_OF_ITEM.iter_unpack(page):  # a loop over the three takes 1.7 times as long
            bits[(first & mask) >> 3] |= _BITS[first & 7]
            bits[(second & mask) >> 3] |= _BITS[second & 7]
            bits[(third & mask) >> 3] |= _BITS[third & 7]
        self.count += len(page) // ITEM_BYTES

    def may_have(self, key: bytes) -> bool:
        bits, mask = self._bits, self._mask
        for probe in _PROBES.unpack_from(key):
            place = probe & mask
            if not bits[place >> 3] >> (place & 7) & 1:
                return False
        return True

    def those_it_may_have(self, keys: Sequence[bytes]) -> list[bytes]:
        """Of many keys: nearly all that are new are ruled out by their first probe, in one pass."""
        if not self.count:
            return []
        bits, mask = self._bits, self._mask
        firsts = _FIRST_PROBE.iter_unpack(b"".join(keys))
        left = [key for key, (probe,) in zip(keys, firsts, strict=True) if bits[(probe & mask) >> 3] >> (probe & 7) & 1]
        return [key for key in left if self.may_have(key)]


def pages(items: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """A sorted run (keys with their encoded places) cut into pages: the first key of each, and its items."""
    ordered = sorted(map(ITEM.pack, items.keys(), items.values()))
    for start in range(0, len(ordered), PAGE_ITEMS):
        part = ordered[start : start + PAGE_ITEMS]
        yield part[0][:KEY_BYTES], b"".join(part)


def find_in_page(page: bytes, key: bytes) -> Place | None:
    at = page.find(key)
    while at >= 0 and at % ITEM_BYTES:
        at = page.find(key, at + 1)
    return None if at < 0 else decode_place(ITEM.unpack_from(page, at)[1])


def last_block(items: bytes) -> int:
    """The highest block that any of these items stands in."""
    return max(decode_place(place).block for _, place in ITEM.iter_unpack(items))


def places_of(number: int, keys: Sequence[bytes]) -> dict[bytes, int]:
    """The keys of a block with where they stand, encoded."""
    first = encode_place(Place(number, 0))
    return dict(zip(keys, range(first, first + len(keys)), strict=True))


def split_keys(joined: bytes) -> list[bytes]:
    """The keys of a block from how they are stored."""
    return [joined[start : start + KEY_BYTES] for start in range(0, len(joined), KEY_BYTES)]
