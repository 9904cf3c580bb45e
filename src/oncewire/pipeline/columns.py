"""Turns located messages into Arrow columns: one copy from the receive buffer, no Python object per message.

    stream string · subject string · sequence long · timestamp timestamp (micros, UTC) · payload binary
    headers array<struct<key string, value binary>>, when asked for
    nanos int (the three digits that `timestamp` cannot hold) · created_ns long · incarnation int, when asked for

Arrays are built from buffers: `pa.array` and `pa.scalar` would import pandas, which costs each new Spark worker more
than a second. Subjects and payloads are the bytes of the wire; a header's value is trimmed as the client trims it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from oncewire._ground import native
from oncewire._ground.jetstream.protocol import CRLF

if TYPE_CHECKING:
    from oncewire.pipeline.frames import Bytes, Cuts, Ints
    from oncewire.pipeline.stream import Row

TIMESTAMP = pa.timestamp("us", tz="UTC")
HEADERS = pa.list_(pa.field("element", pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])))


class Columns:
    """Makes batches of the columns that the user's schema asks for, in that order and of exactly those types."""

    def __init__(self, stream: str, schema: Any, created_ns: int = 0, incarnation: int = 0) -> None:
        self.schema = schema
        self._created_ns = created_ns
        self._incarnation = incarnation
        self.names: list[str] = schema.names
        self._name = stream.encode()
        self._streams = binaries([], pa.string())

    def of_cuts(self, buffer: Bytes, cuts: Cuts) -> Any:
        """A batch of proven messages."""
        made = {
            "subject": lambda: pieces(buffer, cuts.subject_start, cuts.subject_end, pa.string()),
            "headers": lambda: header_lists(pieces(buffer, cuts.header_start, cuts.payload_start)),
            "payload": lambda: pieces(buffer, cuts.payload_start, cuts.payload_end),
        }
        return self._batch(cuts.sequence, cuts.timestamp_ns, made)

    def of_rows(self, rows: Sequence[Row]) -> Any:
        """A batch of messages that the exact parser read."""
        made = {
            "subject": lambda: binaries([row.subject for row in rows], pa.string()),
            "headers": lambda: header_lists(binaries([row.header_raw for row in rows])),
            "payload": lambda: binaries([row.payload for row in rows]),
        }
        sequences = np.array([row.sequence for row in rows], np.int64)
        return self._batch(sequences, np.array([row.timestamp_ns for row in rows], np.int64), made)

    def _batch(self, sequence: Ints, timestamp_ns: Ints, made: dict[str, Any]) -> Any:
        made["stream"] = lambda: self._stream_rows(len(sequence))
        made["sequence"] = lambda: integers(sequence)
        made["timestamp"] = lambda: integers(timestamp_ns // 1_000, TIMESTAMP)
        made["nanos"] = lambda: integers((timestamp_ns % 1_000).astype(np.int32))
        made["created_ns"] = lambda: integers(np.full(len(sequence), self._created_ns, np.int64))
        made["incarnation"] = lambda: integers(np.full(len(sequence), self._incarnation, np.int32))
        return pa.RecordBatch.from_arrays([made[name]() for name in self.names], schema=self.schema)

    def _stream_rows(self, count: int) -> Any:
        """The stream's name that often: a slice of one array that is kept."""
        if count > len(self._streams):
            name = np.frombuffer(self._name, np.uint8)
            self._streams = retyped(fixed_width(np.broadcast_to(name, (count, len(name)))), pa.string())
        return self._streams.slice(0, count)


def pieces(buffer: Bytes, starts: Ints, ends: Ints, kind: Any = None) -> Any:
    """A binary (or string) array of what stands between these places, copied. They are in order and do not overlap."""
    kind = kind or pa.binary()
    if native.gather is not None:
        offsets, values = np.empty(len(starts) + 1, np.int32), pa.allocate_buffer(int((ends - starts).sum()))
        native.gather(buffer, np.ascontiguousarray(starts), np.ascontiguousarray(ends), offsets, values)
        return pa.Array.from_buffers(kind, len(starts), [None, pa.py_buffer(offsets), values])
    cuts = np.column_stack((starts, ends)).astype(np.int32).ravel()
    every = pa.Array.from_buffers(kind, len(cuts) - 1, [None, pa.py_buffer(cuts), pa.py_buffer(buffer)])
    return every.take(integers(np.arange(0, len(cuts), 2, dtype=np.int32)))


def integers(values: Ints | Any, kind: Any = None) -> Any:
    values = np.ascontiguousarray(values)
    kind = kind or (pa.int32() if values.dtype == np.int32 else pa.int64())
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def binaries(values: Sequence[bytes], kind: Any = None) -> Any:
    """A binary (or string) array of these values."""
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum([len(value) for value in values], out=offsets[1:])
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(values))]
    return pa.Array.from_buffers(kind or pa.binary(), len(values), buffers)


