"""Runtime envelopes as rows of silver: read many at a time, and put into columns without a row in between.

Most envelopes say all by themselves (`inputs.read_all_complete`). One that leaves something out, breaks its contract or
is a replay is odd: it is read alone, with what stands around it. What comes of either is the same `Input`, so there is
one way into the columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa

from oncewire._ground.contracts import headers, inputs
from oncewire._ground.contracts.codec import ENCODE
from oncewire._ground.contracts.inputs import Input
from oncewire.pipeline.families import Place, carried_by_replay, key_begun, key_of, read_closely, shown
from oncewire.pipeline.lake.table import TIMESTAMP

RUNTIME: Final = "runtime"


def read_together(bodies: Sequence[bytes], subjects: Sequence[str]) -> list[Input | None]:
    """The envelopes that are complete; None for one that must be looked at closely."""
    try:
        return inputs.read_all_complete(bodies, subjects)
    except Exception:  # one of them, such as one that is nested too deeply: it is found when each is read alone
        return [None] * len(bodies)


def keys_of(found: Sequence[Input | None], subjects: Sequence[str]) -> list[bytes]:
    """Silver's keys of complete envelopes, b"" for the others. What tenant and workspace are is said by the subject, so
    the keys of one subject begin the same."""
    begun: dict[str, Any] = {}
    for one, subject in zip(found, subjects, strict=True):
        if one is not None and subject not in begun:
            begun[subject] = key_begun(RUNTIME, one.envelope.tenant, one.envelope.workspace, subject)
    return [
        key_of(begun[subject], one.identity) if one is not None else b""
        for one, subject in zip(found, subjects, strict=True)
    ]


def read_odd(body: bytes, place: Place, complete: Input | None) -> tuple[Input, bytes, dict[str, str]]:
    """An envelope that is not complete, or a replay: with its key, and the headers of a replay."""
    found = complete or read_closely(body, place)
    carried = carried_by_replay(place)
    begun = key_begun(RUNTIME, found.envelope.tenant, found.envelope.workspace, place.subject)
    is_edited = bool(carried.get(headers.REPLAY_REPLACES))
    return found, key_of(begun, found.identity, found.digest if is_edited else b""), carried


def columns(found: Sequence[Input], carried: Sequence[dict[str, str] | None]) -> dict[str, Any]:
    """What envelopes say, by the columns of their table. `carried` are the headers of the replays among them; it is
    empty where there are none."""
    told = [one.envelope for one in found]
    actors, sources = [one.actor for one in told], [one.source for one in told]
    principals = [one.security_context for one in told]
    return {
        "tenant": [one.tenant for one in told],
        "identity": [one.identity for one in found],
        "event_time": pa.array([one.ts * 1000 for one in told], pa.int64()).cast(TIMESTAMP),
        "trace_id": [one.trace_id for one in told],
        "span_id": [one.span_id for one in told],
        "causation_id": [one.causation_id for one in told],
        "correlation_id": [one.correlation_id for one in told],
        "workspace": [one.workspace for one in told],
        "id": [one.id for one in told],
        "type": [one.type for one in told],
        "schema_version": [one.schema_version for one in told],
        "idempotency_key": [one.idempotency_key for one in told],
        "actor_id": [one.id for one in actors],
        "digest": [one.digest for one in found],
        "replaces": _of_replays(carried, headers.REPLAY_REPLACES, len(found)),
        "replay_for": _of_replays(carried, headers.REPLAY_FOR, len(found)),
        "payload": [ENCODE(one.payload) for one in told],
        "actor_role": [one.role for one in actors],
        "source_agent": [one.agent for one in sources],
        "source_adapter": [one.adapter for one in sources],
        "principal_id": [one.principal_id for one in principals],
        "principal_type": [one.principal_type for one in principals],
        "reply_to": [one.reply_to for one in told],
        "entity_id": [one.entity_id for one in told],
        "expected_version": [one.expected_version for one in told],
    }


def _of_replays(carried: Sequence[dict[str, str] | None], name: str, count: int) -> Any:
    """A header of the replays."""
    return [shown(one.get(name)) if one else None for one in carried] if carried else pa.nulls(count, pa.string())
