"""A stale owner settles, stores and delivers nothing; and each of the three is seen when its guard is taken away."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from oncewire._ground.contracts import topics
from oncewire.broker.jetstream import cell, session
from oncewire.broker.jetstream.takeover import Taker
from tests.support.brokerfences import SCENES, delivers_nothing, settles_no_other, settles_nothing, stores_nothing
from tests.support.nats import NatsServer, nats_server

Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    with nats_server() as one:
        yield one


@pytest.mark.parametrize("scene", SCENES)
async def test_a_stale_owner(scene: str, server: NatsServer) -> None:
    assert [] == await SCENES[scene](server.url)


async def test_without_a_record_before_delivering_the_stale_owner_settles(
    server: NatsServer, monkeypatch: Patch
) -> None:
    async def read_only(self: Any, cell: Any) -> None:
        last = await self._last(topics.RECORDS, cell.records_subject)
        while cell.record_sequence < last:
            await self._apply_records(cell, last)

    monkeypatch.setattr(Taker, "_read_records", read_only)
    assert await settles_nothing(server.url)


async def test_without_waiting_for_messages_a_settlement_covers_those_before_it(
    server: NatsServer, monkeypatch: Patch
) -> None:
    anew = cell.Cell.begin_anew

    def hasty(self: Any) -> None:
        anew(self)
        self.messages.behind = None

    monkeypatch.setattr(cell.Cell, "begin_anew", hasty)
    assert await settles_no_other(server.url)


async def test_without_its_expectation_a_stale_record_lands(server: NatsServer, monkeypatch: Patch) -> None:
    monkeypatch.setattr(cell, "expect", lambda _: b"")
    assert await settles_nothing(server.url)


async def test_without_its_fence_a_stale_message_lands(server: NatsServer, monkeypatch: Patch) -> None:
    monkeypatch.setattr(cell, "fence", lambda *_: b"Oncewire-Fence: none\r\n")
    assert await stores_nothing(server.url)


async def test_without_the_lease_clock_what_was_settled_is_shown_again(server: NatsServer, monkeypatch: Patch) -> None:
    monkeypatch.setattr(session.Session, "is_held", property(lambda self: bool(self.node)))
    assert await delivers_nothing(server.url)
