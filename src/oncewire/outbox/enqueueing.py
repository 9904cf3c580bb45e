"""Enqueue inside your own transaction: the message is published if, and only if, your rows are committed.

    with psycopg.connect(url) as connection:            # one transaction
        connection.execute("INSERT INTO orders …")
        outbox.enqueue(connection, conversation_id, role="assistant", content="Your order is placed.")

Each function has an async twin. What could never be published is refused here, while the caller can still do something
about it: a role or a subject that is none, a body that is too large, another tenant's conversation.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import Struct

from oncewire._ground import tracing
from oncewire._ground.arguments import check_secret, check_text, wrong
from oncewire._ground.contracts.canonical import canonical, has_no_number
from oncewire._ground.contracts.message import MessageEnvelope, encode_message
from oncewire._ground.contracts.subjects import check_subject
from oncewire._ground.database.postgres import quote_name
from oncewire._ground.errors import ContractViolation
from oncewire.outbox import drivers

Role = Literal["user", "assistant", "system"]
ConversationId = str | uuid.UUID


class Enqueued(NamedTuple):
    """The message's id, and its number in the conversation: 1, 2, 3 … in the order of commits."""

    message_id: str
    sequence: int


class NewMessage(Struct, frozen=True, kw_only=True):
    """A message for `enqueue_many`."""

    conversation_id: ConversationId
    role: Role
    content: str
    model: str | None = None
    citations: Any = None
    metadata: Mapping[str, Any] | None = None
    tenant: str = ""
    traceparent: str = ""


def enqueue(
    connection: Any,
    conversation_id: ConversationId,
    *,
    role: Role,
    content: str,
    model: str | None = None,
    citations: Any = None,
    metadata: Mapping[str, Any] | None = None,
    tenant: str = "",
    traceparent: str = "",
    schema: str = "",
) -> Enqueued:
    """Enqueue a message of a conversation in the open transaction of a sync connection.

    It takes a connection or cursor of psycopg 3, a Connection or Session of SQLAlchemy, or Django's connection. The
    conversation stays locked until you commit: its messages are numbered in the order of commits. In a span of
    OpenTelemetry the message continues its trace.
    """
    message = NewMessage(
        conversation_id=conversation_id,
        role=role,
        content=content,
        model=model,
        citations=citations,
        metadata=metadata,
        tenant=tenant,
        traceparent=traceparent,
    )
    return enqueue_many(connection, [message], schema=schema)[0]


async def enqueue_async(
    connection: Any,
    conversation_id: ConversationId,
    *,
    role: Role,
    content: str,
    model: str | None = None,
    citations: Any = None,
    metadata: Mapping[str, Any] | None = None,
    tenant: str = "",
    traceparent: str = "",
    schema: str = "",
) -> Enqueued:
    """`enqueue` for asyncpg, psycopg's AsyncConnection, and SQLAlchemy's AsyncConnection and AsyncSession."""
    message = NewMessage(
        conversation_id=conversation_id,
        role=role,
        content=content,
        model=model,
        citations=citations,
        metadata=metadata,
        tenant=tenant,
        traceparent=traceparent,
    )
    return (await enqueue_many_async(connection, [message], schema=schema))[0]


def enqueue_many(connection: Any, messages: Sequence[NewMessage], *, schema: str = "") -> list[Enqueued]:
    """Several messages, also of several conversations, in one transaction.

    Conversations are locked in the order of their ids, so that two such transactions cannot deadlock; within a
    conversation the given order holds. One call per transaction is enough for that promise, two are not.
    """
    found: dict[int, Enqueued] = {}
    statement = _conversation_statement(schema)
    for at, values in _in_lock_order(messages):
        found[at] = Enqueued(*drivers.run(connection, statement, values)[0])
    return [found[at] for at in range(len(messages))]


async def enqueue_many_async(connection: Any, messages: Sequence[NewMessage], *, schema: str = "") -> list[Enqueued]:
    """`enqueue_many` for async connections."""
    found: dict[int, Enqueued] = {}
    statement = _conversation_statement(schema)
    for at, values in _in_lock_order(messages):
        found[at] = Enqueued(*(await drivers.run_async(connection, statement, values))[0])
    return [found[at] for at in range(len(messages))]


def enqueue_message(
    connection: Any, subject: str, envelope: MessageEnvelope, *, traceparent: str = "", schema: str = ""
) -> int:
    """Enqueue a MessageEnvelope for any subject, in the open transaction of a sync connection.

    It is published under its idempotency key; the same message enqueued again is the same row. Returns the row's id.
    No order is promised. In a span of OpenTelemetry the message continues its trace.
    """
    values = _message_values(subject, envelope, traceparent)
    return int(drivers.run(connection, _message_statement(schema), values)[0][0])


