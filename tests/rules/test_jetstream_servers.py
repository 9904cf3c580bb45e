"""Which servers are tried, in which order, and what an INFO may change about that."""

from __future__ import annotations

import random

import pytest

from oncewire._ground.errors import InvalidSetting
from oncewire._ground.jetstream.options import Options, address_of, parse_servers
from oncewire._ground.jetstream.servers import SERVERS_MAX, Servers
from oncewire._ground.jetstream.wire import ServerInfo

A, B, C = "nats://a:4222", "nats://b:4222", "nats://c:4222"


def servers(*given: str, seed: int = 1) -> Servers:
    return Servers(given, random.Random(seed))


def addresses(known: Servers) -> set[str]:
    return {address_of(server) for server in known.in_order()}


def test_the_given_servers_are_tried_in_a_shuffled_order() -> None:
    orders = {tuple(servers(A, B, C, seed=seed).in_order()) for seed in range(50)}

    assert len(orders) == 6


def test_the_server_that_was_left_comes_last() -> None:
    known = servers(A, B, C)
    known.put_last(B)

    assert known.in_order()[-1] == B


def test_told_servers_are_added_with_the_scheme_and_credentials_of_the_one_that_told() -> None:
    known = servers("tls://me:secret@a:4222")
    known.learn("tls://me:secret@a:4222", ["b:4222", "[::1]:4333"], is_tls=False)

    assert set(known.in_order()) == {
        "tls://me:secret@a:4222",
        "tls://me:secret@b:4222",
        "tls://me:secret@[::1]:4333",
    }


def test_a_server_that_requires_tls_has_neighbours_with_tls() -> None:
    known = servers(A)
    known.learn(A, ["b:4222"], is_tls=True)

    assert "tls://b:4222" in known.in_order()


def test_members_that_left_are_forgotten_and_given_ones_never() -> None:
    known = servers(A, B)
    known.learn(A, ["c:4222", "d:4222"], is_tls=False)
    known.learn(A, ["d:4222"], is_tls=False)

    assert addresses(known) == {"a:4222", "b:4222", "d:4222"}


def test_an_info_without_addresses_changes_nothing() -> None:
    known = servers(A)
    known.learn(A, ["b:4222"], is_tls=False)
    known.learn(A, [], is_tls=False)

    assert addresses(known) == {"a:4222", "b:4222"}


def test_the_same_server_under_its_own_address_is_not_doubled() -> None:
    known = servers(A)
    known.learn(A, ["a:4222", "a:4222", "b:4222", "b:4222"], is_tls=False)

    assert sorted(address_of(server) for server in known.in_order()) == ["a:4222", "b:4222"]


@pytest.mark.parametrize("told", ["[bad", "host:port", "a b", "", "host:99999", "]:1", "x" * 5_000, "a..b:1", "\x00:1"])
def test_an_address_that_is_none_is_passed_over(told: str) -> None:
    """A server's word must not crash the client: addresses come from the network."""
    known = servers(A)
    known.learn(A, [told, "b:4222"], is_tls=False)

    assert addresses(known) == {"a:4222", "b:4222"}


def test_more_addresses_than_the_limit_are_not_believed() -> None:
    known = servers(A)
    known.learn(A, [f"h{number}:1" for number in range(SERVERS_MAX * 2)], is_tls=False)

    assert len(known.in_order()) <= SERVERS_MAX + 1


def test_there_is_another_server_only_when_its_address_differs() -> None:
    assert not servers("nats://u:p@a:4222").has_other_than(A)
    assert servers(A, B).has_other_than(A)


# ---- addresses that people write


def test_servers_are_written_with_commas_or_as_a_list() -> None:
    expected = ("nats://a:1", "tls://b:2", "nats://c")

    assert expected == parse_servers("a:1, tls://b:2,,c")
    assert expected == parse_servers(["a:1", "tls://b:2", "c"])


@pytest.mark.parametrize("url", ["", ",", "http://a", "nats://", "nats://a:x", "nats://a:70000", "nats://[bad", "a b"])
def test_an_address_that_cannot_be_used_is_refused_by_name(url: str) -> None:
    with pytest.raises(InvalidSetting):
        parse_servers(url)


def test_an_error_about_an_address_shows_no_password() -> None:
    with pytest.raises(InvalidSetting) as caught:
        parse_servers("http://me:secret@a:1")
    assert "secret" not in caught.value.message


def test_options_show_no_credentials() -> None:
    options = Options(("nats://me:secret@a:1",), user="u", password="hidden", token="hidden")

    assert "secret" not in repr(options)
    assert "hidden" not in repr(options)
    assert "a:1" in repr(options)


@pytest.mark.parametrize(
    ("server", "expected"),
    [
        ("nats://a:1", ("u", "p", "t")),
        ("nats://me:word@a:1", ("me", "word", "")),
        ("nats://me:@a:1", ("me", "", "")),
        ("nats://tok@a:1", ("", "", "tok")),
        ("nats://m%40e:w%3Ard@a:1", ("m@e", "w:rd", "")),
    ],
)
def test_what_an_address_carries_wins(server: str, expected: tuple[str, str, str]) -> None:
    assert expected == Options(user="u", password="p", token="t").credentials_of(server)


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("2.15.1", (2, 15, 1)),
        ("2.12.0-RC.3", (2, 12, 0)),
        ("2.12", (2, 12, 0)),
        ("", (0, 0, 0)),
        ("dev", (0, 0, 0)),
        ("v2.14.0", (2, 14, 0)),
        ("2.1٣.0", (2, 13, 0)),
    ],
)
def test_a_version_is_read_leniently(version: str, expected: tuple[int, int, int]) -> None:
    assert expected == ServerInfo(version=version).version_tuple
