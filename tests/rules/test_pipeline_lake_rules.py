"""What may be added to the lake and what is missing from it; how messages become rows."""

from __future__ import annotations

import hashlib
import json
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from oncewire._ground.contracts import blocks, encode_message, ids, new_message, runtime
from oncewire._ground.errors import Conflict, Corrupt
from oncewire.pipeline import decode
from oncewire.pipeline.deriving import Sorted, sort_out
from oncewire.pipeline.families import silver_name
from oncewire.pipeline.lake import rules
from oncewire.pipeline.lake.log import Added, version_of
from oncewire.pipeline.lake.rules import Balance, Second, Span, Step, Written
from oncewire.pipeline.staging import Staged
from oncewire.pipeline.tables import BRONZE, SILVER, TABLES
from tests.spark.lakes import WHEN, chat, event, metered

LIFE = ("EVENTS", 1, 0)


def span(first: int, last: int, lifetime: tuple[str, int, int] = LIFE) -> Span:
    return Span(lifetime, first, last)


# ---- ranges


@pytest.mark.parametrize(
    ("first", "last", "reached", "step"),
    [
        (0, 100, None, Step.APPEND),
        (1, 100, None, Step.APPEND),
        (101, 200, 100, Step.APPEND),
        (1, 100, 100, Step.SKIP),
        (0, 50, 100, Step.SKIP),
        (51, 100, 200, Step.SKIP),
    ],
)
def test_a_range_is_appended_once(first: int, last: int, reached: int | None, step: Step) -> None:
    assert step is rules.admit(span(first, last), reached)


@pytest.mark.parametrize(
    ("first", "last", "reached", "said"),
    [(0, 101, 100, "overlap"), (100, 101, 100, "overlap"), (102, 200, 100, "missing"), (2, 5, None, "missing")],
)
def test_a_range_that_overlaps_or_leaves_a_hole_is_refused(first: int, last: int, reached: int, said: str) -> None:
    with pytest.raises(Corrupt, match=said) as refused:
        rules.admit(span(first, last), reached)
    assert "oncewire pipeline backfill EVENTS" in refused.value.hint


def written(*runs: tuple[int, int], rows: int | None = None) -> Written:
    count = sum(last - first + 1 for first, last in runs)
    return Written("p", 1, count if rows is None else rows, "{}", runs=runs)


def test_what_the_executors_wrote_lies_in_the_range_and_stands_once() -> None:
    assert ((1, 5), (7, 9)) == rules.check_runs(span(0, 9), [written((7, 9)), written((1, 5))])
    with pytest.raises(Corrupt, match="twice"):
        rules.check_runs(span(0, 9), [written((1, 5)), written((5, 9))])
    with pytest.raises(Corrupt, match="were written for"):
        rules.check_runs(span(5, 9), [written((4, 9))])
    with pytest.raises(Corrupt, match="were written for"):
        rules.check_runs(span(5, 9), [written((5, 10))])
    with pytest.raises(Corrupt, match="do not hold"):
        rules.check_runs(span(0, 9), [written((1, 9), rows=8)])


def second(ranges: int, sequences: int, **told: Any) -> Second:
    """A stream of sequences 1 to 100 that counts enough deletions."""
    figures = {"first_sequence": 1, "last_sequence": 100, "messages": 90, "deleted": 10, "removes_inside": False}
    return Second(1, limits="{}", ranges=ranges, sequences=sequences, next_stored=0, **{**figures, **told})


