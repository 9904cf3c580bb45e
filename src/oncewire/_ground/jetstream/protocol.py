"""The NATS client protocol, bytes in and events out. Pure: no socket, no clock, no async.

What a server sends is lines that end in CRLF; two of them carry bytes after the line:

    INFO {json}                                     what the server is; again when something changes
    MSG <subject> <sid> [reply] <size>              then size bytes and CRLF
    HMSG <subject> <sid> [reply] <head> <size>      then size bytes, the first `head` of them headers, and CRLF
    PING | PONG | +OK | -ERR '<text>'

`Parser.feed` takes what a socket read gave, in any cut, and returns the events that are complete. It never guesses:
a line that breaks the protocol raises ProtocolViolation, which names the line, and the connection must be dropped,
since nobody knows where the next frame begins.

Payloads are counted, never searched, so a payload that looks like a frame is a payload. What is incomplete is kept in
pieces and joined once enough is there, so that an 8 MiB message in 64 KiB reads is copied once and not 128 times.

The encoder half builds the frames that a client sends. Everything that goes into a line (subjects, header names and
values) is validated here, so that no value can break out of its line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Final

import msgspec

from oncewire._ground import native
from oncewire._ground.errors import ContractViolation, ProtocolViolation

LINE_BYTES_MAX: Final = 256 * 1024
"""The longest control line accepted: an INFO that lists thousands of cluster addresses fits."""
FRAME_BYTES_MAX: Final = 64 * 1024 * 1024 + 64 * 1024
"""The largest payload with headers accepted: NATS allows 64 MiB at most."""
SUBJECT_BYTES_MAX: Final = 4_000
"""Below the server's own limit of 4,096 for a whole line."""
HEADER_BYTES_MAX: Final = 16 * 1024
"""The most that the headers of one published message may take."""

HEADER_LINE: Final = b"NATS/1.0"
CRLF: Final = b"\r\n"
PING: Final = b"PING\r\n"
PONG: Final = b"PONG\r\n"

MSG_ID: Final = "Nats-Msg-Id"


class Message(msgspec.Struct, gc=False, weakref=False):
    """A message as it stands on the wire. Subject, reply and headers are decoded when somebody asks for them."""

    sid: int
    subject_raw: bytes
    reply: bytes
    header_raw: bytes
    payload: bytes

    @property
    def subject(self) -> str:
        return self.subject_raw.decode("utf-8", "surrogateescape")

    @property
    def headers(self) -> dict[str, str]:
        """The headers; of a name that stands several times the first value, as the server itself reads them."""
        return parse_headers(self.header_raw)

    @property
    def status(self) -> int:
        """The status of a message that the server itself made (404, 503, …), 0 for all others."""
        return parse_status(self.header_raw)[0]


class Info(msgspec.Struct):
    """The server's INFO line as it came."""

    body: dict[str, object]


class Ping(msgspec.Struct):
    """The server asks whether we are there."""


class Pong(msgspec.Struct):
    """The answer to our PING: everything that we sent before it has been read."""


class Okay(msgspec.Struct):
    """An answer that only verbose connections get."""


class ServerError(msgspec.Struct):
    """An -ERR line, without its quotes."""

    text: str


Event = Message | Info | Ping | Pong | Okay | ServerError

_decode_info = msgspec.json.Decoder(dict[str, object]).decode


