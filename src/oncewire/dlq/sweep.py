"""What nobody reported: given-up inputs without an advisory, durables from which nobody pulls, a DLQ that fills up.

The server says how many messages of a durable were delivered again and never settled; with nothing in flight those are
given up. Which ones they are it says nowhere. An agent's ledger knows, and the agent sees to them; of a work queue it
is all that it still holds below the delivered sequence; for other streams of foreign consumers only the alert is left.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, Final

from oncewire._ground.contracts import subjects
from oncewire._ground.errors import NotFound
from oncewire.dlq import rules
from oncewire.dlq.events import Event
from oncewire.dlq.rules import Failure, Stand, Watched
from oncewire.dlq.service import Service, Swept

FULL_SHARE: Final = 0.8
LOOKED_AT_MAX: Final = 100_000
"""So many sequences of a durable are asked about in one sweep; the next one goes on above what it settled."""
PART: Final = 1_000
EVENTS_MAX: Final = 250
PAGES_MAX: Final = 1_000


class Sweep:
    """Runs beside the events."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._client = service.client
        self._watched: dict[str, Watched] = {}
        self._told: set[str] = set()
        self._through: dict[tuple[str, int, str], int] = {}
        """By durable: below this sequence nothing is left to find."""

    async def run(self, stopping: asyncio.Event) -> None:
        while not stopping.is_set():
            await self.once()
            self._service.well("sweep")
            self._service.write_metrics()
            await self._service.rest(self._service.options.sweep_s)

    async def once(self) -> None:
        swept = Swept()
        await self._look_at_dlq(swept)
        swept.stands = stands = [stand async for stand in self._stands()]
        await self._look_for_readers(stands, swept)
        await self._look_for_exhausted([one for one in stands if one.may_have_exhausted], swept)
        self._service.swept = swept

    async def _tell_once(self, key: str, kind: str, text: str, facts: dict[str, Any]) -> None:
        if key not in self._told:
            self._told.add(key)
            await self._service.alerts.tell(kind, text, [facts])

    # ---- DLQ itself

    async def _look_at_dlq(self, swept: Swept) -> None:
        info = await self._client.api(f"STREAM.INFO.{rules.DLQ}")
        held, limit = info["state"]["bytes"], info["config"].get("max_bytes", -1)
        swept.letters = info["state"]["messages"]
        share = held / limit if limit > 0 else 0.0
        swept.full_ratio = round(share, 4)
        if share < FULL_SHARE:
            self._told.discard(rules.DLQ)
            return
        text = f"DLQ is {share:.0%} full: at {limit} bytes it drops its oldest letters. Replay or drop some."
        await self._tell_once(rules.DLQ, "dlq_full", text, {"bytes": held, "max_bytes": limit})

    # ---- durables

    async def _stands(self) -> AsyncIterator[Stand]:
        """Every pull durable of every stream."""
        for name in await self._names():
            offset, total = 0, 1
            while offset < total and offset < PAGES_MAX * 256:
                try:
                    page = await self._client.api(f"CONSUMER.LIST.{name}", {"offset": offset})
                except NotFound:
                    break
                found = page.get("consumers") or []
                for info in found:
                    config = info["config"]
                    if config.get("durable_name") and not config.get("deliver_subject"):
                        yield rules.read_stand(info)
                offset, total = offset + max(1, len(found)), page.get("total", 0)

    async def _names(self) -> list[str]:
        names: list[str] = []
        total = 1
        while len(names) < total:
            page = await self._client.api("STREAM.NAMES", {"offset": len(names)})
            found = page.get("streams") or []
            names += found
            total = page.get("total", 0) if found else 0
        return [name for name in names if name not in rules.OWN_STREAMS and not name.startswith("KV_")]

    async def _look_for_readers(self, stands: list[Stand], swept: Swept) -> None:
        now = time.monotonic()
        self._watched = rules.watch(self._watched, stands, now)
        late = {key: one for key, one in self._watched.items() if now - one.since_s >= self._service.options.stalled_s}
        for key, one in late.items():
            stand = one.stand
            count = stand.waits
            swept.unattended[stand.stream, stand.consumer] = count
            text = f"{count} messages wait on {key} and nobody pulls: nothing is retried, and no failure is reported"
            facts = {"stream": stand.stream, "consumer": stand.consumer, "waiting": count}
            await self._tell_once(f"idle {key}", "nobody_pulls", text, facts)
        self._told -= {one for one in self._told if one.startswith("idle ") and one[5:] not in late}

    # ---- given up without a word

    async def _look_for_exhausted(self, stands: list[Stand], swept: Swept) -> None:
        agents = await self._service.facts.agents(_failure(one, 1) for one in stands)
        facts = await self._service.facts.streams(one.stream for one in stands)
        for stand in stands:
            stream = facts.get(stand.stream)
            if (stand.stream, stand.consumer) in agents or stream is None:
                continue  # its ledger knows, and takes them in by itself
            if stream.retention == "workqueue":
                await self._hand_over(stand, stream.created_ns)
                continue
            if not stand.has_exhausted:
                continue
            swept.exhausted[stand.stream, stand.consumer] = stand.redelivered
            key = f"{stand.stream}/{stand.consumer}"
            text = f"{stand.redelivered} messages of {key} were given up and no advisory told which"
            told = {"stream": stand.stream, "consumer": stand.consumer, "exhausted": stand.redelivered}
            await self._tell_once(f"lost {key} {stand.redelivered}", "exhausted", text, told)

    async def _hand_over(self, stand: Stand, created_ns: int) -> None:
        """As if an advisory had come for each of them, from where the last sweep was through."""
        place = (stand.stream, created_ns, stand.consumer)
        sequence, looked = max(stand.ack_floor + 1, self._through.get(place, 0)), 0
        while sequence <= stand.delivered and looked < LOOKED_AT_MAX:
            stored = await self._client.get_batch(stand.stream, count=PART, sequence=sequence)
            here = [one for one in stored if one.sequence <= stand.delivered]
            mine = [one.sequence for one in here if any(subjects.matches(one.subject, own) for own in stand.filters)]
            if not await self._hand_over_all(stand, mine):
                return  # some could not be stored: the next sweep looks again
            is_end = len(here) < len(stored) or not stored
            sequence = self._through[place] = stand.delivered + 1 if is_end else stored[-1].sequence + 1
            looked += len(stored)

    async def _hand_over_all(self, stand: Stand, sequences: list[int]) -> bool:
        failures = [_failure(stand, one) for one in sequences]
        done = 0
        for at in range(0, len(failures), EVENTS_MAX):
            part = failures[at : at + EVENTS_MAX]
            done += len(await self._service.handle([Event(one) for one in part]))
        return done == len(failures)


def _failure(stand: Stand, sequence: int) -> Failure:
    return Failure(
        stream=stand.stream,
        sequence=sequence,
        consumer=stand.consumer,
        kind=rules.MAX_DELIVERIES,
        deliveries=stand.max_deliver,
        reason=f"{rules.MAX_DELIVERIES}: {stand.max_deliver} deliveries",
        outcome="dead",
    )