@pytest.mark.parametrize(
    ("range_", "runs", "told", "gaps"),
    [
        (span(0, 9), [(1, 9)], None, []),
        (span(0, 9), [(4, 9)], second(1, 3, first_sequence=4), [(1, 3, "before")]),
        (span(0, 9), [(4, 5), (8, 8)], second(3, 6, first_sequence=4),
         [(1, 3, "before"), (6, 7, "deleted"), (9, 9, "deleted")]),
        (span(10, 19), [(12, 19)], second(1, 2), [(10, 11, "deleted")]),
        (span(10, 19), [(12, 17)], second(2, 4, removes_inside=True), [(10, 11, "limit"), (18, 19, "limit")]),
        (span(10, 19), [(12, 17)], second(2, 4, first_sequence=12), [(10, 11, "trimmed"), (18, 19, "deleted")]),
        (span(10, 19), [(12, 17)], second(2, 4, first_sequence=12, removes_inside=True),
         [(10, 11, "limit"), (18, 19, "limit")]),
        (span(10, 19), [], second(1, 10), [(10, 19, "deleted")]),
        (span(0, 9, ("EVENTS", 1, 2)), [(4, 9)], None, [(1, 3, "earlier")]),
        (span(0, 9, ("EVENTS", 1, 2)), [(4, 6), (8, 9)], second(1, 1), [(1, 3, "earlier"), (7, 7, "deleted")]),
    ],
)  # fmt: skip
def test_gaps_have_a_range_and_a_cause(
    range_: Span, runs: list[tuple[int, int]], told: Second | None, gaps: list[tuple[int, int, str]]
) -> None:
    found = rules.find_gaps(range_, runs, told, is_loss_accepted=False)
    assert gaps == [(one.first, one.last, one.cause) for one in found]
    assert all(one.lifetime == range_.lifetime and one.second == told for one in found)


@pytest.mark.parametrize(
    "told",
    [
        None,
        second(2, 2),  # asked for something else
        second(1, 3),
        second(1, 2, deleted=1),  # it counts fewer deletions
        second(1, 2, deleted=0),
        second(1, 2, last_sequence=10),  # it ends before
        second(1, 2, first_sequence=11),  # it begins in the middle
    ],
)
def test_what_the_leader_does_not_bear_out_has_no_known_cause(told: Second | None) -> None:
    (found,) = rules.find_gaps(span(10, 19), [(12, 19)], told, is_loss_accepted=True)
    assert (10, 11, "unknown") == (found.first, found.last, found.cause)


def test_a_gap_keeps_what_is_stored_behind_it() -> None:
    told = second(2, 4)
    found = rules.find_gaps(span(10, 19), [(12, 17)], replace(told, next_stored=25), is_loss_accepted=True)
    assert [(12, "the loss was accepted"), (25, "the loss was accepted")] == [
        (one.next_stored, one.detail) for one in found
    ]
    assert [0] == [one.next_stored for one in rules.find_gaps(span(10, 19), [(10, 17)], second(1, 2),
                                                              is_loss_accepted=False)]  # fmt: skip


def test_the_numbers_of_an_earlier_incarnation_are_not_asked_for() -> None:
    """The stream has them: they are other messages."""
    later = span(0, 9, ("EVENTS", 1, 2))
    assert [(7, 7)] == rules.asked(later, rules.missing(later, [(4, 6), (8, 9)]))
    assert [(1, 3)] == rules.asked(span(0, 9), rules.missing(span(0, 9), [(4, 9)]))


def test_what_the_leader_said_goes_with_the_range_into_the_log() -> None:
    told = second(1, 2)
    facts = json.loads(json.dumps(rules.span_facts(span(10, 19), 8, told, is_loss_accepted=False)))
    assert (True, told) == (facts["gaps"], Second.from_dict(facts["second"]))
    assert (False, None) == tuple(
        rules.span_facts(span(10, 19), 10, None, is_loss_accepted=False)[name] for name in ("gaps", "second")
    )


def test_a_batch_that_does_not_balance_fails() -> None:
    Balance("runtime", 10, 7, 2, 1).check()
    with pytest.raises(Corrupt, match="does not balance"):
        Balance("runtime", 10, 7, 2, 0).check()


def test_an_interrupted_batch_is_completed_as_it_was_begun() -> None:
    assert 12 == rules.next_target([12, 12], 20)
    assert 20 == rules.next_target([], 20)


def test_what_compaction_rewrote_is_not_new() -> None:
    def add(path: str, is_new: bool) -> str:
        stats = json.dumps({"numRecords": 3, "minValues": {}})
        return json.dumps({"add": {"path": path, "size": 9, "dataChange": is_new, "stats": stats}})

    info = json.dumps({"commitInfo": {"operation": "WRITE", "oncewire": '{"first": 1}'}})
    found = version_of(4, [info, add("a%20b.parquet", True), add("c.parquet", False)])
    assert (Added("a b.parquet", 3, 9, {"numRecords": 3, "minValues": {}}),) == found.added
    assert {"first": 1} == found.facts


