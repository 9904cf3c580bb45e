"""The broker's HTTP interface as an OpenAPI 3.1 document, made from the types that decode. Pure."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from oncewire._ground.contracts.broker import Delivery, ProduceBody
from oncewire._ground.contracts.codec import ENCODE
from oncewire._ground.version import VERSION
from oncewire.broker import engine, wire

_BODIES = (
    wire.TopicBody, wire.ConsumeBody, wire.SettleBody, wire.NackBody, wire.ExtendBody, wire.IdempotencyBody,
    ProduceBody, Delivery, wire.ProducedLine, wire.Failure, engine.IdempotencyStatus, engine.TopicShown,
)  # fmt: skip

_REQUIRED = {
    "TopicBody": ["name"],
    "ConsumeBody": ["topic", "group", "owner"],
    "SettleBody": ["topic", "group", "partition", "offset", "owner"],
    "NackBody": ["topic", "group", "partition", "offset", "owner"],
    "ExtendBody": ["topic", "group", "partition", "offset", "owner"],
    "IdempotencyBody": ["topic", "group", "partition", "offset", "owner", "idempotency_key"],
}
"""Fields that the decoder leaves open so that their absence gets the sentence that clients know."""

_CODES = {
    400: "INVALID_ARGUMENT: the call is wrong, the same call fails again.",
    401: "UNAUTHENTICATED: the credential is missing or wrong.",
    403: "PERMISSION_DENIED: the credential, or the Host header on loopback, does not allow it.",
    404: "NOT_FOUND: no such path.",
    405: "METHOD_NOT_ALLOWED: `Allow` says which methods there are.",
    408: "DEADLINE_EXCEEDED: the request did not arrive in time.",
    409: "FAILED_PRECONDITION: not owner.",
    413: "INVALID_ARGUMENT: too large.",
    429: "RESOURCE_EXHAUSTED: try again after `retry_after_ms`.",
    431: "INVALID_ARGUMENT: the head is too large.",
    500: "INTERNAL.",
    503: "UNAVAILABLE: not now, or the outcome is unknown.",
}


@cache
def document() -> bytes:
    """The document as JSON."""
    return ENCODE(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "Oncewire broker",
                "version": VERSION,
                "summary": "Topics, partitions, groups, leases, retries and idempotency over HTTP.",
                "description": "Calls take a JSON body or query parameters; a body that is not empty is JSON whatever "
                "its content type says (but for application/x-ndjson), and the query is then ignored.",
                "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            },
            "paths": _paths(),
            "components": {"schemas": _schemas(), "responses": {str(code): _failure(code) for code in _CODES}},
        }
    )


def _schemas() -> dict[str, Any]:
    _, schemas = msgspec.json.schema_components(_BODIES, ref_template="#/components/schemas/{name}")
    for name, required in _REQUIRED.items():
        schemas[name]["required"] = required
        for field in required:
            schemas[name]["properties"][field] = _present(schemas[name]["properties"][field])
    return schemas


def _present(schema: dict[str, Any]) -> dict[str, Any]:
    """A field that must be there: not null, and not empty."""
    kinds = [kind for kind in schema.get("anyOf", [schema]) if kind.get("type") != "null"]
    kind = {name: value for name, value in kinds[0].items() if name != "default"}
    if kind.get("type") == "string":
        kind |= {"minLength": 1, "maxLength": 200, "pattern": r"^[^\x00-\x1f\x7f-\x9f]*\S[^\x00-\x1f\x7f-\x9f]*$"}
    else:
        kind |= {"minimum": 0, "maximum": 2**53 - 1}
    return kind


def _failure(code: int) -> dict[str, Any]:
    shown: dict[str, Any] = {"description": _CODES[code], "content": {"application/json": {"schema": _ref("Failure")}}}
    if code == 405:
        shown["headers"] = {"Allow": {"schema": {"type": "string"}}}
    if code in (429, 503):
        shown["headers"] = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer", "minimum": 1}}}
    return shown


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _json(about: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": about, "content": {"application/json": {"schema": schema}}}


def _lines(about: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": about, "content": {"application/x-ndjson": {"schema": schema}}}


def _call(
    summary: str,
    answers: dict[int, dict[str, Any]],
    *,
    body: str = "",
    batch: bool = False,
    query: dict[str, dict[str, Any]] | None = None,
    failures: tuple[int, ...] = (),
) -> dict[str, Any]:
    responses: dict[str, Any] = {str(code): answer for code, answer in answers.items()}
    for code in sorted({*failures, 400, 401, 403, 405, 408, 413, 431, 500, 503} - set(answers)):
        responses[str(code)] = {"$ref": f"#/components/responses/{code}"}
    call: dict[str, Any] = {"summary": summary, "responses": responses}
    if body:
        content: dict[str, Any] = {"application/json": {"schema": _ref(body)}}
        if batch:
            content["application/x-ndjson"] = {"schema": {"type": "string", "description": "One such object per line."}}
        call["requestBody"] = {"required": True, "content": content}
    if query:
        call["parameters"] = [_parameter(name, schema) for name, schema in query.items()]
    return call


def _parameter(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    is_required = bool(schema.get("minLength")) or schema.get("in") == "path"
    return {
        "name": name, "in": schema.get("in", "query"), "required": is_required,
        "schema": {key: value for key, value in schema.items() if key != "in"},
    }  # fmt: skip


_STATUS = {"type": "object", "properties": {"status": {"type": "string"}}, "required": ["status"]}
_SETTLED = {204: {"description": "Done."}, 200: _lines("A batch: one result per line.", {"type": "object"})}
_NAME = {"type": "string", "minLength": 1, "maxLength": 200}


def _object(**properties: dict[str, Any]) -> dict[str, Any]:
    """An object that has all of these."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def _paths() -> dict[str, Any]:
    return _own_paths() | _topic_paths() | _message_paths() | _idempotency_paths()


