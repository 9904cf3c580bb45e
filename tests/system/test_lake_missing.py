"""What did not come is asked for once more: of the leader, from the first sequence of each range on."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from oncewire._ground.errors import Corrupt, NotFound, Unavailable
from oncewire._ground.jetstream.protocol import parse_time_ns
from oncewire.pipeline import options as given
from oncewire.pipeline.missing import ASKED_AT_ONCE, SecondLook, Unread
from oncewire.pipeline.source import read_file
from oncewire.pipeline.tables import Lifetime
from tests.spark.support import api, fill, make_stream
from tests.support.nats import NatsServer


@pytest.fixture
def look_again(shared_server: NatsServer) -> Iterator[SecondLook]:
    told = {"url": shared_server.url, "stream": "any"}
    made = SecondLook(given.read_options(told, read_file, is_streaming=False).access)
    yield made
    made.close()


def lifetime_of(server: NatsServer, stream: str) -> Lifetime:
    return stream, parse_time_ns(api(server, f"STREAM.INFO.{stream}")["created"]), 0


def delete(server: NatsServer, stream: str, *sequences: int) -> None:
    for sequence in sequences:
        api(server, f"STREAM.MSG.DELETE.{stream}", {"seq": sequence})


def test_what_is_not_stored_is_confirmed_with_how_the_stream_stands(
    shared_server: NatsServer, look_again: SecondLook
) -> None:
    stream = make_stream(shared_server, max_age=3_600_000_000_000)
    fill(shared_server, stream, 20)
    api(shared_server, f"STREAM.PURGE.{stream}", {"seq": 4})
    delete(shared_server, stream, 7, 8, 20)
    told = look_again(lifetime_of(shared_server, stream), [(1, 3), (7, 8)])
    assert (4, 20, 14, 3, 9, 2, 5) == (
        told.first_sequence, told.last_sequence, told.messages, told.deleted, told.next_stored, told.ranges,
        told.sequences,
    )  # fmt: skip
    assert {"discard": "old", "max_age": 3_600_000_000_000} == json.loads(told.limits)
    assert not told.removes_inside
    assert 0 == look_again(lifetime_of(shared_server, stream), [(20, 20)]).next_stored


def test_what_is_stored_after_all_must_be_read_again(shared_server: NatsServer, look_again: SecondLook) -> None:
    stream = make_stream(shared_server)
    fill(shared_server, stream, 20)
    delete(shared_server, stream, 7, 8)
    with pytest.raises(Unread, match=f"sequences 7 to 9 of stream {stream} did not come, and the stream has 9"):
        look_again(lifetime_of(shared_server, stream), [(7, 9)])
    assert isinstance(Unread("x"), Unavailable), "so that it is tried again"


def test_thousands_of_ranges_are_asked_for_some_at_a_time(shared_server: NatsServer, look_again: SecondLook) -> None:
    """As on a stream that keeps one message per subject."""
    stream = make_stream(shared_server, max_msgs_per_subject=1)
    fill(shared_server, stream, 1, subject="first")
    fill(shared_server, stream, 6 * ASKED_AT_ONCE, subject="same")
    gone = api(shared_server, f"STREAM.INFO.{stream}", {"deleted_details": True})["state"]["deleted"]
    assert len(gone) > 2 * ASKED_AT_ONCE
    told = look_again(lifetime_of(shared_server, stream), [(at, at) for at in gone])
    assert (len(gone), len(gone), len(gone), True) == (
        told.ranges, told.sequences, told.deleted, told.removes_inside,
    )  # fmt: skip


def test_another_stream_in_the_place_of_the_one_that_was_read_is_noticed(
    shared_server: NatsServer, look_again: SecondLook
) -> None:
    stream = make_stream(shared_server)
    fill(shared_server, stream, 3)
    delete(shared_server, stream, 2)
    name, created_ns, incarnation = lifetime_of(shared_server, stream)
    with pytest.raises(Corrupt, match="was recreated"):
        look_again((name, created_ns - 1, incarnation), [(2, 2)])
    with pytest.raises(NotFound):
        look_again(("NOSUCH", created_ns, incarnation), [(2, 2)])
