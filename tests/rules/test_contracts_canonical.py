"""Canonical JSON: the RFC's own vectors, an independent library as witness, and what is refused."""

from __future__ import annotations

import json
import math
import struct
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest
import rfc8785
from hypothesis import example, given
from hypothesis import strategies as st

from oncewire._ground.contracts import canonical, ids
from oncewire._ground.errors import ContractViolation

FOLDER = Path(__file__).parent.parent / "vectors"
VECTORS = json.loads((FOLDER / "canonical.json").read_text())
KEYS = json.loads((FOLDER / "idempotency_keys.json").read_text())

WHOLE = st.integers(-canonical.INT_MAX, canonical.INT_MAX)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | WHOLE | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.parametrize("vector", VECTORS["numbers"], ids=lambda one: one["text"])
def test_numbers_are_written_as_the_rfc_lists_them(vector: dict[str, str]) -> None:
    (value,) = struct.unpack(">d", bytes.fromhex(vector["ieee754"]))
    assert canonical.canonical(value).decode() == vector["text"]


@pytest.mark.parametrize("vector", VECTORS["values"], ids=lambda one: one["text"][:30])
def test_values_are_written_as_the_vectors_say(vector: dict[str, str]) -> None:
    assert canonical.canonical(json.loads(vector["text"])).hex() == vector["canonical_hex"]


def test_the_example_of_the_rfc_comes_out_byte_by_byte() -> None:
    value = {
        "numbers": [333333333.33333329, 1e30, 4.50, 2e-3, 0.000000000000000000000000001],
        "string": "\u20ac$\u000f\u000aA'\u0042\u0022\u005c\\\"/",
        "literals": [None, True, False],
    }
    expected = (
        '{"literals":[null,true,false],"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27],'
        '"string":"€$\\u000f\\nA\'B\\"\\\\\\\\\\"/"}'
    )
    assert canonical.canonical(value).decode() == expected


@given(st.integers() | st.integers(10**4_299, 10**4_300 - 1))
@example(2**53)
@example(-(2**53) - 1)
@example(2**64)
@example(1 - 10**4_299)
@example(10**4_300 - 1)
def test_whole_numbers_are_written_with_all_their_digits(value: int) -> None:
    """Also where RFC 8785 would round them: else two ids would have one digest."""
    digits = str(value).encode()
    assert (b'{"n":[%b]}' % digits, True) == canonical.encode({"n": [value]})
    assert b'{"\xc3\xbc":%b}' % digits == canonical.canonical({"ü": value})
    read = msgspec.json.decode(b'{"n":%b}' % digits, type=canonical.PLAIN_OBJECT)
    assert b'{"n":%b}' % digits == canonical.of_plain(read) == canonical.of_all_plain([read])[0]


@pytest.mark.parametrize("value", [10**4_300, -(10**4_299)], ids=["positive", "negative"])
def test_more_digits_than_readers_take_are_refused(value: int) -> None:
    with pytest.raises(ContractViolation, match="more than 4300 digits") as refused:
        canonical.canonical({"a": [value]})
    assert "a[0]" == refused.value.field


@given(VALUES)
@example({"\ufb33": 1, "\U0001f600": 2})
@example([0.001, 1e-7, 1e21, 1e15, 123456789012345.6, 5e-324, 0.01, 0.009])
def test_an_independent_library_writes_the_same(value: Any) -> None:
    assert canonical.canonical(value) == rfc8785.dumps(value)


@given(VALUES)
def test_the_canonical_form_of_the_canonical_form_is_itself(value: Any) -> None:
    written = canonical.canonical(value)
    assert canonical.canonical(json.loads(written)) == written


@given(st.dictionaries(TEXT, VALUES, max_size=4))
@example({"a": 2e-6})
@example({"a": 1.0})
@example({"a": 1e15, "b": -1e15, "c": 1e-5, "d": 0.0, "e": -0.0, "f": 5e-324})
@example({"\ufb33": 1, "\U0001f600": 2})
def test_what_decodes_as_plain_is_written_as_the_exact_way_would(value: dict[str, Any]) -> None:
    try:
        read = msgspec.json.decode(json.dumps(value), type=canonical.PLAIN_OBJECT)
    except msgspec.ValidationError:
        return
    assert canonical.of_plain(read) == rfc8785.dumps(value)


@given(VALUES)
@example({"a": [0.5, 12.25, -123456789.125], "b": 0.015625})
def test_no_text_of_a_plain_value_is_shorter_than_its_canonical_form(value: Any) -> None:
    written, is_tight = canonical.encode(value)
    if is_tight:
        for number in _numbers(value):
            sign, digits, exponent = Decimal(repr(number)).as_tuple()
            shortest = f"{'-' * sign}{''.join(map(str, digits))}e{exponent}"
            assert len(canonical.canonical(number)) <= len(shortest)
        assert len(written) <= len(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode())


def _numbers(value: Any) -> list[float]:
    if isinstance(value, float):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return [number for one in inner for number in _numbers(one)]


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ({"a": {"b": [1, math.nan]}}, "a.b[1]"),
        ({"a": math.inf}, "a"),
        ({"a": -math.inf}, "a"),
        ({"a": "\ud800"}, "a"),
        ({"a": {"\ud800": 1}}, "a"),
        ({"a": {1: 2}}, "a"),
        ({"a": b"bytes"}, "a"),
        ({"a": [object()]}, "a[0]"),
    ],
)
def test_what_json_cannot_carry_is_refused_with_its_path(value: Any, field: str) -> None:
    with pytest.raises(ContractViolation) as refused:
        canonical.canonical(value)
    assert refused.value.field == field


@pytest.mark.parametrize("make", [lambda inner: [inner], lambda inner: {"a": inner}, lambda inner: {"é": inner}])
def test_depth_is_limited_on_every_path(make: Any) -> None:
    value: Any = 1
    for _ in range(canonical.DEPTH_MAX):
        value = make(value)
    canonical.canonical(value)
    with pytest.raises(ContractViolation, match="deeper than 64"):
        canonical.canonical(make(value))


def test_a_value_that_holds_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ContractViolation, match="deeper than 64"):
        canonical.canonical(loop)


@pytest.mark.parametrize("vector", KEYS, ids=lambda one: one["message_type"] + one["message_id"])
def test_idempotency_keys_are_the_committed_ones(vector: dict[str, Any]) -> None:
    key = ids.idempotency_key(vector["message_type"], vector["message_id"], vector["payload"])
    assert key == vector["idempotency_key"]
