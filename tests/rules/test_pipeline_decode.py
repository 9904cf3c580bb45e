"""Runtime envelopes that are read many at a time become exactly the rows that each is alone, read the slow way."""

from __future__ import annotations

import hashlib
import json
import random
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from oncewire._ground.contracts import ids, inputs, letters, runtime
from oncewire._ground.errors import Refused, UnsupportedVersion
from oncewire.pipeline import decode
from oncewire.pipeline.families import shown
from oncewire.pipeline.tables import BRONZE, SILVER

SUBJECT = "evt.acme.main.orders.placed"
OTHERS = ("cmd.acme.main.orders.place", "evt.acme.other.x", "evt.globex.main.x", "evt.acme", "evt.a b.main.x")
WHEN = datetime(2026, 11, 16, 12, tzinfo=UTC)
STORED_NS = int(WHEN.timestamp()) * 1_000_000_000 + 7
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
HEX = "0123456789abcdef"
Message = tuple[str, bytes, dict[str, str]]

PAYLOADS: list[Any] = [
    {"order": 1, "note": "x"}, {}, {"b": 1, "a": {"d": [1, {"c": None}], "b": True}}, {"ü": "ö", "\U0001f600": 1},
    {"a": 0.5}, {"a": 1e-9}, {"a": 1.0}, {"a": -0.0}, {"a": 1e21}, {"a": 2**53 - 1}, {"a": 2**53}, {"a": 2**70},
    {"a": 'q"\\\n'}, {"e-": "1.5"}, {"\ue000": 1, "\U00010000": 2}, {"payload": {"idempotency_key": "k"}},
    {"a": [[[[[[1]]]]]]}, [], "text", None, 7,
]  # fmt: skip
FIELDS: dict[str, list[Any]] = {
    "id": ["i", "", None, 7, "a\u200b", "a\nb", "ü", 'q"', "x" * 512, "x" * 513],
    "ts": [0, 253_402_300_799_999, 253_402_300_800_000, -1, 1.0, "1", None, True],
    "type": ["T", "", None, "ü", "x" * 257, 3],
    "schema_version": ["1.0", "9.9", None, 1],
    "trace_id": ["0" * 32, "F" * 32, "a" * 31, "a" * 33, "", None, "g" * 32, "a" * 16, "0" * 31 + "1", "ä" * 32],
    "span_id": ["0" * 16, "A" * 16, "b" * 15, "b" * 32, "", None, 5, "0" * 15 + "2"],
    "tenant": ["acme", "globex", "", None, 1],
    "workspace": ["main", "other", "", None],
    "actor": [{"id": "a", "role": "user"}, {"id": "a"}, {"id": "", "role": "r"}, None, "a",
              {"id": "a", "role": "r", "x": 1}],
    "idempotency_key": ["k", "", None, "k\x7f", "k\u2028", "schlüssel", "\ue000"],
    "source": [{"agent": "a", "adapter": "b"}, None, {}, {"agent": "a", "adapter": None}],
    "security_context": [{"principal_id": "p", "principal_type": "user"}, {"principal_id": "p", "principal_type": "x"},
                         None],
    "causation_id": ["c", "", None], "correlation_id": ["c", "", None, "x" * 513],
    "reply_to": ["a.b", "a..b", "", None], "entity_id": ["e", None], "expected_version": [0, 5, 2**53, -1, None, "5"],
    "unknown": [1, "text", None],
}  # fmt: skip
CARRIED = [
    {}, {}, {}, {"Nats-Msg-Id": "in.1"}, {"Nats-Msg-Id": "rp.1"},
    {"Nats-Msg-Id": "rp.2", "Oncewire-Replay-Replaces": "ab" * 32, "Oncewire-Replay-For": "c"},
    {"Nats-Msg-Id": "rp.3", "Oncewire-Replay-Replaces": "", "Oncewire-Replay-Id": "was", "Oncewire-Replay-Ts": "9"},
    {"Oncewire-Replay-Replaces": "cd" * 32}, {"traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01"},
]  # fmt: skip
WRITERS = [
    lambda told: json.dumps(told, ensure_ascii=False, separators=(",", ":")),
    lambda told: json.dumps(told),
    lambda told: json.dumps(told, sort_keys=True, indent=1),
    lambda told: json.dumps(dict(reversed(told.items())), separators=(",", ":")),
]


