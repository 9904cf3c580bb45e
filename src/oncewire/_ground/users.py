"""The users of NATS: which there are beside the services, where each hears its answers, where its key lies."""

from __future__ import annotations

from pathlib import Path

OPERATOR = "operator"
"""Applies the topology and does what people decide. No service may be called so."""
DEVELOPER = "developer"
"""Programs that bring no key to an embedded server. No service may be called so."""

MONITOR = "monitor"
"""Asks the servers about themselves, in the system account. No service may be called so."""


def inbox_prefix(user: str) -> str:
    return f"_INBOX_{user}"


def key_path(folder: Path, user: str) -> Path:
    return folder / f"{user}.nk"


def identity(folder: Path, user: str) -> dict[str, str]:
    """The settings with which a process is this user."""
    return {"nats_nkey": str(key_path(folder, user)), "nats_inbox_prefix": inbox_prefix(user)}
