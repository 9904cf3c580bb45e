"""Rows to publish, checked and made into frames by Arrow kernels. No socket.

    subject string · payload binary (or string) · headers array<struct<key string, value binary>> or map · msg_id string

Everything is checked before anything is sent: a row that could never be published fails its task with the reason and
the row's number, and nothing of that task goes out.

Every message carries an id, since what may be sent twice must be recognised. Without a `msg_id` column it is

    <query or write>.<batch>.<partition> hashed, then a digest of subject, headers and payload, then its count among
    equal rows of the partition

so a partition that is computed again has the same ids even when its rows come in another order; a plain row number
would then give one row's id to another row, and the server would drop it as a duplicate.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from oncewire._ground.contracts import hashes
from oncewire._ground.errors import ContractViolation, TooLarge
from oncewire._ground.jetstream import protocol
from oncewire.pipeline.columns import binaries, contents, fixed_width, integers, retyped
from oncewire.pipeline.frames import Ints

DIGEST_BYTES: Final = 16
ID_BYTES_MAX: Final = 1_024
DEFAULT_ID_BYTES_MAX: Final = 96
_PLAIN_SUBJECT: Final = r"^[0-9A-Za-z_$:-]+(\.[0-9A-Za-z_$:-]+)*$"
_PLAIN_NAME: Final = r"^[0-9A-Za-z-]{1,128}$"
_BREAKS_OUT: Final = "[\\x00\\r\\n]"
_RESERVED: Final = "^(?i)(nats-msg-id|nats-expected-.*)$"


@dataclass(frozen=True)
class Checked:
    """Rows that can be published, as binary columns without nulls.

    `lines` are the header lines in wire form; `msg_id` is the user's, or a digest of the row that an id is made of.
    """

    subject: Any
    payload: Any
    lines: Any
    msg_id: Any

    def __len__(self) -> int:
        return len(self.subject)

    def slice(self, first: int, count: int) -> Checked:
        parts = (self.subject, self.payload, self.lines, self.msg_id)
        return Checked(*(part.slice(first, count) for part in parts))

    @property
    def size_bytes(self) -> int:
        return sum(int(part.nbytes) for part in (self.subject, self.payload, self.lines, self.msg_id))


def check(batch: Any, first_row: int, extra: bytes, payload_bytes_max: int) -> Checked:
    """A batch of the user's rows, or the reason why one of them cannot be published. `extra`: a line for every row."""
    subject = _subjects(_column(batch, "subject"), first_row)
    payload = _payloads(_column(batch, "payload"), first_row)
    lines = _header_lines(batch, first_row)
    has_ids = "msg_id" in batch.schema.names
    msg_id = _ids(_column(batch, "msg_id"), first_row) if has_ids else digests(subject, lines, payload)
    checked = Checked(subject, payload, joined([extra, lines], len(subject)), msg_id)
    _check_sizes(checked, first_row, payload_bytes_max)
    return checked


def with_id_lines(rows: Checked, msg_id: Any) -> Checked:
    """The rows with the line of their id among their header lines."""
    return replace(rows, lines=joined([b"Nats-Msg-Id: ", msg_id, b"\r\n", rows.lines], len(rows)))


def frames(rows: Checked, reply: bytes) -> Any:
    """HPUB frames as one binary array, each answered at `reply`."""
    count = len(rows)
    head = _sum(pc.binary_length(rows.lines), len(protocol.HEADER_LINE) + 4)
    total = _sum(head, pc.binary_length(rows.payload))
    parts = [
        b"HPUB ",
        rows.subject,
        b" " + reply + b" ",
        _digits(head),
        b" ",
        _digits(total),
        b"\r\nNATS/1.0\r\n",
        rows.lines,
        b"\r\n",
        rows.payload,
        b"\r\n",
    ]
    return joined(parts, count)


def joined(parts: Sequence[bytes | Any], count: int) -> Any:
    """The parts of each row, one behind the other; plain bytes stand in every row."""
    nothing = binaries([b""])[0]
    arrays = [binaries([part])[0] if isinstance(part, bytes) else part for part in parts]
    made = pc.binary_join_element_wise(*arrays, nothing)
    assert len(made) == count
    return made.combine_chunks() if isinstance(made, pa.ChunkedArray) else made


def _digits(numbers: Any) -> Any:
    return retyped(pc.cast(numbers, pa.string()), pa.binary())


