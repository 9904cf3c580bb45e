"""Packages of the extras: imported when they are first needed, and a clear word when they are not installed."""

from __future__ import annotations

from typing import Any

from oncewire._ground.errors import Refused


def asyncpg() -> Any:
    """The module asyncpg. Importing it takes a tenth of a second, which a command without PostgreSQL need not spend."""
    try:
        import asyncpg
    except ImportError:
        raise Refused(
            "the PostgreSQL driver asyncpg is not installed", hint="Install it: pip install 'oncewire[postgres]'."
        ) from None
    return asyncpg
