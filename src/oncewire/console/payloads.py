"""A payload as a person may look at it: JSON set apart, text as it is, anything else as hex; always bounded. Pure."""

from __future__ import annotations

from typing import Any, Final

import msgspec

SHOWN_BYTES_MAX: Final = 64 << 10
EDIT_BYTES_MAX: Final = 256 << 10
"""What is handed out whole, for editing."""
HEX_BYTES_MAX: Final = 4 << 10
LINE: Final = 16


def shown_payload(payload: bytes) -> dict[str, Any]:
    """`kind` json, text, hex or empty; `text` is what is shown, `whole` what can be edited (None when it cannot)."""
    if not payload:
        return {"kind": "empty", "text": "", "bytes": 0, "is_cut": False, "whole": ""}
    text = _text(payload[:EDIT_BYTES_MAX], is_cut=len(payload) > EDIT_BYTES_MAX)
    facts: dict[str, Any] = {"bytes": len(payload)}
    if text is None:
        is_cut = len(payload) > HEX_BYTES_MAX
        return facts | {"kind": "hex", "text": hex_lines(payload[:HEX_BYTES_MAX]), "is_cut": is_cut, "whole": None}
    whole = text if len(payload) <= EDIT_BYTES_MAX else None
    pretty = _pretty(payload) if len(payload) <= SHOWN_BYTES_MAX else None
    kind, told = ("json", pretty) if pretty is not None else ("text", text)
    is_cut = len(told) > SHOWN_BYTES_MAX or len(payload) > EDIT_BYTES_MAX
    return facts | {"kind": kind, "text": told[:SHOWN_BYTES_MAX], "is_cut": is_cut, "whole": whole}


def _text(payload: bytes, *, is_cut: bool) -> str | None:
    """None when it is not text: not UTF-8, or with control characters that text does not have."""
    try:
        text = payload.decode()
    except UnicodeDecodeError as error:
        if not is_cut or error.start < len(payload) - 4:
            return None
        text = payload[: error.start].decode()  # cut within a character
    return None if any(ord(sign) < 32 and sign not in "\t\n\r" for sign in text) else text


def _pretty(payload: bytes) -> str | None:
    try:
        return msgspec.json.format(payload, indent=2).decode()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def hex_lines(payload: bytes) -> str:
    """Offset, bytes, and the letters among them."""
    lines = []
    for at in range(0, len(payload), LINE):
        part = payload[at : at + LINE]
        letters = "".join(chr(one) if 32 <= one < 127 else "." for one in part)
        lines.append(f"{at:08x}  {part.hex(' '):<{3 * LINE}} {letters}")
    return "\n".join(lines)
