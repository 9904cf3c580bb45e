"""The published schemas: committed as made, true to the decoders, and changed only by the rules of versions."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, given, settings

from oncewire._ground.contracts import broker, evolution, message, realtime, runtime, schemas
from oncewire.cli import contracts as command
from tests.rules import test_contracts_envelopes as envelopes

ROOT = Path(__file__).parent.parent.parent
COMMITTED = ROOT / "docs" / "schemas"
RELEASED = ROOT / "tests" / "vectors" / "released"
BY_KIND = {one.kind: one for one in schemas.PUBLISHED}
ALL = pytest.mark.parametrize("published", schemas.PUBLISHED, ids=lambda one: one.kind)


def validator(kind: str) -> Any:
    return jsonschema.Draft202012Validator(
        schemas.schema(BY_KIND[kind]), format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )


@ALL
def test_the_committed_schema_is_the_one_that_the_types_give(published: schemas.Published) -> None:
    committed = (COMMITTED / published.file_name).read_text(encoding="utf-8")
    assert committed == schemas.text(published), "run `make contracts`"


def test_no_schema_is_committed_that_nothing_makes() -> None:
    assert {path.name for path in COMMITTED.iterdir()} == {one.file_name for one in schemas.PUBLISHED}


@ALL
def test_a_released_version_is_never_broken(published: schemas.Published) -> None:
    """tests/vectors/released holds each schema as first published; it is not written by any command."""
    released = json.loads((RELEASED / published.file_name).read_text(encoding="utf-8"))
    assert evolution.breaking(released, schemas.schema(published)) == []


@ALL
def test_a_schema_is_valid_and_its_examples_keep_it(published: schemas.Published) -> None:
    schema = schemas.schema(published)
    jsonschema.Draft202012Validator.check_schema(schema)
    for example in schema["examples"]:
        validator(published.kind).validate(example)
    assert schema["$id"] == f"urn:oncewire:{published.name}:{published.version}"


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(envelopes.MESSAGES, envelopes.RUNTIMES, envelopes.REALTIMES, envelopes.PRODUCES, envelopes.DELIVERIES)
def test_what_we_encode_keeps_the_schema(
    sent: message.MessageEnvelope,
    event: runtime.RuntimeEnvelope,
    chat: realtime.RealtimeEnvelope,
    produce: broker.ProduceBody,
    delivery: broker.Delivery,
) -> None:
    validator("message").validate(json.loads(message.encode_message(sent)))
    validator("runtime").validate(json.loads(runtime.encode_runtime(event)))
    validator("realtime").validate(json.loads(realtime.encode_realtime(chat)))
    validator("broker").validate(json.loads(broker.encode_produce(produce)))
    validator("delivery").validate(json.loads(broker.encode_delivery(delivery)))


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        ("message", {"actor_kind": "ROBOT"}),
        ("message", {"timestamp": "2024-01-15T14:30:00+02:00"}),
        ("message", {"payload": []}),
        ("message", {"schema_version": "2.0"}),
        ("runtime", {"payload": 1}),
        ("realtime", {"event": {"type": "chat.unheard.of"}}),
        ("broker", {"unknown": 1}),
        ("broker", {"envelope": {"dlq": {}}}),
    ],
)
def test_a_schema_refuses_what_its_decoder_refuses(kind: str, changed: dict[str, Any]) -> None:
    assert not validator(kind).is_valid(envelopes.example(kind) | changed)


SCHEMA: dict[str, Any] = {
    "title": "T",
    "type": "object",
    "properties": {
        "a": {"type": "string", "maxLength": 5},
        "b": {"$ref": "#/$defs/B"},
        "c": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    },
    "required": ["a"],
    "$defs": {"B": {"type": "object", "properties": {"x": {"enum": ["A", "B"]}}, "required": []}},
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """SCHEMA with one place changed; `...` takes it away."""
    schema = copy.deepcopy(SCHEMA)
    *way, last = path.split("/")
    place: Any = schema
    for step in way:
        place = place[int(step) if isinstance(place, list) else step]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return schema


@pytest.mark.parametrize(
    ("path", "value", "weight", "where"),
    [
        ("properties/d", {"type": "string"}, "minor", "d"),
        ("$defs/B/properties/y", {"type": "string"}, "minor", "b.y"),
        ("properties/a", ..., "breaking", "a"),
        ("required", ["a", "c"], "breaking", "c"),
        ("required", [], "breaking", "a"),
        ("$defs/B/required", ["x"], "breaking", "b.x"),
        ("properties/a/type", "integer", "breaking", "a.type"),
        ("properties/a/maxLength", 4, "breaking", "a.maxLength"),
        ("properties/a/maxLength", 6, "breaking", "a.maxLength"),
        ("properties/a/maxLength", ..., "breaking", "a"),
        ("properties/a/minLength", 1, "breaking", "a"),
        ("$defs/B/properties/x/enum", ["A", "B", "C"], "breaking", "b.x.enum"),
        ("properties/c/anyOf", [{"type": "number"}, {"type": "null"}], "breaking", "c.anyOf[0].type"),
        ("additionalProperties", False, "breaking", ""),
    ],
)
def test_only_a_new_optional_field_keeps_the_version(path: str, value: Any, weight: str, where: str) -> None:
    assert [(one.weight, one.path) for one in evolution.changes(SCHEMA, changed(path, value))] == [(weight, where)]


def test_a_new_field_that_is_required_is_breaking() -> None:
    new = changed("properties/d", {"type": "string"}) | {"required": ["a", "d"]}
    assert [(one.weight, one.path) for one in evolution.changes(SCHEMA, new)] == [("breaking", "d")]


@pytest.mark.parametrize(
    "path", ["title", "description", "properties/a/description", "$defs/B/title", "examples", "$id"]
)
def test_words_for_people_change_nothing(path: str) -> None:
    assert evolution.changes(SCHEMA, changed(path, "other words")) == []


def test_renaming_a_definition_changes_nothing() -> None:
    new = changed("properties/b/$ref", "#/$defs/C")
    new["$defs"] = {"C": new["$defs"]["B"]}
    assert evolution.changes(SCHEMA, new) == []


def run(*words: str, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(command.contracts, list(words), input=stdin)


def test_export_writes_every_schema_and_may_be_repeated(tmp_path: Path) -> None:
    for _ in range(2):
        done = run("export", "--out", str(tmp_path / "new"), "--json")
        assert (done.exit_code, len(json.loads(done.output)["written"])) == (0, len(schemas.PUBLISHED))
    assert {path.name for path in (tmp_path / "new").iterdir()} == {one.file_name for one in schemas.PUBLISHED}


def test_export_without_a_folder_prints(tmp_path: Path) -> None:
    assert set(json.loads(run("export").output)) == {one.file_name for one in schemas.PUBLISHED}


def test_export_refuses_a_breaking_change_under_the_same_version(tmp_path: Path) -> None:
    run("export", "--out", str(tmp_path))
    path = tmp_path / "message-envelope-1.0.schema.json"
    old = json.loads(path.read_text())
    old["$defs"]["MessageOnWire"]["required"].append("correlation_id")
    path.write_text(json.dumps(old))
    done = run("export", "--out", str(tmp_path))
    assert done.exit_code == 2
    assert "correlation_id is no longer required" in done.output
    assert json.loads(path.read_text()) == old


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff"])
def test_export_does_not_overwrite_what_is_no_schema(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "message-envelope-1.0.schema.json").write_bytes(content)
    done = run("export", "--out", str(tmp_path))
    assert (done.exit_code, "is not a JSON Schema" in done.output) == (2, True)


def test_export_to_a_place_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run("export", "--out", str(tmp_path / "file" / "below"))
    assert (done.exit_code, "cannot be written" in done.output) == (2, True)


@ALL
def test_check_accepts_the_example_from_a_file_and_from_stdin(published: schemas.Published, tmp_path: Path) -> None:
    (tmp_path / "body.json").write_text(published.example)
    assert run("check", str(tmp_path / "body.json"), "--kind", published.kind).exit_code == 0
    done = run("check", "-", "--kind", published.kind, "--json", stdin=published.example.encode())
    assert (done.exit_code, json.loads(done.output)["ok"]) == (0, True)


def test_check_names_the_field_that_is_wrong() -> None:
    wrong = envelopes.body("message", actor_kind="ROBOT")
    done = run("check", "-", "--kind", "message", "--json", stdin=wrong)
    assert (done.exit_code, json.loads(done.output)["error"]["field"]) == (1, "actor_kind")
    shown = run("check", "-", "--kind", "message", stdin=wrong)
    assert (shown.exit_code, "broken:" in shown.output, "actor_kind" in shown.output) == (1, True, True)


def test_check_of_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    done = run("check", str(tmp_path / "missing.json"), "--kind", "message")
    assert (done.exit_code, "cannot be read" in done.output) == (2, True)
