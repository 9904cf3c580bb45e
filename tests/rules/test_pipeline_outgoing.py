"""Rows to publish: checked before anything is sent, and made into the frames that the client would make."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from oncewire._ground.errors import ContractViolation, TooLarge
from oncewire._ground.jetstream import protocol
from oncewire.pipeline.columns import HEADERS
from oncewire.pipeline.outgoing import Checked, check, default_ids, frames, id_prefix, ranks, with_id_lines
from oncewire.pipeline.publish import CHUNK_BYTES, CHUNK_RECORDS, chunks

LIMIT = 1024 * 1024


def rows(**columns: Any) -> Any:
    count = len(next(iter(columns.values())))
    given = {"subject": ["a.b"] * count, "payload": [b"x"] * count, **columns}
    kinds = {"payload": pa.binary(), "headers": HEADERS}
    arrays = [pa.array(values, kinds.get(name, pa.string())) for name, values in given.items()]
    return pa.RecordBatch.from_arrays(arrays, names=list(given))


def checked(batch: Any, extra: bytes = b"", limit: int = LIMIT) -> Checked:
    return check(batch, 100, extra, limit)


def sent(batch: Any) -> list[bytes]:
    good = checked(batch)
    made: list[bytes] = frames(with_id_lines(good, good.msg_id), b"_INBOX.x.7").to_pylist()
    return made


def test_frames_are_those_of_the_client() -> None:
    batch = rows(
        subject=["a.b", "ü.c"],
        payload=[b"", b"{}\r\n\x00\xff"],
        msg_id=["id-1", "id-2"],
        headers=[None, [{"key": "A", "value": b"1"}, {"key": "B-2", "value": b"two"}]],
    )
    wanted = []
    for number, (subject, payload, headers) in enumerate(
        [("a.b", b"", {}), ("ü.c", b"{}\r\n\x00\xff", {"A": "1", "B-2": "two"})], 1
    ):
        header = protocol.encode_headers({"Nats-Msg-Id": f"id-{number}", **headers})
        wanted.append(protocol.encode_pub(subject.encode(), b"_INBOX.x.7", payload, header))
    assert wanted == sent(batch)


@pytest.mark.parametrize("headers", [[None, None], [[], []], [None, []]])
def test_rows_without_any_header_are_published(headers: list[Any]) -> None:
    assert [b"", b""] == checked(rows(payload=[b"1", b"2"], headers=headers)).lines.to_pylist()


def test_headers_may_be_a_map() -> None:
    kind = pa.map_(pa.string(), pa.string())
    columns = [pa.array(["a"]), pa.array([b"x"]), pa.array([[("K", "v")]], kind), pa.array(["i"])]
    batch = pa.RecordBatch.from_arrays(columns, names=["subject", "payload", "headers", "msg_id"])
    assert b"\r\nNats-Msg-Id: i\r\nK: v\r\n\r\nx\r\n" in sent(batch)[0]


@pytest.mark.parametrize(
    ("column", "bad", "reason"),
    [
        ("subject", None, "no subject"),
        ("subject", "", "1 to 4000 bytes"),
        ("subject", "a.*", "wildcard"),
        ("subject", "a.>", "wildcard"),
        ("subject", "a..b", "not a subject"),
        ("subject", "a b", "not a subject"),
        ("subject", "a\r\nPUB x", "not a subject"),
        ("subject", "s" * 4001, "1 to 4000|longer than"),
        ("subject", "dlq.billing.x", "dead-letter service"),
        ("payload", None, "payload is null"),
        ("msg_id", None, "msg_id is null"),
        ("msg_id", "", "msg_id has not"),
        ("msg_id", " x", "blank"),
        ("msg_id", "a\nb", "line break"),
        ("headers", [{"key": "A", "value": b"1\r\nB: 2"}], "line break"),
        ("headers", [{"key": "A\r\nB", "value": b"1"}], "name of one"),
        ("headers", [{"key": "", "value": b"1"}], "name of one"),
        ("headers", [{"key": None, "value": b"1"}], "has no name"),
        ("headers", [{"key": "A", "value": None}], "has no value"),
        ("headers", [None], "headers is null"),
        ("headers", [{"key": "nats-msg-id", "value": b"1"}], "column msg_id"),
        ("headers", [{"key": "Nats-Expected-Last-Sequence", "value": b"1"}], "set by the sink"),
    ],
)
def test_a_bad_row_is_named_with_its_reason(column: str, bad: Any, reason: str) -> None:
    good = {"subject": "a", "payload": b"x", "msg_id": "m", "headers": [{"key": "A", "value": b"1"}]}[column]
    with pytest.raises(ContractViolation, match=f"row 102 .*({reason})"):
        checked(rows(**{column: [good, good, bad, good]}))


def test_a_row_that_the_server_would_not_take_is_named() -> None:
    with pytest.raises(TooLarge, match=r"row 101 .* takes \d+ bytes"):
        checked(rows(payload=[b"x", b"y" * 2000]), limit=2000)


def test_a_line_for_every_row_counts_and_stands_in_each() -> None:
    good = checked(rows(payload=[b"1", b"2"], msg_id=["a", "b"]), extra=b"Nats-Expected-Stream: S\r\n")
    assert [b"Nats-Expected-Stream: S\r\n"] * 2 == good.lines.to_pylist()


def ids(batch: Any, prefix: str = "p") -> list[bytes]:
    good = checked(batch)
    made: list[bytes] = default_ids(prefix, good.msg_id, ranks([good.msg_id])).to_pylist()
    return made


def test_rows_keep_their_ids_in_whatever_order_they_come() -> None:
    payloads = [b"%d" % (number % 7) for number in range(20)]
    assert sorted(ids(rows(payload=payloads))) == sorted(ids(rows(payload=payloads[::-1])))


def test_equal_rows_have_different_ids() -> None:
    assert 20 == len(set(ids(rows(payload=[b"same"] * 20))))


def test_nothing_moves_between_subject_headers_and_payload_unseen() -> None:
    alike = rows(subject=["a", "ab"], payload=[b"bc", b"c"])
    assert 2 == len({one.rpartition(b".")[0] for one in ids(alike)})


def test_ids_of_another_batch_or_partition_differ() -> None:
    assert id_prefix("query", "q", "1", 0) == id_prefix("query", "q", "1", 0)
    assert 3 == len(
        {id_prefix("query", "q", "1", 0), id_prefix("query", "q", "1", 1), id_prefix("query", "q", "11", 0)}
    )


def test_equal_rows_are_counted_over_all_batches() -> None:
    first, second = (checked(rows(payload=[b"x", b"y"])).msg_id for _ in range(2))
    assert [0, 0, 1, 1] == ranks([first, second]).tolist()
    assert 0 == len(ranks([])) == len(np.empty(0))


def test_chunks_are_limited_in_rows_and_in_bytes_and_a_large_row_stands_alone() -> None:
    sizes = [10] * 3_000 + [CHUNK_BYTES + 1] + [CHUNK_BYTES // 4] * 5
    made = list(chunks(checked(rows(payload=[b"x" * size for size in sizes]), limit=2 * CHUNK_BYTES)))
    assert [CHUNK_RECORDS, 1_000, 1, 4, 1] == [len(chunk.rows) for chunk in made]
    assert sizes == [len(payload) for chunk in made for payload in chunk.rows.payload.to_pylist()]
