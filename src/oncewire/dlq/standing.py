"""Whether a dead letter is done after all, as far as that can be known without its agent: from the blocks that agents
announce, and from the ledger itself where somebody names it.

A ledger keeps what is done for a bounded time. What is older than that cannot be told from what never happened, so it
is not replayed: it could happen twice.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import Final

import msgspec
from msgspec import Struct

from oncewire._ground.contracts.blocks import Announcement, Outcome
from oncewire._ground.errors import NotFound, Refused
from oncewire._ground.jetstream import Client, Start, parse_reply
from oncewire._ground.jetstream.protocol import parse_time_ns
from oncewire._ground.ledger import rules as ledger_rules
from oncewire._ground.ledger.store import Store
from oncewire.dlq import rules
from oncewire.dlq.letters import Dead

LEDGER: Final = "LEDGER"
FETCH_S: Final = 2.0
DAY_NS: Final = 86_400 * 10**9


class Standing(StrEnum):
    """What is known of the input behind a letter."""

    OPEN = "open"
    DONE = "done"
    DONE_OTHERWISE = "done with other content"
    FORGOTTEN = "forgotten"


class Horizon(Struct, frozen=True):
    """How far back a ledger must remember, by stream: 2 × max_age + DLQ's max_age + 1 day. 0 means for ever."""

    by_stream_ns: dict[str, int]

    def is_beyond(self, stream: str, timestamp_ns: int, now_ns: int) -> bool:
        limit = self.by_stream_ns.get(stream, 0)
        return bool(limit and timestamp_ns and now_ns - timestamp_ns > limit)


async def horizon(client: Client, streams: set[str]) -> Horizon:
    dlq_ns = (await client.api(f"STREAM.INFO.{rules.DLQ}"))["config"].get("max_age", 0)
    found: dict[str, int] = {}
    for name in sorted(streams - {""}):
        try:
            age_ns = (await client.api(f"STREAM.INFO.{name}"))["config"].get("max_age", 0)
        except NotFound:
            continue
        if age_ns and dlq_ns:
            found[name] = 2 * age_ns + dlq_ns + DAY_NS
    return Horizon(found)


Wanted = dict[tuple[str, int, str], list[tuple[int, str]]]
"""By stream, its creation time and consumer: sequences of originals in order, with their letters."""


async def withdrawn(client: Client, letters: Sequence[Dead]) -> set[str]:
    """The letters whose position is announced as done. One reading of LEDGER, from the oldest original on."""
    wanted: Wanted = {}
    for letter in letters:
        key = (letter.stream, letter.created_ns, letter.consumer)
        wanted.setdefault(key, []).append((letter.of_sequence, letter.id))
    for part in wanted.values():
        part.sort()
    times = [one.timestamp_ns for one in letters if one.timestamp_ns]
    found: set[str] = set()
    state = (await client.api(f"STREAM.INFO.{LEDGER}"))["state"]
    if not times or not state["messages"] or parse_time_ns(state["last_ts"]) < min(times):
        return found
    start = Start(time=datetime.fromtimestamp(min(times) // 10**9, UTC).isoformat().replace("+00:00", "Z"))
    async with client.read(LEDGER, start=start) as reader:
        while True:
            messages = await reader.fetch(timeout_s=FETCH_S)
            for message in messages:
                found.update(_done(message.payload, wanted))
            if not messages or parse_reply(messages[-1].reply).pending == 0:
                return found


def _done(payload: bytes, wanted: Wanted) -> Iterator[str]:
    try:
        inputs = msgspec.json.decode(payload, type=Announcement).inputs
    except msgspec.DecodeError:
        return
    for one in inputs:
        created_ns = parse_time_ns(one.created.partition("#")[0])
        letters = wanted.get((one.stream, created_ns, one.consumer))
        for first, last in (*one.done, *one.duplicate) if letters else ():
            assert letters is not None
            for at in range(bisect.bisect_left(letters, (first, "")), len(letters)):
                if letters[at][0] > last:
                    break
                yield letters[at][1]


class LedgerView:
    """A ledger that somebody named: what it says of identities. Looks only."""

    def __init__(self, store: Store, agent: str) -> None:
        names = agent.split("/")
        if len(names) != 3 or not all(names):
            raise Refused(f"{agent!r} is not TENANT/WORKSPACE/AGENT", hint="For example default/demo/biller.")
        self._store = store
        self._agent = agent
        store.open(*names)
        base = store.base().number
        first = store.block(base + 1) if base else None
        self._remembers_ns = first.content.sent_ms * 1_000_000 if first else 0

    def standings(self, inputs: Sequence[tuple[rules.Resolved, int]]) -> list[Standing]:
        """Of each input (with the time of its original)."""
        keys = [ledger_rules.identity_key(self._agent, one.identity) for one, _ in inputs]
        self._store.begin()
        try:
            places = self._store.claim([], look=keys)
        finally:
            self._store.rollback()
        found: list[Standing] = []
        for key, (resolved, timestamp_ns) in zip(keys, inputs, strict=True):
            place = places.get(key) if resolved.identity else None
            if place is None:
                is_old = bool(self._remembers_ns and timestamp_ns < self._remembers_ns)
                found.append(Standing.FORGOTTEN if is_old else Standing.OPEN)
                continue
            block = self._store.block(place.block)
            entry = block.content.entries[place.at] if block else None
            is_same = entry is None or (entry.subject, entry.digest.hex()) == (resolved.subject, resolved.digest)
            is_done = entry is None or entry.outcome is Outcome.DONE
            found.append(Standing.OPEN if not is_done else Standing.DONE if is_same else Standing.DONE_OTHERWISE)
        return found