async def enqueue_message_async(
    connection: Any, subject: str, envelope: MessageEnvelope, *, traceparent: str = "", schema: str = ""
) -> int:
    """`enqueue_message` for async connections."""
    values = _message_values(subject, envelope, traceparent)
    return int((await drivers.run_async(connection, _message_statement(schema), values))[0][0])


def _in_lock_order(messages: Sequence[NewMessage]) -> list[tuple[int, list[Any]]]:
    """Each message's place in the call and its values, in the order in which PostgreSQL sorts conversation ids."""
    ready = [(_uuid(one.conversation_id).bytes, at, _values(one)) for at, one in enumerate(messages)]
    return [(at, values) for _, at, values in sorted(ready, key=lambda one: one[:2])]


def _values(message: NewMessage) -> list[Any]:
    texts: dict[str, object] = {"role": message.role, "content": message.content, "model": message.model or ""}
    texts |= {"tenant": message.tenant, "traceparent": message.traceparent}
    for field, value in texts.items():
        if "\0" in check_secret("enqueue", field, value):
            raise ContractViolation(f"{field} must be text without NUL", field=field)
    if message.metadata is not None and not isinstance(message.metadata, Mapping):
        raise ContractViolation("metadata must be an object", field="metadata")
    return [
        str(_uuid(message.conversation_id)),
        message.role,
        message.content,
        message.model,
        _json(message.citations, "citations"),
        _json(message.metadata, "metadata"),
        message.tenant,
        _traceparent(message.traceparent),
    ]


def _uuid(value: ConversationId) -> uuid.UUID:
    try:
        return value if isinstance(value, uuid.UUID) else uuid.UUID(value)
    except (ValueError, AttributeError, TypeError):
        raise ContractViolation(f"conversation_id is no UUID: {value!r}", field="conversation_id") from None


def _json(value: Any, field: str) -> str | None:
    """JSON text that every reader understands: depth and numbers are those of the envelope's contract."""
    if value is None:
        return None
    try:
        if has_no_number(msgspec.to_builtins(value)):
            raise ContractViolation("has NaN or an infinite number, which JSON does not have")
        text = msgspec.json.encode(value)
        canonical(msgspec.json.decode(text))
    except ContractViolation as wrong:
        raise ContractViolation(f"{field}: {wrong.message}", field=field, hint=wrong.hint) from None
    except (TypeError, ValueError, RecursionError) as error:
        raise ContractViolation(f"{field} cannot be written as JSON: {error}", field=field) from None
    return text.decode()


def _message_values(subject: str, envelope: MessageEnvelope, traceparent: str) -> list[Any]:
    check_subject(check_text("enqueue_message", "subject", subject))
    if not isinstance(envelope, MessageEnvelope):
        raise wrong(
            "enqueue_message", "envelope", envelope, "is not a MessageEnvelope",
            "Make one with oncewire._ground.contracts.new_message.",
        )  # fmt: skip
    check_text("enqueue_message", "traceparent", traceparent)
    return [subject, encode_message(envelope).decode(), _traceparent(traceparent)]


def _traceparent(given: str) -> str | None:
    """What the caller says, else the span that it runs in."""
    context = None if given else tracing.current()
    return given or (context.traceparent if context else None)


def _conversation_statement(schema: str) -> drivers.Statement:
    """Every value goes as text and is cast by PostgreSQL: drivers differ in what they make of JSON and UUIDs."""
    name = _qualified("enqueue_conversation_message", schema)
    casts = ("uuid", "text", "text", "text", "jsonb", "jsonb", "text", "text")
    parameters = ("conversation_id", "role", "content", "model", "citations", "metadata", "tenant", "traceparent")

    def write(holder: Callable[[int], str]) -> str:
        given = (
            f"p_{parameter} => CAST(CAST({holder(at)} AS text) AS {cast})"
            for at, (parameter, cast) in enumerate(zip(parameters, casts, strict=True), start=1)
        )
        return f"SELECT CAST(message_id AS text), sequence FROM {name}({', '.join(given)})"  # noqa: S608

    return write


def _message_statement(schema: str) -> drivers.Statement:
    name = _qualified("enqueue_message", schema)

    def write(holder: Callable[[int], str]) -> str:
        given = f"CAST({holder(1)} AS text), CAST(CAST({holder(2)} AS text) AS json), CAST({holder(3)} AS text)"
        return f"SELECT {name}({given})"

    return write


def _qualified(function: str, schema: str) -> str:
    return f"{quote_name(schema)}.{function}" if schema else function
