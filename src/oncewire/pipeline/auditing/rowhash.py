"""One hash for a whole row of a table, so that rows can be compared without bringing their columns together. Pure.

Every column takes part, in the table's order, each with its length before it: no two rows share a text. What a file
does not have is null, as it is for every other reader.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from oncewire._ground.contracts import hashes
from oncewire.pipeline.lake.table import Columns
from oncewire.pipeline.tables import QUARANTINE, RAW, SILVER

ROW_BYTES: Final = 16
REFUSED: Final[Columns] = (*RAW, ("family", pa.string()), ("reason", pa.string()))
"""What of quarantine follows from a message: all but the words of the reason."""
_NULL: Final = pa.scalar(b"-", pa.binary())
_JSON: Final = msgspec.json.Encoder(order="sorted").encode


def columns_of(name: str) -> Columns:
    return REFUSED if name == QUARANTINE.name else SILVER[name].columns


def row_hashes(name: str, rows: pa.Table) -> pa.Array:
    """A hash per row of a silver table, by its family, or of quarantine."""
    told = [_told(rows[column].combine_chunks(), kind) for column, kind in columns_of(name)]
    if not rows.num_rows:
        return pa.array([], pa.binary())
    joined = pc.binary_join_element_wise(*told, pa.scalar(b"", pa.binary()))
    return pa.array(hashes.blake2b_all(f"{name}:", (joined.to_pylist(),), ROW_BYTES), pa.binary())


def _told(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """The values as bytes with their length before them."""
    values = _bytes_of(column.cast(kind), kind)
    lengths = pc.cast(pc.cast(pc.binary_length(values), pa.string()), pa.binary())
    whole = pc.binary_join_element_wise(lengths, values, pa.scalar(b":", pa.binary()))
    return pc.fill_null(whole, _NULL)


def _bytes_of(column: pa.Array, kind: pa.DataType) -> pa.Array:
    if pa.types.is_binary(kind):
        return column
    if pa.types.is_string(kind):
        return column.cast(pa.binary())
    if pa.types.is_nested(kind):
        return pa.array([None if one is None else _JSON(one) for one in column.to_pylist()], pa.binary())
    number: Any = column.cast(pa.int32()) if pa.types.is_date32(kind) else column
    return pc.cast(pc.cast(pc.cast(number, pa.int64()), pa.string()), pa.binary())
