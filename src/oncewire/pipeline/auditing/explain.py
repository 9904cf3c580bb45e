"""Which columns of a row differ, for findings that know only that the row does: both rows are brought together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from msgspec.structs import replace

from oncewire.pipeline.auditing.frames import literal
from oncewire.pipeline.auditing.rowhash import columns_of
from oncewire.pipeline.auditing.verdict import Finding
from oncewire.pipeline.decode import decode
from oncewire.pipeline.families import Families
from oncewire.pipeline.staging import conform
from oncewire.pipeline.tables import BRONZE, POSITION, QUARANTINE, SILVER

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

EXPLAINED_MAX: Final = 20
"""Findings; the others name their rows alone."""
_PLACE: Final = tuple(name for name, _ in POSITION)

Place = tuple[Any, ...]


def explained(found: Mapping[str, DataFrame], findings: Sequence[Finding], families: Families) -> list[Finding]:
    """The findings, with the names of the columns that differ in the first row of each."""
    asked = [one for one in findings if one.check in ("silver", "quarantine") and one.problem == "differs"]
    asked = asked[:EXPLAINED_MAX]
    if not asked:
        return list(findings)
    where = " or ".join(f"(stream = {literal(one.stream)} and sequence = {one.first}L)" for one in asked)
    read = decode(conform(found["bronze"].where(where).toArrow(), BRONZE), families)
    told: dict[tuple[str, str, int], str] = {}
    for name, wanted in {**read.parts, QUARANTINE.name: read.quarantine}.items():
        table = QUARANTINE if name == QUARANTINE.name else SILVER[name]
        if not wanted.num_rows or table.name not in found:
            continue
        there = by_place(conform(found[table.name].where(where).toArrow(), table))
        check = "quarantine" if table is QUARANTINE else "silver"
        for place, row in by_place(wanted).items():
            names = differing(name, row, there[place]) if place in there else []
            told[check, place[0], place[-1]] = " and ".join(names) or f"{table.name} has no row for it"
    return [_with(one, told.get((one.check, one.stream, one.first), "")) for one in findings]


def by_place(rows: pa.Table) -> dict[Place, dict[str, Any]]:
    return {tuple(row[name] for name in _PLACE): row for row in rows.to_pylist()}


def differing(name: str, wanted: Mapping[str, Any], there: Mapping[str, Any]) -> list[str]:
    """The columns that are not the same."""
    return [column for column, _ in columns_of(name) if wanted[column] != there[column]]


def _with(finding: Finding, columns: str) -> Finding:
    return replace(finding, detail=f"{finding.detail}: {columns}") if columns else finding