def fixed_width(rows: Any) -> Any:
    """A binary array of rows that are all as wide."""
    rows = np.ascontiguousarray(rows)
    offsets = np.arange(len(rows) + 1, dtype=np.int32) * np.int32(rows.shape[1])
    return pa.Array.from_buffers(pa.binary(), len(rows), [None, pa.py_buffer(offsets), pa.py_buffer(rows)])


def retyped(array: Any, kind: Any) -> Any:
    """The same bytes under another type of the same layout."""
    return pa.Array.from_buffers(kind, len(array), array.buffers(), offset=array.offset)


def contents(array: Any) -> tuple[Ints, Bytes]:
    """Offsets and bytes of a binary array. An empty one may come without any buffer at all."""
    if not len(array):
        return np.zeros(1, np.int64), np.empty(0, np.uint8)
    _, offsets, values = array.buffers()
    ends = np.frombuffer(offsets, np.int32)[array.offset : array.offset + len(array) + 1].astype(np.int64)
    return ends, np.frombuffer(values, np.uint8) if values else np.empty(0, np.uint8)


def header_lists(blocks: Any) -> Any:
    """Header blocks (`NATS/1.0 CRLF name: value CRLF … CRLF`) as lists of key and value, in order, doubles kept."""
    ends, values = contents(blocks)
    first = int(ends[0])
    values, ends = values[first : int(ends[-1])], ends - first
    lines, row_of_line = _header_lines(values, ends)
    colons = np.flatnonzero(values == ord(":"))
    following = np.searchsorted(colons, lines[:, 0])
    colon = colons[np.minimum(following, len(colons) - 1)] if len(colons) else np.zeros(len(lines), np.int64)
    is_pair = (following < len(colons)) & (colon < lines[:, 1])
    lines, colon, row_of_line = lines[is_pair], colon[is_pair], row_of_line[is_pair]
    offsets = np.zeros(len(blocks) + 1, np.int32)
    np.cumsum(np.bincount(row_of_line, minlength=len(blocks)), out=offsets[1:])
    pairs = _pairs(values, lines, colon)
    return pa.ListArray.from_arrays(integers(offsets), pairs, type=HEADERS)


def _header_lines(values: Bytes, ends: Ints) -> tuple[Ints, Ints]:
    """Start and end of each line but the first of its block, and the block that it stands in."""
    breaks = np.flatnonzero(values[:-1] == CRLF[0]) if len(values) else np.empty(0, np.int64)
    breaks = breaks[values[breaks + 1] == CRLF[1]]
    block = np.searchsorted(ends, breaks, side="right") - 1
    is_next = block[1:] == block[:-1]  # a line goes from one break to the next one of the same block
    lines = np.column_stack((breaks[:-1] + 2, breaks[1:]))[is_next]
    return lines, block[1:][is_next]


def _pairs(values: Bytes, lines: Ints, colon: Ints) -> Any:
    if not len(lines):
        return pa.StructArray.from_arrays([binaries([], pa.string()), binaries([])], fields=list(HEADERS.value_type))
    keys = pieces(values, lines[:, 0], colon)
    given = pieces(values, colon + 1, lines[:, 1])
    trimmed = retyped(pc.ascii_trim_whitespace(retyped(given, pa.string())), pa.binary())
    return pa.StructArray.from_arrays([readable(keys), trimmed], fields=list(HEADERS.value_type))


def readable(keys: Any) -> Any:
    """Names as text. A name that is no UTF-8 shows its bad bytes as signs, since Spark's strings must be text."""
    _, values = contents(keys)
    if not (values > 127).any():
        return retyped(keys, pa.string())
    names = [name.decode("utf-8", "replace").encode() for name in keys.to_pylist()]
    return binaries(names, pa.string())
