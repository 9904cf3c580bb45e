"""Every scenario of the /v1 contract, against both engines.

Two scenarios are the local engine's alone: without a log it forgets, and says so. The engine over JetStream always has
its streams. Nothing else is left out.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from oncewire._ground.jetstream import connect
from tests.support.http import Answer
from tests.support.nats import NatsServer, nats_server
from tests.support.scenarios import Replay, Scenario, difference, jetstream_broker, local_broker, read

SCENARIOS = [
    scenario for path in sorted((Path(__file__).parent / "broker").glob("*.scenario")) for scenario in read(path)
]


WITHOUT_LOG = {"Without a log a restart forgets", "version tells version, commit and whether a log is enabled"}
SHARED = [scenario for scenario in SCENARIOS if scenario.name not in WITHOUT_LOG]


def named(scenario: Scenario) -> str:
    return f"{scenario.place}: {scenario.name}"


@pytest.mark.parametrize("scenario", SCENARIOS, ids=named)
async def test_the_contract(scenario: Scenario, tmp_path: Path) -> None:
    await Replay(scenario, lambda settings: local_broker(settings, tmp_path / "wal")).run()


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    with nats_server() as one:
        yield one


@pytest.fixture
async def url(server: NatsServer) -> AsyncIterator[str]:
    """A server without topics."""
    yield server.url
    async with connect(server.url) as client:
        names = (await client.api("STREAM.NAMES"))["streams"] or []
        for name in names:
            await client.api(f"STREAM.DELETE.{name}" if name.startswith("OWB") else f"STREAM.PURGE.{name}")


@pytest.mark.parametrize("scenario", SHARED, ids=named)
async def test_the_contract_on_jetstream(scenario: Scenario, url: str) -> None:
    await Replay(scenario, lambda settings: jetstream_broker(settings, url)).run()


def test_the_scenarios_are_there() -> None:
    """A glob that finds nothing would pass in silence."""
    assert len(SCENARIOS) > 100
    assert len({scenario.name for scenario in SCENARIOS}) == len(SCENARIOS)
    assert len(SHARED) == len(SCENARIOS) - len(WITHOUT_LOG)


@pytest.mark.parametrize(
    "expected",
    [
        "201",
        '200 {"a": 1}',
        '200 ~{"a": 2}',
        "200 | X: z",
        '200 ~{"c": 1}',
        '200 lines [{"a": 1}, {"a": 1}]',
        '200 ~{"b": ["x", "y"]}',
    ],
)
def test_an_answer_that_differs_is_seen(expected: str) -> None:
    """A runner that cannot fail is worth nothing."""
    answer = Answer(200, {"x": "y"}, b'{"a": 1, "b": ["x"]}')
    assert difference(answer, expected)
    assert not difference(answer, '200 | X: y ~{"b": ["x"]}')
