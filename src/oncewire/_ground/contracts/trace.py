"""W3C trace context: which trace a message belongs to, and the span of the hop that sent it.

A context is continued, never invented over an existing one: each hop keeps the trace id and gives itself a new span
id. What does not follow the W3C rules is treated as absent, as they ask. Entropy is an argument.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import NamedTuple

from oncewire._ground.contracts.headers import TRACEPARENT, TRACESTATE, Headers

SAMPLED = 1
ENTROPY_BYTES = 24
SPAN_ENTROPY_BYTES = 8
TRACESTATE_CHARS_MAX = 512
TRACESTATE_MEMBERS_MAX = 32

_TRACE_ID = re.compile(r"(?!0{32})[0-9a-f]{32}")
_HEX = "0123456789abcdef"
_HEX_BYTES = _HEX.encode()
_NO_TRACE = "0" * 32
_NO_SPAN = "0" * 16
_TRACEPARENT = re.compile(r"(?!ff)([0-9a-f]{2})-((?!0{32})[0-9a-f]{32})-((?!0{16})[0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_STATE_KEY = r"[a-z][a-z0-9_\-*/]{0,255}|[a-z0-9][a-z0-9_\-*/]{0,240}@[a-z][a-z0-9_\-*/]{0,13}"
_STATE_MEMBER = re.compile(rf"(?:{_STATE_KEY})=[ -+\--<>-~]{{0,255}}[!-+\--<>-~]")


class TraceContext(NamedTuple):
    trace_id: str
    span_id: str
    flags: int = SAMPLED
    state: str = ""

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"

    def headers(self) -> dict[str, str]:
        """The context as headers of a message."""
        written = {TRACEPARENT: self.traceparent}
        if self.state:
            written[TRACESTATE] = self.state
        return written


def is_trace_id(value: str) -> bool:
    return bool(_TRACE_ID.fullmatch(value))


def are_ids(trace_id: str, span_id: str) -> bool:
    """Whether the fields of an envelope carry a context."""
    return (
        len(trace_id) == 32
        and len(span_id) == 16
        and not (trace_id + span_id).strip(_HEX)  # nothing but hex digits; a regular expression takes twice as long
        and trace_id != _NO_TRACE
        and span_id != _NO_SPAN
    )


def are_all_ids(trace_ids: Sequence[str], span_ids: Sequence[str]) -> bool:
    """Whether `are_ids` holds for each pair, looked for in all of them at once. Ids of half the length are often padded
    with zeros: where many stand in a row, each id is asked whether it is nothing else."""
    joined = "".join(trace_ids) + "".join(span_ids)
    return (
        {32}.issuperset(map(len, trace_ids))
        and {16}.issuperset(map(len, span_ids))
        and joined.isascii()
        and not joined.encode().translate(None, _HEX_BYTES)
        and (_NO_SPAN not in joined or (_NO_TRACE not in trace_ids and _NO_SPAN not in span_ids))
    )


def parse_traceparent(header: str) -> TraceContext | None:
    """The context of a `traceparent`, None when it is not valid. Later versions are read as far as they are alike."""
    found = _TRACEPARENT.fullmatch(header.strip(" \t"))
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == "00" and more is not None:
        return None
    kept = int(flags, 16) if version == "00" else int(flags, 16) & SAMPLED
    return TraceContext(trace_id, span_id, kept)


def parse_tracestate(header: str) -> str:
    """The `tracestate` without empty members, '' when it is not valid."""
    members = [member.strip(" \t") for member in header.split(",")]
    members = [member for member in members if member]
    keys = {member.partition("=")[0] for member in members}
    state = ",".join(members)
    is_valid = (
        len(keys) == len(members) <= TRACESTATE_MEMBERS_MAX
        and len(state) <= TRACESTATE_CHARS_MAX
        and all(_STATE_MEMBER.fullmatch(member) for member in members)
    )
    return state if is_valid else ""


def extract(headers: Headers) -> TraceContext | None:
    """The context that a message's headers carry, None without a valid one."""
    parent = headers.get(TRACEPARENT) or headers.get("Traceparent")  # Go clients write the second
    context = parse_traceparent(parent) if parent else None
    if context is None:
        return None
    state = headers.get(TRACESTATE) or headers.get("Tracestate") or ""
    return context._replace(state=parse_tracestate(state)) if state else context


def start(entropy: bytes) -> TraceContext:
    """A new trace, for a message that belongs to none."""
    assert len(entropy) == ENTROPY_BYTES
    return TraceContext(_nonzero(entropy[:16]), _nonzero(entropy[16:]))


def begun_by(message_id: str) -> TraceContext:
    """The trace that a message without one begins: the same for everyone who reads it."""
    return start(hashlib.sha256(message_id.encode("utf-8", "surrogatepass")).digest()[:ENTROPY_BYTES])


def next_hop(context: TraceContext, entropy: bytes) -> TraceContext:
    """The same trace with a span of its own."""
    assert len(entropy) == SPAN_ENTROPY_BYTES
    return context._replace(span_id=_nonzero(entropy))


def _nonzero(entropy: bytes) -> str:
    """As hex; all zeros would mean "no id"."""
    return entropy.hex() if any(entropy) else (b"\1" * len(entropy)).hex()
