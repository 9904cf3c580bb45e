"""Hides secrets in what people and machines may read: addresses, log lines, answers."""

from __future__ import annotations

import re
from typing import Final

MASK: Final = "••••••"

# Lines come from anybody and are masked on the event loop, so each search is linear: what may be long begins where its
# run of characters begins, never at each of them, and gives nothing back.

_URL: Final = re.compile(
    r"(?<![A-Za-z0-9+.-])([0-9+.-]*+)([A-Za-z][A-Za-z0-9+.-]*+://(?:(?!,[A-Za-z][A-Za-z0-9+.-]*+://)[^\s\"'<>])++)"
)
_NAMED: Final = re.compile(
    r"(?i)((?:password|passwd|secret|token|api[_-]?key|authorization)[\"']?\s*[=:]\s*[\"']?)"
    r"(?!•)((?:bearer|basic)\s+)?[^\s,;&\"'}]+"
)
_BEARER: Final = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}")
_JWT: Final = re.compile(
    r"(?<![A-Za-z0-9_-])(?=[A-Za-z0-9_-]++\.[A-Za-z0-9_-]{5,}+\.)"  # three parts, before a beginning is looked for
    r"([A-Za-z0-9_-]*?)\beyJ[A-Za-z0-9_-]{5,}+\.[A-Za-z0-9_-]++\.[A-Za-z0-9_-]*+"
)
_SHAPES: Final = re.compile(
    r"\bS[ACOUNX][A-Z2-7]{56}\b"  # the seed of an nkey
    r"|\bow_[A-Za-z0-9_-]{16,}"  # an API key of ours
)


def mask_url(url: str) -> str:
    """Hide the secrets of an address, or of several: `nats://user:secret@host`, `nats://token@host`,
    `?password=secret`. By the letter, not by the rules of addresses: one that breaks them has secrets too."""
    return ",".join(_masked(one) for one in _NEXT_ADDRESS.split(url))


_NEXT_ADDRESS = re.compile(r",(?=[A-Za-z][A-Za-z0-9+.-]*://)")
_IN_QUERY = re.compile(r"(?i)((?:password|token|secret|key)=)[^&]*")


def _masked(url: str) -> str:
    scheme, mark, rest = url.partition("://")
    if not mark:
        return url
    place, question, query = rest.partition("?")
    credentials, at, host = place.rpartition("@")
    user, colon, _ = credentials.partition(":")
    is_token = at and not colon and not scheme.startswith("postgres")
    shown = MASK if is_token else f"{user}:{MASK}" if colon else user
    hidden = _IN_QUERY.sub(lambda found: found[1] + MASK, query)
    return f"{scheme}://{shown}{at}{host}{question}{hidden}"


def mask_text(text: str) -> str:
    """A line that somebody else may have a part in: what is a secret by its place or its shape is hidden."""
    text = _URL.sub(lambda found: found.group(1) + mask_url(found.group(2)), text)
    text = _NAMED.sub(lambda found: f"{found.group(1)}{MASK}", text)
    text = _BEARER.sub(lambda found: f"{found.group(1)} {MASK}", text)
    text = _JWT.sub(lambda found: found.group(1) + MASK, text)
    return _SHAPES.sub(MASK, text)
