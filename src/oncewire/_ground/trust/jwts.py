"""JSON Web Tokens of an identity provider: which keys sign them, what must be in them, who they speak for.

The algorithm is taken from an allow-list, never from the token alone; `exp`, `iss` and `aud` are required. Public keys
come as a JWKS, from a file or an address. An address is asked at the start, then each `refresh_s`, and again, at most
each `AGAIN_S`, when a token names a key that is not known yet; in between the last good answer holds, so that an
identity provider that is away locks nobody out who has a valid token.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import logging
import math
import urllib.request
from pathlib import Path
from typing import Any, Final

import jwt
import msgspec

from oncewire._ground.errors import AuthenticationFailed, InvalidSetting, PermissionDenied, Refused, Unavailable
from oncewire._ground.http.principal import Principal
from oncewire._ground.settings import mask_url
from oncewire._ground.trust.grants import ACTIONS, GRANTS_MAX
from oncewire._ground.trust.keys import TENANT

ALGORITHMS: Final = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""Signatures with a public key only: a shared secret would let every server that checks tokens make them."""
TOKEN_CHARS_MAX: Final = 8_192
JWKS_BYTES_MAX: Final = 1 << 20
ASK_S: Final = 5.0
AGAIN_S: Final = 30.0
LEEWAY_S: Final = 30

log = logging.getLogger("oncewire.trust")


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """What a token must say. `tenant_claim` holds the tenant; `scope` (words) or `grants` (a list) what it allows."""

    issuer: str
    audience: str
    jwks: str
    algorithms: tuple[str, ...] = ("RS256", "ES256", "EdDSA")
    tenant_claim: str = "tenant"
    refresh_s: float = 300.0

    def check(self) -> None:
        for name in ("issuer", "audience", "jwks"):
            if not getattr(self, name):
                raise InvalidSetting(f"tokens cannot be checked without auth.{name}", hint="Set all three, or none.")
        unknown = sorted(set(self.algorithms) - set(ALGORITHMS))
        if unknown or not self.algorithms:
            raise InvalidSetting(
                f"tokens signed with {', '.join(unknown) or 'nothing'} are not accepted",
                hint=f"Possible are: {', '.join(ALGORITHMS)}.",
            )
        if "://" in self.jwks and not self.jwks.startswith(("https://", "http://127.0.0.1:", "http://localhost:")):
            raise InvalidSetting("auth.jwks must be an https address or a file: its answer decides who gets in")


class Tokens:
    """Checks tokens. `async with` it where the keys come from an address."""

    def __init__(self, rules: Rules) -> None:
        rules.check()
        self._rules = rules
        self._keys: dict[str, jwt.PyJWK] = {}
        self._nameless: list[jwt.PyJWK] = []
        self._ask = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Tokens:
        await self._load()
        self._keeper = asyncio.create_task(self._keep())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)

    def principal(self, token: str, now_s: float) -> Principal:
        """Who it speaks for. AuthenticationFailed with a reason that gives nothing away."""
        claims, signer = self._verified(token, now_s)
        tenant = claims.get(self._rules.tenant_claim)
        if not isinstance(tenant, str) or not TENANT.fullmatch(tenant):
            raise PermissionDenied(f"the token names no tenant (claim {self._rules.tenant_claim})")
        return Principal(
            tenant,
            _grants(claims),
            name=f"jwt:{claims['sub']}",
            voucher=f"signer:{signer}",
            until_s=claims["exp"] + LEEWAY_S,
        )

    def vouches_for(self, principal: Principal) -> bool:
        """Whether the key that signed its token is still among the provider's."""
        signer = principal.voucher.partition(":")[2]
        return signer in self._keys or (not signer and bool(self._nameless))

    def _verified(self, token: str, now_s: float) -> tuple[dict[str, Any], str]:
        rules = self._rules
        if len(token) > TOKEN_CHARS_MAX:
            raise AuthenticationFailed("the token is too long")
        try:
            head = jwt.get_unverified_header(token)
            claims: dict[str, Any] = jwt.decode(
                token,
                self._key(head.get("kid")),
                algorithms=list(rules.algorithms),
                audience=rules.audience,
                issuer=rules.issuer,
                # Times are compared below, against the clock that we are given.
                options={"require": ["exp", "iss", "aud", "sub"], "verify_exp": False, "verify_nbf": False,
                         "verify_iat": False},
            )  # fmt: skip
        except jwt.InvalidTokenError as error:
            raise AuthenticationFailed(f"the token is not accepted: {error}") from None
        except jwt.PyJWTError:
            raise AuthenticationFailed("the token is not accepted") from None
        if not _is_time(claims["exp"]) or claims["exp"] + LEEWAY_S <= now_s:
            raise AuthenticationFailed("the token has expired")
        if "nbf" in claims and (not _is_time(claims["nbf"]) or claims["nbf"] - LEEWAY_S > now_s):
            raise AuthenticationFailed("the token is not valid yet")
        return claims, head.get("kid") or ""

    def _key(self, kid: object) -> jwt.PyJWK:
        if kid is None and len(self._nameless) == 1:
            return self._nameless[0]
        key = self._keys.get(kid) if isinstance(kid, str) else None
        if key is None:
            self._ask.set()
            raise AuthenticationFailed("the token is signed with an unknown key")
        return key

    # ---- the keys

    async def _keep(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ask.wait(), self._rules.refresh_s)
            try:
                await self._load()
            except (Refused, Unavailable) as error:
                log.warning("the last known keys stay: %s", error)
            await asyncio.sleep(AGAIN_S)
            self._ask.clear()

    async def _load(self) -> None:
        body = await asyncio.to_thread(_fetch, self._rules.jwks)
        try:
            found = jwt.PyJWKSet.from_json(body.decode()).keys
        except (jwt.PyJWTError, ValueError, AttributeError, TypeError) as error:
            raise InvalidSetting(f"{mask_url(self._rules.jwks)} holds no JWKS: {error}") from None
        self._keys = {key.key_id: key for key in found if key.key_id}
        self._nameless = [*found] if len(found) == 1 else []


class _NoDetour(urllib.request.HTTPRedirectHandler):
    """An answer that sends us elsewhere, perhaps without TLS, is none."""

    def redirect_request(self, *_: object) -> None:
        return None


def _fetch(where: str) -> bytes:
    try:
        if "://" not in where:
            return Path(where).read_bytes()[:JWKS_BYTES_MAX]
        request = urllib.request.Request(where, headers={"Accept": "application/json"})  # noqa: S310 - checked above
        with urllib.request.build_opener(_NoDetour).open(request, timeout=ASK_S) as answer:
            body: bytes = answer.read(JWKS_BYTES_MAX + 1)
    except (OSError, http.client.HTTPException) as error:
        raise Unavailable(f"the keys of the tokens cannot be read from {mask_url(where)}: {error}") from None
    if len(body) > JWKS_BYTES_MAX:
        raise InvalidSetting(f"{mask_url(where)} answers with more than a JWKS")
    return body


def _grants(claims: dict[str, Any]) -> frozenset[str]:
    """Words that mean nothing to us are left out: an identity provider has scopes for others too."""
    listed = claims.get("grants")
    words = listed if isinstance(listed, list) else str(claims.get("scope", "")).split()
    known = [word for word in words if isinstance(word, str) and (word == "*" or word.partition(":")[0] in ACTIONS)]
    return frozenset(known[:GRANTS_MAX])


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