# ---- duplicates


def staged(*pairs: tuple[int, int]) -> Staged:
    """Rows by key and digest."""
    keys = b"".join(key.to_bytes(16, "big") for key, _ in pairs)
    digests = b"".join(digest.to_bytes(32, "big") for _, digest in pairs)
    sequences = b"".join(sequence.to_bytes(8, "little") for sequence in range(1, len(pairs) + 1))
    return Staged("runtime", f"part-{pairs[0]}", len(pairs), 1, keys, digests, sequences)


def test_the_first_copy_wins_and_another_content_under_its_identity_is_a_conflict() -> None:
    first, second = staged((1, 1), (2, 1), (1, 1)), staged((2, 9), (3, 1))
    known = {(3).to_bytes(16, "big"): (1).to_bytes(32, "big")}
    found = sort_out("runtime", [("a.parquet", first), ("b.parquet", second)], known, has_digest=True)
    assert 2 == found.duplicates
    assert {first.path: [2], second.path: [0, 1]} == found.dropped
    assert [("b.parquet", 1)] == [(one.bronze, one.sequence) for one in found.conflicts]


def test_keys_that_differ_in_one_half_are_not_copies() -> None:
    half = 2**64
    alike = staged((half, 1), (2 * half, 1), (half + 1, 1))
    assert Sorted({}, 0, []) == sort_out("runtime", [("a", alike)], {}, has_digest=True)
    assert 1 == sort_out("runtime", [("a", alike), ("b", staged((2 * half, 1)))], {}, has_digest=True).duplicates


# ---- messages to rows


def bronze_rows(*bodies: tuple[str, bytes, dict[str, str]]) -> pa.Table:
    made = [
        {
            "tenant": "acme" if subject.startswith("evt.") else None,
            "stream": "ANY",
            "created_ns": 5,
            "incarnation": 0,
            "sequence": at,
            "subject": subject,
            "timestamp": WHEN,
            "nanos": 7,
            "headers": [{"key": name, "value": value.encode()} for name, value in carried.items()],
            "payload": body,
            "date": WHEN.date(),
        }
        for at, (subject, body, carried) in enumerate(bodies, 1)
    ]
    return pa.Table.from_pylist(made, schema=BRONZE.schema)


def of(message: Any) -> tuple[str, bytes, dict[str, str]]:
    return message.subject, message.payload, dict(message.headers or {})


BAD = [
    b"",
    b"\x00",
    b"\xff\xfe",
    b"{",
    b"[]",
    b'"text"',
    b'{"type":"a"}',
    b'{"type":"a","payload":[]}',
    b'{"type":"a","payload":{},"schema_version":"9.9"}',
    b'{"type":"a","payload":{"x":"\\ud800"}}',
    b'{"type":"a","type":"b","payload":{}}',
    b'{"type":"a","payload":{},"tenant":"other"}',
    b'{"type":"a","payload":' + b"[" * 2000 + b"]" * 2000 + b"}",
    b'{"type":"a","payload":{"x":"' + b"y" * (9 << 20) + b'"}}',
]


def test_what_breaks_its_contract_is_refused_alone_and_kept_byte_for_byte() -> None:
    good = of(event(1))
    rows = bronze_rows(good, *(("evt.acme.main.x", body, {}) for body in BAD), of(event(2)))
    found = decode.decode(rows)
    assert ["key:acme/main/order-1", "key:acme/main/order-2"] == found.parts["runtime"]["identity"].to_pylist()
    assert {"runtime": len(BAD)} == found.refused
    assert BAD == found.quarantine["payload"].to_pylist()
    reasons = found.quarantine["reason"].to_pylist()
    assert "version" == reasons[BAD.index(b'{"type":"a","payload":{},"schema_version":"9.9"}')]
    assert {"contract", "version"} == set(reasons)


def test_a_subject_that_no_contract_names_is_refused() -> None:
    found = decode.decode(bronze_rows(("strange.subject", b"{}", {})))
    assert ["subject"] == found.quarantine["reason"].to_pylist()
    assert [None] == found.quarantine["family"].to_pylist()
    assert {"": 1} == found.refused


