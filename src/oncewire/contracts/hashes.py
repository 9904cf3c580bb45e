"""Many hashes that begin alike, compiled where that was possible. Pure. What a part is, `native.Part` says."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from oncewire import native
from oncewire.native import Part, Piece


def blake2b_all(begin: str, parts: Sequence[Part], size: int) -> list[bytes]:
    """The BLAKE2b digests, `size` bytes each, of `begin` with each of the parts behind it."""
    if native.blake2b_all is not None:
        try:
            return native.blake2b_all(_bytes(begin), parts, size)
        except (UnicodeEncodeError, OverflowError):
            pass  # a lone surrogate, or a number of more than 64 bits
    return _each(_blake2b_begun(begin, size), parts)


def blake2b_sum(begin: str, parts: Sequence[Part]) -> bytes | None:
    """Those of 64 bytes, added up in eight lanes. None: whoever asks must add them."""
    if native.blake2b_sum is None:
        return None
    try:
        return native.blake2b_sum(_bytes(begin), parts)
    except (UnicodeEncodeError, OverflowError):
        return None


def sha256_all(begin: str, parts: Sequence[Part]) -> list[bytes]:
    if native.sha256_all is not None:
        try:
            return native.sha256_all(_bytes(begin), parts)
        except (UnicodeEncodeError, OverflowError):
            pass
    return _each(_sha256_begun(begin), parts)


def _each(begun: Any, parts: Sequence[Part]) -> list[bytes]:
    found: list[bytes] = []
    for part in parts:
        hashed = begun.copy()
        for piece in part if type(part) is tuple else (part,):
            hashed.update(piece if type(piece) is bytes else _bytes(piece))
        found.append(hashed.digest())
    return found


@lru_cache(maxsize=256)
def _blake2b_begun(begin: str, size: int) -> Any:
    return hashlib.blake2b(_bytes(begin), digest_size=size)


@lru_cache(maxsize=256)
def _sha256_begun(begin: str) -> Any:
    return hashlib.sha256(_bytes(begin))


def _bytes(piece: Piece | Any) -> bytes:
    if isinstance(piece, bytes):
        return piece
    return piece.encode("utf-8", "surrogatepass") if isinstance(piece, str) else b"%d" % piece
