"""The names of the headers that Oncewire reads and writes, each in one place.

A replay carries what the original was resolved to, so that filling-in gives the same envelope again (runtime.py).
"""

from __future__ import annotations

from collections.abc import Mapping

Headers = Mapping[str, str]
"""One value per name, as NATS spells the name: its headers are case-sensitive."""

MSG_ID = "Nats-Msg-Id"
TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"

REPLAY_FOR = "Oncewire-Replay-For"
"""The consumer that a replay is meant for; others ack it without running."""
REPLAY_ID = "Oncewire-Replay-Id"
REPLAY_IDEMPOTENCY_KEY = "Oncewire-Replay-Idempotency-Key"
REPLAY_TS = "Oncewire-Replay-Ts"
REPLAY_ORIGIN = "Oncewire-Replay-Origin"
REPLAY_REPLACES = "Oncewire-Replay-Replaces"
"""Hex digest of the content that an edited replay replaces."""

EPOCH = "Oncewire-Epoch"
SEQUENCE = "Oncewire-Sequence"
DEDUPE_ID = "Oncewire-Dedupe-Id"
TENANT = "Oncewire-Tenant"
"""What a relay says about a conversation's message: a gateway reads it without the body."""

NODE = "Oncewire-Node"
"""The gateway node through which somebody is there."""

DLQ_PREFIX = "Oncewire-Dlq-"
ORIGINAL_PREFIX = "Oncewire-Orig-"
"""The original's headers stand under this prefix in a dead letter, so that they do not act again."""

_PLAIN = bytes(range(0x20, 0x7F))


def is_plain(text: str) -> bool:
    """Printable ASCII and nothing else, which may stand in a header as it is. Quicker than `str.isprintable`."""
    return text.isascii() and not text.encode().translate(None, _PLAIN)
