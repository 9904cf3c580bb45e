"""When a contract needs a new version: two JSON Schemas compared by the rules of the message contracts.

Adding an optional field is minor: the version stays, and consumers ignore what they do not know. Everything else that
a reader or writer could notice is breaking and needs a new version: a field gone, a field now required or no longer,
another type, another set of values, another limit in either direction (old messages or old readers would fail).
Words for people (titles, descriptions, examples) change nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Any, NamedTuple

Schema = dict[str, Any]
_FOR_PEOPLE = frozenset({"$schema", "$id", "$defs", "$comment", "title", "description", "examples", "default"})
_BY_OTHER_RULES = frozenset({"$ref", "properties", "required"})


class Weight(StrEnum):
    MINOR = "minor"
    BREAKING = "breaking"


class Change(NamedTuple):
    weight: Weight
    path: str
    what: str


def changes(old: Schema, new: Schema) -> list[Change]:
    """What changed from `old` to `new`, in the order of the schema."""
    return list(_compare(old, new, old, new, ""))


def breaking(old: Schema, new: Schema) -> list[Change]:
    """The changes that need a new version."""
    return [change for change in changes(old, new) if change.weight is Weight.BREAKING]


def _compare(old: Any, new: Any, old_root: Schema, new_root: Schema, path: str) -> Iterator[Change]:
    if not isinstance(old, dict) or not isinstance(new, dict):
        if old != new:
            yield Change(Weight.BREAKING, path, f"{old!r} became {new!r}")
        return
    old, new = _resolved(old, old_root), _resolved(new, new_root)
    yield from _properties(old, new, old_root, new_root, path)
    for keyword in sorted((old.keys() | new.keys()) - _FOR_PEOPLE - _BY_OTHER_RULES):
        yield from _keyword(keyword, old, new, old_root, new_root, path)


def _resolved(schema: Schema, root: Schema) -> Schema:
    while "$ref" in schema:
        name = schema["$ref"].removeprefix("#/$defs/")
        schema = {key: value for key, value in schema.items() if key != "$ref"} | root["$defs"][name]
    return schema


def _properties(old: Schema, new: Schema, old_root: Schema, new_root: Schema, path: str) -> Iterator[Change]:
    before, after = old.get("properties", {}), new.get("properties", {})
    were, are = set(old.get("required", ())), set(new.get("required", ()))
    for name in before:
        here = f"{path}.{name}".lstrip(".")
        if name not in after:
            yield Change(Weight.BREAKING, here, "is gone")
            continue
        if (name in were) != (name in are):
            yield Change(Weight.BREAKING, here, "is now required" if name in are else "is no longer required")
        yield from _compare(before[name], after[name], old_root, new_root, here)
    for name in after:
        if name not in before:
            weight = Weight.BREAKING if name in are else Weight.MINOR
            yield Change(weight, f"{path}.{name}".lstrip("."), "is new")


def _keyword(keyword: str, old: Schema, new: Schema, old_root: Schema, new_root: Schema, path: str) -> Iterator[Change]:
    if keyword not in old or keyword not in new:
        yield Change(Weight.BREAKING, path, f"{keyword} is {'gone' if keyword in old else 'new'}")
        return
    before, after = old[keyword], new[keyword]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for at, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from _compare(one, other, old_root, new_root, f"{path}.{keyword}[{at}]".lstrip("."))
    else:
        yield from _compare(before, after, old_root, new_root, f"{path}.{keyword}".lstrip("."))
