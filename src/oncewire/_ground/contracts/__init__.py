"""What the messages are: envelopes, subjects, ids, trace context and their JSON Schemas.

    subjects    grammar and matching of subjects; builders whose values cannot leave their place
    catalog     every subject that the contracts name, and the envelope that it carries
    canonical   canonical JSON (RFC 8785)
    codec       how a body becomes a typed value; limits; what can be wrong with it
    message     MessageEnvelope 1.0          runtime    the runtime envelope and its filling-in
    realtime    realtime envelope 2024-12-01 broker     the broker's bodies
    inputs      one shape for handlers, with identity and digest
    publishing  what may be published where, and under which id
    ids         identities, digests, message ids
    trace       W3C trace context            headers    names of headers
    schemas     the contracts as JSON Schemas           evolution  when a change needs a new version
    letters     dead letters, and requests for them

Everything here is pure: values in, values out. No clock, no I/O, no chance; time and entropy are arguments.
"""

from __future__ import annotations

from oncewire._ground.contracts.broker import (
    BrokerEnvelope,
    Delivery,
    ProduceBody,
    decode_delivery,
    decode_produce,
    encode_delivery,
    encode_produce,
)
from oncewire._ground.contracts.canonical import DEPTH_MAX
from oncewire._ground.contracts.canonical import canonical as canonical_json
from oncewire._ground.contracts.catalog import CATALOG, sr_event
from oncewire._ground.contracts.codec import BODY_BYTES_MAX
from oncewire._ground.contracts.ids import Origin, effect_id, idempotency_key, input_id, letter_id, replay_id
from oncewire._ground.contracts.inputs import Input, as_message, read_input, view
from oncewire._ground.contracts.message import MessageEnvelope, decode_message, encode_message, new_message
from oncewire._ground.contracts.realtime import RealtimeEnvelope, decode_realtime, encode_realtime
from oncewire._ground.contracts.runtime import RuntimeEnvelope, decode_runtime, encode_runtime
from oncewire._ground.contracts.subjects import cmd, dlq_subject, evt, sr_command
from oncewire._ground.contracts.trace import TraceContext

__all__ = [
    "BODY_BYTES_MAX",
    "CATALOG",
    "DEPTH_MAX",
    "BrokerEnvelope",
    "Delivery",
    "Input",
    "MessageEnvelope",
    "Origin",
    "ProduceBody",
    "RealtimeEnvelope",
    "RuntimeEnvelope",
    "TraceContext",
    "as_message",
    "canonical_json",
    "cmd",
    "decode_delivery",
    "decode_message",
    "decode_produce",
    "decode_realtime",
    "decode_runtime",
    "dlq_subject",
    "effect_id",
    "encode_delivery",
    "encode_message",
    "encode_produce",
    "encode_realtime",
    "encode_runtime",
    "evt",
    "idempotency_key",
    "input_id",
    "letter_id",
    "new_message",
    "read_input",
    "replay_id",
    "sr_command",
    "sr_event",
    "view",
]
