"""What the keep-alive process is told of inputs, and what it makes of that."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from oncewire._ground.jetstream.pull import parse_replies
from oncewire.agent.keepalive import KeepAlive, _held

HEAD = b"$JS.ACK.ORDERS.biller"


def told(monkeypatch: pytest.MonkeyPatch, replies: list[bytes]) -> list[bytes]:
    """The words of the line that a watch sends, without its token and its times."""
    lines: list[bytes] = []
    client: Any = SimpleNamespace(connection=SimpleNamespace(options=None))
    keepalive = KeepAlive(client, 1.0, 60.0)
    monkeypatch.setattr(keepalive, "_write", lines.append)
    keepalive.watch_all(replies, parse_replies(replies))
    (line,) = lines
    verb, _, _, _, *words = line.split()
    return [verb, *words]


def test_a_run_of_sequences_is_told_by_its_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    replies = [HEAD + b".1.%d.%d.1.0" % (at, at + 7) for at in range(5, 9)]
    verb, *words = told(monkeypatch, replies)

    assert (verb, words) == (b"r", [HEAD, b"5", b"4"])
    extended = parse_replies(_held(verb, words, 1.0, 60.0).replies)
    assert [(one.stream, one.consumer, one.sequence) for one in extended] == [
        ("ORDERS", "biller", at) for at in range(5, 9)
    ]


@pytest.mark.parametrize(
    "replies",
    [
        [HEAD + b".1.%d.1.1.0" % at for at in (5, 7)],
        [HEAD + b".2.%d.1.1.0" % at for at in (5, 3, 7)],
        [b"$JS.ACK.hub.HASH.ORDERS.biller.1.%d.1.1.0.x" % at for at in (5, 6)],
    ],
    ids=["a gap", "a redelivery between", "with domain and account"],
)
def test_everything_else_is_told_one_by_one(monkeypatch: pytest.MonkeyPatch, replies: list[bytes]) -> None:
    verb, *words = told(monkeypatch, replies)
    assert (verb, words) == (b"w", replies)
    assert _held(verb, words, 1.0, 60.0).replies == replies
