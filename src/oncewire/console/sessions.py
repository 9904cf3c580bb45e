"""Who has logged in. A browser sends its key once and gets a cookie that scripts cannot read; the key itself is not
kept. Whether it is still good is asked at every request, and each second for pages that are open. Nothing is written.

The console shows the things of all tenants, so that only one tenant's credentials open it: the operators' own.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from typing import Final

from msgspec import Struct

from oncewire._ground.errors import PermissionDenied
from oncewire._ground.http import NOBODY, Principal, Request
from oncewire._ground.trust import Gate

LIVES_S: Final = 8 * 3_600
SESSIONS_MAX: Final = 1_000
COOKIE: Final = "ow_console"


class Session(Struct, frozen=True):
    principal: Principal
    ends_s: float


class Sessions:
    """Callable: `http.Server(…, authenticate=sessions)`. `tenant` is the operators'."""

    def __init__(self, gate: Gate, tenant: str, *, is_secure: bool) -> None:
        self._gate = gate
        self._tenant = tenant
        self._is_secure = is_secure
        self._cookie = f"__Host-{COOKIE}" if is_secure else COOKIE
        self._sessions: dict[bytes, Session] = {}

    def __call__(self, request: Request) -> Principal:
        if b"authorization" in request.headers or b"x-api-key" in request.headers:
            return self._welcome(self._gate(request))
        token = self._sent(request)
        return self.principal(token) if token else NOBODY

    def principal(self, token: str) -> Principal:
        """Who holds this cookie; nobody when its session or its credential has ended."""
        session = self._sessions.get(_digest(token))
        if session is None or session.ends_s <= time.monotonic():
            return NOBODY
        if not self._gate.vouches_for(session.principal):
            del self._sessions[_digest(token)]
            return NOBODY
        return session.principal

    def _welcome(self, principal: Principal) -> Principal:
        if principal is NOBODY or (self._tenant and principal.tenant == self._tenant):
            return principal
        hint = (
            f"console.tenant is {self._tenant}"
            if self._tenant
            else "console.tenant names whose keys may: it is not set"
        )
        raise PermissionDenied(f"the console shows the things of all tenants, and {hint}")

    # ---- in and out

    def login(self, credential: str) -> tuple[Principal, bytes]:
        """A session for a key or a token, and the header line that hands it out."""
        principal = self._welcome(self._gate.principal("bearer", credential))
        principal.require("read")
        now_s = time.monotonic()
        for token in [one for one, session in self._sessions.items() if session.ends_s <= now_s]:
            del self._sessions[token]
        if len(self._sessions) >= SESSIONS_MAX:
            del self._sessions[next(iter(self._sessions))]
        made = secrets.token_urlsafe(32)
        self._sessions[_digest(made)] = Session(principal, now_s + LIVES_S)
        return principal, self._line(made, LIVES_S)

    def logout(self, request: Request) -> bytes:
        self._sessions.pop(_digest(self._sent(request)), None)
        return self._line("", 0)

    def _line(self, value: str, age_s: int) -> bytes:
        kept = f"Path=/; Max-Age={age_s}; HttpOnly; SameSite=Strict" + "; Secure" * self._is_secure
        return f"Set-Cookie: {self._cookie}={value}; {kept}\r\n".encode()

    def _sent(self, request: Request) -> str:
        for pair in request.header(b"cookie").split(";"):
            name, _, value = pair.strip().partition("=")
            if name == self._cookie:
                return value
        return ""


def _digest(token: str) -> bytes:
    """The memory holds no cookie that could be used."""
    return hashlib.sha256(token.encode()).digest()
