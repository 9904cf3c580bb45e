"""What a table of the lake is: its name, columns, key and grain."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import pyarrow as pa

from oncewire._ground.contracts.catalog import Family

TIMESTAMP: Final = pa.timestamp("us", tz="UTC")

Columns = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Table:
    """One table: its name is its path below the lake."""

    name: str
    columns: Columns
    keys: tuple[str, ...]
    """What no two rows share."""
    grain: str
    family: Family | None = None

    @cached_property
    def schema(self) -> pa.Schema:
        return pa.schema([pa.field(name, kind) for name, kind in self.columns])

    @property
    def is_dated(self) -> bool:
        """Whether `--partition-by date` partitions it."""
        return self.columns[-1][0] == "date"
