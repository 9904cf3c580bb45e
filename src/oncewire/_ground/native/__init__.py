"""Loops over every message in C (`core.c`), where a compiler was at hand when the package was built; else None.

Whoever uses one has the same in Python beside it: what comes out never depends on whether it is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Piece = bytes | str | int
"""What is hashed: bytes, text (as UTF-8), a whole number (in decimal)."""
Columns = tuple[list[Any] | bytes, ...]
"""Lists of pieces, or the one piece that stands in all rows; a row is hashed one piece behind the other."""

try:
    from oncewire._ground.native import core as _core  # type: ignore[attr-defined]  # mypy does not read C
except ImportError:
    _core = None

columns: Callable[[Sequence[Any], type, tuple[str, ...]], list[list[Any]] | None] | None
columns = getattr(_core, "columns", None)
deliveries: Callable[[Any, bytes, Any], int] | None = getattr(_core, "deliveries", None)
gather: Callable[[Any, Any, Any, Any, Any], None] | None = getattr(_core, "gather", None)
is_plain: Callable[[object], bool] | None = getattr(_core, "is_plain", None)
messages: Callable[[bytes, int, Callable[..., Any], list[Any]], int] | None = getattr(_core, "messages", None)
replies: Callable[..., list[Any] | None] | None = getattr(_core, "replies", None)
envelopes: Callable[..., tuple[list[Any], list[int]]] | None = getattr(_core, "envelopes", None)
frames: Callable[..., tuple[list[bytes], int] | None] | None = getattr(_core, "frames", None)
blake2b_all: Callable[[bytes, Columns, int], list[bytes]] | None = getattr(_core, "blake2b_all", None)
blake2b_sum: Callable[[bytes, Columns], bytes] | None = getattr(_core, "blake2b_sum", None)
sha256_all: Callable[[bytes, Columns], list[bytes]] | None = getattr(_core, "sha256_all", None)
caused: Callable[..., list[Any] | None] | None = getattr(_core, "caused", None)
