"""Located messages as Arrow columns: the same rows from both parsers, headers included."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oncewire._ground.jetstream.protocol import Message, Parser
from oncewire.pipeline.columns import HEADERS, TIMESTAMP, Columns, binaries, header_lists
from oncewire.pipeline.frames import Cuts, split
from oncewire.pipeline.stream import Row
from tests.rules.test_pipeline_frames import EXPECTED, TIME_NS, delivery

pytestmark = pytest.mark.usefixtures("loops")

SCHEMA = pa.schema(
    [
        ("stream", pa.string()),
        ("subject", pa.string()),
        ("sequence", pa.int64()),
        ("timestamp", TIMESTAMP),
        ("payload", pa.binary()),
        ("headers", HEADERS),
    ]
)


def pairs(raw: bytes) -> list[dict[str, Any]]:
    """Header by header, as the client reads a block, but with doubles kept."""
    found = []
    for line in raw.split(b"\r\n")[1:]:
        name, colon, value = line.partition(b":")
        if colon:
            found.append({"key": name.decode("utf-8", "replace"), "value": value.strip(b" \t\n\r\x0b\x0c")})
    return found


def test_rows_are_the_same_from_both_parsers() -> None:
    headers = [b"", b"NATS/1.0\r\nA: 1\r\nB:2\r\nA: 3\r\n\r\n", b"NATS/1.0\r\n\r\n"]
    data = b"".join(delivery(n, b"p" * n, headers[n % 3], b"s.%d" % n) for n in range(1, 60))
    buffer = np.frombuffer(data, np.uint8)
    (cuts,), _ = split(buffer, EXPECTED)
    assert isinstance(cuts, Cuts)
    rows = [
        Row(event.subject_raw, number, TIME_NS + number, event.header_raw, event.payload)
        for number, event in enumerate(Parser().feed(data), 1)
        if isinstance(event, Message)
    ]
    columns = Columns("ORDERS", SCHEMA)
    fast, exact = columns.of_cuts(buffer, cuts), columns.of_rows(rows)
    fast.validate(full=True)
    assert exact.equals(fast)
    assert {"stream": "ORDERS", "subject": "s.1", "sequence": 1, "payload": b"p"}.items() <= fast.to_pylist()[0].items()


def test_only_the_columns_that_the_schema_names_are_made_and_in_its_order() -> None:
    columns = Columns("ORDERS", pa.schema([("payload", pa.binary()), ("sequence", pa.int64())]))
    batch = columns.of_rows([Row(b"s", 5, TIME_NS, b"", b"x")])
    assert [{"payload": b"x", "sequence": 5}] == batch.to_pylist()


def test_no_rows_make_an_empty_batch() -> None:
    assert 0 == Columns("ORDERS", SCHEMA).of_rows([]).num_rows


@pytest.mark.parametrize(
    "block",
    [
        b"",
        b"NATS/1.0\r\n\r\n",
        b"NATS/1.0 503\r\n\r\n",
        b"NATS/1.0\r\nA: 1\r\n\r\n",
        b"NATS/1.0\r\nA:\r\nB:  two words \r\nC: x:y:z\r\n\r\n",
        b"NATS/1.0\r\nno colon here\r\nA: 1\r\n\r\n",
        b"NATS/1.0\r\nN\xff: \xfe\x80\r\n\r\n",
        b"NATS/1.0\r\n: nameless\r\n\r\n",
    ],
)
def test_a_header_block_is_read_as_the_client_reads_it(block: bytes) -> None:
    around = b"NATS/1.0\r\nBefore: 1\r\n\r\n"
    found = header_lists(binaries([around, block, around])).to_pylist()
    assert [pairs(around), pairs(block), pairs(around)] == found


@given(st.lists(st.lists(st.tuples(st.text("AbZ-9", min_size=1), st.binary(max_size=12)), max_size=4), max_size=6))
@settings(max_examples=200, deadline=None)
def test_any_headers_come_through(rows: list[list[tuple[str, bytes]]]) -> None:
    blocks = []
    for row in rows:
        lines = [name.encode() + b": " + value.replace(b"\r\n", b"") for name, value in row]
        blocks.append(b"\r\n".join([b"NATS/1.0", *lines]) + b"\r\n\r\n" if row else b"")
    found = header_lists(binaries(blocks))
    found.validate(full=True)
    assert [pairs(block) for block in blocks] == found.to_pylist()
