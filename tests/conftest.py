"""Fixtures that every test may use: real servers, each with its own folder and ports."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.support.nats import NatsServer, nats_server

settings.register_profile("house", deadline=None)  # no test asserts how long something takes: the machine may be busy
settings.load_profile("house")


_LONGEST_FIRST = ("/spark/", "/test_up", "/system/test_agent", "/system/", "/browser/", "/contracts/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Two workers take file after file: what takes long comes first, so that neither is alone at the end."""

    def rank(item: pytest.Item) -> int:
        path = item.path.as_posix()
        return next((at for at, part in enumerate(_LONGEST_FIRST) if part in path), len(_LONGEST_FIRST))

    items.sort(key=rank)


@pytest.fixture
def server() -> Iterator[NatsServer]:
    """A fresh nats-server with JetStream for this test alone."""
    with nats_server() as running:
        yield running


@pytest.fixture(scope="module")
def shared_server() -> Iterator[NatsServer]:
    """One nats-server for a module whose tests use their own stream names."""
    with nats_server() as running:
        yield running