def _sum(left: Any, right: Any) -> Any:
    a = np.asarray(left).astype(np.int64)
    return integers(a + (right if isinstance(right, int) else np.asarray(right).astype(np.int64)))


def _column(batch: Any, name: str) -> Any:
    column = batch.column(batch.schema.get_field_index(name))
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def as_binary(column: Any) -> Any:
    """Strings and binaries of either width as plain binary."""
    return column if column.type == pa.binary() else pc.cast(column, pa.binary())


def _refuse(first_row: int, wrong: Any, reason: str) -> None:
    """Fail for the first row that is marked."""
    at = np.flatnonzero(np.asarray(wrong.fill_null(False)) if isinstance(wrong, pa.Array) else wrong)
    if len(at):
        raise ContractViolation(f"row {first_row + int(at[0])} of the partition cannot be published: {reason}")


def _subjects(column: Any, first_row: int) -> Any:
    _refuse(first_row, column.is_null(), "it has no subject")
    text = column if pa.types.is_string(column.type) else pc.cast(column, pa.string())
    odd = np.flatnonzero(~np.asarray(pc.match_substring_regex(text, _PLAIN_SUBJECT)))
    for at in odd:  # exactly what the client refuses; ordinary subjects never come here
        try:
            protocol.encode_subject(text[int(at)].as_py())
        except ContractViolation as error:
            raise ContractViolation(
                f"row {first_row + int(at)} of the partition cannot be published: {error}", hint=error.hint
            ) from None
    _refuse(first_row, pc.starts_with(text, "dlq."), "dlq.> is the dead-letter service's alone to write")
    too_long = np.asarray(pc.binary_length(text)) > protocol.SUBJECT_BYTES_MAX
    _refuse(first_row, too_long, f"its subject is longer than {protocol.SUBJECT_BYTES_MAX} bytes")
    return as_binary(text)


def _payloads(column: Any, first_row: int) -> Any:
    _refuse(first_row, column.is_null(), "its payload is null (an empty one is allowed)")
    return as_binary(column)


def _ids(column: Any, first_row: int) -> Any:
    _refuse(first_row, column.is_null(), "its msg_id is null, and only an id keeps a repeated row from standing twice")
    text = column if pa.types.is_string(column.type) else pc.cast(column, pa.string())
    size = np.asarray(pc.binary_length(text))
    _refuse(first_row, (size == 0) | (size > ID_BYTES_MAX), f"its msg_id has not 1 to {ID_BYTES_MAX} bytes")
    trimmed = pc.utf8_trim_whitespace(text)
    _refuse(first_row, pc.not_equal(trimmed, text), "its msg_id begins or ends with a blank")
    _refuse(first_row, pc.match_substring_regex(text, _BREAKS_OUT), "its msg_id has a line break or NUL")
    return as_binary(text)


def _header_lines(batch: Any, first_row: int) -> Any:
    """`name: value CRLF …` of each row; empty where there are no headers."""
    if "headers" not in batch.schema.names:
        return binaries([b""]).take(integers(np.zeros(batch.num_rows, np.int32)))
    column = _column(batch, "headers")
    if pa.types.is_map(column.type):
        offsets, keys, values = column.offsets, column.keys, column.items
    else:
        offsets, pairs = column.offsets, column.values
        _refuse(first_row, _rows_of(offsets, pairs.is_null()), "one of its headers is null")
        keys, values = (pairs.field(place) for place in (0, 1))
    _check_headers(offsets, keys, values, first_row)
    lines = joined([as_binary(keys), b": ", as_binary(values), b"\r\n"], len(keys))
    per_row = pa.ListArray.from_arrays(offsets, lines)
    return pc.fill_null(pc.binary_join(per_row, binaries([b""])[0]), binaries([b""])[0])


def _check_headers(offsets: Any, keys: Any, values: Any, first_row: int) -> None:
    for part, name in ((keys, "name"), (values, "value")):
        _refuse(first_row, _rows_of(offsets, part.is_null()), f"one of its headers has no {name}")
    names = keys if pa.types.is_string(keys.type) else pc.cast(keys, pa.string())
    texts = retyped(as_binary(values), pa.string())  # the bytes are looked at one by one: they need not be text
    broken = np.array([b"\r" in one or b"\n" in one or b"\0" in one for one in _odd(texts)], np.bool_)
    _refuse(
        first_row,
        _rows_of(offsets, pc.invert(pc.match_substring_regex(names, _PLAIN_NAME))),
        "the name of one of its headers",
    )
    if len(broken):
        _refuse(first_row, _rows_of(offsets, broken), "one of its headers has a line break or NUL")
    _refuse(
        first_row,
        _rows_of(offsets, pc.match_substring_regex(names, _RESERVED)),
        "Nats-Msg-Id and Nats-Expected-… are set by the sink: give the id as the column msg_id",
    )


