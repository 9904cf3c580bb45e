"""Short-lived tickets for browsers: a page cannot set a header on a WebSocket or an EventSource, and an address with a
key or a token in it ends up in logs and histories. A ticket is bought with a real credential, speaks for the same
principal with at most the same grants, and is worth nothing a minute later: it opens, and it buys no other ticket. What
it has opened stays open as long as the credential that bought it is good.

Tickets are signed with a secret that all nodes share (`auth.ticket_secret`); without one, each process makes its own,
and a ticket is good at the node that sold it.
"""

from __future__ import annotations

import secrets
from typing import Final

import jwt

from oncewire._ground.errors import AuthenticationFailed, InvalidSetting, PermissionDenied
from oncewire._ground.http.principal import Principal
from oncewire._ground.trust.grants import check_grants, covers, is_bound_to_groups

LIVES_S: Final = 60
SECRET_CHARS_MIN: Final = 32
FOR_EVER: Final = float("inf")
_AUDIENCE: Final = "oncewire-ticket"
_ALGORITHM: Final = "HS256"


class Tickets:
    """Sells and takes tickets."""

    def __init__(self, secret: str = "") -> None:
        if secret and len(secret) < SECRET_CHARS_MIN:
            raise InvalidSetting(f"auth.ticket_secret needs at least {SECRET_CHARS_MIN} characters")
        self._secret = secret or secrets.token_urlsafe(32)

    def sell(self, principal: Principal, now_s: float, grants: tuple[str, ...] = ()) -> str:
        """A ticket for the principal, narrowed to these grants when any are given."""
        if principal.is_ticket:
            raise PermissionDenied("a ticket buys no ticket: use the credential that bought it")
        wanted = check_grants(grants) if grants else principal.actions
        if is_bound_to_groups(principal.actions) and not is_bound_to_groups(wanted):
            wanted |= {one for one in principal.actions if one.startswith("group:")}
        beyond = sorted(grant for grant in wanted if not covers(principal.actions, grant))
        if beyond:
            raise PermissionDenied(f"the credential itself does not allow {beyond[0]}")
        claims = {"aud": _AUDIENCE, "sub": principal.name, "exp": int(now_s) + LIVES_S}
        claims |= {"tenant": principal.tenant, "grants": sorted(wanted), "by": principal.voucher}
        if principal.until_s != FOR_EVER:
            claims["until"] = principal.until_s
        return jwt.encode(claims, self._secret, _ALGORITHM)

    def principal(self, ticket: str, now_s: float) -> Principal:
        try:
            claims = jwt.decode(
                ticket,
                self._secret,
                algorithms=[_ALGORITHM],
                audience=_AUDIENCE,
                options={"require": ["exp", "aud", "sub", "by"], "verify_exp": False},
            )
        except jwt.PyJWTError:
            raise AuthenticationFailed("the ticket is not accepted") from None
        if claims["exp"] <= now_s:
            raise AuthenticationFailed("the ticket has expired: ask for another")
        return Principal(
            claims["tenant"],
            frozenset(claims["grants"]),
            name=claims["sub"],
            voucher=claims["by"],
            until_s=claims.get("until", FOR_EVER),
            is_ticket=True,
        )
