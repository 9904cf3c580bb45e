"""JetStream's own error codes, each translated into our tree in this one place.

An answer of the JetStream API that fails carries {"code": HTTP-like, "err_code": number, "description": text}. The
numbers in the table need another branch than their HTTP-like code says, or a hint; all others go by that code, so a
code that a newer server invents still lands on the right branch.
"""

from __future__ import annotations

from typing import Any

from oncewire._ground.errors import (
    Conflict,
    Corrupt,
    NotFound,
    OncewireError,
    Overloaded,
    PermissionDenied,
    Refused,
    TimedOut,
    TooLarge,
    Unavailable,
)

WRONG_LAST_SEQUENCE = 10071
WRONG_LAST_NOW = 10164
STREAM_NOT_FOUND = 10059
CONSUMER_NOT_FOUND = 10014
STREAM_NAME_IN_USE = 10058
CONSUMER_EXISTS = 10148
NO_MESSAGE_FOUND = 10037
MESSAGE_DELETE_FAILED = 10057
BATCH_DUPLICATE = 10201
BATCH_TOO_MANY = 10210

_BY_NUMBER: dict[int, type[OncewireError]] = {
    10002: Overloaded,  # resource limits exceeded for account
    10005: Unavailable,  # no suitable peers
    10006: Refused,  # JetStream not in clustered mode
    10010: Refused,  # clustering support required
    10012: Refused,  # what was asked of a consumer cannot be: the server says 500 for it
    10013: Conflict,  # consumer name already in use
    10023: Overloaded,  # insufficient resources
    10026: Overloaded,  # maximum consumers limit reached
    10027: Overloaded,  # maximum number of streams reached
    10028: Overloaded,  # insufficient memory resources
    10035: Refused,  # account not found
    10036: Refused,  # not supported in clustered mode
    10039: Refused,  # JetStream not enabled for account
    10043: NotFound,  # sequence not found
    10047: Overloaded,  # insufficient storage resources
    10052: Refused,  # stream configuration is invalid
    10053: Overloaded,  # stream limits exceeded
    10054: TooLarge,  # message size exceeds maximum allowed
    10057: NotFound,  # message could not be deleted: it is not there (or: see class_of)
    10058: Conflict,  # stream name in use with another configuration
    10060: Conflict,  # expected stream does not match
    10063: Conflict,  # expected stream sequence does not match
    10065: Conflict,  # subjects overlap with an existing stream
    10069: Refused,  # stream update not allowed
    10070: Conflict,  # wrong last message id
    10071: Conflict,  # wrong last sequence
    10074: Refused,  # replicas > 1 not supported in non-clustered mode
    10076: Refused,  # JetStream not enabled
    10077: Overloaded,  # maximum messages, bytes or messages per subject reached
    10097: TooLarge,  # header size exceeds maximum
    10099: Conflict,  # a second unfiltered consumer on a work queue
    10100: Conflict,  # filtered consumer not unique on a work queue
    10105: Conflict,  # consumer already exists and is active
    10106: Conflict,  # consumer exists with another configuration
    10110: Refused,  # purge not permitted
    10111: Refused,  # rollup not permitted
    10117: TooLarge,  # too many subjects for one answer
    10124: Unavailable,  # stream move in progress
    10130: Conflict,  # restore: stream name in use
    10148: Conflict,  # consumer already exists with another configuration
    10149: NotFound,  # consumer does not exist
    10158: Unavailable,  # the same message id is being stored just now
    10164: Conflict,  # wrong last sequence, within a batch or against what is being stored just now
    10172: Corrupt,  # message counter is broken
    10176: Unavailable,  # the server lost part of an atomic batch: nothing of it is stored
    10180: Unavailable,  # this replica is not as far yet
    10199: TooLarge,  # atomic batch is too large
    10201: Conflict,  # a message id of the batch is a duplicate
    10202: Unavailable,  # cluster member change in progress
    10208: Unavailable,  # the server forgot a fast batch: begin a new one
    10225: Conflict,  # the consumer's stream is not the one expected
    10226: Unavailable,  # stream reconfiguration in progress
}
_BY_CODE: dict[int, type[OncewireError]] = {
    400: Refused,
    403: PermissionDenied,
    404: NotFound,
    408: TimedOut,
    409: Conflict,
    429: Overloaded,
    500: Unavailable,
    503: Unavailable,
}
_HINTS = {
    10039: "JetStream is off for this account: switch it on at the server.",
    10076: "Start the server with JetStream (`nats-server -js`, or `oncewire up`).",
    10059: "Declare it and run `oncewire topology apply`.",
    10014: "Declare it and run `oncewire topology apply`.",
    10077: "The stream is full: consume, trim, or raise its limits.",
    10047: "The server's disk budget is used up: free space or raise max_file.",
    10074: "Use --env dev for a single server.",
}
RETRY_NUMBERS = frozenset({10004, 10007, 10008, 10009, 10041, 10158, 10163, 10167})
"""A cluster that is electing, moving or busy: nothing was stored, and the same may go through in a moment."""


def class_of(code: int, number: int, text: str = "") -> type[OncewireError]:
    """The branch of the tree for JetStream's HTTP-like code and its own number."""
    if number == MESSAGE_DELETE_FAILED and "not permitted" in text:  # one number for two reasons
        return Refused
    found = _BY_NUMBER.get(number) or _BY_CODE.get(code)
    if found is None:
        found = Refused if 400 <= code < 500 else Unavailable if 500 <= code < 600 else Corrupt
    return found


def from_api(problem: dict[str, Any], what: str) -> OncewireError:
    """The error of a JetStream answer; `server_code` keeps JetStream's own number."""
    code, number = _int(problem.get("code")), _int(problem.get("err_code"))
    text = str(problem.get("description") or "no description")
    error = class_of(code, number, text)(f"{what}: {text}", hint=_HINTS.get(number, ""))
    error.server_code = number
    return error


def _int(value: object) -> int:
    return value if isinstance(value, int) else 0
