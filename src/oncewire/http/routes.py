"""Which handler answers which method and path. Paths are exact, or have `{name}` in place of one segment."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes

from oncewire.errors import ContractViolation

if TYPE_CHECKING:
    from oncewire.http.request import Request

Handler = Callable[["Request"], None]
"""Answers the request at once, later (`request.respond`), or bit by bit (`request.stream`)."""

Methods = dict[bytes, Handler]


class Routes:
    """A table of handlers. `unknown` answers every path that is not in it."""

    def __init__(self, unknown: Handler) -> None:
        self.unknown = unknown
        self._exact: dict[bytes, Methods] = {}
        self._patterns: list[tuple[tuple[str, ...], Methods]] = []

    def add(self, method: str, pattern: str, handler: Handler, *, has_head: bool = True) -> None:
        """A GET answers HEAD too, unless it changes something or never ends."""
        methods = self._methods(pattern)
        methods[method.encode()] = handler
        if method == "GET" and has_head:
            methods[b"HEAD"] = handler

    def _methods(self, pattern: str) -> Methods:
        if "{" not in pattern:
            return self._exact.setdefault(pattern.encode(), {})
        segments = tuple(pattern.split("/"))
        for known, methods in self._patterns:
            if known == segments:
                return methods
        self._patterns.append((segments, {}))
        return self._patterns[-1][1]

    def find(self, path: bytes) -> tuple[Methods | None, dict[str, str]]:
        """The methods of a path and what its `{name}` segments say; None when no route has it."""
        methods = self._exact.get(path)
        if methods is not None or not self._patterns:
            return methods, {}
        sent = path.split(b"/")
        for segments, found in self._patterns:
            if len(segments) == len(sent) and all(
                known[:1] == "{" or known.encode() == given for known, given in zip(segments, sent, strict=True)
            ):
                return found, _named(segments, sent)
        return None, {}


def _named(segments: tuple[str, ...], sent: list[bytes]) -> dict[str, str]:
    try:
        return {
            known[1:-1]: unquote_to_bytes(given).decode()
            for known, given in zip(segments, sent, strict=True)
            if known[:1] == "{"
        }
    except UnicodeDecodeError:
        raise ContractViolation("the path is not UTF-8, percent-encoded") from None
