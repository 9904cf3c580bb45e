"""What a named ledger says of the inputs behind dead letters, in both stores."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from oncewire._ground.errors import Refused
from oncewire._ground.ledger.store import Mark, Store
from oncewire.dlq.rules import Resolved
from oncewire.dlq.standing import LedgerView, Standing
from tests.support.ledgers import NAME, NOW_MS, LedgerKit, PostgresKit, SqliteKit, entry, mark, settle

BEFORE_NS, AFTER_NS = (NOW_MS - 1) * 1_000_000, (NOW_MS + 1) * 1_000_000


@pytest.fixture(params=["sqlite", "postgres"])
def kit(request: pytest.FixtureRequest, tmp_path: Path) -> LedgerKit:
    return SqliteKit(tmp_path) if request.param == "sqlite" else PostgresKit()


@pytest.fixture
def store(kit: LedgerKit) -> Iterator[Store]:
    """Blocks 1 to 3, one input each."""
    with contextlib.closing(kit.new()) as opened:
        for number in (1, 2, 3):
            settle(opened, [number])
        mark(opened, *(Mark(block, 0, 0, "LEDGER", block) for block in (1, 2)))
        yield opened


def standings(
    kit: LedgerKit, *asked: tuple[int, int], digest: str = "", subject: str = "evt.default.demo.t"
) -> list[Standing]:
    with contextlib.closing(kit.unopened()) as looking:
        view = LedgerView(looking, NAME)
        return view.standings(
            [
                (Resolved(identity=f"key:{number}", subject=subject, digest=digest or entry(number).digest.hex()), at)
                for number, at in asked
            ]
        )


def test_what_is_done_is_known_by_its_identity_and_its_content(kit: LedgerKit, store: Store) -> None:
    assert [Standing.DONE, Standing.OPEN] == standings(kit, (1, BEFORE_NS), (9, BEFORE_NS))
    assert [Standing.DONE_OTHERWISE] == standings(kit, (1, BEFORE_NS), digest="00" * 32)
    assert [Standing.DONE_OTHERWISE] == standings(kit, (1, BEFORE_NS), subject="evt.default.demo.u")


def test_what_is_older_than_a_shortened_ledger_counts_as_forgotten(kit: LedgerKit, store: Store) -> None:
    """It cannot be told from what never happened."""
    assert 2 == store.forget(NOW_MS + 1, 10)

    assert [Standing.FORGOTTEN, Standing.DONE] == standings(kit, (1, BEFORE_NS), (3, BEFORE_NS))
    assert [Standing.FORGOTTEN, Standing.OPEN] == standings(kit, (9, BEFORE_NS), (9, AFTER_NS))


@pytest.mark.parametrize("agent", ["", "biller", "a/b", "a//c", "a/b/c/d"])
def test_an_agent_is_named_whole(kit: LedgerKit, agent: str) -> None:
    with pytest.raises(Refused, match="TENANT/WORKSPACE/AGENT"):
        LedgerView(kit.unopened(), agent)
