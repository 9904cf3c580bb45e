"""API keys in a file: made, listed and revoked by `oncewire keys`, looked up at every request.

A key is `ow_<id>_<secret>`. The secret has 256 random bits and is shown once; the file keeps its SHA-256, from which
nobody can get it back: a slow hash would only protect secrets that people choose. The file is one JSON document,
replaced as a whole, readable by its owner alone; a running server sees a change within a second.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal

import msgspec

from oncewire._ground.errors import AuthenticationFailed, Corrupt, InvalidSetting, NotFound, Unavailable
from oncewire._ground.files import make_folder, open_private, write_whole
from oncewire._ground.http.principal import Principal
from oncewire._ground.trust.grants import check_grants, is_within

LOOK_S: Final = 1.0
"""How often a running server looks whether the file was changed."""
NAME_CHARS_MAX: Final = 80
TENANT: Final = re.compile(r"[!-~]{1,128}")
_KEY = re.compile(r"ow_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")


class ApiKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One key as the file has it. Times are Unix seconds; 0 is never."""

    id: str
    name: str
    tenant: str
    grants: tuple[str, ...]
    secret_sha256: str
    created_s: int
    expires_s: int = 0
    revoked_s: int = 0

    def is_good(self, now_s: float) -> bool:
        return not self.revoked_s and not 0 < self.expires_s <= now_s

    def principal(self) -> Principal:
        until_s = float(self.expires_s) if self.expires_s else float("inf")
        return Principal(self.tenant, frozenset(self.grants), f"key:{self.id}", f"key:{self.id}", until_s)


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: Literal[1] = 1
    keys: tuple[ApiKey, ...] = ()


class KeyFile:
    """The file, and what was in it when it was last looked at."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: tuple[int, int, int, int] | None = None
        self._look_at = 0.0
        self._keys: dict[str, ApiKey] = {}
        self._principals: dict[str, Principal] = {}

    def keys(self) -> list[ApiKey]:
        """What is in it now, the oldest first."""
        self._read()
        return sorted(self._keys.values(), key=lambda key: (key.created_s, key.id))

    def principal(self, sent: str, now_s: float) -> Principal:
        """Who holds this key. The same answer, after the same work, whatever is wrong with it."""
        self._look(now_s)
        found = _KEY.fullmatch(sent)
        if found and found[1] not in self._keys:
            self._read()  # it may be new: whoever made it wants to use it at once
        key = self._keys.get(found[1]) if found else None
        wanted = key.secret_sha256 if key else "0" * 64
        is_same = hmac.compare_digest(_digest(found[2] if found else sent), wanted)
        if key is None or not is_same or not key.is_good(now_s):
            raise AuthenticationFailed("the API key is unknown, revoked or expired")
        return self._principals[key.id]

    def vouches_for(self, principal: Principal, now_s: float) -> bool:
        """Whether the key is still good, and allows all that the principal was let in with."""
        self._look(now_s)
        key = self._keys.get(principal.voucher.partition(":")[2])
        if key is None or not key.is_good(now_s) or key.tenant != principal.tenant:
            return False
        return is_within(principal.actions, key.grants)

    def create(
        self, name: str, tenant: str, grants: tuple[str, ...], now_s: int, lives_s: int = 0
    ) -> tuple[ApiKey, str]:
        """A new key, and its text, which nobody can show again."""
        kept = tuple(sorted(check_grants(grants)))
        if not TENANT.fullmatch(tenant):
            raise InvalidSetting("a tenant is 1 to 128 printable ASCII characters without spaces")
        if not 0 < len(name) <= NAME_CHARS_MAX or not name.isprintable():
            raise InvalidSetting(f"a key's name is 1 to {NAME_CHARS_MAX} printable characters")
        secret = secrets.token_urlsafe(32)
        key = ApiKey(
            id=secrets.token_hex(6),
            name=name,
            tenant=tenant,
            grants=kept,
            secret_sha256=_digest(secret),
            created_s=now_s,
            expires_s=now_s + lives_s if lives_s else 0,
        )
        with self._held():
            self._write([*self.keys(), key])
        return key, f"ow_{key.id}_{secret}"

    def revoke(self, key_id: str, now_s: int) -> ApiKey:
        """It stops working within a second; its line stays, so that logs can be read."""
        with self._held():
            keys = {key.id: key for key in self.keys()}
            if key_id not in keys:
                raise NotFound(f"no key has the id {key_id[:80]!r}", hint="`oncewire keys ls` lists them.")
            revoked = keys[key_id]
            if not revoked.revoked_s:
                revoked = keys[key_id] = msgspec.structs.replace(revoked, revoked_s=now_s)
                self._write(list(keys.values()))
        return revoked

    # ---- the file

    @contextmanager
    def _held(self) -> Iterator[None]:
        """One writer at a time. The lock is a file of its own, since the document is replaced."""
        make_folder(self.path.parent)
        lock = open_private(self.path.with_name(f"{self.path.name}.lock"), os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def _write(self, keys: list[ApiKey]) -> None:
        body = msgspec.json.format(msgspec.json.encode(_Document(keys=tuple(keys))), indent=2)
        write_whole(self.path, body + b"\n")
        self._seen = None

    def _look(self, now_s: float) -> None:
        if now_s >= self._look_at or self._look_at > now_s + LOOK_S:
            self._read()
            self._look_at = now_s + LOOK_S

    def _read(self) -> None:
        try:
            facts = self.path.stat()
            seen = (facts.st_ino, facts.st_mtime_ns, facts.st_size, facts.st_mode)
            if seen == self._seen:
                return
            if facts.st_mode & 0o022:
                raise Corrupt(
                    f"{self.path} can be written by others, who could let themselves in",
                    hint=f"Look at its keys, then: chmod 600 {self.path}",
                )
            body = self.path.read_bytes()
        except FileNotFoundError:
            self._seen, self._keys, self._principals = None, {}, {}
            return
        except OSError as error:
            raise Unavailable(f"the API keys in {self.path} cannot be read: {error.strerror}") from None
        try:
            document = msgspec.json.decode(body, type=_Document)
        except msgspec.DecodeError as error:
            raise Corrupt(
                f"{self.path} is no list of API keys: {error}", hint="Restore it, or move it away and make new keys."
            ) from None
        self._seen, self._keys = seen, {key.id: key for key in document.keys}
        self._principals = {key.id: key.principal() for key in document.keys}


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
