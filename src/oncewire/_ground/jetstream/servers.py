"""Which servers there are and which comes next. Pure but for the shuffle, whose order is handed in."""

from __future__ import annotations

import random
from collections.abc import Sequence
from urllib.parse import urlsplit, urlunsplit

from oncewire._ground.jetstream.options import address_of, is_address

SERVERS_MAX = 1_000
"""More addresses than this in one INFO are not believed."""


class Servers:
    """The given servers and those that the cluster told of. Given ones are never forgotten."""

    def __init__(self, given: Sequence[str], chance: random.Random) -> None:
        self._given = frozenset(given)
        self._chance = chance
        self._order = list(given)
        chance.shuffle(self._order)

    def in_order(self) -> list[str]:
        """The servers to try, best first."""
        return list(self._order)

    def has_other_than(self, current: str) -> bool:
        here = address_of(current)
        return any(address_of(server) != here for server in self._order)

    def put_last(self, current: str) -> None:
        """The server that was just left is tried when no other answers."""
        here = address_of(current)
        self._order.sort(key=lambda server: address_of(server) == here)

    def learn(self, current: str, told: Sequence[str], *, is_tls: bool) -> None:
        """The cluster's members as INFO lists them: new ones are added, those that left are forgotten.

        A member gets the credentials that stood in the address of the server that told of it.
        """
        if not told:
            return
        parts = urlsplit(current)
        scheme = "tls" if is_tls or parts.scheme == "tls" else "nats"
        user, at, _ = parts.netloc.rpartition("@")
        usable = dict.fromkeys(one for one in told[:SERVERS_MAX] if is_address(one))
        members = [urlunsplit((scheme, user + at + one, "", "", "")) for one in usable]
        known = {address_of(server) for server in self._order}
        keep = {address_of(server) for server in (*members, current)}
        fresh = [server for server in members if address_of(server) not in known]
        self._chance.shuffle(fresh)
        kept = [server for server in self._order if server in self._given or address_of(server) in keep]
        self._order = kept + fresh
