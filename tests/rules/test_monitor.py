"""What a server's own words about syncing are worth."""

from __future__ import annotations

from typing import Any

import pytest

from oncewire._ground.monitor import Promise, durability


def jsz(server_id: str = "A", cluster_size: int = 0, **config: Any) -> dict[str, Any]:
    answer: dict[str, Any] = {"server_id": server_id, "config": config}
    return answer | ({"meta_cluster": {"cluster_size": cluster_size}} if cluster_size else {})


ALWAYS = {"sync_interval": 120_000_000_000, "sync_always": True}
DEFAULT = {"sync_interval": 120_000_000_000}


def test_a_server_that_syncs_always_survives_a_power_cut() -> None:
    assert durability([jsz(**ALWAYS)], "A").promise is Promise.POWER


def test_the_default_survives_a_crash_only_and_says_how_much_a_power_cut_costs() -> None:
    found = durability([jsz(**DEFAULT)], "A")
    assert found.promise is Promise.CRASH
    assert "last 120 s" in found.text


@pytest.mark.parametrize(
    "answers",
    [
        [],
        [{}],
        [jsz()],
        [jsz(sync_always="yes")],
        [{"server_id": "A", "disabled": True}],
        [jsz("B", **ALWAYS)],
        [jsz(cluster_size=3, **ALWAYS)],
        [jsz(cluster_size=3, **ALWAYS), jsz("A", cluster_size=3, **ALWAYS), jsz("B", cluster_size=3, **ALWAYS)],
    ],
)
def test_what_is_not_proved_is_unknown(answers: list[dict[str, Any]]) -> None:
    """No answer, no word on syncing, another server, or not all of a cluster."""
    assert durability(answers, "A").promise is Promise.UNKNOWN


def test_a_cluster_is_as_good_as_its_worst_server() -> None:
    three = [jsz(name, 3, **ALWAYS) for name in "AB"]
    assert durability([*three, jsz("C", 3, **ALWAYS)], "A").promise is Promise.POWER
    assert durability([*three, jsz("C", 3, **DEFAULT)], "A").promise is Promise.CRASH
