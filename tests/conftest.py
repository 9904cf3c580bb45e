"""Fixtures that every test may use: real servers, each with its own folder and ports."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.support.native import loops
from tests.support.nats import NatsServer, nats_server

__all__ = ["loops"]

settings.register_profile("house", deadline=None)  # no test asserts how long something takes: the machine may be busy
settings.load_profile("house")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a run in the background: what it starts must hear Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)


_LONGEST_FIRST = ("/test_up", "/system/test_agent", "/system/", "/browser/", "/contracts/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Workers take file after file. What takes long comes first, so that none is alone at the end; Spark, which takes
    the whole machine, comes in between files that mostly wait."""
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path.as_posix(), []).append(item)

    def rank(path: str) -> int:
        return next((at for at, part in enumerate(_LONGEST_FIRST) if part in path), len(_LONGEST_FIRST))

    busy = [path for path in files if "/spark/" in path]
    pure = [path for path in files if "/rules/" in path]
    others = sorted((path for path in files if path not in (*busy, *pure)), key=rank)
    order = pure
    for number, path in enumerate(busy):
        order += [path, *others[2 * number : 2 * number + 2]]
    order += others[2 * len(busy) :]
    items[:] = [item for path in order for item in files[path]]


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