def _own_paths() -> dict[str, Any]:
    shown = {"type": "object"}
    return {
        "/v1/healthz": {"get": _call("Liveness", {200: _json("It lives.", _STATUS)})},
        "/v1/readyz": {"get": _call("Readiness", {200: _json("Ready.", _STATUS), 503: _json("Not ready.", _STATUS)})},
        "/v1/version": {"get": _call("Version, commit, durability", {200: _json("As it runs.", shown)})},
        "/v1/openapi.json": {"get": _call("This document", {200: _json("OpenAPI 3.1.", shown)})},
    }


def _topic_paths() -> dict[str, Any]:
    topic = {"name": _NAME | {"in": "path"}}
    created = _object(
        status={"const": "created"}, name={"type": "string"}, partitions={"type": "integer", "minimum": 1}
    )
    listed = _json("Sorted by name.", _object(topics={"type": "array", "items": {"type": "string"}}))
    shown = _json("As it is.", _ref("TopicShown"))
    gone = {"description": "Gone."}
    return {
        "/v1/topics": {
            "get": _call("List topics", {200: listed}),
            "post": _call("Create a topic", {201: _json("It is there.", created)}, body="TopicBody", failures=(429,)),
        },
        "/v1/topics/{name}": {
            "get": _call("A topic with its groups", {200: shown}, query=topic, failures=(404,)),
            "delete": _call("Delete a topic", {204: gone}, query=topic, failures=(404, 429)),
        },
    }


def _message_paths() -> dict[str, Any]:
    produced = {
        "description": "Produced; a batch answers one result per line.",
        "content": {
            "application/json": {"schema": _object(status={"const": "produced"}, topic={"type": "string"})},
            "application/x-ndjson": {"schema": {"anyOf": [_ref("ProducedLine"), _ref("Failure")]}},
        },
    }
    number = {"type": "integer", "minimum": 1}
    wanted = {"topic": _NAME, "group": _NAME, "owner": _NAME, "lease_ms": number, "max": number | {"maximum": 1_000}}
    wanted["in_flight"] = number | {"maximum": 1_000}
    wanted["wait_ms"] = {"type": "integer", "minimum": 0, "maximum": 60_000}
    produce = _call("Produce a message, or a batch", {200: produced}, body="ProduceBody", batch=True, failures=(429,))
    consume = _call(
        "Read messages: a stream that goes on, with at most in_flight unsettled, or with max or wait_ms one answer",
        {200: _lines("One delivery per line.", _ref("Delivery"))},
        query=wanted,
        failures=(429,),
    )
    return {"/v1/produce": {"post": produce}, "/v1/consume": {"get": consume}} | {
        f"/v1/{act}": {"post": _call(about, _SETTLED, body=body, batch=True, failures=(409, 429))}
        for act, about, body in (
            ("ack", "A message is done", "SettleBody"),
            ("nack", "A message failed", "NackBody"),
            ("extend", "Renew a lease", "ExtendBody"),
        )
    }


def _idempotency_paths() -> dict[str, Any]:
    status = _json("Where the operation stands.", _ref("IdempotencyStatus"))
    return {
        f"/v1/idempotency/{act}": {"post": _call(about, {200: status}, body="IdempotencyBody", failures=(409, 429))}
        for act, about in (
            ("begin", "Before an effect: is it done already?"),
            ("success", "The effect is done"),
            ("failure", "The effect failed"),
        )
    }