def test_numbers_that_a_table_cannot_hold_are_refused_alone() -> None:
    advisory = {"type": "t", "stream": "S", "consumer": "c", "stream_seq": 1, "id": "a"}
    subject = "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.S.c"
    bodies = [advisory, advisory | {"id": "b", "stream_seq": 2**70}, advisory | {"id": "c"}]
    found = decode.decode(bronze_rows(*((subject, json.dumps(body).encode(), {}) for body in bodies)))
    assert 2 == found.parts["advisory"].num_rows
    assert ["unreadable"] == found.quarantine["reason"].to_pylist()


def test_every_family_becomes_rows_of_its_table() -> None:
    block = blocks.Announcement(
        1,
        "led",
        "acme",
        "main",
        "biller",
        7,
        "00" * 32,
        [
            blocks.Inputs(
                "EVENTS",
                "2026-11-16T12:00:00.5Z#2",
                "c",
                ("evt.>",),
                1,
                "ab",
                done=[(1, 9)],
                listed=[(1, "i", "d")],
                subjects=["cmd.x"],
            )
        ],
        ["fx.1"],
        "cd",
        blocks.Confirmed(6, {"EVENTS": 5}),
        {"EVENTS": [(0, 0)]},
        [("EVENTS", "2026-11-16T12:00:00.5Z", 9)],
    )
    told = {"Oncewire-Dlq-Cause": "timeout", "Oncewire-Dlq-Stream": "EVENTS", "Oncewire-Dlq-Sequence": "3"}
    rows = bronze_rows(
        of(event(1)),
        of(metered(1)),
        of(chat(1)),
        ("ledger.biller.led", blocks.write_announcement(block), {}),
        ("dlq.evt.acme.main.x", b"\xff", told | {"Nats-Msg-Id": "dl.1"}),
        ("dlq_requests.biller", b"body", told),
        ("dlq_replays.ab", b'{"letter":"ab"}', {}),
    )
    found = decode.decode(rows)
    assert 0 == found.quarantine.num_rows, found.quarantine["detail"].to_pylist()
    assert {"runtime", "message", "realtime", "ledger", "letter", "request", "replay"} == set(found.parts)
    assert all(SILVER[name].schema == part.schema for name, part in found.parts.items())
    ledger = found.parts["ledger"].to_pylist()[0]
    assert (7, "acme", "main") == (ledger["number"], ledger["tenant"], ledger["workspace"])
    assert (1_794_830_400_500_000_000, 2) == (ledger["inputs"][0]["created_ns"], ledger["inputs"][0]["incarnation"])
    assert [{"first": 1, "last": 9}] == ledger["inputs"][0]["done"]
    assert ["cmd.x"] == [listed["subject"] for listed in ledger["inputs"][0]["listed"]]
    letter = found.parts["letter"].to_pylist()[0]
    assert ("timeout", "EVENTS", 3, b"\xff") == tuple(
        letter[name] for name in ("cause", "origin_stream", "origin_sequence", "body")
    )
    assert all(len(key) == 16 for part in found.parts.values() for key in part["key"].to_pylist())


def test_identities_are_those_that_an_agent_knows() -> None:
    """A message without an id gets the one that the runtime would give it, which needs the nanoseconds."""
    from oncewire._ground.contracts import Origin, read_input

    body = b'{"type":"a","payload":{}}'
    found = decode.decode(bronze_rows(("evt.acme.main.x", body, {}))).parts["runtime"].to_pylist()[0]
    at_ns = int(WHEN.timestamp()) * 1_000_000_000 + 7
    wanted = read_input(body, subject="evt.acme.main.x", origin=Origin("ANY", 5, 1, at_ns), carried={})
    assert (wanted.identity, wanted.digest) == (found["identity"], found["digest"])


