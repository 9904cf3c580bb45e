"""What each command may touch: NATS and as which of its users, PostgreSQL, the file of API keys.

Commands take their NATS user from here (`face.load_here`); a test holds the table against the commands that there are
and against docs/security.md, so that a new one cannot be forgotten.
"""

from __future__ import annotations

import click
from msgspec import Struct

from oncewire._ground.users import DEVELOPER, OPERATOR


class Right(Struct, frozen=True):
    """One command's. Where the settings name a user, a key or a token of NATS, that one counts."""

    nats: str = ""
    """The user as whom it speaks to the NATS of the `up` beside it; '' when it does not speak to NATS."""
    postgres: bool = False
    keys: str = ""
    """What it does with the file of API keys: `reads`, `writes` or nothing."""


RIGHTS = {
    "agent adopt": Right(OPERATOR),
    "agent apply": Right(OPERATOR),
    "agent hash": Right(),
    "agent replay": Right(),
    "agent run": Right(DEVELOPER),
    "agent status": Right(OPERATOR),
    "broker run": Right("broker", keys="reads"),
    "broker wal inspect": Right(),
    "broker wal verify": Right(),
    "config": Right(),
    "console run": Right(OPERATOR, keys="reads"),
    "contracts check": Right(),
    "contracts export": Right(),
    "demo": Right(OPERATOR, postgres=True),
    "dlq drop": Right(OPERATOR),
    "dlq inject": Right(OPERATOR),
    "dlq losses": Right(OPERATOR),
    "dlq ls": Right(OPERATOR),
    "dlq replay": Right(OPERATOR),
    "dlq run": Right("dlq"),
    "dlq show": Right(OPERATOR),
    "doctor": Right(OPERATOR, postgres=True),
    "gateway run": Right("gateway", postgres=True, keys="reads"),
    "keys create": Right(keys="writes"),
    "keys ls": Right(keys="reads"),
    "keys revoke": Right(keys="writes"),
    "migrate": Right(postgres=True),
    "outbox purge": Right(postgres=True),
    "outbox retry": Right(postgres=True),
    "outbox status": Right(postgres=True),
    "outbox void": Right(postgres=True),
    "pipeline audit": Right(),
    "pipeline backfill": Right("pipeline"),
    "pipeline report": Right(),
    "pipeline run": Right("pipeline"),
    "pipeline status": Right("pipeline"),
    "publish": Right(DEVELOPER),
    "relay run": Right("relay", postgres=True),
    "topology apply": Right(OPERATOR),
    "topology check": Right(OPERATOR),
    "topology export": Right(),
    "topology lint": Right(),
    "topology plan": Right(OPERATOR),
    "up": Right(OPERATOR, postgres=True, keys="reads"),
}


def right_of(context: click.Context | None) -> Right:
    """The right of the command that is running, however its group was reached."""
    words: list[str] = []
    while context is not None and context.parent is not None:
        words.insert(0, context.command.name or "")
        context = context.parent
    if context is not None and context.command.name != "main":
        words.insert(0, context.command.name or "")
    return RIGHTS[" ".join(words)]
