"""How a body becomes a typed value: one way for every envelope, and one sentence for everything that can be wrong.

msgspec validates faster than others parse, but it takes the last of two members with one name in silence, and it
nests as deep as the interpreter's stack allows. `read_whole` (for what is complete and plain) and `refuse_repeats`
(for the rest) close both:

  A text that repeats a name holds more strings than the value that was read from it, since a JSON text has one pair
  of quotes per string. So the value is encoded again and compared: equal lengths prove it at once where no part of a
  re-encoded value can be longer than its text ("tight"), equal counts of quotes prove it for any text, and only what
  is still open (fields that the envelope does not know, or a repeat) is read a second time in full.

The order of the checks is law: size, then the version, then the rest, so that a message of a later version is reported
as that and not as one with missing fields.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

import msgspec

from oncewire._ground.contracts import canonical
from oncewire._ground.contracts.canonical import DEPTH_MAX, too_deep
from oncewire._ground.errors import ContractViolation, TooLarge, UnsupportedVersion

PAYLOAD_BYTES_MAX = 8 * 1024 * 1024
"""`max_payload` of the embedded server."""

BODY_BYTES_MAX = PAYLOAD_BYTES_MAX - 16 * 1024
"""What a publisher may send: the rest is for the headers of a dead letter, so that every message fits in one."""

MEMBERS_MAX = 65_536
"""Members of one object. Every reader pays for each of them, and no body of ours comes near it."""
_CROWDED_BYTES = MEMBERS_MAX * len('"":0,')
"""A shorter text has no room for as many."""

NAME_CHARS_MAX = 256
ID_CHARS_MAX = 512

T = TypeVar("T", bound=msgspec.Struct)
V = TypeVar("V")
Mend = Callable[[dict[str, Any]], dict[str, Any] | None]
"""Rewrites what a lenient producer sent into the strict form, None when there is nothing to mend."""

ENCODE = msgspec.json.Encoder().encode
_ENCODE_LINES = msgspec.json.Encoder().encode_lines
_ANY = msgspec.json.Decoder()
_OBJECT: msgspec.json.Decoder[dict[str, Any]] = msgspec.json.Decoder(dict[str, Any])
_TO_ONE_BRACKET = bytes.maketrans(b"{}", b"[]")
_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_LONE_SURROGATE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)
_AT = " - at `$"
_UNKNOWN = "Object contains unknown field"
_MEMBER = re.compile(r"Object (missing required|contains unknown) field `(.*)`", re.DOTALL)


@dataclass(frozen=True)
class Contract(Generic[T]):
    """A shape that bodies are read as. `version_field` and `version` are empty where a shape carries none."""

    name: str
    decoder: msgspec.json.Decoder[T]
    version_field: str = ""
    version: str = ""
    mend: Mend | None = None

    def read(self, body: bytes) -> T:
        """The value, or ContractViolation. Repeated names are not seen here: see `refuse_repeats`."""
        if len(body) > BODY_BYTES_MAX:
            raise TooLarge(f"{self.name}: {len(body)} bytes, more than {BODY_BYTES_MAX}")
        if may_be_crowded(body):
            _refuse_crowds(self.name, body)
        try:
            return self.decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return self._second_look(body, error)

    def _second_look(self, body: bytes, error: Exception) -> T:
        """A body that is no JSON at all is that first; then its version counts, then what can be mended."""
        if not isinstance(error, msgspec.ValidationError):
            fail(self.name, body, error)
        value = _parse(self.name, body)
        if isinstance(value, dict) and self.version_field:
            _check_version(self.name, value.get(self.version_field), self.version_field, self.version)
        mended = self.mend(value) if isinstance(value, dict) and self.mend else None
        if mended is None:
            fail(self.name, body, error)
        _refuse_repeats_in(self.name, body, value)  # what is mended no longer shows what was repeated
        try:
            return self.decoder.decode(ENCODE(mended))
        except msgspec.ValidationError as still:
            fail(self.name, body, still)


def read_whole(decoder: msgspec.json.Decoder[T], body: bytes) -> T | None:
    """The value in one go, if `decoder` knows every field of `body` and none stands twice. None: look closer.

    The type of the value must leave out what is empty when it is encoded, so that it never holds more than its text.
    """
    return read_all(decoder, (body,))[0]


def read_all(decoder: msgspec.json.Decoder[V], bodies: Sequence[bytes]) -> list[V | None]:
    """What `read_whole` gives for each, as lines of one text: a value that writes as its own line was read in full, and
    one comparison says so of all."""
    joined = b"\n".join(bodies)
    values = _decode_lines(decoder, bodies, joined)
    if values is not None:
        again = _ENCODE_LINES(values)
        if again == joined + b"\n":
            return values
        if joined.count(b"\n") >= len(bodies):  # a body of several lines: the values are not where they seem to be
            values = None
    if values is None:
        values = [_decode_one(decoder, body) for body in bodies]
        again = _ENCODE_LINES(values)
    return [
        value if text == body or (value is not None and _strings(text) == _strings(body)) else None
        for value, text, body in zip(values, again.splitlines(), bodies, strict=True)
    ]


def read_lines(decoder: msgspec.json.Decoder[V], lines: bytes) -> list[V | None]:
    """What `read_all` gives for the lines of a text, each of which goes from a brace to the one that closes it."""
    try:
        if not may_be_crowded(lines):
            values: list[V | None] = decoder.decode_lines(lines)  # type: ignore[assignment]  # as below
            if _ENCODE_LINES(values) == lines:
                return values
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    return read_all(decoder, lines.splitlines())


def _decode_lines(decoder: msgspec.json.Decoder[V], bodies: Sequence[bytes], joined: bytes) -> list[V | None] | None:
    """All of them at once, None when one of them cannot be read.

    To the decoder a line break is space like any other. So each body must begin and end as an object does: then no
    value goes from one into the next, and as many values as bodies are one for each.
    """
    if (
        max(map(len, bodies), default=0) > _CROWDED_BYTES
        or not {b"{"}.issuperset([body[:1] for body in bodies])
        or not {b"}"}.issuperset([body[-1:] for body in bodies])
    ):
        return None
    try:
        values: list[V | None] = decoder.decode_lines(joined)  # type: ignore[assignment]  # a list of V is one of these
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return values if len(values) == len(bodies) else None


def _decode_one(decoder: msgspec.json.Decoder[V], body: bytes) -> V | None:
    try:
        return decoder.decode(body) if is_acceptable(body) else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def write_whole(decoder: msgspec.json.Decoder[T], value: T) -> bytes | None:
    """The body of a value that reads back as itself. None: look closer (the encoder makes null of NaN, for one)."""
    try:
        body = ENCODE(value)
        return body if is_acceptable(body) and decoder.decode(body) == value else None
    except (TypeError, ValueError, OverflowError, RecursionError):  # msgspec's own errors are ValueErrors
        return None


def write_closely(contract: Contract[T], wire: T) -> bytes:
    """The body of a value whose payload is written already, if its contract would read it back the same."""
    try:
        body = ENCODE(wire)
    except (TypeError, ValueError, OverflowError) as error:
        raise ContractViolation(f"{contract.name}: cannot be encoded: {error}") from None
    read = contract.read(body)
    for name in read.__struct_fields__:
        if name != "payload" and getattr(read, name) != getattr(wire, name):
            raise ContractViolation(f"{contract.name}: {name}: would not read back as it is", field=name)
    return body


def read_payload(name: str, raw: msgspec.Raw) -> tuple[dict[str, Any], bytes]:
    """A payload that was kept raw, checked in full: the object and its canonical form."""
    text = bytes(raw)
    try:
        payload = _OBJECT.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        fail(name, text, error, within="payload")
    try:
        written, is_tight = canonical.encode(payload)
    except ContractViolation as wrong:
        raise inside(name, "payload", wrong) from None
    refuse_repeats(f"{name}: payload", text, written, tight=is_tight)
    return payload, written


def write_payload(name: str, payload: object) -> msgspec.Raw:
    """A payload for the wire, or ContractViolation if it has no canonical form (the encoder would make NaN null).

    Not written in that form itself: there 1.0 is 1, and the reader would get another type than the sender had.
    """
    if not isinstance(payload, dict):
        raise ContractViolation(f"{name}: payload: must be an object", field="payload")
    try:
        canonical.encode(payload)
    except ContractViolation as wrong:
        raise inside(name, "payload", wrong) from None
    return msgspec.Raw(ENCODE(payload))


def inside(name: str, where: str, wrong: ContractViolation) -> ContractViolation:
    """What is wrong inside the field `where`, told from the outside."""
    field = f"{where}.{wrong.field}" if wrong.field else where
    return ContractViolation(f"{name}: {where}: {wrong.message}", field=field, hint=wrong.hint)


def refuse_repeats(name: str, body: bytes, again: bytes, *, tight: bool) -> None:
    """ContractViolation when `body` names a member twice. `again` encodes what was read from it."""
    if tight and len(again) == len(body):
        return
    if _strings(again) == _strings(body):
        return
    _refuse_repeats_in(name, body, _parse(name, body))


def _strings(text: bytes) -> int:
    """Twice the number of strings in a JSON text."""
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    return text.count(b'"')


def _parse(name: str, body: bytes) -> Any:
    """The whole body as JSON, with the fields that its contract does not know."""
    try:
        value = _ANY.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        fail(name, body, error)
    if not is_within_depth(body, DEPTH_MAX + 1):  # the envelope itself is one level more
        raise too_deep()
    return value


def _refuse_repeats_in(name: str, body: bytes, value: Any) -> None:
    if _strings(ENCODE(value)) == _strings(body):
        return
    field = _repeated(body)
    raise ContractViolation(
        f"{name}: {field} stands twice in one object", field=field, hint="Readers differ in which of the two they take."
    )


def _repeated(body: bytes) -> str:
    """The first name that occurs twice in one object of a valid text."""
    repeats: list[str] = []

    def look(members: list[tuple[str, Any]]) -> None:
        repeat = first_repeat(name for name, _ in members)
        if repeat is not None:
            repeats.append(repeat)

    _look_at_objects(body, look)
    return repeats[0]


def first_repeat(names: Iterable[str]) -> str | None:
    """The first name that is among those before it."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def is_acceptable(body: bytes) -> bool:
    """Whether a body is within the limits that a look at its bytes can prove. False: look closer."""
    return len(body) <= BODY_BYTES_MAX and not may_be_crowded(body)


