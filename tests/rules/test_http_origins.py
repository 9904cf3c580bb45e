"""Which requests come from a web page of another origin."""

from __future__ import annotations

import pytest

from oncewire._ground.checks import are_origins, split_origins
from oncewire._ground.http.origins import VARY, cors_lines, is_foreign, is_navigation

HOST = b"localhost:8080"
OWN = b"http://localhost:8080"
ALLOWED = frozenset({b"https://shop.example"})


@pytest.mark.parametrize(
    ("headers", "is_refused"),
    [
        ({}, False),
        ({b"origin": OWN}, False),
        ({b"origin": b"https://LOCALHOST:8080"}, False),
        ({b"origin": OWN, b"sec-fetch-site": b"same-origin"}, False),
        ({b"sec-fetch-site": b"same-origin"}, False),
        ({b"sec-fetch-site": b"none"}, False),
        ({b"origin": b"https://shop.example"}, False),
        ({b"origin": b"https://shop.example", b"sec-fetch-site": b"cross-site"}, False),
        ({b"origin": b"https://shop.example.evil.example"}, True),
        ({b"origin": b"http://shop.example"}, True),
        ({b"origin": b"https://evil.example"}, True),
        ({b"origin": b"http://localhost:3000"}, True),
        ({b"origin": b"http://localhost"}, True),
        ({b"origin": b"http://127.0.0.1:8080"}, True),
        ({b"origin": b"http://localhost:8080.evil.example"}, True),
        ({b"origin": b"http://evil.example/localhost:8080"}, True),
        ({b"origin": b"file://localhost:8080"}, True),
        ({b"origin": b"localhost:8080"}, True),
        ({b"origin": b"null"}, True),
        ({b"origin": b""}, True),
        ({b"origin": OWN + b", https://evil.example"}, True),
        ({b"origin": OWN, b"sec-fetch-site": b"cross-site"}, True),
        ({b"sec-fetch-site": b"cross-site"}, True),
        ({b"sec-fetch-site": b"same-site"}, True),
        ({b"sec-fetch-site": b"same-origin, none"}, True),
        ({b"sec-fetch-site": b""}, True),
    ],
)
def test_a_page_of_another_origin_is_known_by_what_its_browser_says(
    headers: dict[bytes, bytes], is_refused: bool
) -> None:
    assert is_refused == is_foreign(headers, HOST, ALLOWED)


def test_without_a_host_no_origin_is_the_servers_own() -> None:
    assert is_foreign({b"origin": b"http://"}, b"", frozenset())


@pytest.mark.parametrize(
    ("method", "headers", "is_link"),
    [
        (b"GET", {b"sec-fetch-mode": b"navigate", b"sec-fetch-dest": b"document"}, True),
        (b"HEAD", {b"sec-fetch-mode": b"navigate", b"sec-fetch-dest": b"document"}, True),
        (b"POST", {b"sec-fetch-mode": b"navigate", b"sec-fetch-dest": b"document"}, False),
        (b"GET", {b"sec-fetch-mode": b"navigate", b"sec-fetch-dest": b"iframe"}, False),
        (b"GET", {b"sec-fetch-mode": b"no-cors", b"sec-fetch-dest": b"image"}, False),
        (b"GET", {b"sec-fetch-mode": b"navigate", b"sec-fetch-dest": b"document", b"origin": b"null"}, False),
        (b"GET", {}, False),
    ],
)
def test_a_followed_link_is_known(method: bytes, headers: dict[bytes, bytes], is_link: bool) -> None:
    assert is_link == is_navigation(method, headers)


def test_only_an_allowed_origin_may_read_an_answer() -> None:
    assert b"" == cors_lines({b"origin": OWN}, frozenset())
    assert VARY == cors_lines({}, ALLOWED) == cors_lines({b"origin": OWN}, ALLOWED)
    lines = cors_lines({b"origin": b"https://shop.example"}, ALLOWED)
    assert b"Access-Control-Allow-Origin: https://shop.example\r\n" in lines
    assert lines.endswith(VARY)


@pytest.mark.parametrize(
    "value", ["", "https://a.example", "http://localhost:3000, https://B.example ", "http://[::1]:80"]
)
def test_origins_of_a_setting_are_as_browsers_send_them(value: str) -> None:
    assert are_origins(value) is None
    assert [origin.strip().lower() for origin in value.split(",") if origin] == split_origins(value)


@pytest.mark.parametrize(
    "value", ["*", "null", "a.example", "https://a.example/", "https://a.example/x", "https://", "ws://a"]
)
def test_what_is_not_an_origin_is_refused_in_the_setting(value: str) -> None:
    assert are_origins(value) is not None
