"""What an audit concludes from sums: those that blocks announce against those of their inputs, and those that silver's
batches name against what the tables hold. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from oncewire._ground.contracts import blocks
from oncewire._ground.contracts.blocks import NO_STATE
from oncewire.pipeline.auditing.rules import Lifetime, Result


class Part(NamedTuple):
    """What is known of the sum of a block: what it announces (per stream, and for its chain), or what rows give."""

    chain: str
    block: int
    what: str
    """`link`, `inputs` (announced), `listed` (of a work queue), or `sum` (recomputed)."""
    stream: str
    created_ns: int
    incarnation: int
    amount: int
    position: bytes
    state: bytes


def compare(parts: Iterable[Part]) -> Iterator[Result]:
    """Parts in order of chain and block: what each block announces against what its inputs give."""
    block: list[Part] = []
    for part in parts:
        if block and (block[0].chain, block[0].block) != (part.chain, part.block):
            yield from _compare_block(block)
            block = []
        block.append(part)
    if block:
        yield from _compare_block(block)


def _compare_block(parts: list[Part]) -> Iterator[Result]:
    chain, number = parts[0].chain, parts[0].block
    announced: dict[Lifetime, list[Part]] = {}
    """By stream, of which an agent may read several durables."""
    found: dict[Lifetime, list[Part]] = {}
    for part in parts:
        if part.what == "inputs":
            announced.setdefault(part[3:6], []).append(part)
        elif part.what in ("sum", "listed"):
            found.setdefault(part[3:6], []).append(part)
    is_whole = True
    for place, told in sorted(announced.items()):
        mine, amount = found.get(place, []), sum(part.amount for part in told)
        is_listed = any(part.what == "listed" for part in mine)
        if sum(part.amount for part in mine) != amount:
            is_whole = False
            yield Result("count", "sums", "unproven", *place, chain=chain, block=number, amount=amount)
        elif is_listed:
            yield Result("count", "sums", "listed", *place, chain=chain, block=number, amount=amount)
        elif _positions(mine) != _positions(told):
            text = f"the bytes of its {amount} inputs in bronze are not those that it settled"
            yield Result("error", "sums", "bodies", *place, chain=chain, block=number, amount=amount, detail=text)
        else:
            yield Result("count", "sums", "inputs", *place, chain=chain, block=number, amount=amount)
    yield from _compare_state(chain, number, parts, found, is_whole)


def _positions(parts: Sequence[Part]) -> bytes:
    return blocks.add(NO_STATE, [part.position for part in parts])


def _compare_state(
    chain: str, number: int, parts: list[Part], found: dict[Lifetime, list[Part]], is_whole: bool
) -> Iterator[Result]:
    links = [part for part in parts if part.what == "link"]
    if not links or not links[0].state or not is_whole:
        yield Result("count", "state", "unproven", chain=chain, block=number, amount=1)
        return
    given = blocks.add(NO_STATE, [part.state for mine in found.values() for part in mine])
    if given != links[0].state:
        text = "its state hash does not follow from its inputs"
        yield Result("error", "state", "differs", chain=chain, block=number, detail=text, position=links[0].position)
    else:
        yield Result("count", "state", "blocks", chain=chain, block=number, amount=1, state=given)


# ---- balance

Balances = Mapping[tuple[str, str], int]
"""Rows by family and by what became of them: rows_in, rows_out, quarantined."""


def compare_balance(told: Balances, found: Balances) -> Iterator[Result]:
    """What silver's batches say they took in and put out, against what the tables hold below the cut."""
    for family, name in sorted({*told, *found}):
        wanted, there = told.get((family, name), 0), found.get((family, name), 0)
        if wanted != there:
            table = {"rows_in": "bronze", "rows_out": f"silver/{family}", "quarantined": "quarantine"}[name]
            text = f"silver's batches name {wanted:,} rows of {family or 'no family'}, and {table} holds {there:,}"
            yield Result("error", "balance", name, detail=text, amount=abs(wanted - there))
        else:
            yield Result("count", "balance", name, chain=family, amount=there)