class Parser:
    """Turns the server's bytes into events. Keeps what is incomplete between calls."""

    __slots__ = ("_chunks", "_held", "_is_in_line", "_need")

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        self._held = 0
        self._need = 0
        self._is_in_line = False

    @property
    def held_bytes(self) -> int:
        """How much is kept of a frame that is not complete."""
        return self._held

    def feed(self, data: bytes) -> list[Event]:
        """Take what a read gave; return the events that it completed, in order."""
        if self._held:
            self._chunks.append(data)
            self._held += len(data)
            if self._held < self._need:
                return []
            if self._is_in_line and b"\n" not in data:  # joining for each piece of a long line would be quadratic
                self._check_open_line(self._chunks[0], self._held)
                return []
            data = b"".join(self._chunks)
            self._chunks.clear()
            self._held = 0
        events: list[Event] = []
        pos = self._parse(data, events)
        if pos < len(data):
            rest = data[pos:] if pos else data
            self._chunks.append(rest)
            self._held = len(rest)
            self._need -= pos
        return events

    def _parse(self, data: bytes, events: list[Event]) -> int:
        """Append every complete event; return where the first incomplete one begins, with `_need` set past it."""
        find, add, size, numbers = data.find, events.append, len(data), _NUMBERS
        pos = 0
        while pos < size:
            if native.messages is not None:
                pos = native.messages(data, pos, Message, events)
                if pos == size:
                    break
            end = find(CRLF, pos)
            if end < 0:
                self._check_open_line(data[pos : pos + 40], size - pos)
                self._need = size + 1
                self._is_in_line = True
                return pos
            kind = data[pos]
            if kind != 77 and kind != 72:  # M, H: the two that carry bytes
                add(_parse_line(data[pos:end]))
                pos = end + 2
                continue
            line = data[pos:end].split()
            words = len(line)
            if line[0] == b"MSG" and (words == 5 or words == 4):
                head = 0
            elif line[0] == b"HMSG" and (words == 6 or words == 5):
                head = numbers.get(line[-2]) or _number(line[-2], line)
                words -= 1
            else:
                raise ProtocolViolation(f"not a line of the NATS protocol: {_shown(line)}")
            length = numbers.get(line[-1]) or _number(line[-1], line)
            start = end + 2
            stop = start + length
            if length > FRAME_BYTES_MAX or head > length:
                raise ProtocolViolation(f"a frame has an impossible size: {_shown(line)}")
            if size < stop + 2:
                self._need = stop + 2
                self._is_in_line = False
                return pos
            if data[stop : stop + 2] != CRLF:
                raise ProtocolViolation(f"a payload of {length} bytes is not followed by CRLF: {_shown(line)}")
            sid = numbers.get(line[2]) or _number(line[2], line)
            body = start + head
            reply = line[3] if words == 5 else b""
            add(Message(sid, line[1], reply, data[start:body] if head else b"", data[body:stop]))
            pos = stop + 2
        return pos

    @staticmethod
    def _check_open_line(begin: bytes, size: int) -> None:
        if size > LINE_BYTES_MAX:
            raise ProtocolViolation(f"a line is longer than {LINE_BYTES_MAX} bytes: {_shown([begin[:40]])}")


_NUMBERS: dict[bytes, int] = {}
"""Sizes and ids seen lately: a few hundred tokens cover nearly every line, and a look-up beats checking and parsing."""
_NUMBERS_MAX: Final = 4096


def _number(token: bytes, line: list[bytes]) -> int:
    """A size or an id: plain digits, since int() would also take signs, spaces and underscores."""
    if not token.isdigit() or len(token) > 18:
        raise ProtocolViolation(f"a size or id is not a number: {_shown(line)}")
    value = int(token)
    if len(_NUMBERS) < _NUMBERS_MAX:
        _NUMBERS[token] = value
    return value


def _parse_line(line: bytes) -> Event:
    if line == b"PING":
        return Ping()
    if line == b"PONG":
        return Pong()
    if line == b"+OK":
        return Okay()
    if line[:5] == b"-ERR ":
        return ServerError(line[5:].strip().strip(b"'").decode("utf-8", "replace"))
    if line[:5] == b"INFO ":
        try:
            return Info(_decode_info(line[5:]))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolViolation(f"INFO is not a JSON object: {error}") from None
    raise ProtocolViolation(f"not a line of the NATS protocol: {_shown([line])}")


def _shown(words: Sequence[bytes]) -> str:
    text = b" ".join(words)
    return repr(text[:80]) + ("…" if len(text) > 80 else "")


# ---- headers


def parse_headers(raw: bytes) -> dict[str, str]:
    """All headers by name. Of a name that stands several times the first counts, as for the server."""
    headers: dict[str, str] = {}
    if not raw:
        return headers
    for line in raw.split(CRLF)[1:]:
        name, colon, value = line.partition(b":")
        if colon:
            headers.setdefault(name.decode("utf-8", "replace"), value.strip().decode("utf-8", "surrogateescape"))
    return headers


def parse_status(raw: bytes) -> tuple[int, str]:
    """The status and its text from a header block: (0, '') when the first line carries none."""
    if raw[8:9] != b" ":
        return 0, ""
    code, _, text = raw[9 : raw.find(CRLF)].partition(b" ")
    return (int(code) if code.isdigit() and len(code) < 6 else 0), text.strip().decode("utf-8", "replace")


_FIRST_LINE = HEADER_LINE.decode()
_HEADER_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]{1,128}")
_HEADER_VALUE_BAD = re.compile(r"[\x00\r\n]")


