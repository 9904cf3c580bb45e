"""The envelopes' codec beside pydantic, and canonical JSON beside the reference library, in one run.

pydantic reads the same fields with the same rules of type and length. It does not see repeated names, depth, or
numbers that other readers would round; `decode_message` does, and `types alone` shows what the same fields cost
without. `read_input` is the agent's way in: decoded, filled or mapped to the one shape, with identity and digest.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec
import pydantic
import rfc8785

from benchmarks.measure import ratio, table, take_turns, verdict
from oncewire._ground.contracts import broker, canonical, ids, inputs, message, runtime

ROUNDS = 7
CALLS = 4_000
ORIGIN = ids.Origin("sr-events", 1_700_000_000_000_000_000, 17, 1_705_329_000_123_456_789)

PAYLOAD: dict[str, Any] = {
    "loop_id": "loop_01HQGX8K9JNPQR5MWTVYZ3F4BD",
    "work_unit_id": "wu_01HQGX8K9JNPQR5MWTVYZ3F4AE",
    "goal": "Implement user authentication",
    "attempt": 3,
    "is_final": False,
    "tags": ["auth", "backend", "urgent"],
    "limits": {"tokens": 4096, "seconds": 30, "model": None},
    "requested_at": "2024-01-15T14:30:00Z",
}
WITH_FRACTIONS = PAYLOAD | {"cost": 12.75, "requested_at": "2024-01-15T14:30:00.123Z"}

_Id = Annotated[str, pydantic.Field(min_length=1, max_length=512)]


class Yardstick(pydantic.BaseModel):
    """MessageEnvelope as a pydantic user would write it."""

    model_config = pydantic.ConfigDict(frozen=True, extra="ignore")

    schema_version: Literal["1.0"]
    message_type: Annotated[str, pydantic.Field(min_length=1, max_length=256)]
    message_id: _Id
    timestamp: pydantic.AwareDatetime
    actor_id: _Id
    actor_kind: Literal["HUMAN", "AGENT", "SYSTEM"]
    idempotency_key: _Id
    payload: dict[str, Any]
    correlation_id: _Id | None = None
    causation_id: _Id | None = None


class YardstickEnvelope(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    run_id: str = ""
    step_id: str = ""
    tenant_id: str = ""
    idempotency_key: str = ""
    target_topic: str = ""
    partition_override: int | None = None
    deadline: pydantic.AwareDatetime | None = None


class YardstickProduce(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    topic: str
    value: str
    key: str = ""
    envelope: YardstickEnvelope | None = None


def a_message(payload: dict[str, Any]) -> message.MessageEnvelope:
    return message.new_message(
        "LoopCreated",
        payload,
        message_id="evt_01HQGX8K9JNPQR5MWTVYZ3F4BC",
        timestamp=datetime.fromisoformat("2024-01-15T14:30:00Z"),
        actor_id="user_01HQGW8K9JNPQR5MWTVYZ3F4AA",
        actor_kind="HUMAN",
        correlation_id="req_01HQGX8K9JNPQR5MWTVYZ3F4AB",
    )


def timed(call: Callable[[], object]) -> Callable[[], Awaitable[float]]:
    """Calls per second over one round."""

    async def run() -> float:
        began = time.perf_counter()
        for _ in range(CALLS):
            call()
        return CALLS / (time.perf_counter() - began)

    return run


def compare(title: str, contenders: Mapping[str, Callable[[], object]], beside: str) -> dict[str, list[float]]:
    for call in contenders.values():
        call()
    runs = asyncio.run(take_turns({name: timed(call) for name, call in contenders.items()}, ROUNDS))
    print(table(title, runs, beside) + "\n", flush=True)
    return runs


def decoding(payload: dict[str, Any], what: str) -> None:
    body = message.encode_message(a_message(payload))
    types_alone = msgspec.json.Decoder(message.MessageEnvelope).decode
    runs = compare(
        f"decode MessageEnvelope, {len(body)} bytes, {what}",
        {
            "pydantic": lambda: Yardstick.model_validate_json(body),
            "decode_message": lambda: message.decode_message(body),
            "peek_message, payload raw": lambda: message.peek_message(body),
            "msgspec, types alone": lambda: types_alone(body),
            "read_input, with digest": lambda: inputs.read_input(
                body, subject="sr.events.loop", origin=ORIGIN, carried={}
            ),
        },
        "pydantic",
    )
    print(verdict("decode_message beside pydantic", ratio(runs, "decode_message", "pydantic")[0], 1.0) + "\n")


def encoding() -> None:
    ours = a_message(PAYLOAD)
    theirs = Yardstick.model_validate_json(message.encode_message(ours))
    view = inputs.view(ours, {})
    compare(
        "encode",
        {
            "pydantic": lambda: theirs.model_dump_json().encode(),
            "encode_message, checked": lambda: message.encode_message(ours),
            "encode_runtime, checked": lambda: runtime.encode_runtime(view),
            "msgspec, unchecked": lambda: msgspec.json.encode(ours),
        },
        "pydantic",
    )


def producing() -> None:
    envelope = broker.BrokerEnvelope(run_id="run_123", step_id="step_7", idempotency_key="run_123:step_7")
    body = broker.encode_produce(broker.ProduceBody(topic="t1", key="user:1", value="v" * 256, envelope=envelope))
    compare(
        f"decode a broker produce, {len(body)} bytes, unknown fields refused",
        {
            "pydantic": lambda: YardstickProduce.model_validate_json(body),
            "decode_produce": lambda: broker.decode_produce(body),
        },
        "pydantic",
    )


def canonicalising(payload: dict[str, Any], what: str) -> None:
    compare(
        f"canonical JSON and SHA-256, {len(canonical.canonical(payload))} bytes, {what}",
        {
            "rfc8785": lambda: hashlib.sha256(rfc8785.dumps(payload)).digest(),
            "oncewire": lambda: hashlib.sha256(canonical.canonical(payload)).digest(),
        },
        "rfc8785",
    )


def main() -> None:
    decoding(PAYLOAD, "plain payload")
    decoding(WITH_FRACTIONS, "payload with fractions")
    encoding()
    producing()
    canonicalising(PAYLOAD, "plain")
    canonicalising(WITH_FRACTIONS, "with fractions")
    canonicalising(PAYLOAD | {"whole": 2.0, "😀": 1e-7}, "through the exact writer")


if __name__ == "__main__":
    main()
