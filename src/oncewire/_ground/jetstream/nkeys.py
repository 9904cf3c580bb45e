"""Nkeys and creds files: an Ed25519 key pair that signs the server's nonce and never shows its seed.

Files are read at each connection attempt, so that a renewed credential is taken up by the next reconnect.

An nkey seed is base32 without padding of: two prefix bytes (18 << 3 for 'S' joined with the kind), 32 bytes of
Ed25519 seed, and a CRC-16/XMODEM of all before it, little-endian.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import os
import re
import secrets
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from oncewire._ground.errors import AuthenticationFailed
from oncewire._ground.files import write_whole

SEED_PREFIX = 18 << 3
PREFIX_USER = 20 << 3
SEED_BYTES = 32

_BLOCK = re.compile(r"-{3,}BEGIN (?P<kind>[A-Z ]+)-{3,}\s*(?P<body>[A-Za-z0-9_\-.=]+)\s*-{3,}END [A-Z ]+-{3,}")


class NKey:
    """A user's key pair: signs the server's nonce, never shows its seed."""

    def __init__(self, seed: str) -> None:
        raw = _decode(seed)
        if raw[0] & 0xF8 != SEED_PREFIX or len(raw) != 34:
            raise AuthenticationFailed("this is not an nkey seed", hint="A user's seed begins with SU.")
        kind = (raw[0] & 7) << 5 | (raw[1] & 0xF8) >> 3
        if kind != PREFIX_USER:
            raise AuthenticationFailed("this nkey seed is not a user's", hint="A user's seed begins with SU.")
        self._key = Ed25519PrivateKey.from_private_bytes(raw[2:])
        public = bytes([PREFIX_USER]) + self._key.public_key().public_bytes_raw()
        self.public = base64.b32encode(public + _crc16(public)).decode().rstrip("=")

    def sign(self, nonce: str) -> str:
        return base64.urlsafe_b64encode(self._key.sign(nonce.encode())).decode().rstrip("=")


def make_seed(entropy: bytes) -> str:
    """The seed of a new user from 32 bytes of chance."""
    raw = bytes([SEED_PREFIX | PREFIX_USER >> 5, (PREFIX_USER & 31) << 3]) + entropy
    return base64.b32encode(raw + _crc16(raw)).decode().rstrip("=")


def ensure_key(path: Path) -> str:
    """The public key of a seed file. Made when it is not there, for its owner's eyes only; one that is there stays,
    also when two make it at once."""
    if not path.exists():
        fresh = path.with_name(f".{path.name}.{os.getpid()}")
        write_whole(fresh, f"{make_seed(secrets.token_bytes(SEED_BYTES))}\n".encode())
        with contextlib.suppress(FileExistsError):
            path.hardlink_to(fresh)
        fresh.unlink()
    return read_nkey(str(path)).public


def _decode(seed: str) -> bytes:
    try:
        raw = base64.b32decode(seed.strip() + "=" * (-len(seed.strip()) % 8))
    except (binascii.Error, ValueError):
        raw = b""
    if len(raw) < 4 or _crc16(raw[:-2]) != raw[-2:]:
        raise AuthenticationFailed("the nkey seed is damaged", hint="Its checksum does not match: copy it again.")
    return raw[:-2]


def _crc16(data: bytes) -> bytes:
    return binascii.crc_hqx(data, 0).to_bytes(2, "little")


def read_creds(path: str) -> tuple[str, NKey]:
    """The JWT and the key of a creds file."""
    blocks = {match["kind"]: match["body"] for match in _BLOCK.finditer(_read(path))}
    jwt, seed = blocks.get("NATS USER JWT"), blocks.get("USER NKEY SEED")
    if not jwt or not seed:
        raise AuthenticationFailed(f"{path} is not a creds file", hint="It needs a NATS USER JWT and a USER NKEY SEED.")
    return jwt, NKey(seed)


def holds_jwt(path: str) -> bool:
    """Whether a key file is one of credentials, and not of a bare seed."""
    return "BEGIN NATS USER JWT" in _read(path)


def read_nkey(path: str) -> NKey:
    for line in _read(path).splitlines():
        if line.strip().startswith("S"):
            return NKey(line)
    raise AuthenticationFailed(f"{path} holds no nkey seed", hint="The file has one line that begins with SU.")


def _read(path: str) -> str:
    try:
        return Path(path).expanduser().read_text()
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: no home for ~user
        raise AuthenticationFailed(f"the credentials file {path} cannot be read: {error}") from None