def may_be_crowded(body: bytes) -> bool:
    """Whether an object in this text can have more than MEMBERS_MAX members. A text of usual size is not looked at."""
    return len(body) > _CROWDED_BYTES and body.count(b":") > MEMBERS_MAX


def _refuse_crowds(name: str, body: bytes) -> None:
    """ContractViolation when an object has too many members. What is not JSON is left to the decoder."""

    def look(members: list[tuple[str, Any]]) -> None:
        if len(members) > MEMBERS_MAX:
            raise ContractViolation(
                f"{name}: an object has {len(members)} members, more than {MEMBERS_MAX}",
                hint="Send several messages, or a list.",
            )

    with contextlib.suppress(ValueError, RecursionError):  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        _look_at_objects(body, look)


def _look_at_objects(body: bytes, look: Callable[[list[tuple[str, Any]]], None]) -> None:
    """Show the members of each object, as they are in the text, the innermost object first."""
    import json  # only for bodies that are unusual or wrong

    json.loads(body, object_pairs_hook=look, parse_int=str, parse_float=str)


def is_within_depth(body: bytes, depth: int) -> bool:
    """Whether a valid JSON text nests at most `depth` arrays and objects. Works on bytes, so it cannot overflow."""
    if body.count(b"[") + body.count(b"{") <= depth:
        return True
    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    outside_strings = b"".join(body.split(b'"')[::2])
    brackets = outside_strings.translate(_TO_ONE_BRACKET, _NOT_BRACKETS)
    for _ in range(depth):
        if not brackets:
            break
        brackets = brackets.replace(b"[]", b"")  # takes away the innermost level everywhere
    return not brackets