@lru_cache(maxsize=4096)
def parse_time_ns(text: str) -> int:
    """Nanoseconds since 1970 of an RFC 3339 time in UTC, exactly: a datetime would cut them to microseconds."""
    whole, _, fraction = text.rstrip("Z").partition(".")
    try:
        seconds = int(datetime.fromisoformat(whole + "+00:00").timestamp())
        return seconds * 1_000_000_000 + int(fraction.ljust(9, "0")[:9] or 0)
    except ValueError:
        raise ContractViolation(f"{text[:40]!r} is not a UTC time") from None


@lru_cache(maxsize=1024)
def _header_name(name: str) -> str:
    if not _HEADER_NAME.fullmatch(name):
        raise ContractViolation(f"{name!r} is not a header name", hint="Use letters, digits and '-'.")
    return name + ": "


def encode_headers(headers: Mapping[str, str], bytes_max: int = HEADER_BYTES_MAX) -> bytes:
    """A header block. Refuses names and values that would break out of their line."""
    lines = [_FIRST_LINE]
    for name, value in headers.items():
        if not (value.isascii() and value.isprintable()):
            _check_value(name, value)
        lines.append(_header_name(name) + value.strip())
    block = "\r\n".join(lines).encode("utf-8", "surrogateescape") + b"\r\n\r\n"
    if len(block) > bytes_max:
        raise ContractViolation(f"the headers take {len(block)} bytes, {bytes_max} are allowed")
    return block


def _check_value(name: str, value: str) -> None:
    if _HEADER_VALUE_BAD.search(value):
        raise ContractViolation(f"the value of header {name} has a line break or NUL", field=name)
    try:
        value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise ContractViolation(f"the value of header {name} is not valid text", field=name) from None


# ---- subjects

_SUBJECT_BAD = re.compile(r"[\x00-\x20\x7f]")


@lru_cache(maxsize=16384)
def encode_subject(subject: str) -> bytes:
    """A subject to publish on: whole tokens, no wildcard, nothing that could end the line."""
    encoded = encode_filter(subject)
    if "*" in subject or ">" in subject:
        tokens = subject.split(".")
        if "*" in tokens or ">" in tokens:
            raise ContractViolation(f"{subject!r} has a wildcard", hint="Publish to one subject, without '*' and '>'.")
    return encoded


@lru_cache(maxsize=4096)
def encode_filter(subject: str) -> bytes:
    """A subject to subscribe to: wildcards are allowed, '>' only as the last token."""
    try:
        encoded = subject.encode()
    except UnicodeEncodeError:
        raise ContractViolation(f"{subject!r} is not valid text for a subject") from None
    if not encoded or len(encoded) > SUBJECT_BYTES_MAX:
        raise ContractViolation(f"a subject has 1 to {SUBJECT_BYTES_MAX} bytes, this one {len(encoded)}")
    tokens = subject.split(".")
    if "" in tokens or _SUBJECT_BAD.search(subject):
        raise ContractViolation(
            f"{subject!r} is not a subject",
            hint="Tokens are joined by single dots, without spaces or control characters.",
        )
    if ">" in tokens[:-1]:
        raise ContractViolation(f"{subject!r} has '>' before its end")
    return encoded


# ---- frames that a client sends


def encode_connect(body: Mapping[str, object]) -> bytes:
    return b"CONNECT " + msgspec.json.encode(body) + CRLF


def encode_sub(subject: bytes, sid: int, queue: bytes = b"") -> bytes:
    return b"SUB %b %b %d\r\n" % (subject, queue, sid) if queue else b"SUB %b %d\r\n" % (subject, sid)


def encode_unsub(sid: int, after: int = 0) -> bytes:
    return b"UNSUB %d %d\r\n" % (sid, after) if after else b"UNSUB %d\r\n" % sid


def encode_pub(subject: bytes, reply: bytes, payload: bytes, header: bytes = b"") -> bytes:
    """One publish. `header` is a block from `encode_headers`, empty for none."""
    if header:
        size = len(header)
        return b"HPUB %b %b %d %d\r\n%b%b\r\n" % (subject, reply, size, size + len(payload), header, payload)
    return b"PUB %b %b %d\r\n%b\r\n" % (subject, reply, len(payload), payload)


def encode_acks(replies: Iterable[bytes], verb: bytes = b"+ACK") -> bytes:
    """Many settlements in one write: the same verb for each reply subject."""
    tail = b" %d\r\n%b\r\n" % (len(verb), verb)
    joined = (tail + b"PUB ").join(replies)
    return b"PUB " + joined + tail if joined else b""
