"""Runs out of the newest messages, for who has no lake or does not want to wait for it: the same rules as gold's.

Messages of a run share a correlation id, each names the one that caused it; in topics of the broker these are run_id,
step_id and parent_step_id of the envelope. Only the end of each stream is read: older steps are in the lake.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from oncewire._ground.contracts import catalog, ids, inputs, topics
from oncewire._ground.contracts.records import decode_body
from oncewire._ground.errors import ContractViolation, NotFound, OncewireError
from oncewire._ground.jetstream import Client, StoredMessage
from oncewire.console import rules
from oncewire.console.rules import StreamRow
from oncewire.pipeline.gold.rules import Message, Run, Step, run_of

TAIL_MAX: Final = 400
TAIL_BYTES_MAX: Final = 2 << 20
STREAMS_MAX: Final = 40
AT_ONCE_MAX: Final = 8
RUNS_MAX: Final = 200
STEPS_MAX: Final = 500


async def live_runs(client: Client, streams: Sequence[StreamRow]) -> list[tuple[Run, list[Step]]]:
    """Of more than one step, the newest first."""
    tails = [one for one in streams if one.is_there and one.messages and _may_tell(one)][:STREAMS_MAX]
    gate = asyncio.Semaphore(AT_ONCE_MAX)

    async def read(row: StreamRow) -> list[Message]:
        async with gate:
            try:
                found = await client.get_batch(
                    row.name, count=TAIL_MAX, sequence=max(row.first, row.last - TAIL_MAX + 1), bytes_max=TAIL_BYTES_MAX
                )
            except OncewireError:
                return []  # gone since, or a stream without direct get
        return [told for one in found if (told := _message(one, row.kind)) is not None]

    messages = [one for part in await asyncio.gather(*(read(row) for row in tails)) for one in part]
    return _together(messages)


def _may_tell(row: StreamRow) -> bool:
    """Whether its messages have envelopes with causes."""
    if row.kind == "topic":
        return True
    families = (catalog.Family.RUNTIME, catalog.Family.MESSAGE)
    return not row.is_internal and any(catalog.family(one.replace("*", "x").replace(">", "x")) in families
                                       for one in row.subjects)  # fmt: skip


def _message(stored: StoredMessage, kind: str) -> Message | None:
    try:
        return _of_topic(stored) if kind == "topic" else _of_stream(stored)
    except (ContractViolation, msgspec.DecodeError, ValueError):
        return None  # what breaks its contract belongs to no run


def _of_stream(stored: StoredMessage) -> Message | None:
    origin = ids.Origin(stored.stream, 0, stored.sequence, stored.timestamp_ns)
    told = inputs.read_input(stored.payload, subject=stored.subject, origin=origin, carried=stored.headers).envelope
    return Message(
        told.tenant, told.correlation_id or told.id, told.id, told.causation_id, told.type, stored.subject,
        stored.stream, stored.sequence, stored.timestamp_ns // 1000, 0,
    )  # fmt: skip


def _of_topic(stored: StoredMessage) -> Message | None:
    place = topics.read_subject(stored.subject)
    told = decode_body(stored.payload).envelope if place.kind == topics.MESSAGE and stored.payload else None
    if told is None or not told.run_id:
        return None
    step = told.step_id or f"{place.topic} {stored.sequence}"
    attempts = told.dlq.attempts if told.dlq else 0
    return Message(
        told.tenant_id or place.tenant, told.run_id, step, told.parent_step_id or None, step, stored.subject,
        stored.stream, stored.sequence, stored.timestamp_ns // 1000, attempts,
    )  # fmt: skip


def _together(messages: Iterable[Message]) -> list[tuple[Run, list[Step]]]:
    by_run: dict[tuple[str, str], list[Message]] = {}
    for one in sorted(messages, key=lambda one: (one.at_us, one.sequence)):
        by_run.setdefault((one.tenant, one.run), []).append(one)
    found = [run_of(part) for part in by_run.values() if len(part) > 1]
    return sorted(found, key=lambda one: -one[0].started_us)[:RUNS_MAX]


def run_row(run: Run) -> dict[str, Any]:
    return {
        "tenant": rules.shown(run.tenant), "run": rules.shown(run.run), "steps": run.steps,
        "started_ms": run.started_us / 1000, "duration_ms": run.duration_ms, "depth": run.depth,
        "retries": run.retries, "critical_ms": run.critical_ms, "is_cut": run.is_cut,
    }  # fmt: skip


def step_row(step: Step) -> dict[str, Any]:
    one = step.message
    return {
        "step": rules.shown(one.step), "parent": rules.shown(one.parent or ""), "type": rules.shown(one.type),
        "subject": rules.shown(one.subject), "stream": one.stream, "sequence": one.sequence,
        "at_ms": one.at_us / 1000, "wait_ms": step.wait_ms, "depth": step.depth, "retries": one.retries,
        "is_critical": step.is_critical,
    }  # fmt: skip


def find_run(found: Iterable[tuple[Run, list[Step]]], tenant: str, wanted: str) -> dict[str, Any]:
    for run, steps in found:
        if run.run == wanted and (not tenant or run.tenant == tenant):
            return {"run": run_row(run), "steps": [step_row(one) for one in steps[:STEPS_MAX]]}
    raise NotFound(f"the newest messages have no run {rules.shown(wanted, 80)}", hint="Older runs are in the lake.")
