"""Many objects at once: their fields as columns, and which different ones there are."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, TypeVar

from oncewire._ground import native

T = TypeVar("T")


def columns(objects: Sequence[Any], kind: type, *names: str) -> list[list[Any]]:
    """By name what the objects hold there. Quick where all are of this kind, a Struct."""
    if native.columns is not None and (found := native.columns(objects, kind, names)) is not None:
        return found
    return [list(map(attrgetter(name), objects)) for name in names]


def distinct(values: Sequence[T]) -> list[T]:
    """Each object once, in the order in which they come first; where all are equal, the first stands for them.

    Asks none for its hash: those of enums take long.
    """
    if values and values.count(values[0]) == len(values):
        return [values[0]]
    return list(dict(zip(map(id, values), values, strict=True)).values())
