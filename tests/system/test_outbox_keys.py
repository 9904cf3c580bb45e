"""Keys of messages that SQL alone enqueues: made where they are left out, checked where they are not."""

from __future__ import annotations

import json
import math
import random
import struct
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest
import pytest_asyncio

import oncewire
from oncewire._ground.contracts import canonical, decode_message, ids
from oncewire.outbox.relay import relaying
from tests.rules.test_contracts_canonical import VECTORS
from tests.support.nats import NatsServer
from tests.support.outbox import MESSAGES_STREAM, MESSAGES_SUBJECT, drained, make_messages_stream
from tests.support.postgres import shared_postgres

WORDS = [
    "",
    "a",
    "b",
    "Z",
    "ä",
    "é",
    "\u20ac",
    "\ud7ff",
    "\ue000",
    "\ufb33",
    "\uffff",
    "\U00010000",
    "\U0001f600",
    '"\\/',
    "\b\f\n\r\t\x01\x7f",
]
"""Names that UTF-8 and UTF-16 sort differently, and characters with and without escapes."""


@pytest_asyncio.fixture
async def url() -> str:
    return await shared_postgres().new_database()


@pytest_asyncio.fixture
async def connection(url: str) -> AsyncIterator[Any]:
    opened = await asyncpg.connect(url)
    yield opened
    await opened.close()


def envelope(**fields: Any) -> dict[str, Any]:
    told = {
        "schema_version": "1.0", "message_type": "LoopCreated", "message_id": "m-1",
        "timestamp": "2025-01-01T00:00:00Z", "actor_id": "a", "actor_kind": "HUMAN", "payload": {"n": 1},
    }  # fmt: skip
    return {name: value for name, value in (told | fields).items() if value is not ...}


async def enqueue(connection: Any, subject: str = MESSAGES_SUBJECT, text: str = "", **fields: Any) -> int:
    sent = text or json.dumps(envelope(**fields))
    found: int = await connection.fetchval("SELECT enqueue_message($1, $2::text::json)", subject, sent)
    return found


async def bodies(connection: Any) -> list[str]:
    return [row[0] for row in await connection.fetch("SELECT body FROM outbox_messages ORDER BY id")]


def derived(sent: dict[str, Any]) -> str:
    return ids.idempotency_key(sent["message_type"], sent["message_id"], sent["payload"])


# ---- the canonical form


def values(chance: random.Random, depth: int = 3) -> Any:
    match chance.randrange(7 if depth else 5):
        case 0:
            return chance.choice([None, True, False])
        case 1:
            return chance.choice(
                [0, -1, 2**53 + 1, 1_705_329_000_123_456_789, -(2**64), 10**40, chance.getrandbits(70)]
            )
        case 2:
            return chance.choice(
                [
                    0.0,
                    -0.0,
                    1.0,
                    1e23,
                    1e21,
                    1e-7,
                    5e-324,
                    0.1,
                    1e20,
                    chance.uniform(-9, 9) * 10 ** chance.randint(-9, 25),
                ]
            )
        case 3 | 4:
            return "".join(chance.choices(WORDS, k=chance.randrange(3)))
        case 5:
            return [values(chance, depth - 1) for _ in range(chance.randrange(4))]
    return {"".join(chance.choices(WORDS, k=chance.randint(0, 2))): values(chance, depth - 1) for _ in range(6)}


def _vectors() -> list[Any]:
    """But for the character that no text of PostgreSQL holds."""
    told = [json.loads(one["text"]) for one in VECTORS["values"]]
    return [one for one in told if "\\u0000" not in json.dumps(one)]


async def test_sql_writes_the_canonical_form_that_python_writes(connection: Any) -> None:
    chance = random.Random(20250115)
    told = [{"v": values(chance)} for _ in range(1_000)] + _vectors()
    texts = [json.dumps(one, ensure_ascii=chance.random() < 0.5, indent=chance.choice([None, 1])) for one in told]
    found = await connection.fetch("SELECT canonical_json(one::json) FROM unnest($1::text[]) AS one", texts)
    assert [canonical.canonical(json.loads(text)).decode() for text in texts] == [row[0] for row in found]


async def test_sql_writes_every_double_as_ecmascript_does(connection: Any) -> None:
    """PostgreSQL's own text of 1e23 and its like is a digit longer."""
    chance = random.Random(7)
    doubles = [10.0**at for at in range(-323, 309)] + [2.0**at for at in range(-1074, 1024)]
    doubles += [math.nextafter(one, way) for one in doubles for way in (0.0, math.inf)]
    doubles += [struct.unpack(">d", chance.randbytes(8))[0] for _ in range(5_000)]
    doubles = [one for one in doubles if math.isfinite(one)]
    query = "SELECT canonical_fraction(one) FROM unnest($1::float8[]) AS one"
    assert [canonical.number(one) for one in doubles] == [row[0] for row in await connection.fetch(query, doubles)]


