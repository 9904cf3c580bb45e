"""Which handler answers which method and path, and what one must be allowed to do for it. Paths are exact, or have
`{name}` in place of one segment.

Every route has a rule: an action that the Principal must have, or OPEN. A handler that learns from the body which thing
is meant asks again, by name (`request.principal.require`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes

from oncewire._ground.errors import ContractViolation

if TYPE_CHECKING:
    from oncewire._ground.http.request import Request

Handler = Callable[["Request"], None]
"""Answers the request at once, later (`request.respond`), or bit by bit (`request.stream`)."""

Methods = dict[bytes, Handler]

OPEN = ""
"""The action of a route that everybody may use: health, version, what is public by nature."""


class Routes:
    """A table of handlers. `unknown` answers every path that is not in it."""

    def __init__(self, unknown: Handler) -> None:
        self.unknown = unknown
        self._exact: dict[bytes, Methods] = {}
        self._patterns: list[tuple[tuple[str, ...], Methods]] = []
        self.rules: dict[tuple[str, str], str] = {}
        """The action of each method and path."""
        self.guarded: set[Handler] = set()
        """The handlers that are not open to all."""
        self.tells_pages = False
        """Whether its handlers take a web page's offer of another protocol also when its credential is refused, and say
        there why: a page is not shown the answer to an offer that fails."""

    def add(self, method: str, pattern: str, handler: Handler, *, action: str, has_head: bool = True) -> None:
        """A GET answers HEAD too, unless it changes something or never ends."""
        methods = self._methods(pattern)
        methods[method.encode()] = handler = _guarded(action, handler)
        self.rules[method, pattern] = action
        if action != OPEN:
            self.guarded.add(handler)
        if method == "GET" and has_head:
            methods[b"HEAD"] = handler
            self.rules["HEAD", pattern] = action

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

    def has(self, path: bytes) -> bool:
        """Whether a route answers this path, and not `unknown`."""
        try:
            return self.find(path)[0] is not None
        except ContractViolation:
            return True


def _guarded(action: str, handler: Handler) -> Handler:
    """Only for who may; without authentication that is everybody."""
    if action == OPEN:
        return handler

    def guarded(request: Request) -> None:
        request.principal.require(action)
        handler(request)

    return guarded


def _named(segments: tuple[str, ...], sent: list[bytes]) -> dict[str, str]:
    try:
        return {
            known[1:-1]: unquote_to_bytes(given).decode()
            for known, given in zip(segments, sent, strict=True)
            if known[:1] == "{"
        }
    except UnicodeDecodeError:
        raise ContractViolation("the path is not UTF-8, percent-encoded") from None
