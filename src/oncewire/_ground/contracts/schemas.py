"""The contracts as JSON Schemas (2020-12), for readers in other languages.

They are made from the types that decode, so they cannot say something else; docs/schemas holds them as committed.
What a schema cannot say (no name twice in one object, depth, digits of whole numbers) stands in `$comment`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from oncewire._ground.contracts import broker, message, realtime, runtime
from oncewire._ground.contracts.canonical import DEPTH_MAX, WHOLE_CHARS_MAX
from oncewire._ground.contracts.codec import BODY_BYTES_MAX, MEMBERS_MAX

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_LIMITS = (
    f"At most {BODY_BYTES_MAX} bytes of UTF-8 and {DEPTH_MAX} levels; at most {MEMBERS_MAX} members in one object, "
    f"no name twice; whole numbers in payloads of at most {WHOLE_CHARS_MAX} digits."
)


class Published(NamedTuple):
    """A contract that others build against. `kind` is its name on the command line."""

    kind: str
    name: str
    version: str
    type: Any
    title: str
    example: str
    check: Callable[[bytes], object]

    @property
    def file_name(self) -> str:
        return f"{self.name}-{self.version}.schema.json"


_MESSAGE = """{
  "schema_version": "1.0",
  "message_type": "LoopCreated",
  "message_id": "evt_01HQGX8K9JNPQR5MWTVYZ3F4BC",
  "correlation_id": "req_01HQGX8K9JNPQR5MWTVYZ3F4AB",
  "causation_id": null,
  "timestamp": "2024-01-15T14:30:00Z",
  "actor_id": "user_01HQGW8K9JNPQR5MWTVYZ3F4AA",
  "actor_kind": "HUMAN",
  "payload": {
    "loop_id": "loop_01HQGX8K9JNPQR5MWTVYZ3F4BD",
    "work_unit_id": "wu_01HQGX8K9JNPQR5MWTVYZ3F4AE",
    "goal": "Implement user authentication"
  },
  "idempotency_key": "sha256:abc123def456..."
}"""
_RUNTIME = """{
  "id": "ord-17",
  "ts": 1705329000000,
  "type": "order.placed",
  "schema_version": "1.0",
  "trace_id": "0af7651916cd43dd8448eb211c80319c",
  "span_id": "b7ad6b7169203331",
  "tenant": "default",
  "workspace": "demo",
  "actor": {"id": "u-1", "role": "user"},
  "payload": {"order": 17, "amount": 25.5},
  "idempotency_key": "ord-17",
  "source": {"agent": "shop", "adapter": "http"},
  "security_context": {"principal_id": "u-1", "principal_type": "user"}
}"""
_REALTIME = """{
  "version": "2024-12-01",
  "conversationId": "5f6c2b1e-8d53-4f1c-9a55-1f6f5a0c7d11",
  "sequence": 42,
  "issuedAt": "2025-01-01T12:00:00.000Z",
  "contract": {"guarantee": "at-least-once", "dedupeKey": "08ac"},
  "event": {
    "type": "chat.message.created",
    "messageId": "0d4e7c62-17a3-4c1b-bd3a-6a1f0e6f2b90",
    "dedupeId": "08ac",
    "role": "assistant",
    "content": "Message body",
    "model": "meditron:7b"
  }
}"""
_PRODUCE = """{
  "topic": "t1",
  "key": "optional-key",
  "value": "payload-as-string",
  "envelope": {
    "run_id": "run_123",
    "step_id": "step_7",
    "parent_step_id": "step_3",
    "tenant_id": "tenant_a",
    "idempotency_key": "tenant_a:run_123:step_7",
    "target_topic": "tasks.enrich",
    "partition_override": 1,
    "deadline": "2025-12-21T12:00:00Z",
    "retry_policy": {"max_attempts": 5, "backoff_ms": 250, "max_backoff_ms": 5000}
  }
}"""
_DELIVERY = """{
  "partition": 0,
  "offset": 12,
  "attempts": 1,
  "key": "optional-key",
  "value": "payload-as-string",
  "last_error": "",
  "routing": {"label": "some-label", "meta": {"k": "v"}},
  "envelope": {"run_id": "run_123", "step_id": "step_7", "tenant_id": "tenant_a"}
}"""

PUBLISHED = (
    Published(
        "message",
        "message-envelope",
        message.VERSION,
        message.MessageOnWire,
        "MessageEnvelope on sr.> and the platform's subjects",
        _MESSAGE,
        message.decode_message,
    ),
    Published(
        "runtime",
        "runtime-envelope",
        runtime.VERSION,
        runtime.RuntimeOnWire,
        "Runtime envelope on evt.> and cmd.>, as producers may send it",
        _RUNTIME,
        runtime.check_runtime,
    ),
    Published(
        "realtime",
        "realtime-envelope",
        realtime.VERSION,
        realtime.RealtimeEnvelope,
        "Realtime envelope on chat.>",
        _REALTIME,
        realtime.decode_realtime,
    ),
    Published(
        "broker",
        "broker-produce",
        "v1",
        broker.ProduceBody,
        "Body of POST /v1/produce",
        _PRODUCE,
        broker.decode_produce,
    ),
    Published(
        "delivery",
        "broker-delivery",
        "v1",
        broker.Delivery,
        "A line of GET /v1/consume",
        _DELIVERY,
        broker.decode_delivery,
    ),
)


def schema(published: Published) -> dict[str, Any]:
    """The JSON Schema of a contract."""
    head = {
        "$schema": DIALECT,
        "$id": f"urn:oncewire:{published.name}:{published.version}",
        "$comment": _LIMITS,
        "title": published.title,
        "examples": [msgspec.json.decode(published.example)],
    }
    return head | msgspec.json.schema(published.type)


def text(published: Published) -> str:
    """The schema as it is committed."""
    return msgspec.json.format(msgspec.json.encode(schema(published)), indent=2).decode() + "\n"
