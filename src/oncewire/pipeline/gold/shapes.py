"""Frames in the shape of a table."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from oncewire.pipeline.lake.table import Table


def union(frames: list[DataFrame]) -> DataFrame:
    return reduce(lambda one, other: one.unionByName(other), frames)


def shaped(frame: DataFrame, table: Table) -> DataFrame:
    """Exactly the columns of the table."""
    from pyspark.sql.pandas.types import from_arrow_type

    kinds = [(name, from_arrow_type(kind).simpleString()) for name, kind in table.columns]
    return frame.selectExpr(*(f"cast(`{name}` as {kind}) as `{name}`" for name, kind in kinds))
