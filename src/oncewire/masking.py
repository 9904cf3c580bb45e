"""Hides secrets in what people and machines may read: addresses, log lines, answers."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import urlsplit, urlunsplit

MASK: Final = "••••••"

_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://(?:(?!,[A-Za-z][A-Za-z0-9+.-]*://)[^\s\"'<>])+")
_NAMED: Final = re.compile(
    r"(?i)\b((?:[a-z0-9_.-]*(?:password|passwd|secret|token|api[_-]?key)|authorization)[\"']?\s*[=:]\s*[\"']?)"
    r"(?!•)((?:bearer|basic)\s+)?[^\s,;&\"'}]+"
)
_BEARER: Final = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}")
_SHAPES: Final = re.compile(
    r"\beyJ[A-Za-z0-9_-]{5,}\.[A-Za-z0-9_-]{5,}\.[A-Za-z0-9_-]*"  # a JWT
    r"|\bS[ACOUNX][A-Z2-7]{56}\b"  # the seed of an nkey
    r"|\bow_[A-Za-z0-9_-]{16,}"  # an API key of ours
)


def mask_url(url: str) -> str:
    """Hide the secrets of an address: `nats://user:secret@host`, `nats://token@host`, `?password=secret`."""
    parts = urlsplit(url)
    if parts.query:
        hidden = re.sub(r"(?i)((?:password|token|secret|key)=)[^&]*", rf"\1{MASK}", parts.query)
        parts = parts._replace(query=hidden)
    if "@" in parts.netloc:
        credentials, _, host = parts.netloc.rpartition("@")
        user, colon, _ = credentials.partition(":")
        is_token = not colon and not parts.scheme.startswith("postgres")
        shown = MASK if is_token else f"{user}:{MASK}" if colon else user
        parts = parts._replace(netloc=f"{shown}@{host}")
    return urlunsplit(parts)


def mask_text(text: str) -> str:
    """A line that somebody else may have a part in: what is a secret by its place or its shape is hidden."""
    text = _URL.sub(lambda found: _masked_url(found.group()), text)
    text = _NAMED.sub(lambda found: f"{found.group(1)}{MASK}", text)
    text = _BEARER.sub(lambda found: f"{found.group(1)} {MASK}", text)
    return _SHAPES.sub(MASK, text)


def _masked_url(url: str) -> str:
    try:
        return mask_url(url)
    except ValueError:  # no address after all: all of it might be a secret
        return MASK