def test_messages_read_together_are_the_rows_that_they_are_alone() -> None:
    """Complete envelopes are read many at a time; an odd one among them changes nothing for the others."""
    payloads = [{"a": 1}, {"b": "ü"}, {"c": 0.5}, {"d": 10**400}, {}]
    deep = b'{"payload":' + b'{"a":' * 2_000 + b"1" + b"}" * 2_000 + b"}"
    bodies = [complete_body(number, payload) for number, payload in enumerate(payloads)] + [deep, b"{"]
    found = bronze_rows(*(("evt.acme.main.x", body, {}) for body in bodies))
    together = decode.decode(found)
    alone = [decode.decode(found.slice(at, 1)) for at in range(len(bodies))]
    parts = [one.parts["runtime"] for one in alone if "runtime" in one.parts]
    assert pa.concat_tables(parts).to_pylist() == together.parts["runtime"].to_pylist()
    assert pa.concat_tables([one.quarantine for one in alone]).to_pylist() == together.quarantine.to_pylist()
    assert 5 == len(parts)


def complete_body(number: int, payload: dict[str, Any]) -> bytes:
    """An envelope that needs nothing from where it stands."""
    body = {"type": "T", "payload": {}, "idempotency_key": f"k{number}"}
    origin = ids.Origin("ANY", 5, 1, 0)
    told = runtime.decode_runtime(json.dumps(body).encode(), subject="evt.acme.main.x", origin=origin, carried={})
    text = json.dumps(payload, ensure_ascii=False, separators=(",", ":"))
    return runtime.encode_runtime(told).replace(b'"payload":{}', b'"payload":' + text.encode())


def test_a_key_is_the_hash_of_all_that_tells_two_messages_apart() -> None:
    [row] = decode.decode(bronze_rows(of(event(1)))).parts["runtime"].to_pylist()
    text = ids.joined("silver", "runtime", "acme", "main", row["subject"], row["identity"])
    assert hashlib.blake2b(text.encode(), digest_size=16).digest() == row["key"]


def test_the_same_key_on_another_subject_is_another_message_and_an_edited_replay_is_a_row_of_its_own() -> None:
    one, other = event(1), event(1, "evt.acme.main.invoices.made")
    edited = (one.subject, one.payload, {"Nats-Msg-Id": "rp.1", "Oncewire-Replay-Replaces": "00" * 32})
    found = decode.decode(bronze_rows(of(one), of(other), edited, of(one))).parts["runtime"]
    keys = found["key"].to_pylist()
    assert 3 == len(set(keys))
    assert keys[0] == keys[3]
    assert [None, None, "00" * 32, None] == found["replaces"].to_pylist()


def test_chat_subjects_may_have_another_prefix() -> None:
    from oncewire._ground.contracts.catalog import Family

    assert "realtime" == silver_name("talk.c1", (("talk.*", Family.REALTIME),))
    assert "" == silver_name("talk.c1")
    assert ("request", "letter") == (silver_name("dlq_requests.a"), silver_name("dlq.evt.a"))


def test_a_message_that_is_sent_to_the_platform_keeps_its_time_to_the_microsecond() -> None:
    sent = new_message(
        "UsageMetered",
        {"tenant_id": "t2"},
        message_id="m",
        timestamp=WHEN.replace(microsecond=123_456),
        actor_id="a",
        actor_kind="SYSTEM",
    )
    body = encode_message(sent)
    row = decode.decode(bronze_rows(("platform.billing.usage.metered", body, {}))).parts["message"].to_pylist()[0]
    assert (sent.timestamp, "t2", "id:t2/default/m") == (row["event_time"], row["tenant"], row["identity"])


def test_every_table_says_its_keys_and_grain() -> None:
    for name, table in TABLES.items():
        columns = [column for column, _ in table.columns]
        assert name == table.name
        assert set(table.keys) <= set(columns), name
        assert len(columns) == len(set(columns)), name
        assert table.grain


@pytest.mark.parametrize(
    ("reached", "is_refused"), [(None, False), (2, False), (7, False), (3, True), (5, True), (8, True)]
)
def test_a_batch_of_silver_is_refused_where_a_table_stands_at_another_cut(
    reached: int | None, is_refused: bool
) -> None:
    """Versions 3 to 7 of bronze are at hand. That a table has just these is what a kill leaves behind."""
    with pytest.raises(Conflict, match="another pipeline works on this lake") if is_refused else nullcontext():
        rules.check_begun("quarantine", 3, 7, reached)
