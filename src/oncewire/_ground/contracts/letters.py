"""Dead letters on the wire: what agents hand to the dead-letter service, and what a letter carries.

A letter's body is the original's, byte for byte; its story stands in `Oncewire-Dlq-*` headers, the original's own
headers under `Oncewire-Orig-*`, so that none of them acts again. A request of an agent looks the same, on the subject
`dlq_requests.<agent>`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from msgspec import Struct

from oncewire._ground.contracts import headers as names
from oncewire._ground.contracts import subjects
from oncewire._ground.errors import ContractViolation

STREAM = "Oncewire-Dlq-Stream"
CREATED = "Oncewire-Dlq-Created"
"""When the stream was made, in nanoseconds."""
SEQUENCE = "Oncewire-Dlq-Sequence"
TIMESTAMP = "Oncewire-Dlq-Timestamp"
"""When the stream took the message in, in nanoseconds."""
CONSUMER = "Oncewire-Dlq-Consumer"
DELIVERIES = "Oncewire-Dlq-Deliveries"
SUBJECT = "Oncewire-Dlq-Subject"
OUTCOME = "Oncewire-Dlq-Outcome"
CAUSE = "Oncewire-Dlq-Cause"
"""In a request the whole reason; in a letter the short name that letters are grouped by."""
ERROR = "Oncewire-Dlq-Error"
"""The whole reason."""
AT = "Oncewire-Dlq-At"
"""When it was dead-lettered, in Unix milliseconds."""
TRACE = "Oncewire-Dlq-Trace"
TENANT = "Oncewire-Dlq-Tenant"
PAYLOAD = "Oncewire-Dlq-Payload"
"""Absent when the body is the original's; else GONE or POINTER."""
BYTES = "Oncewire-Dlq-Bytes"
HEADERS = "Oncewire-Dlq-Headers"
"""How many of the original's headers could not be carried."""
INJECTED = "Oncewire-Dlq-Injected"

GONE = "gone"
"""The stream no longer had the message when the service looked."""
POINTER = "pointer"
"""The message is larger than a letter may be: it stands where it stood, at stream and sequence."""

CAUSE_CHARS_MAX = 64
ERROR_CHARS_MAX = 1_000
HEADERS_BYTES_MAX = 48 * 1024
"""Of the original's headers; the server takes 64 KiB in all."""
_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_NAME_CHARS_MAX = 128
_CAUSE = re.compile(r"([A-Za-z_][A-Za-z0-9_.-]{0,63})(?=:|$)")


class Carried(Struct, frozen=True):
    """The original's headers as a letter carries them, and how many it cannot."""

    headers: dict[str, str]
    dropped: int


def carry(original: Mapping[str, str], bytes_max: int = HEADERS_BYTES_MAX, *, text_only: bool = False) -> Carried:
    """The original's headers under our prefix. A name that a header cannot have, or more than fits, is left out; with
    `text_only` also a value whose bytes are not UTF-8, which a ledger cannot hold."""
    kept: dict[str, str] = {}
    room = bytes_max
    for name, value in original.items():
        line = f"{names.ORIGINAL_PREFIX}{name}"
        size = len(line) + len(value.encode("utf-8", "surrogateescape")) + 4
        is_name = len(line) <= _NAME_CHARS_MAX and _NAME.fullmatch(name) is not None
        is_lost = text_only and not is_text(value)
        if not is_name or is_lost or size > room or any(sign in value for sign in "\r\n\x00"):
            continue
        kept[line] = value
        room -= size
    return Carried(kept, len(original) - len(kept))


def is_text(value: str) -> bool:
    """Whether UTF-8 can write it: bytes that were not UTF-8 are read as lone surrogates."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def originals(carried: Mapping[str, str]) -> dict[str, str]:
    """The other way: the original's headers out of a letter's or a request's."""
    prefix = names.ORIGINAL_PREFIX
    return {name.removeprefix(prefix): value for name, value in carried.items() if name.startswith(prefix)}


def one_line(text: str, chars_max: int = ERROR_CHARS_MAX) -> str:
    """A reason as any header, store and log can hold it: one line, no control characters, no halves of characters, not
    too long."""
    cleaned = "".join(sign if sign.isprintable() else " " for sign in text[: 4 * chars_max])
    return " ".join(cleaned.split())[:chars_max]


def cause_of(reason: str, otherwise: str) -> str:
    """The short name of a reason: what stands before its first colon when that is one word, else `otherwise`."""
    found = _CAUSE.match(reason)
    return found[1] if found else otherwise


def letter_subject(subject: str, stream: str) -> str:
    """Where a letter goes: by the message's subject, or under `_unnamed` when that is not known or not usable."""
    try:
        return subjects.check_subject(subjects.dlq_subject(subject))
    except ContractViolation:
        return f"{subjects.DLQ_PREFIX}._unnamed.{stream}"
