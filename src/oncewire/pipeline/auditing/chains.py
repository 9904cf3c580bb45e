"""What an audit concludes from the blocks of a chain, in order: each follows from the one before it. Pure.

broken          it names another hash for the one before
forked          another block stands under its number
missing         a confirmed block is not there
in_gap          the same, and enough sequences of LEDGER are known to be missing between its neighbours
pending         the same, and it is not confirmed: it may come yet
begins_later    the oldest block in the lake is not the first
republished     the same block stands there once more
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from oncewire._ground.contracts.blocks import NO_HASH, NO_STATE
from oncewire.pipeline.auditing.excuses import Ranges
from oncewire.pipeline.auditing.rules import Result


class Link(NamedTuple):
    """A block as its chain sees it. `sequence` is where the announcement stands."""

    chain: str
    number: int
    previous: bytes
    hash: bytes
    state: bytes
    sequence: int


class Hole(NamedTuple):
    """Why blocks may be missing: what is confirmed must be there, unless a known gap of the stream lies between."""

    confirmed: int
    gaps: Ranges


def walk(links: Iterable[Link], holes: Mapping[str, Hole]) -> Iterator[Result]:
    """The blocks of chains, in order of chain, number and place: each must follow from the one before."""
    before: Link | None = None
    for link in links:
        if before is None or before.chain != link.chain:
            yield from _begin(link)
        elif link.number == before.number:
            yield from _copy(before, link)
            continue
        elif link.number == before.number + 1:
            yield from _follow(before, link)
        else:
            yield from _hole(before, link, holes[link.chain])
        before = link


def _link(link: Link, before: bytes | None) -> Result:
    added = subtract(link.state, before) if before is not None else b""
    detail = "" if before is not None else "base"
    return _about(link, "link", "chain", "", state=added, detail=detail, position=link.state)


def _about(link: Link, what: str, check: str, problem: str, **more: Any) -> Result:
    return Result(
        what, check, problem, chain=link.chain, block=link.number, first=more.pop("first", link.sequence), **more
    )


def _begin(link: Link) -> Iterator[Result]:
    if link.number == 1:
        if link.previous != NO_HASH:
            yield _about(link, "error", "chain", "broken", detail="the first block names one before it")
        yield _link(link, NO_STATE)
    else:
        yield _about(link, "note", "chain", "begins_later", detail=f"the oldest block in the lake is {link.number}")
        yield _link(link, None)


def _copy(before: Link, link: Link) -> Iterator[Result]:
    if link.hash == before.hash:
        yield _about(link, "note", "chain", "republished", detail=f"the same as at sequence {before.sequence}")
    else:
        text = f"another block {link.number} is at sequence {before.sequence}"
        yield _about(link, "error", "chain", "forked", last=link.sequence, detail=text)


def _follow(before: Link, link: Link) -> Iterator[Result]:
    if link.previous != before.hash:
        text = (
            f"block {link.number} was made behind a block {before.number} with the hash {link.previous.hex()[:16]}…, "
            f"the one at sequence {before.sequence} has {before.hash.hex()[:16]}…"
        )
        yield _about(link, "error", "chain", "broken", last=link.sequence, detail=text)
    yield _link(link, before.state)


def _hole(before: Link, link: Link, known: Hole) -> Iterator[Result]:
    first, last = before.number + 1, link.number - 1
    low, high = sorted((before.sequence, link.sequence))
    named = {"first": first, "last": last, "amount": last - first + 1}
    if known.gaps.count(low + 1, high - 1) >= last - first + 1:
        yield _about(link, "note", "chain", "in_gap", **named, detail="they were in a known gap of LEDGER")
    elif first <= known.confirmed:
        text = f"blocks {first} to {last} are confirmed and not in the lake"
        yield _about(link, "error", "chain", "missing", **named, detail=text)
    else:
        yield _about(link, "count", "chain", "pending", **named)
    yield _link(link, None)


def subtract(after: bytes, before: bytes) -> bytes:
    """Lane by lane, modulo 2^64."""
    lanes = np.frombuffer(after, "<u8") - np.frombuffer(before, "<u8")
    return bytes(lanes.astype("<u8").tobytes())
