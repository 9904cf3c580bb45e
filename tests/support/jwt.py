"""Decentralised auth for tests: an operator, an account and users, as JWTs signed with nkeys.

A NATS JWT is header.claims.signature in base64url without padding; its `jti` is the base32 of the SHA-256 of the claims
without it. The keys come from the `nkeys` package, which is not the code under test.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import time
from typing import Any

import nkeys

HEADER = {"typ": "JWT", "alg": "ed25519-nkey"}


def make_seed(kind: int) -> str:
    return nkeys.encode_seed(os.urandom(32), kind).decode()


def _b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _signed(claims: dict[str, Any], issuer: nkeys.KeyPair) -> str:
    digest = hashlib.sha256(json.dumps(claims, separators=(",", ":")).encode()).digest()
    claims = {**claims, "jti": base64.b32encode(digest).decode().rstrip("=")}
    head, body = _b64(json.dumps(HEADER).encode()), _b64(json.dumps(claims).encode())
    return f"{head}.{body}.{_b64(issuer.sign(f'{head}.{body}'.encode()))}"


def _claims(kind: str, name: str, subject: str, issuer: str, extra: dict[str, Any]) -> dict[str, Any]:
    return {
        "iat": int(time.time()),
        "iss": issuer,
        "name": name,
        "sub": subject,
        "nats": {"type": kind, "version": 2, **extra},
    }


def creds_text(jwt: str, seed: str) -> str:
    """A creds file: the JWT and the seed, each in its block."""
    return (
        f"-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
    )


class Operator:
    """An operator with one account; makes users. `config` is what the server needs."""

    def __init__(self) -> None:
        self._operator = nkeys.from_seed(make_seed(nkeys.PREFIX_BYTE_OPERATOR).encode())
        self._account = nkeys.from_seed(make_seed(nkeys.PREFIX_BYTE_ACCOUNT).encode())
        self._system = nkeys.from_seed(make_seed(nkeys.PREFIX_BYTE_ACCOUNT).encode())
        self.account = self._account.public_key.decode()

    @property
    def config(self) -> str:
        public, system = self._operator.public_key.decode(), self._system.public_key.decode()
        claims = _claims("operator", "test", public, public, {"system_account": system})
        stores = {"mem_storage": -1, "disk_storage": -1, "streams": -1, "consumer": -1}
        return (
            f"operator: {_signed(claims, self._operator)}\n"
            f"resolver: MEMORY\n"
            f"resolver_preload: {{ {self.account}: {self._account_jwt(self.account, stores)}\n"
            f"{system}: {self._account_jwt(system, {})} }}\n"
        )

    def _account_jwt(self, public: str, stores: dict[str, int]) -> str:
        limits = dict.fromkeys(("subs", "data", "payload", "imports", "exports", "conn", "leaf"), -1)
        extra = {"limits": {**limits, "wildcards": True, **stores}}
        return _signed(_claims("account", "app", public, self._operator.public_key.decode(), extra), self._operator)

    def user(self, *, expires_in_s: float | None = None, deny_publish: list[str] | None = None) -> str:
        """The text of a creds file for a fresh user."""
        seed = make_seed(nkeys.PREFIX_BYTE_USER)
        public = nkeys.from_seed(seed.encode()).public_key.decode()
        extra = {"pub": {"deny": deny_publish or []}, "sub": {}, "subs": -1, "data": -1, "payload": -1}
        claims = _claims("user", "someone", public, self.account, extra)
        if expires_in_s is not None:
            claims["exp"] = int(time.time() + expires_in_s)
        return creds_text(_signed(claims, self._account), seed)
