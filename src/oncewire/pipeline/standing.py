"""How a lake stands: what each table holds, how far each stream is, who works on it. Needs no Spark.

And the way back when a checkpoint is lost: the lake itself knows how far it has read each stream.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from oncewire._ground.contracts.topics import STREAM_PREFIXES
from oncewire._ground.errors import Corrupt, NotFound, Refused, Unavailable
from oncewire._ground.jetstream.protocol import parse_time_ns
from oncewire.pipeline import checkpoints
from oncewire.pipeline.lake import hold
from oncewire.pipeline.lake.log import SILVER_APP, Lake
from oncewire.pipeline.reading import Streams
from oncewire.pipeline.rules import Facts
from oncewire.pipeline.tables import BATCHES, BRONZE, TABLES, Lifetime, high_water


@dataclass(frozen=True)
class TableStands:
    name: str
    version: int
    rows: int
    files: int
    size_bytes: int


@dataclass(frozen=True)
class StreamStands:
    """`last` is the stream's own last sequence, None when nobody could be asked."""

    name: str
    reached: int
    last: int | None
    state: str
    error: str
    hint: str


def tables(lake: Lake) -> list[TableStands]:
    found = []
    for table in TABLES.values():
        if lake.exists(table):
            handle = lake.open(table)
            adds = pa.table(handle.get_add_actions(flatten=True))
            rows = pc.sum(adds["num_records"]).as_py() if adds.num_rows else 0
            size = pc.sum(adds["size_bytes"]).as_py() if adds.num_rows else 0
            found.append(TableStands(table.name, handle.version(), rows or 0, adds.num_rows, size or 0))
    return found


def reached(lake: Lake) -> dict[str, tuple[Lifetime, int]]:
    """By stream: its newest lifetime in bronze, and the last sequence there."""
    known = high_water(lake.open(BRONZE)) if lake.exists(BRONZE) else {}
    return {lifetime[0]: (lifetime, last) for lifetime, last in sorted(known.items())}


def streams(lake: Lake, names: list[str], server: Streams) -> list[StreamStands]:
    """Each declared stream, with what the pipeline last said about it."""
    far = reached(lake)
    told: dict[str, Any] = hold.read_state(lake.beside).get("streams", {})
    found = []
    facts = _facts(server, names)
    for name in names:
        state = told.get(name, {})
        at = far[name][1] if name in far else 0
        error, hint = state.get("error", ""), state.get("hint", "")
        try:
            checkpoints.check(lake.beside, name, at or None)
        except Corrupt as lost:
            state, error, hint = {"state": "stopped"}, lost.message, lost.hint
        found.append(StreamStands(name, at, _last(facts, name), state.get("state", "waiting"), error, hint))
    return found


@dataclass(frozen=True)
class TopicsStand:
    """The broker's topics. `listed` and `behind` are None when nobody could be asked."""

    read: int
    messages: int
    listed: int | None
    behind: int | None
    stopped: dict[str, str]
    error: str
    hint: str


def topics(lake: Lake, server: Streams) -> TopicsStand:
    """How many the lake has read, deleted ones included, and how many are further than it."""
    known = high_water(lake.open(BRONZE)) if lake.exists(BRONZE) else {}
    far = {lifetime: last for lifetime, last in known.items() if lifetime[0].startswith(STREAM_PREFIXES)}
    told: dict[str, Any] = hold.read_state(lake.beside).get("topics") or {}
    listed: int | None = None
    behind: int | None = None
    with suppress(Unavailable, Refused):
        found = server.topics()
        listed = len(found)
        behind = sum(1 for facts, _ in found if facts.last > far.get((facts.name, parse_time_ns(facts.created), 0), 0))
    stopped, error, hint = told.get("stopped", {}), told.get("error", ""), told.get("hint", "")
    return TopicsStand(len(far), sum(far.values()), listed, behind, stopped, error, hint)


def _facts(server: Streams, names: list[str]) -> dict[str, Facts | None]:
    """What the server says of each; nothing when nobody answers, which need not be found out once per stream."""
    try:
        return {name: server.facts(name) for name in names}
    except Unavailable:
        return {}


def _last(facts: dict[str, Facts | None], name: str) -> int | None:
    """The last sequence of a stream, 0 where there is none, None when nobody could be asked."""
    one = facts.get(name)
    return one.last if one is not None else 0 if name in facts else None


def silver_has(lake: Lake) -> int:
    """The version of bronze that is whole in silver; -1 before the first batch."""
    found = lake.open(BATCHES).transaction_version(SILVER_APP) if lake.exists(BATCHES) else None
    return -1 if found is None else found


def begin_again(lake: Lake, stream: str, server: Streams) -> int:
    """A new checkpoint right behind what the lake has; the sequence that it begins with.

    Only for the stream that the lake knows: one that was made anew or went back needs a person's word first.
    """
    far = reached(lake).get(stream)
    if far is None:
        checkpoints.begin(lake.beside, stream, 0)
        return 1
    lifetime, last = far
    facts = server.facts(stream)
    if facts is None:
        raise NotFound(f"there is no stream {stream} on the server")
    if parse_time_ns(facts.created) != lifetime[1]:
        raise Corrupt(
            f"stream {stream} was made anew since the lake read it",
            hint=f"To read the new one beside what the lake has: `oncewire pipeline run --accept-loss {stream}`.",
        )
    if facts.last < last:
        raise Corrupt(
            f"stream {stream} ends at {facts.last}, and the lake has it up to {last}: it went back",
            hint="`oncewire agent apply --accept-loss` begins a new incarnation of it.",
        )
    checkpoints.begin(lake.beside, stream, last + 1)
    return last + 1
