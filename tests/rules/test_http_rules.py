"""What the front accepts, case by case."""

from __future__ import annotations

import pytest

from oncewire._ground import errors
from oncewire._ground.errors import ContractViolation, OncewireError
from oncewire._ground.http.rules import (
    Refusal,
    Target,
    answer_of,
    is_loopback,
    is_request_id,
    read_head,
    read_query,
    read_target,
)

HOST = (b"Host", b"localhost")


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        (b"/a?b=c", Target(b"/a", b"b=c", b"")),
        (b"/a", Target(b"/a", b"", b"")),
        (b"/a?b?c#d", Target(b"/a", b"b?c", b"")),
        (b"/a#b?c", Target(b"/a", b"", b"")),
        (b"http://x:1/a?b", Target(b"/a", b"b", b"x:1")),
        (b"HTTP://x", Target(b"/", b"", b"x")),
        (b"http://x?b", Target(b"/", b"b", b"x")),
        (b"*", Target(b"*", b"", b"")),
    ],
)
def test_a_target_in_its_parts(sent: bytes, read: Target) -> None:
    assert read == read_target(sent)


def test_headers_are_found_by_their_name_in_any_case_and_joined() -> None:
    read = read_head([(b"HOST", b"a"), (b"X-A", b"1"), (b"x-a", b"2")], "1.1")
    assert {b"host": b"a", b"x-a": b"1, 2"} == read


@pytest.mark.parametrize(
    ("pairs", "version", "status"),
    [
        ([], "1.1", 400),
        ([HOST, HOST], "1.1", 400),
        ([HOST, (b"Content-Type", b"a"), (b"content-type", b"a")], "1.1", 400),
        ([HOST, (b"Transfer-Encoding", b"gzip, chunked")], "1.1", 400),
        ([HOST, (b"Transfer-Encoding", b"chunked")], "1.0", 400),
        ([HOST, (b"Expect", b"more")], "1.1", 417),
        ([HOST], "2.0", 400),
        ([HOST], "0.9", 400),
    ],
)
def test_a_head_that_could_be_read_differently_is_refused(
    pairs: list[tuple[bytes, bytes]], version: str, status: int
) -> None:
    with pytest.raises(Refusal) as caught:
        read_head(pairs, version)
    assert status == caught.value.status


def test_http_1_0_needs_no_host() -> None:
    assert {} == read_head([], "1.0")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.9.9.9", "::1", "[::1]", "LocalHost", "localhost."])
def test_names_of_this_machine(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "10.0.0.1", "localhost.evil", "127.0.0.1.evil", "evil", "", "128.0.0.1"]
)
def test_names_that_may_mean_another(host: str) -> None:
    assert not is_loopback(host)


def test_a_request_id_is_short_and_plain() -> None:
    assert is_request_id(b"a-B_9~".replace(b"_", b"."))
    assert is_request_id(b"x" * 128)
    assert not any(is_request_id(sent) for sent in (b"", b"x" * 129, b"a b", b"a\r\nX: y", b"\xc3\xa9", b"<a>"))


def test_of_a_parameter_that_stands_twice_the_first_counts() -> None:
    assert {"a": "1", "b": "", "c": "é +"} == read_query(b"a=1&a=2&b=&c=%C3%A9+%2B")


@pytest.mark.parametrize("query", [b"a=%FF", b"&".join(b"a%d=1" % n for n in range(65)), b"a=\xff"])
def test_a_query_that_cannot_be_read_is_refused(query: bytes) -> None:
    with pytest.raises(ContractViolation):
        read_query(query)


def test_every_error_of_ours_has_an_answer() -> None:
    """What is the caller's fault is a 4xx, what may pass is 429 or 503, the rest tells nothing."""
    for kind in vars(errors).values():
        if not (isinstance(kind, type) and issubclass(kind, OncewireError)):
            continue
        status, code = answer_of(kind.__new__(kind))
        expected = {"Refused": range(400, 429), "Unavailable": (429, 503), "Corrupt": (500,), "OncewireError": (500,)}
        branch = next(name for name in expected if any(base.__name__ == name for base in kind.__mro__))
        assert status in expected[branch], kind
        assert code.isupper()
