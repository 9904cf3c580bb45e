"""The audit's own reader and silver's, on the same messages: they know nothing of each other, and must agree."""

from __future__ import annotations

import ast
import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from oncewire._ground.contracts.catalog import Family
from oncewire.pipeline import decode
from oncewire.pipeline.auditing import plain
from oncewire.pipeline.auditing.rowhash import columns_of
from oncewire.pipeline.families import silver_name
from oncewire.pipeline.landing import tenants
from oncewire.pipeline.tables import BRONZE, QUARANTINE, SILVER
from tests.rules.test_pipeline_decode import BREAKS, CARRIED, complete, odd_message
from tests.support.everything import everything
from tests.support.lakes import CREATED_NS, Lake, headers_of

Row = dict[str, Any]


def messages_of(lake: Lake) -> list[tuple[str, bytes, dict[str, str]]]:
    return [
        (row["subject"], row["payload"], {one["key"]: one["value"].decode() for one in row["headers"]})
        for row in lake.rows
    ]


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    return everything(tmp_path_factory.mktemp("lake"))


def bronze(messages: list[tuple[str, bytes, dict[str, str]]]) -> pa.Table:
    """Messages in the order of a stream, a nanosecond and a second apart."""
    rows = []
    for at, (subject, body, carried) in enumerate(messages, 1):
        when = plain.EPOCH.replace(year=2026, month=11, day=1 + at % 28, second=at % 60, microsecond=at)
        rows.append(
            {
                "stream": "ANY", "created_ns": CREATED_NS, "incarnation": at % 2, "sequence": at, "subject": subject,
                "timestamp": when, "nanos": at % 1000, "headers": headers_of(carried), "payload": body,
                "date": when.date(),
            }
        )  # fmt: skip
    made = pa.Table.from_pylist(rows, BRONZE.schema)
    column = tenants(made["subject"].combine_chunks(), made["headers"].combine_chunks())
    return made.set_column(0, BRONZE.schema.field("tenant"), column)


def plainly(row: Row) -> plain.Told:
    """What the plain reader says; what a table cannot hold is refused."""
    told = plain.read(plain.seen_of(row))
    try:
        return plain.Told(told.name, kept(told.name, told.row))
    except (pa.ArrowException, OverflowError, UnicodeError, TypeError, ValueError):
        refused = plain.refused(row, told.name, "unreadable")
        return plain.Told(refused.name, kept(refused.name, refused.row))


def kept(name: str, row: Row) -> Row:
    """A row as its table has it."""
    columns = columns_of(name)
    found: Row = pa.Table.from_pylist([row], pa.schema(columns)).to_pylist()[0]
    assert name == QUARANTINE.name or set(row) == {column for column, _ in columns}, "every column has its value"
    return found


def agree(messages: list[tuple[str, bytes, dict[str, str]]]) -> dict[str, int]:
    """Both readers on these messages; how many became rows of each table."""
    rows = bronze(messages)
    found = decode.decode(rows)
    counted: dict[str, int] = {}
    by_place: dict[int, tuple[str, Row]] = {}
    for name, part in {**found.parts, QUARANTINE.name: found.quarantine}.items():
        columns = [column for column, _ in columns_of(name)]
        by_place |= {row["sequence"]: (name, row) for row in part.select(columns).to_pylist()}
    for row in rows.to_pylist():
        told = plainly(row)
        assert by_place[row["sequence"]] == (told.name, told.row)
        counted[told.name] = counted.get(told.name, 0) + 1
    return counted


def test_both_agree_about_a_message_of_every_family(lake: Lake) -> None:
    assert {*SILVER, QUARANTINE.name} == set(agree(messages_of(lake)))


@pytest.mark.parametrize("seed", range(4))
def test_both_agree_about_odd_envelopes(seed: int) -> None:
    chance = random.Random(seed)
    counted = agree([odd_message(chance, number) for number in range(700)])
    assert min(counted["runtime"], counted[QUARANTINE.name]) > 100


