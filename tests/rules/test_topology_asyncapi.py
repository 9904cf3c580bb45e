"""The committed AsyncAPI document: valid, complete, and what the topology and the contracts say today."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator

from oncewire._ground.settings import Settings
from oncewire._ground.topology import Topology, load
from oncewire._ground.topology.asyncapi import document
from oncewire._ground.topology.export import export_as

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / "docs" / "asyncapi.json"
VECTORS = ROOT / "tests" / "vectors"


@pytest.fixture(scope="module")
def topology() -> Topology:
    return load((), Settings())


@pytest.fixture(scope="module")
def validator() -> Draft7Validator:
    return Draft7Validator(json.loads((VECTORS / "asyncapi" / "asyncapi-3.0.0.schema.json").read_text()))


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for inner in node.values():
            yield from references(inner)
    elif isinstance(node, list):
        for inner in node:
            yield from references(inner)


def resolve(root: Any, reference: str) -> Any:
    for name in reference.removeprefix("#/").split("/"):
        root = root[name]
    return root


def test_the_committed_document_is_what_would_be_written_today(topology: Topology) -> None:
    """If this fails: oncewire topology export --out docs/asyncapi.json"""
    assert COMMITTED.read_text() == export_as("asyncapi", topology)


def test_it_is_valid_asyncapi_3(topology: Topology, validator: Draft7Validator) -> None:
    assert [error.message for error in validator.iter_errors(document(topology))] == []


@pytest.mark.parametrize("broken", ["action", "channel"])
def test_the_schema_sees_what_is_missing(topology: Topology, validator: Draft7Validator, broken: str) -> None:
    shown = document(topology)
    next(iter(shown["operations"].values())).pop(broken)
    assert not validator.is_valid(shown)


def test_every_reference_leads_somewhere(topology: Topology) -> None:
    shown = document(topology)
    found = set(references(shown))
    assert {"schemas/message-envelope-1.0.schema.json"} < found
    for reference in found:
        if reference.startswith("#/"):
            assert resolve(shown, reference)
        else:
            assert (COMMITTED.parent / reference).is_file(), reference


def test_every_parameter_of_an_address_is_described(topology: Topology) -> None:
    for channel in document(topology)["channels"].values():
        named = [token[1:-1] for token in channel["address"].split(".") if token.startswith("{")]
        assert named == list(channel.get("parameters", {}))


def test_each_platform_consumer_is_an_operation_with_the_numbers_of_its_table(topology: Topology) -> None:
    operations = document(topology)["operations"]
    for row in json.loads((VECTORS / "topology" / "platform-consumers.json").read_text()):
        facts = operations[f"{row['stream']}_{row['name']}"]["x-nats-config"]
        assert facts["filter_subject"] == row["filter"]
        assert facts["ack_wait"] in (f"{row['ack_wait_s']}s", f"{row['ack_wait_s'] // 60}m")
        assert facts["max_deliver"] == row["max_deliver"]
        assert (facts["dlq_subject"] is None) == (row["name"] == "dlq_inspector")


def test_every_subject_of_the_contracts_is_a_channel_with_its_stream(topology: Topology) -> None:
    shown = {one["x-nats-config"]["subject"]: one for one in document(topology)["channels"].values()}
    for entry in topology.contracts:
        assert shown[entry.pattern]["x-nats-config"]["stream"]
        assert shown[entry.pattern]["messages"]
