"""What a setting may be. A check takes a parsed value and returns what is wrong with it, or None."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

OFF = "off"
Check = Callable[[Any], str | None]


def between(low: int, high: int) -> Check:
    def check(value: int) -> str | None:
        return None if low <= value <= high else f"must be from {low} to {high}"

    return check


def one_of(*allowed: str) -> Check:
    def check(value: str) -> str | None:
        return None if value in allowed else f"must be {' or '.join(allowed)}"

    return check


def is_name_prefix(value: str) -> str | None:
    return None if re.fullmatch(r"[A-Za-z0-9_-]{1,64}", value) else "must be 1 to 64 letters, digits, '-' or '_'"


def is_subject_prefix(value: str) -> str | None:
    word = r"[A-Za-z0-9_-]+"
    return None if re.fullmatch(rf"{word}(\.{word})*", value) else "must be subject tokens joined by dots"


def is_nats_url(value: str) -> str | None:
    for one in value.split(","):
        parts = urlsplit(one if "://" in one else f"nats://{one}")
        try:
            _ = parts.port
        except ValueError:
            return "has a port that is not a number from 0 to 65535"
        if parts.scheme not in ("nats", "tls") or not parts.hostname:
            return "must be nats://host:port or tls://host:port, several joined by commas"
    return None


def split_address(value: str) -> tuple[str, int] | None:
    """`host:port` in its two parts, `[::1]:8080` too; None when it is not that."""
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})", value)
    return (found.group(1).strip("[]"), int(found.group(2))) if found and int(found.group(2)) <= 65535 else None


def is_address(value: str) -> str | None:
    return None if split_address(value) else "must be host:port"


def is_address_or_off(value: str) -> str | None:
    return None if value == OFF or split_address(value) else "must be host:port, or off"


def is_traces(value: str) -> str | None:
    is_known = value in (OFF, "otlp", "console") or re.fullmatch("file:.+", value)
    return None if is_known else "must be off, otlp, console or file:PATH"


def is_http_url(value: str) -> str | None:
    for one in value.split(",") if value else ():
        parts = urlsplit(one.strip())
        if parts.scheme not in ("http", "https") or not parts.hostname:
            return "must be http://host:port, several joined by commas"
    return None


def split_origins(value: str) -> list[str]:
    """Origins as browsers send them: lower case, without a path."""
    return [origin.strip().lower() for origin in value.split(",") if origin.strip()]


def are_origins(value: str) -> str | None:
    for origin in split_origins(value):
        if not re.fullmatch(r"https?://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?", origin):
            return "must be scheme://host or scheme://host:port, without a path, several joined by commas"
    return None


def is_postgres_url(value: str) -> str | None:
    if value == "" or value.startswith(("postgresql://", "postgres://")):
        return None
    return "must start with postgresql://"


PORT = between(0, 65535)
POSITIVE = between(1, 2**53)
