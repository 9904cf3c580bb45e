"""Many hashes that begin alike, compiled where that was possible. Pure. What is hashed, `native.Columns` says."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from itertools import repeat
from typing import Any

from oncewire._ground import native
from oncewire._ground.native import Columns, Piece


def blake2b_all(begin: str, columns: Columns, size: int) -> list[bytes]:
    """The BLAKE2b digests, `size` bytes each, of `begin` with each row of the columns behind it."""
    if native.blake2b_all is not None:
        try:
            return native.blake2b_all(_bytes(begin), columns, size)
        except (UnicodeEncodeError, OverflowError):
            pass  # a lone surrogate, or a number of more than 64 bits
    return _each(_blake2b_begun(begin, size), columns)


def blake2b_sum(begin: str, columns: Columns) -> bytes | None:
    """Those of 64 bytes, added up in eight lanes. None: whoever asks must add them."""
    if native.blake2b_sum is None:
        return None
    try:
        return native.blake2b_sum(_bytes(begin), columns)
    except (UnicodeEncodeError, OverflowError):
        return None


def sha256_all(begin: str, columns: Columns) -> list[bytes]:
    if native.sha256_all is not None:
        try:
            return native.sha256_all(_bytes(begin), columns)
        except (UnicodeEncodeError, OverflowError):
            pass
    return _each(_sha256_begun(begin), columns)


def _each(begun: Any, columns: Columns) -> list[bytes]:
    count = max(len(column) for column in columns if isinstance(column, list))
    found: list[bytes] = []
    for row in zip(*(one if isinstance(one, list) else repeat(one, count) for one in columns), strict=True):
        hashed = begun.copy()
        for piece in row:
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