def _odd(texts: Any) -> Sequence[bytes]:
    """The values, when any byte among them could break out of its line; else nothing to look at."""
    ends, values = contents(texts)
    inside = values[int(ends[0]) : int(ends[-1])]
    if not ((inside == 10) | (inside == 13) | (inside == 0)).any():
        return []
    found: Sequence[bytes] = retyped(texts, pa.binary()).to_pylist()
    return found


def _rows_of(offsets: Any, wrong: Any) -> Any:
    """Rows whose list holds a marked element."""
    marks = np.flatnonzero(
        np.asarray(wrong.fill_null(True)) if isinstance(wrong, pa.Array | pa.ChunkedArray) else wrong
    )
    edges = np.asarray(offsets).astype(np.int64)
    rows = np.zeros(len(edges) - 1, np.bool_)
    rows[np.searchsorted(edges, marks, side="right") - 1] = True
    return rows


def _check_sizes(rows: Checked, first_row: int, payload_bytes_max: int) -> None:
    lines = np.asarray(pc.binary_length(rows.lines)).astype(np.int64)
    _refuse(
        first_row, lines > protocol.HEADER_BYTES_MAX, f"its headers take more than {protocol.HEADER_BYTES_MAX} bytes"
    )
    id_line = np.maximum(np.asarray(pc.binary_length(rows.msg_id)), DEFAULT_ID_BYTES_MAX) + len("Nats-Msg-Id: \r\n")
    size = lines + id_line + len(protocol.HEADER_LINE) + 4 + np.asarray(pc.binary_length(rows.payload))
    at = np.flatnonzero(size > payload_bytes_max)
    if len(at):
        raise TooLarge(
            f"row {first_row + int(at[0])} of the partition cannot be published: it takes {size[at[0]]} bytes with its "
            f"headers, the server takes {payload_bytes_max}",
            hint="Raise max_payload at the server, or put large bodies elsewhere and send a reference.",
        )


# ---- ids that rows have by themselves


def digests(subject: Any, lines: Any, payload: Any) -> Any:
    """16 bytes that stand for the content of each row; the lengths keep two rows from looking alike."""
    count = len(subject)
    lengths = [_digits(_sum(pc.binary_length(part), 0)) for part in (subject, lines)]
    whole = joined([lengths[0], b" ", lengths[1], b" ", subject, lines, payload], count)
    edges, values = contents(whole)
    content = values.tobytes()
    rows = [content[first:end] for first, end in pairwise(edges.tolist())]
    made = b"".join(hashes.blake2b_all("", (rows,), DIGEST_BYTES))
    return fixed_width(np.frombuffer(made, np.uint8).reshape(count, DIGEST_BYTES))


def ranks(digests_of_all: Sequence[Any]) -> Ints:
    """How many equal rows stand before each row of the partition."""
    flat = np.concatenate([contents(one)[1] for one in digests_of_all]) if digests_of_all else np.empty(0, np.uint8)
    words = flat.reshape(-1, DIGEST_BYTES).view(np.uint64)
    order = np.lexsort((words[:, 1], words[:, 0]))  # stable: equal rows stay in their order
    ordered = words[order]
    is_new = np.ones(len(order), np.bool_)
    is_new[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    at = np.arange(len(order))
    rank = np.empty(len(order), np.int64)
    rank[order] = at - np.maximum.accumulate(np.where(is_new, at, 0))
    return rank


def default_ids(prefix: str, digest: Any, rank: Ints) -> Any:
    _, values = contents(digest)
    hexed = np.frombuffer(values.tobytes().hex().encode(), np.uint8).reshape(len(digest), 2 * DIGEST_BYTES)
    return joined([prefix.encode() + b".", fixed_width(hexed), b".", _digits(integers(rank))], len(digest))


def id_prefix(*names: object) -> str:
    """The part of an id that names the query or write, the batch and the partition."""
    text = "\0".join(map(str, names)).encode()
    return "spark." + hashlib.blake2b(text, digest_size=DIGEST_BYTES).hexdigest()