# ---- keys


async def test_a_key_that_is_left_out_is_that_of_the_message(connection: Any, url: str, server: NatsServer) -> None:
    async with oncewire.connect(server.url) as client:
        await make_messages_stream(client)
        sent = envelope(payload={"at_ns": 1_705_329_000_123_456_789, "rate": 1e-7, "ü": ["\U0001f600"]})
        first = await enqueue(connection, text=json.dumps(sent, indent=2))
        assert first == await enqueue(connection, **sent)
        async with relaying(client, url):
            await drained(url)
        (stored,) = await client.get_batch(MESSAGES_STREAM)
    told = decode_message(stored.payload)
    assert derived(sent) == told.idempotency_key == stored.headers["Nats-Msg-Id"]
    assert sent["payload"] == told.payload
    query = "SELECT message_idempotency_key($1, $2, $3::text::json)"
    assert derived(sent) == await connection.fetchval(query, "LoopCreated", "m-1", json.dumps(sent["payload"]))


async def test_an_id_under_its_other_name_counts_too(connection: Any) -> None:
    await enqueue(connection, message_id=..., event_id="m-1")
    (body,) = await bodies(connection)
    assert derived(envelope()) == json.loads(body)["idempotency_key"]


async def test_a_hash_of_another_message_is_refused(connection: Any) -> None:
    await enqueue(connection, idempotency_key=derived(envelope()))
    for wrong in (derived(envelope(message_id="m-2")), f"sha256:{'0' * 64}"):
        with pytest.raises(asyncpg.PostgresError, match="not that of the message") as refused:
            await enqueue(connection, idempotency_key=wrong)
        assert "OW400" == refused.value.sqlstate
    assert 1 == len(await bodies(connection))


async def test_another_content_under_a_used_key_is_an_error_and_a_repeat_is_none(connection: Any) -> None:
    first = await enqueue(connection, idempotency_key="a7")
    assert first == await enqueue(connection, idempotency_key="a7", timestamp="2025-02-02T00:00:00Z")
    assert first == await enqueue(connection, idempotency_key="a7", payload={"n": 1.0})
    for changed in ({"payload": {"n": 2}}, {"message_type": "LoopClosed"}):
        with pytest.raises(asyncpg.PostgresError, match="another type or payload") as refused:
            await enqueue(connection, idempotency_key="a7", **changed)
        assert "OW409" == refused.value.sqlstate
    with pytest.raises(asyncpg.PostgresError, match="was enqueued for"):
        await enqueue(connection, "sr.events.other", idempotency_key="a7")
    assert 1 == len(await bodies(connection))


@pytest.mark.parametrize("fields", [{}, {"idempotency_key": "k"}])
async def test_a_nul_that_postgresql_cannot_hold_is_refused(connection: Any, fields: dict[str, str]) -> None:
    with pytest.raises(asyncpg.PostgresError, match="u0000 cannot be converted to text"):
        await enqueue(connection, payload={"text": "a\0b"}, **fields)
    await enqueue(connection, payload={"text": "a\\u0000b"}, **fields)
    assert [{"text": "a\\u0000b"}] == [json.loads(body)["payload"] for body in await bodies(connection)]


INCOMPLETE: list[dict[str, Any]] = [
    *({name: ...} for name in envelope()),
    *({name: None} for name in (*envelope(), "idempotency_key")),
    *({name: ""} for name in ("message_type", "message_id", "actor_id", "idempotency_key")),
    *({name: 7} for name in (*envelope(), "idempotency_key")),
    {"schema_version": "9.9"},
    {"actor_kind": "ROBOT"},
    {"payload": []},
    {"timestamp": "2025-01-01T00:00:00"},
    {"timestamp": "2025-01-01T00:00:00+02:00"},
    {"message_id": "a\nb"},
    {"idempotency_key": "a\nb"},
    {"message_type": "x" * 257},
    {"actor_id": "x" * 513},
]


@pytest.mark.parametrize(
    "changed", INCOMPLETE, ids=[json.dumps(one, default=lambda _: "left out")[:60] for one in INCOMPLETE]
)
async def test_an_envelope_without_what_readers_need_is_refused_in_the_transaction(
    connection: Any, changed: dict[str, Any]
) -> None:
    with pytest.raises(asyncpg.PostgresError) as refused:
        await enqueue(connection, **changed)
    assert "OW400" == refused.value.sqlstate
    assert next(iter(changed)) in str(refused.value)
    assert [] == await bodies(connection)
