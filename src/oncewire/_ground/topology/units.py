"""Durations and sizes as people write them, and back. Pure.

A duration is whole numbers with units, `7d`, `30s`, `1h30m`, or `forever`; a size is `64 MiB`, a number of bytes, or
`unlimited`. `MB` means `MiB`, as it does for nats-server: the specs' 64 MB are 67,108,864 bytes.
"""

from __future__ import annotations

import re

FOREVER = 0
UNLIMITED = -1
INT64_MAX = 2**63 - 1

_NS = {"d": 86_400 * 10**9, "h": 3_600 * 10**9, "m": 60 * 10**9, "s": 10**9, "ms": 10**6}
_BYTES = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "GB": 1 << 30, "MB": 1 << 20, "KB": 1 << 10, "B": 1}
_DURATION = re.compile(r"(?:[0-9]{1,19}(?:d|h|ms|m|s))+")
_SIZE = re.compile(r"([0-9]{1,19}) ?(GiB|MiB|KiB|GB|MB|KB|B)")


def parse_duration_ns(text: str) -> int:
    """Nanoseconds. ValueError says what is wrong, without naming the place."""
    if text == "forever":
        return FOREVER
    if not _DURATION.fullmatch(text):
        raise ValueError(f"is not a duration: {text[:40]!r}")
    total = sum(int(count) * _NS[unit] for count, unit in re.findall(r"([0-9]+)(d|h|ms|m|s)", text))
    if not 0 < total <= INT64_MAX:
        raise ValueError(f"must be more than nothing and less than 292 years, not {text[:40]!r}")
    return total


def parse_bytes(text: str) -> int:
    if text == "unlimited":
        return UNLIMITED
    found = _SIZE.fullmatch(text)
    if not found:
        raise ValueError(f"is not a size: {text[:40]!r}")
    total = int(found[1]) * _BYTES[found[2]]
    if not 0 < total <= INT64_MAX:
        raise ValueError(f"must be from 1 byte to 8 EiB, not {text[:40]!r}")
    return total


def show_duration(duration_ns: int) -> str:
    """The shortest exact text that `parse_duration_ns` reads back."""
    if duration_ns <= 0:
        return "forever"
    parts = []
    for unit, size in _NS.items():
        count, duration_ns = divmod(duration_ns, size)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) + (f"+{duration_ns}ns" if duration_ns else "")


def show_bytes(size: int) -> str:
    """The exact size in its largest whole unit."""
    if size < 0:
        return "unlimited"
    for unit in ("GiB", "MiB", "KiB"):
        if size and size % _BYTES[unit] == 0:
            return f"{size // _BYTES[unit]} {unit}"
    return f"{size} B"


def show_count(count: int) -> str:
    return "unlimited" if count < 0 else f"{count:,}"
