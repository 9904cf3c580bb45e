"""W3C trace context: what is read, what counts as absent, and how a hop goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncewire._ground.contracts import trace

VECTORS = json.loads((Path(__file__).parent.parent / "vectors" / "trace_context.json").read_text())
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize("vector", VECTORS["valid"], ids=lambda one: one["traceparent"])
def test_a_valid_traceparent_is_read(vector: dict[str, Any]) -> None:
    expected = trace.TraceContext(vector["trace_id"], vector["span_id"], vector["flags"])
    assert trace.parse_traceparent(vector["traceparent"]) == expected


@pytest.mark.parametrize("header", VECTORS["invalid"])
def test_an_invalid_traceparent_counts_as_absent(header: str) -> None:
    assert trace.parse_traceparent(header) is None
    assert trace.extract({"traceparent": header, "tracestate": "a=1"}) is None


@pytest.mark.parametrize("vector", VECTORS["tracestate"], ids=lambda one: one["header"][:20])
def test_tracestate_is_kept_when_valid_and_dropped_when_not(vector: dict[str, str]) -> None:
    assert trace.parse_tracestate(vector["header"]) == vector["kept"]
    context = trace.extract({"traceparent": PARENT, "tracestate": vector["header"]})
    assert context is not None
    assert context.state == vector["kept"]


@given(st.binary(min_size=24, max_size=24), st.integers(0, 255))
def test_what_is_written_into_headers_is_read_back(entropy: bytes, flags: int) -> None:
    context = trace.start(entropy)._replace(flags=flags, state="a=1")
    assert trace.extract(context.headers()) == context


@given(st.binary(min_size=8, max_size=8))
def test_a_hop_keeps_the_trace_and_gets_its_own_span(entropy: bytes) -> None:
    context = trace.extract({"traceparent": PARENT, "tracestate": "a=1"})
    assert context is not None
    hop = trace.next_hop(context, entropy)
    assert hop == context._replace(span_id=hop.span_id)
    assert trace.extract(hop.headers()) == hop


def test_entropy_of_zeros_still_gives_valid_ids() -> None:
    context = trace.start(bytes(24))
    assert trace.parse_traceparent(context.traceparent) == context
    assert trace.parse_traceparent(trace.next_hop(context, bytes(8)).traceparent) is not None


def test_a_go_client_writes_the_header_with_a_capital() -> None:
    assert trace.extract({"Traceparent": PARENT}) == trace.parse_traceparent(PARENT)


def test_no_header_is_no_context() -> None:
    assert trace.extract({}) is None


def test_a_message_without_a_trace_begins_the_same_one_for_every_reader() -> None:
    assert trace.begun_by("m-1") == trace.begun_by("m-1") != trace.begun_by("m-2")


@pytest.mark.parametrize(
    ("trace_id", "span_id"),
    [("", ""), ("0" * 32, "b7ad6b7169203331"), ("a" * 32, "0" * 16), ("a" * 31, "b" * 17), ("A" * 32, "b" * 16)],
)
def test_fields_that_are_no_ids_carry_no_context(trace_id: str, span_id: str) -> None:
    assert not trace.are_ids(trace_id, span_id)


def test_fields_that_are_ids_carry_one() -> None:
    assert trace.are_ids("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")


TRACE_IDS = ["0" * 32, "0" * 31 + "1", "0" * 16 + "463ac35c9f6413ad", "1" + "0" * 31, "A" * 32, "é" * 32]
SPAN_IDS = ["0" * 16, "0" * 15 + "1", "b7ad6b7169203331", "B7ad6b7169203331", "b7ad", "b7ad6b716920333 "]


@given(st.lists(st.tuples(st.sampled_from(TRACE_IDS), st.sampled_from(SPAN_IDS)), max_size=4))
def test_many_fields_are_ids_when_each_is(pairs: list[tuple[str, str]]) -> None:
    found = trace.are_all_ids([one for one, _ in pairs], [other for _, other in pairs])
    assert found == all(trace.are_ids(*pair) for pair in pairs)
