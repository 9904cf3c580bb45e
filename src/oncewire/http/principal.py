"""Who asks. Every handler gets a Principal, also where authentication is off: then it is `ANYONE`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Principal:
    """The tenant whose things are meant, and what may be done with them."""

    tenant: str
    actions: frozenset[str]

    def may(self, action: str) -> bool:
        return action in self.actions or "*" in self.actions


ANYONE = Principal("", frozenset({"*"}))
"""Without authentication, which only loopback listeners may do: one tenant, everything allowed."""
