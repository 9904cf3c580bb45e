"""Why a message can never be written, told by argument and value. Only messages that failed are looked at. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oncewire._ground.arguments import check_text, shown, wrong
from oncewire._ground.errors import ContractViolation


def wrong_message(message: Any, kind: type) -> ContractViolation | None:
    """None: only the server can tell. `kind` is what a message has to be."""
    if not isinstance(message, kind):
        return ContractViolation(f"publish: {shown(message)} is not an {kind.__name__}")
    payload, headers = getattr(message, "payload", None), getattr(message, "headers", None) or {}
    try:
        for field in ("subject", "msg_id", "expected_stream", "traceparent"):
            check_text("publish", field, getattr(message, field))
    except ContractViolation as violation:
        return violation
    if not isinstance(payload, bytes | bytearray | memoryview):
        return wrong("publish", "payload", payload, "is not bytes")
    if not isinstance(headers, Mapping) or not all(isinstance(one, str) for one in (*headers, *headers.values())):
        return wrong("publish", "headers", headers, "is not a mapping of text to text")
    return None
