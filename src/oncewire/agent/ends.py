"""How a handler ends, and what its input fails with when it did not return. Pure.

    returned                                  done, with its effects
    raised Retry                              again, after its delay
    raised Terminate, broke a contract        given up, handed to the dead-letter service
    raised any other Exception                again after a while; at its last delivery dead, with this as its cause
    raised what is no Exception               the same, under its own name ("SystemExit: 5")
    took longer than its time                 the same ("TimedOut: …")
    did not stop when it was cancelled        the same, and its task is abandoned

Whatever a handler raises is about its own input alone. An error that is no Exception (`sys.exit()`, a panic of an
extension module, a CancelledError from a loop that the handler ran) would otherwise end the task or the thread around
the handler, and with it the agent.
"""

from __future__ import annotations

import dis
import traceback
from types import TracebackType
from typing import Final

from oncewire._ground.ledger.rules import short_error

TRACEBACK_CHARS_MAX: Final = 8_000


class BrokenOff(Exception):
    """What a handler raised that is no Exception: the cause, as an error that fails one input."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(short_error(cause))
        self.__cause__ = cause


def failure_of(error: BaseException) -> Exception:
    """What an input fails with whose handler raised this."""
    return error if isinstance(error, Exception) else BrokenOff(error)


def cause_of(failure: Exception) -> BaseException:
    """What the handler itself raised."""
    return failure.__cause__ if isinstance(failure, BrokenOff) and failure.__cause__ else failure


def reason_of(failure: Exception) -> str:
    """The failure as ledgers, letters and logs name it."""
    return short_error(cause_of(failure))


def traceback_of(failure: Exception) -> str:
    """Where it happened, for its author: in text that every log can hold, whatever the errors say."""
    lines = "".join(traceback.format_exception(cause_of(failure)))
    return lines.replace("\0", "\\0").encode("utf-8", "backslashreplace").decode()[-TRACEBACK_CHARS_MAX:]


def is_signal(error: BaseException) -> bool:
    """Whether a KeyboardInterrupt came from Ctrl-C: nobody raised it by a statement. Then it is the process's."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return isinstance(error, KeyboardInterrupt) and not (last is not None and _is_raised_there(last))


def _is_raised_there(traceback: TracebackType) -> bool:
    code = traceback.tb_frame.f_code.co_code
    return dis.opname[code[traceback.tb_lasti]] == "RAISE_VARARGS" and not _is_asyncio(traceback)


def _is_asyncio(traceback: TracebackType) -> bool:
    """Its own handler for Ctrl-C raises by a statement."""
    return traceback.tb_frame.f_globals.get("__name__") == "asyncio.runners"
