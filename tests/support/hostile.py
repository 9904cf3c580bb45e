# ruff: noqa: E501 (a list)
"""A thousand names that somebody might try: paths, wildcards, control characters, look-alikes, and what breaks parsers.

Deterministic: the same list in every run, so that a failure names a string that anybody can send again.
"""

from __future__ import annotations

import itertools

PIECES = (
    "..", "../", "..\\", "/", "//", "/etc/passwd", "%2e%2e%2f", "%00", "\x00", "\n", "\r\n", "\r\nX-Evil: 1", "\t", "\x1b[2J",
    "\x7f", "\x85", "\u2028", "\u200b", "\u202e", "\ufeff", "\u0301", "\ufffd", "\U0001f4a3", "*", ">", ".", "a.*", "a.>",
    "$JS.API.STREAM.DELETE.X", "$SYS.REQ", "$KV.x", "_INBOX.x", "dlq.x", "' OR '1'='1", "\"; DROP TABLE x;--", "${7*7}",
    "{{7*7}}", "<script>alert(1)</script>", "%s%n%x", "\\u0000", "null", "NaN", "-1", "1e999", "9" * 40, "true", "[]", "{}",
    "con", "nul.txt", "~", "~root", "-", "--help", "-rf", "|id", "`id`", "$(id)", "&", "#", "?", "a=b&c=d", "a\\b", " ", "  a",
    "\u00a0", "tenant\u0000other", "\u0430dmin", "\uff0e\uff0e\uff0f", "ℂ", "ß", "İ", "ﬀ", "e\u0301", "\u0065\u0301", "\U000e0041",
)  # fmt: skip
FRAMES = (
    "{}", "a{}", "{}a", "a{}b", "{0}{0}", "a.{}", "{}.a", "a/{}", "tenant:{}", "{}{}{}", "x" * 150 + "{}", "{}" + "y" * 60,
    "{}\n{}", "{} {}",
)  # fmt: skip
LONG = ("a" * 201, "ä" * 101, "a." * 200, "x" * 5_000, "/" * 300, "\U0001f4a3" * 60, "%" * 250)


def names() -> list[str]:
    """At least a thousand, each once, every one of them valid Unicode."""
    framed = (frame.replace("{0}", "{}").replace("{}", piece) for frame in FRAMES for piece in PIECES)
    found = list(dict.fromkeys(itertools.chain(PIECES, LONG, framed)))
    assert len(found) >= 1_000
    return found