def _check_version(name: str, found: object, field: str, version: str) -> None:
    if isinstance(found, str) and found != version:
        raise UnsupportedVersion(
            f"{name}: {field} {found[:40]!r} is not supported",
            version=found,
            field=field,
            hint=f"This process knows {version!r}.",
        )


def fail(name: str, body: bytes, error: Exception, within: str = "") -> NoReturn:
    """Raise what a codec error means, naming the field."""
    if isinstance(error, RecursionError):
        raise too_deep() from None
    if isinstance(error, msgspec.ValidationError):
        field, wrong = _field_and_wrong(str(error))
        field = ".".join(part for part in (within, field) if part)
        raise ContractViolation(f"{name}: {field or 'body'}: {wrong}", field=field) from None
    wrong = _malformed(body, error)
    raise ContractViolation(f"{name}: {within or 'body'}: {wrong}", field=within) from None


def _field_and_wrong(text: str) -> tuple[str, str]:
    """msgspec's sentence as a path and what is wrong there: `$.actor.id` → `actor.id`."""
    head, at, path = text.rpartition(_AT)
    is_split = at and not (head.startswith(_UNKNOWN) and not head.endswith("`"))  # a sender's name may look like a path
    text, path = (head, path.removeprefix(".").removesuffix("`")) if is_split else (text, "")
    member = _MEMBER.fullmatch(text)
    if member:
        field = member.group(2)[:NAME_CHARS_MAX]
        path = f"{path}.{field}" if path else field
        return path, "is required" if member.group(1) == "missing required" else "is not a field of this contract"
    return path, text[0].lower() + text[1:]


def _malformed(body: bytes, error: Exception) -> str:
    if not body.strip():
        return "is empty"
    if body.startswith(b"\xef\xbb\xbf"):
        return "starts with a byte order mark; JSON is UTF-8 without one"
    try:
        body.decode()
    except UnicodeDecodeError as bad:
        return f"is not UTF-8: bad byte at position {bad.start}"
    if _LONE_SURROGATE.search(body):
        return "has a \\u escape that is half of a surrogate pair, which is no character"
    text = str(error)
    return "is cut off" if "truncated" in text else f"is not JSON: {text.removeprefix('JSON is malformed: ')}"