def complete(chance: random.Random, number: int) -> dict[str, Any]:
    """An envelope that needs nothing from where it stands, as our own encoder orders it."""
    told = {"type": "T", "payload": {"order": number}, "idempotency_key": f"k{number}"}
    origin = ids.Origin("ANY", 5, number, 0)
    body = msgspec.json.encode(told)
    whole = runtime.encode_runtime(runtime.decode_runtime(body, subject=SUBJECT, origin=origin, carried={}))
    found: dict[str, Any] = msgspec.json.decode(whole)
    found["trace_id"] = "".join(chance.choices(HEX, k=32))
    return found


def odd_message(chance: random.Random, number: int) -> Message:
    """One that is wrong, or merely strange, in one or two ways."""
    told = complete(chance, number)
    for name in chance.sample(list(FIELDS), chance.choice((0, 1, 1, 2))):
        told[name] = chance.choice(FIELDS[name])
    if chance.random() < 0.5:
        told["payload"] = chance.choice(PAYLOADS)
    if chance.random() < 0.2:
        del told[chance.choice(list(told))]
    body = chance.choice(WRITERS)(told).encode("utf-8", "surrogatepass")
    body = chance.choice(BREAKS)(chance, body) if chance.random() < 0.4 else body
    subject = SUBJECT if chance.random() < 0.8 else chance.choice(OTHERS)
    return subject, body, chance.choice(CARRIED)


def flip(chance: random.Random, body: bytes) -> bytes:
    at = chance.randrange(len(body))
    return body[:at] + bytes([chance.randrange(256)]) + body[at + 1 :]


BREAKS = [
    flip,
    lambda chance, body: body[: chance.randrange(len(body))],
    lambda _, body: body.replace(b'"type"', b'"type":"S","type"', 1),
    lambda _, body: body.replace(b'"payload"', b'"payload":{"a":1},"payload"', 1),
    lambda _, body: body.replace(b"{", b'{"a":1,"a":2,', 1),
    lambda _, body: body.replace(b'"order"', b'"order":0,"order"', 1),
    lambda _, body: body.replace(b'"T"', b'"\\u0054"', 1),
    lambda _, body: body.replace(b'"T"', b'"\\ud800"', 1),
    lambda _, body: body.replace(b'"order"', b'"\\u006frder"', 1),
    lambda _, body: body + b" ",
    lambda _, body: body + b"x",
]


def bronze(messages: list[Message]) -> pa.Table:
    rows = [
        {
            "tenant": "acme", "stream": "ANY", "created_ns": 5, "incarnation": 0, "sequence": at, "subject": subject,
            "timestamp": WHEN, "nanos": 7, "payload": body, "date": WHEN.date(),
            "headers": [{"key": name, "value": value.encode()} for name, value in carried.items()],
        }
        for at, (subject, body, carried) in enumerate(messages, 1)
    ]  # fmt: skip
    return pa.Table.from_pylist(rows, schema=BRONZE.schema)


