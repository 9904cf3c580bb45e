"""The gate that the HTTP front asks about every request: which credential came, and who it speaks for.

    Authorization: Bearer <API key or token>
    X-Api-Key: <API key>
    ?ticket=<ticket>                              WebSocket and SSE from browsers

One credential per request: two that disagree would leave it to chance who asks. No credential is nobody: nobody reaches
only what is open to all (health, version), and gets 401 for the rest.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from oncewire._ground.errors import AuthenticationFailed, ContractViolation, Corrupt, Unavailable
from oncewire._ground.http.principal import NOBODY, Principal
from oncewire._ground.trust.jwts import Rules, Tokens
from oncewire._ground.trust.keys import KeyFile
from oncewire._ground.trust.tickets import LIVES_S, Tickets

if TYPE_CHECKING:
    from oncewire._ground.http.request import Request
    from oncewire._ground.settings import Settings

KEY_PREFIX = "ow_"

log = logging.getLogger("oncewire.trust")


class Gate:
    """Callable: `http.Server(…, authenticate=gate)`."""

    def __init__(
        self,
        keys: KeyFile | None,
        tokens: Tokens | None,
        tickets: Tickets,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.keys = keys
        self.tokens = tokens
        self.tickets = tickets
        self.clock = clock

    def __call__(self, request: Request) -> Principal:
        sent = _credentials(request)
        if not sent:
            return NOBODY
        if len(sent) > 1:
            raise AuthenticationFailed("send one credential, not several")
        return self.principal(*sent[0])

    def principal(self, kind: str, text: str) -> Principal:
        """Whom a credential speaks for: a `key`, a `ticket`, or a `bearer`, which may be a key or a token."""
        now_s = self.clock()
        if kind == "ticket":
            return self._ticketed(text, now_s)
        if self.keys is not None and (kind == "key" or text.startswith(KEY_PREFIX)):
            return self.keys.principal(text, now_s)
        if self.tokens is not None and kind == "bearer":
            return self.tokens.principal(text, now_s)
        raise AuthenticationFailed("this server does not take that kind of credential")

    def _ticketed(self, text: str, now_s: float) -> Principal:
        principal = self.tickets.principal(text, now_s)
        if not self._is_good(principal, now_s):
            raise AuthenticationFailed("the credential that bought the ticket is no longer good")
        return principal

    def vouches_for(self, principal: Principal) -> bool:
        """Whether who was let in before would be let in now, with the same rights: asked each second for whoever holds
        a connection open. A file of keys that cannot be read just now says nothing about those who are in."""
        try:
            return self._is_good(principal, self.clock())
        except (Corrupt, Unavailable) as error:
            log.error("who holds a connection open keeps it: %s", error)
            return True

    def _is_good(self, principal: Principal, now_s: float) -> bool:
        """The same for who is not in yet: a file of keys that cannot be read lets nobody in."""
        if principal.until_s <= now_s:
            return False
        kind = principal.voucher.partition(":")[0]
        if kind == "key":
            return self.keys is not None and self.keys.vouches_for(principal, now_s)
        if kind == "signer":
            return self.tokens is not None and self.tokens.vouches_for(principal)
        return True

    def sell(self, request: Request) -> None:
        """POST: a ticket for who asks; the body may narrow it: {"grants": ["join:room-1"]}."""
        wanted = _read_wanted(request.body)
        ticket = self.tickets.sell(request.principal, self.clock(), wanted.grants)
        body = msgspec.json.encode({"ticket": ticket, "expires_in_s": LIVES_S})
        request.respond(201, body, extra=b"Cache-Control: no-store\r\n")


class _Wanted(msgspec.Struct, forbid_unknown_fields=True):
    grants: tuple[str, ...] = ()


def _read_wanted(body: bytes) -> _Wanted:
    try:
        return msgspec.json.decode(body, type=_Wanted) if body else _Wanted()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ContractViolation(f'the body is not {{"grants": [...]}}: {error}') from None


def _credentials(request: Request) -> list[tuple[str, str]]:
    found = []
    authorization = request.header(b"authorization")
    if authorization:
        scheme, _, text = authorization.partition(" ")
        if scheme.lower() != "bearer" or not text.strip():
            raise AuthenticationFailed("the Authorization header must be: Bearer, then an API key or a token")
        found.append(("bearer", text.strip()))
    if key := request.header(b"x-api-key"):
        found.append(("key", key))
    if b"ticket=" in request.query_string and (ticket := request.query.get("ticket")):
        sent = [part for part in request.query_string.split(b"&") if part.startswith(b"ticket=")]
        found += [("ticket", ticket)] * len(sent)
    return found


@contextlib.asynccontextmanager
async def open_gate(settings: Settings) -> AsyncIterator[Gate | None]:
    """The gate that the settings ask for; None when they ask for none, which only a listener on loopback may do."""
    keys = KeyFile(Path(settings.auth_keys)) if settings.auth_keys else None
    if keys is not None:
        keys.keys()  # a damaged file is said at the start, not at the first request
    asked = [settings.auth_issuer, settings.auth_audience, settings.auth_jwks]
    if keys is None and not any(asked):
        yield None
        return
    tickets = Tickets(settings.auth_ticket_secret)
    if not any(asked):
        yield Gate(keys, None, tickets)
        return
    rules = Rules(
        issuer=settings.auth_issuer,
        audience=settings.auth_audience,
        jwks=settings.auth_jwks,
        algorithms=tuple(one.strip() for one in settings.auth_algorithms.split(",") if one.strip()),
        tenant_claim=settings.auth_tenant_claim,
    )
    async with Tokens(rules) as tokens:
        yield Gate(keys, tokens, tickets)
