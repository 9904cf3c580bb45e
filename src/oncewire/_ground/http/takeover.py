"""Who may have a socket that began in HTTP: the front goes on to count it, to stop it and to look at its deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from oncewire._ground.http.principal import Principal


class Heir(asyncio.Protocol):
    """The protocol of a socket that a handler took over. `server.closed(self)` when it is lost is its duty."""

    __slots__ = ("deadline", "principal")

    principal: Principal
    """Who opened it."""
    deadline: float
    """When `overdue` is called, in the front's time; infinity for never."""

    def overdue(self) -> None:
        """The deadline has passed."""
        raise NotImplementedError

    def revoke(self) -> None:
        """The credential that opened it is no longer good: say so, send nothing more, and close."""
        raise NotImplementedError

    def stop(self) -> None:
        """The server stops: say so to the client, and close."""
        raise NotImplementedError

    def abort(self) -> None:
        """Close without a word."""
        raise NotImplementedError


MakeHeir = Callable[[asyncio.Transport], Heir]