@pytest.mark.parametrize("seed", range(4))
def test_both_agree_about_messages_of_every_family_that_were_changed(lake: Lake, seed: int) -> None:
    """A member is dropped, doubled, emptied or replaced, or bytes are flipped; headers come and go."""
    chance = random.Random(seed)
    messages = [changed(chance, chance.choice(messages_of(lake))) for _ in range(900)]
    counted = agree(messages)
    assert len(SILVER) <= len(counted)


def changed(chance: random.Random, told: tuple[str, bytes, dict[str, str]]) -> tuple[str, bytes, dict[str, str]]:
    subject, body, carried = told
    try:
        sent = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        sent = None
    if isinstance(sent, dict) and sent and chance.random() < 0.8:
        place = sent
        while (inner := [one for one in place.values() if isinstance(one, dict) and one]) and chance.random() < 0.5:
            place = chance.choice(inner)
        name = chance.choice(list(place))
        value = chance.choice([None, "", 0, -1, 2**63, 1.5, "x", [], {}, "2026-11-16T12:00:00Z", True, place[name]])
        if chance.random() < 0.2:
            del place[name]
        else:
            place[chance.choice([name, "unknown"])] = value
        body = json.dumps(sent, ensure_ascii=chance.random() < 0.5).encode("utf-8", "surrogatepass")
    if body and chance.random() < 0.2:
        body = chance.choice(BREAKS)(chance, body)
    if chance.random() < 0.3:
        carried = {**carried, **chance.choice(CARRIED)}
    if carried and chance.random() < 0.3:
        name = chance.choice(list(carried))
        carried = {**carried, name: chance.choice(["", "x", "7", "9" * 19, "9" * 20, "ü", "²"])}
    if chance.random() < 0.1:
        subject = chance.choice([subject + ".x", subject.rpartition(".")[0] or "a", subject.replace(".", "..", 1)])
    return subject, body, carried


def test_both_agree_about_complete_envelopes_with_any_payload() -> None:
    chance = random.Random(1)
    bodies = [complete(chance, number) | {"payload": {"v": any_value(chance, 3)}} for number in range(300)]
    messages = [("evt.acme.main.x", json.dumps(body).encode(), {}) for body in bodies]
    assert agree(messages)["runtime"] > 50


def any_value(chance: random.Random, depth: int) -> Any:
    kinds: list[Any] = [None, True, chance.randrange(-(2**60), 2**60), chance.uniform(-1e20, 1e20), "ü\n", 1e-7, 0.0]
    if depth:
        kinds += [{str(n): any_value(chance, depth - 1) for n in range(3)}, [any_value(chance, depth - 1)]] * 3
    return chance.choice(kinds)


@pytest.mark.parametrize(
    "subject",
    ["evt.a.b.c", "evt.a", "cmd.a.b.c", "sr.events.loop", "chat.events.c1", "talk.c1", "ledger.a.b", "ledger.a",
     "dlq.evt.x", "dlq_requests.a", "dlq_replays.b", "owb.a.b.1.0", "owb.a.b.1.0.fence", "owb.a.b.1.keys", "owb",
     "broker_records.1.0", "broker_records", "platform.billing.x", "nothing", "$JS.EVENT.ADVISORY.x"],
)  # fmt: skip
def test_both_find_the_same_family(subject: str) -> None:
    patterns = (("talk.*", Family.REALTIME),)
    assert silver_name(subject, patterns) == plain.family_of(subject, patterns)


def test_the_plain_reader_knows_the_contracts_alone() -> None:
    """A mistake of silver's code must not be its own."""
    tree = ast.parse(Path(plain.__file__).read_text())
    imported = {
        f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("oncewire")
        for alias in node.names
    }
    assert imported
    assert {"oncewire._ground.contracts", "oncewire._ground.errors", "oncewire._ground.jetstream"} == {
        ".".join(name.split(".")[:3]) for name in imported
    }
