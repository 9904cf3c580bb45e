"""A broker process that is killed under load. `make faults` does it hundreds of times."""

from __future__ import annotations

from pathlib import Path

from tests.support.brokerkills import Kills


async def test_a_killed_broker_loses_doubles_and_skips_nothing(tmp_path: Path) -> None:
    client = Kills(tmp_path / "wal", seed=0)
    for _ in range(3):
        await client.until_killed()
    assert [] == await client.finish()
    assert client.produced