def slowly(at: int, subject: str, body: bytes, carried: dict[str, str]) -> dict[str, Any]:
    """The row of a message that is read alone, and closely."""
    found = inputs.read_closely(body, subject=subject, origin=ids.Origin("ANY", 5, at, STORED_NS), carried=carried)
    told, msg_id = found.envelope, carried.get("Nats-Msg-Id")
    replay = carried if msg_id and msg_id.startswith("rp.") else {}
    edited = (found.digest.hex(),) if replay.get("Oncewire-Replay-Replaces") else ()
    key = ids.joined("silver", "runtime", told.tenant, told.workspace, subject, found.identity, *edited)
    return {
        "tenant": told.tenant, "stream": "ANY", "created_ns": 5, "incarnation": 0, "sequence": at, "subject": subject,
        "timestamp": WHEN, "key": hashlib.blake2b(key.encode(), digest_size=16).digest(), "identity": found.identity,
        "msg_id": msg_id, "event_time": EPOCH + timedelta(milliseconds=told.ts), "trace_id": told.trace_id,
        "span_id": told.span_id, "causation_id": told.causation_id, "correlation_id": told.correlation_id,
        "workspace": told.workspace, "id": told.id, "type": told.type, "schema_version": told.schema_version,
        "idempotency_key": told.idempotency_key, "actor_id": told.actor.id, "digest": found.digest,
        "replaces": replay.get("Oncewire-Replay-Replaces"), "replay_for": replay.get("Oncewire-Replay-For"),
        "payload": msgspec.json.encode(told.payload).decode(), "actor_role": told.actor.role,
        "source_agent": told.source.agent, "source_adapter": told.source.adapter,
        "principal_id": told.security_context.principal_id, "principal_type": told.security_context.principal_type,
        "reply_to": told.reply_to, "entity_id": told.entity_id, "expected_version": told.expected_version,
        "date": WHEN.date(),
    }  # fmt: skip


def sorted_slowly(messages: list[Message]) -> tuple[list[dict[str, Any]], list[tuple[int, str, str | None]]]:
    rows: list[dict[str, Any]] = []
    refused: list[tuple[int, str, str | None]] = []
    for at, (subject, body, carried) in enumerate(messages, 1):
        try:
            rows.append(slowly(at, subject, body, carried))
        except Refused as error:
            reason = "version" if isinstance(error, UnsupportedVersion) else "contract"
            refused.append((at, reason, shown(letters.one_line(str(error), decode.DETAIL_CHARS_MAX))))
    return rows, refused


def compare(messages: list[Message]) -> tuple[int, int]:
    found = decode.decode(bronze(messages))
    rows, refused = sorted_slowly(messages)
    part = found.parts.get("runtime", SILVER["runtime"].schema.empty_table())
    assert rows == part.to_pylist()
    told = (found.quarantine[name].to_pylist() for name in ("sequence", "reason", "detail"))
    assert refused == list(zip(*told, strict=True))
    assert ({"runtime": len(refused)} if refused else {}) == found.refused
    return len(rows), len(refused)


SHARES = (1.0, 1.0, 0.5, 0.5, 0.02, 0.001)
"""How much is odd: all, half, or one here and there in what is complete."""


@pytest.mark.parametrize(("seed", "share"), list(enumerate(SHARES)))
def test_odd_envelopes_become_the_rows_and_refusals_of_the_slow_way(seed: int, share: float) -> None:
    chance = random.Random(seed)
    messages = [
        odd_message(chance, number)
        if chance.random() < share
        else (SUBJECT, msgspec.json.encode(complete(chance, number)), chance.choice(CARRIED[:4]))
        for number in range(decode.TOGETHER + 500)
    ]
    good, bad = compare(messages)
    assert good > 100, "hardly anything was read"
    assert bad > 100 or share < 1, "hardly anything was refused"


@pytest.mark.parametrize("name", FIELDS)
def test_each_value_of_a_field_is_read_among_others_as_alone(name: str) -> None:
    chance = random.Random(name)
    odd = [(SUBJECT, msgspec.json.encode(complete(chance, 1) | {name: value}), {}) for value in FIELDS[name]]
    for message in odd:
        around = [(SUBJECT, msgspec.json.encode(complete(chance, number)), {}) for number in range(3)]
        compare([*around, message, *around])


def test_rows_keep_bronzes_order_whatever_reads_them() -> None:
    """The first copy of an identity wins: an odd envelope may not come before or after its place."""
    chance = random.Random(0)
    bodies = [complete(chance, number) for number in range(2 * decode.TOGETHER + 10)]
    for told in bodies[::7]:
        del told["id"]
    rows = bronze([(SUBJECT, msgspec.json.encode(told), {}) for told in bodies])
    assert rows["sequence"].to_pylist() == decode.decode(rows).parts["runtime"]["sequence"].to_pylist()
