"""Canonical JSON (RFC 8785, but for large whole numbers): one value, one sequence of bytes, in every language.

Members sorted by UTF-16 code units, no spaces, fractions as ECMAScript writes them, strings with the fewest escapes.
A number that is written without point and exponent is whole, and is written with all its digits. RFC 8785 would round
it beyond ±(2^53 − 1), and two different ids would get one digest.

Most payloads need none of the special rules. `of_plain` knows that from the type that a text was decoded as, `encode`
looks once at a value (`_are_plain`); then the C encoder writes the sorted form. Everything else goes through `_exact`.
docs/decisions/canonical-json.md has the figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import msgspec

from oncewire._ground.errors import ContractViolation

DEPTH_MAX = 64
"""Arrays and objects inside each other, the outermost included."""

INT_MAX = 2**53 - 1
"""The largest count that every JSON reader holds exactly: what our own sequences and sizes are bounded by."""

_FINITE_MAX = 1.7976931348623157e308
WHOLE_CHARS_MAX = 4_300
"""Digits of a whole number and its sign: what msgspec reads."""

_WHOLE_MIN, _WHOLE_MAX = 1 - 10 ** (WHOLE_CHARS_MAX - 1), 10**WHOLE_CHARS_MAX - 1
_PLAIN_FLOAT_MIN = 0.01
_PLAIN_FLOAT_MAX = 1e15
_PLAIN_LEVELS = 4
_SORTED = msgspec.json.Encoder(order="sorted").encode
_SORTED_LINES = msgspec.json.Encoder(order="sorted").encode_lines
_STRING = msgspec.json.Encoder().encode


def _plain_object() -> Any:
    """Types cannot be endless, and each level doubles their number: four levels below the first cover most payloads."""
    leaf = str | bool | int | Annotated[float, msgspec.Meta(ge=-_PLAIN_FLOAT_MAX, le=_PLAIN_FLOAT_MAX)] | None
    value: Any = leaf
    for _ in range(_PLAIN_LEVELS):
        value = leaf | list[value] | dict[str, value]
    return dict[str, value]


PLAIN_OBJECT = _plain_object()
"""A type whose values are within the limit of depth: what decodes as it needs no second look."""


def canonical(value: object) -> bytes:
    """The canonical form of a JSON value (dict, list, str, int, float, bool, None), as RFC 8785 defines it."""
    return encode(value)[0]


def encode(value: object) -> tuple[bytes, bool]:
    """The canonical form, and whether it is proven that no JSON text of the same value is shorter.

    That proof lets a reader see from the length alone that nothing of the text was dropped (codec.py).
    """
    try:
        if _are_plain((value,), DEPTH_MAX + 1):
            return _SORTED(value), True
    except (UnicodeEncodeError, TypeError):
        pass  # a lone surrogate or a key that is no text: the exact way says where
    return _exact(value, "", DEPTH_MAX), False


def of_plain(value: dict[str, Any]) -> bytes:
    """The canonical form of a value that was decoded as PLAIN_OBJECT.

    The encoder writes its fractions with a dot or "e-": without either there are none, and without other than ASCII the
    names are in order.
    """
    written = _SORTED(value)
    if 0x2E in written or b"e-" in written or not written.isascii():
        return canonical(value)
    return written


def of_all_plain(values: Sequence[dict[str, Any]]) -> list[bytes]:
    """What `of_plain` gives for each: what no text has is looked for in all of them at once."""
    lines = _SORTED_LINES(values)
    if 0x2E in lines or b"e-" in lines or not lines.isascii():
        return [of_plain(value) for value in values]
    return lines.splitlines()


def _are_plain(values: Iterable[Any], room: int) -> bool:
    """Whether the C encoder writes these values as RFC 8785 wants them, and as shortly as JSON can.

    Below 0.01 a text such as 1e-3 is shorter than the canonical 0.001; fractions above need no exponent.
    """
    if not room:
        raise too_deep()
    for value in values:
        kind = type(value)
        if kind is str or kind is bool or value is None:
            continue
        if kind is int:
            if not _WHOLE_MIN <= value <= _WHOLE_MAX:
                return False
        elif kind is dict:
            if not "".join(value).isascii() or not _are_plain(value.values(), room - 1):
                return False
        elif kind is list:
            if not _are_plain(value, room - 1):
                return False
        elif kind is not float or not _is_plain_float(value):
            return False
    return True


def _is_plain_float(value: float) -> bool:
    return _PLAIN_FLOAT_MIN <= abs(value) < _PLAIN_FLOAT_MAX and not value.is_integer()


def _exact(value: object, path: str, room: int) -> bytes:
    match value:
        case None:
            return b"null"
        case bool():
            return b"true" if value else b"false"
        case str():
            return _string(value, path)
        case int():
            return _whole(value, path)
        case float():
            return number(value, path).encode()
        case dict():
            return _object(value, path, room)
        case list() | tuple():
            if not room:
                raise too_deep()
            inside = (_exact(one, f"{path}[{at}]", room - 1) for at, one in enumerate(value))
            return b"[" + b",".join(inside) + b"]"
    raise ContractViolation(f"{_named(path)} is not JSON: {type(value).__name__}", field=path)


def _object(members: dict[Any, object], path: str, room: int) -> bytes:
    if not room:
        raise too_deep()
    for name in members:
        if not isinstance(name, str):
            raise ContractViolation(f"{_named(path)} has a name that is not text: {name!r}", field=path)
    written = [(_string(name, path), name) for name in sorted(members, key=_utf16)]
    dot = f"{path}." if path else ""
    inside = (text + b":" + _exact(members[name], f"{dot}{name}", room - 1) for text, name in written)
    return b"{" + b",".join(inside) + b"}"


def _utf16(name: str) -> bytes:
    return name.encode("utf-16-be", "surrogatepass")


def _string(value: str, path: str) -> bytes:
    try:
        return _STRING(value)
    except UnicodeEncodeError:
        raise ContractViolation(
            f"{_named(path)} has a lone surrogate, which is no character and cannot be encoded", field=path
        ) from None


def _whole(value: int, path: str) -> bytes:
    if _WHOLE_MIN <= value <= _WHOLE_MAX:
        return b"%d" % value
    raise ContractViolation(
        f"{_named(path)} is a whole number of more than {WHOLE_CHARS_MAX} digits",
        field=path,
        hint="Send it as text.",
    )


def has_no_number(value: object) -> bool:
    """Whether some number in it is none: the encoder makes null of NaN and of infinities."""
    match value:
        case float():
            return not -_FINITE_MAX <= value <= _FINITE_MAX
        case dict():
            return any(map(has_no_number, value.values()))
        case list() | tuple():
            return any(map(has_no_number, value))
    return False


def number(value: float, path: str = "") -> str:
    """A double as ECMAScript's Number::toString writes it. Python's repr has the same digits, set out differently."""
    if value != value or value in (float("inf"), float("-inf")):
        raise ContractViolation(f"{_named(path)} is {value}, which JSON does not have", field=path)
    if value == 0:
        return "0"
    sign = "-" if value < 0 else ""
    mantissa, _, exponent = repr(abs(value)).partition("e")
    whole, _, fraction = mantissa.partition(".")
    digits = (whole + fraction).lstrip("0")
    point = len(whole.lstrip("0")) + int(exponent or 0)
    if not whole.strip("0"):
        point -= len(fraction) - len(fraction.lstrip("0"))
    return sign + _set_out(digits.rstrip("0"), point)


def _set_out(digits: str, point: int) -> str:
    """`digits` with the decimal point after the first `point` of them."""
    count = len(digits)
    if count <= point <= 21:
        return digits + "0" * (point - count)
    if 0 < point <= 21:
        return f"{digits[:point]}.{digits[point:]}"
    if -6 < point <= 0:
        return f"0.{'0' * -point}{digits}"
    fraction = f".{digits[1:]}" if count > 1 else ""
    return f"{digits[0]}{fraction}e{point - 1:+d}"


def too_deep() -> ContractViolation:
    return ContractViolation(f"nested deeper than {DEPTH_MAX} arrays and objects")


def _named(path: str) -> str:
    return path or "value"
