"""Every error that Oncewire raises, as one tree.

    OncewireError
    ├── Refused                  the caller's fault: the same call fails again, never retry
    │   ├── ContractViolation    a message, subject or value breaks its contract
    │   │   └── UnsupportedVersion   a schema version that this process does not know
    │   ├── InvalidSetting       a flag, variable or file key that cannot be used
    │   ├── TooLarge             over a limit that has a name
    │   ├── Conflict             what was expected of the current state does not hold
    │   ├── NotFound             the stream, consumer, key or message is not there
    │   ├── PermissionDenied     the credential does not allow it
    │   └── AuthenticationFailed the credential is missing, wrong or expired
    ├── Unavailable              not now: try again, after `retry_after_s` when it is given
    │   ├── NotConnected         the connection is down, draining or closed
    │   ├── TimedOut             no answer within the time that the caller gave
    │   ├── NoResponders         nobody listens on that subject
    │   ├── Overloaded           a limit on what may wait is reached
    │   └── OutcomeUnknown       sent, not confirmed: it may have happened
    └── Corrupt                  stop and tell a person
        └── ProtocolViolation    the other side sent what its protocol does not allow

Ask what the caller should do, then pick the branch. The text of an error says what happened and to what; `hint` says
what to do next. Adapters translate their driver's exceptions into this tree in one place each.
"""

from __future__ import annotations

from typing import ClassVar


class OncewireError(Exception):
    """The root. `code` is stable and meant for machines, `hint` is one sentence for a person."""

    code: ClassVar[str] = "error"
    is_retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.server_code = 0
        """JetStream's own error number, 0 when the error is not the server's."""

    def to_dict(self) -> dict[str, object]:
        """The error as `--json` and the HTTP edges show it."""
        shown: dict[str, object] = {"code": self.code, "message": self.message, "retryable": self.is_retryable}
        if self.hint:
            shown["hint"] = self.hint
        return shown


class Refused(OncewireError):
    """The caller's fault: the same call fails again."""

    code = "refused"


class ContractViolation(Refused):
    """A message, subject or value breaks its contract. `field` is the path to what is wrong, '' for the whole."""

    code = "contract_violation"

    def __init__(self, message: str, *, field: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.field = field

    def to_dict(self) -> dict[str, object]:
        shown = super().to_dict()
        if self.field:
            shown["field"] = self.field
        return shown


class UnsupportedVersion(ContractViolation):
    """A schema version that this process does not know: consumers terminate the message."""

    code = "unsupported_version"

    def __init__(self, message: str, *, version: str, field: str = "", hint: str = "") -> None:
        super().__init__(message, field=field, hint=hint)
        self.version = version


class InvalidSetting(Refused):
    """A flag, variable or file key that cannot be used."""

    code = "invalid_setting"


class TooLarge(Refused):
    """Over a limit that has a name."""

    code = "too_large"


class Conflict(Refused):
    """What was expected of the current state does not hold."""

    code = "conflict"


class NotFound(Refused):
    """The stream, consumer, key or message is not there."""

    code = "not_found"


class PermissionDenied(Refused):
    """The credential does not allow it."""

    code = "permission_denied"


class AuthenticationFailed(Refused):
    """The credential is missing, wrong or expired."""

    code = "authentication_failed"


class Unavailable(OncewireError):
    """Not now: try again, after `retry_after_s` when it is given."""

    code = "unavailable"
    is_retryable = True

    def __init__(self, message: str, *, hint: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class NotConnected(Unavailable):
    """The connection is down, draining or closed."""

    code = "not_connected"


class TimedOut(Unavailable):
    """No answer within the time that the caller gave."""

    code = "timed_out"


class NoResponders(Unavailable):
    """Nobody listens on that subject."""

    code = "no_responders"


class Overloaded(Unavailable):
    """A limit on what may wait is reached."""

    code = "overloaded"


class OutcomeUnknown(Unavailable):
    """Sent, not confirmed: it may have happened. Look before you repeat it without an id."""

    code = "outcome_unknown"


class Corrupt(OncewireError):
    """Stop and tell a person: going on would make it worse."""

    code = "corrupt"


class ProtocolViolation(Corrupt):
    """The other side sent what its protocol does not allow."""

    code = "protocol_violation"
