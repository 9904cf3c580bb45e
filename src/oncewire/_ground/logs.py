"""Log lines: one per record, whoever wrote it and whatever it says.

Names, reasons and errors in a record come from clients, servers and messages. A line break or an escape sequence in
them could forge a line or steer a terminal, so every control character is shown by its number; what looks like a
secret is hidden (masking.py). Payloads are never logged: what is said of one is its size.

    text   2026-11-16T03:14:41.592Z warning gateway  room 17 cannot be read: …
    json   {"time": "…", "level": "warning", "part": "gateway", "event": "room 17 cannot …", "trace_id": "…"}

`trace_id` is set around the work on one message, for its handler's own lines too.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Final, TextIO

from oncewire._ground.masking import mask_text

LEVELS: Final = ("debug", "info", "warning", "error")
LINE_CHARS_MAX: Final = 16_384
PACKAGE: Final = "oncewire"

trace_id: ContextVar[str] = ContextVar("oncewire_trace_id", default="")
"""The trace of the message that is being worked on."""

_CONTROL: Final = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
"""C0, C1 and DEL; what breaks lines elsewhere, turns the direction of writing, or is no character."""


def printable(text: str) -> str:
    """Every control character by its number."""
    return _CONTROL.sub(lambda found: _shown(ord(found.group())), text)


def _shown(number: int) -> str:
    if number == 0x0A:
        return "\\n"
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"


def said(text: str) -> str:
    """A text of any origin as it may stand in a line: bounded, without secrets, without control characters."""
    shown = printable(mask_text(text[: LINE_CHARS_MAX + 1]))
    return f"{shown[:LINE_CHARS_MAX]}…" if len(text) > LINE_CHARS_MAX else shown


def part_of(logger: str) -> str:
    """The part that a record is from: the package below ours, else the logger's own name."""
    package, _, rest = logger.partition(".")
    return rest.partition(".")[0] or package if package == PACKAGE else logger


def facts_of(record: logging.LogRecord) -> dict[str, Any]:
    """What a line says, in the order in which it says it."""
    facts = {
        "time": time_of(record.created),
        "level": record.levelname.lower(),
        "part": said(part_of(record.name)),
        "event": said(_message(record)),
    }
    trace = getattr(record, "trace_id", "") or trace_id.get()
    if trace:
        facts["trace_id"] = printable(str(trace))
    if record.exc_info and record.exc_info[0] is not None:
        facts["error"] = said(logging.Formatter().formatException(record.exc_info))
    return facts


def time_of(unix_s: float) -> str:
    at = datetime.fromtimestamp(unix_s, UTC)
    return f"{at:%Y-%m-%dT%H:%M:%S}.{at.microsecond // 1000:03d}Z"


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except (TypeError, ValueError, KeyError) as error:  # somebody's format does not fit its arguments
        return f"{record.msg} ({type(error).__name__} in its arguments)"


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return json_line(facts_of(record))


class TextLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        facts = facts_of(record)
        line = f"{facts['time']} {facts['level']} {facts['part']}  {facts['event']}"
        line += f"  trace_id={facts['trace_id']}" if "trace_id" in facts else ""
        return f"{line}  {facts['error']}" if "error" in facts else line


def json_line(facts: dict[str, Any]) -> str:
    """One line of JSON; characters that JSON leaves alone and terminals do not are escaped too."""
    return escaped(json.dumps(facts, ensure_ascii=False, default=str))


def escaped(text: str) -> str:
    """JSON in one line that says the same without a control character."""
    return _CONTROL.sub(lambda found: f"\\u{ord(found.group()):04x}", text)


class _Handler(logging.StreamHandler[TextIO]):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's own name
        """A reader who went away must not stop a service."""


def set_up(form: str, level: str, out: TextIO | None = None) -> None:
    """All log lines of this process, for commands that own it."""
    handler = _Handler(out or sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    root = logging.getLogger()
    root.handlers[:] = [*(one for one in root.handlers if not isinstance(one, _Handler)), handler]
    root.setLevel(logging.WARNING)  # what libraries tell besides is theirs
    logging.getLogger(PACKAGE).setLevel(level.upper())
