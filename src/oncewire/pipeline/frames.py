"""Finds the messages in what a socket gave with numpy, and proves that they are the messages. No socket, no clock.

A delivery of a pull consumer is one line, then counted bytes:

    MSG  <subject> <sid> <reply> <size>            CRLF  payload          CRLF
    HMSG <subject> <sid> <reply> <head> <size>     CRLF  headers payload  CRLF
    reply: $JS.ACK.<stream>.<consumer>.<deliveries>.<sequence>.<consumer sequence>.<time in ns>.<pending>

Every line of the buffer that ends like that is a *candidate*, also one inside a payload that only looks like a frame.
The proof is the chain: the buffer begins at a frame; a frame's own size says where the next one begins; so a candidate
is a frame exactly when a chain of frames from the start of the buffer leads to it. Whole runs of candidates that follow
each other without a break are taken at once.

What no candidate explains (a PING, a status of the server, an answer to a request, an odd spelling) goes to the
client's own parser, up to the next candidate at which that parser stands between two frames: from there on the chain
is proven again. A buffer never needs to be guessed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oncewire._ground import native
from oncewire._ground.jetstream.protocol import LINE_BYTES_MAX, Event, Parser

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]
Bits = NDArray[np.bool_]

SIZE_DIGITS_MAX = 8
"""64 MiB have eight digits: longer sizes are for the exact parser to refuse."""
NUMBER_DIGITS_MAX = 19
"""Nanoseconds since 1970 have that many; what does not fit into 63 bits shows as negative."""
LINE_BYTES_MIN = 4
BUFFER_BYTES_MIN = 32
"""Below this there is nothing to gain, and words of eight bytes would reach over the edge."""
DELIVERY_BYTES_MIN = len(b"MSG a1.1.1.1.1 0\r\n\r\n")
ANSWER_DIGITS = 10
PUB_ACK = b'{"stream":"'
_WORD = 8
_WINDOW = 64
_CR, _LF, _BLANK, _DOT = 13, 10, 32, 46
_u8 = np.uint64
_ZERO = np.uint8(0x30)
_ZEROS = _u8(0x3030303030303030)
_SIXES = _u8(0x0606060606060606)
_HIGH_NIBBLES = _u8(0xF0F0F0F0F0F0F0F0)
_HIGH_BITS = _u8(0x8080808080808080)
_LOW_BITS = _u8(0x0101010101010101)


@dataclass(frozen=True)
class Cuts:
    """Proven messages as positions in one buffer, a row each. Nothing is copied yet."""

    subject_start: Ints
    subject_end: Ints
    header_start: Ints
    payload_start: Ints
    payload_end: Ints
    sequence: Ints
    consumer_sequence: Ints
    timestamp_ns: Ints
    pending: Ints

    def __len__(self) -> int:
        return len(self.sequence)

    def first(self, count: int) -> Cuts:
        return Cuts(**{name: column[:count] for name, column in vars(self).items()})


_DELIVERY_COLUMNS = tuple(field.name for field in fields(Cuts))
_DELIVERY = re.compile(rb"H?MSG \S+ (\d{1,8}) (\$JS\.ACK\.\S+) (?:\d+ )?\d+\r\n")


@dataclass(frozen=True)
class Expected:
    """What every delivery to one reader has in common: the bytes between its subject and its numbers."""

    between: bytes

    @classmethod
    def of(cls, sid: int, reply: bytes) -> Expected:
        """From the reply of any delivery: all of them share everything before their five numbers."""
        return cls(b" %d %b." % (sid, reply.rsplit(b".", 5)[0]))

    @classmethod
    def seen_in(cls, buffer: Bytes) -> Expected | None:
        """From the first line of a buffer that begins at a frame; None when that is no delivery."""
        found = _DELIVERY.match(buffer[:LINE_BYTES_MAX].tobytes())
        return cls.of(int(found[1]), found[2]) if found else None


Piece = Cuts | list[Event]
"""In the order of the stream: messages that were proven, or what the exact parser made of the rest."""


@dataclass(frozen=True)
class Answers:
    """Proven PubAcks as positions in one buffer, by the number at the end of their inbox."""

    number: Ints
    payload_start: Ints
    payload_end: Ints


def split(buffer: Bytes, expected: Expected | None) -> tuple[list[Piece], int]:
    """All complete frames of a buffer that begins at a frame, and how many bytes they take."""
    found = _deliveries(buffer, expected) if expected and len(buffer) >= BUFFER_BYTES_MIN else None
    return _walk(buffer, found)


def split_answers(buffer: Bytes, inbox: bytes) -> tuple[list[Any], int]:
    """The same for the answers to publishes under `<inbox>.<number of ANSWER_DIGITS digits>`: Answers or events."""
    found = _answers(buffer, inbox) if len(buffer) >= BUFFER_BYTES_MIN else None
    return _walk(buffer, found)


def _walk(buffer: Bytes, found: _Candidates | None) -> tuple[list[Any], int]:
    pieces: list[Any] = []
    position = 0
    while position < len(buffer):
        run = found.run_at(position) if found else None
        if found and run:
            pieces.append(found.cuts(*run))
            position = int(found.ends[run[1] - 1])
            continue
        events, reached, is_complete = _exact(buffer, position, found)
        if events:
            pieces.append(events)
        position = reached
        if not is_complete:
            break
    return pieces, position


def _exact(buffer: Bytes, position: int, found: _Candidates | None) -> tuple[list[Event], int, bool]:
    """The exact parser from `position` to the next candidate where it stands between frames, or to the end."""
    parser = Parser()
    events: list[Event] = []
    for stop in found.starts_after(position) if found else [len(buffer)]:
        events += parser.feed(buffer[position:stop].tobytes())
        position = stop
        if not parser.held_bytes:
            return events, position, True
    return events, position - parser.held_bytes, False


class _Candidates:
    """Every line of the buffer that looks like what is expected and whose bytes are all there."""

    def __init__(
        self, buffer: Bytes, starts: Ints, ends: Ints, kind: type[Cuts] | type[Answers], columns: dict[str, Any]
    ) -> None:
        self.buffer = buffer
        self._kind = kind
        self.starts = starts
        self.ends = ends
        self._columns = columns
        self._breaks = np.flatnonzero(starts[1:] != ends[:-1]) + 1
        """Where a candidate does not begin at the end of the one before it."""

    def run_at(self, position: int) -> tuple[int, int] | None:
        """The candidates that chain from `position`, as a half-open range; None when none begins there."""
        first = int(np.searchsorted(self.starts, position))
        if first == len(self.starts) or self.starts[first] != position:
            return None
        following = int(np.searchsorted(self._breaks, first, side="right"))
        return first, int(self._breaks[following]) if following < len(self._breaks) else len(self.starts)

    def starts_after(self, position: int) -> Iterator[int]:
        for index in range(int(np.searchsorted(self.starts, position, side="right")), len(self.starts)):
            yield int(self.starts[index])
        yield len(self.buffer)

    def cuts(self, first: int, end: int) -> Cuts | Answers:
        return self._kind(**{name: column[first:end] for name, column in self._columns.items()})


def _deliveries(buffer: Bytes, expected: Expected) -> _Candidates:
    if native.deliveries is not None:
        return _compiled_deliveries(buffer, expected.between)
    starts, line_ends = _lines(buffer)
    first = buffer[starts]
    is_headed = first == ord("H")
    at = np.flatnonzero(is_headed | (first == ord("M")))
    return _parsed(buffer, starts[at], line_ends[at], is_headed[at], expected)


def _compiled_deliveries(buffer: Bytes, between: bytes) -> _Candidates:
    """The same in one pass. It does not look inside of what it has found, so it may find less, never another chain."""
    assert native.deliveries is not None
    table = np.empty((2 + len(_DELIVERY_COLUMNS), len(buffer) // (len(between) + DELIVERY_BYTES_MIN) + 1), np.int64)
    starts, ends, *columns = table[:, : native.deliveries(buffer, between, table)]
    return _Candidates(buffer, starts, ends, Cuts, dict(zip(_DELIVERY_COLUMNS, columns, strict=True)))


def _answers(buffer: Bytes, inbox: bytes) -> _Candidates:
    """`MSG <inbox>.<number> 1 <size>` with a payload that begins as a PubAck does; an error begins otherwise."""
    starts, line_ends = _lines(buffer)
    size, at, is_good = _number_before(buffer, line_ends, SIZE_DIGITS_MAX)
    number_end = at - len(b" 1 ")
    is_good &= _has_before(buffer, at, b" 1 ")
    number, number_start, good = _number_before(buffer, np.maximum(number_end, 0), ANSWER_DIGITS)
    before = b"MSG %b." % inbox
    is_good &= good & (number_start == starts + len(before)) & _has_before(buffer, number_start, before)
    payload_end = line_ends + 2 + size
    is_good &= _has_crlf(buffer, payload_end) & (size >= len(PUB_ACK))
    is_good &= _has_before(buffer, np.minimum(line_ends + 2 + len(PUB_ACK), len(buffer)), PUB_ACK)
    keep = np.flatnonzero(is_good)
    columns = {"number": number[keep], "payload_start": line_ends[keep] + 2, "payload_end": payload_end[keep]}
    return _Candidates(buffer, starts[keep], payload_end[keep] + 2, Answers, columns)


def _lines(buffer: Bytes) -> tuple[Ints, Ints]:
    """Start and end of everything that stands between two CRLF: lines, and pieces of payloads."""
    ends = _places(buffer[:-1] == _CR)
    ends = ends[buffer[ends + 1] == _LF]
    starts = np.empty_like(ends)
    starts[:1] = 0
    starts[1:] = ends[:-1] + 2
    is_long = ends - starts >= LINE_BYTES_MIN
    return starts[is_long], ends[is_long]


def _places(bits: Bits) -> Ints:
    """Where few of many are true: 64 at a time are looked at, and mostly there is none, or one."""
    whole = len(bits) & ~63
    words = np.packbits(bits[:whole], bitorder="little").view("<u8")
    at = np.flatnonzero(words)
    word = words[at]
    if (word & (word - _u8(1))).any():
        return np.flatnonzero(bits)
    exponent = word.astype(np.float64).view(np.int64) >> 52  # a power of two is exact as a float
    return np.concatenate((at * 64 + (exponent - 1023), np.flatnonzero(bits[whole:]) + whole))


def _parsed(buffer: Bytes, starts: Ints, line_ends: Ints, is_headed: Bits, expected: Expected) -> _Candidates:
    """Read each line from its end backwards; drop the lines that are not deliveries."""
    read = _Tails(buffer, line_ends, is_headed, expected.between)
    subject_start = starts + 4 + is_headed
    payload_end = line_ends + 2 + read.size
    is_good = read.is_good & (read.at > subject_start) & _has_crlf(buffer, payload_end)
    is_good &= _every(buffer, _MSG.dtype)[subject_start - 4] == _MSG
    is_good &= _are_tokens(buffer, subject_start, read.at, is_good)
    columns = {
        "subject_start": subject_start,
        "subject_end": read.at,
        "header_start": line_ends + 2,
        "payload_start": line_ends + 2 + read.head,
        "payload_end": payload_end,
        "sequence": read.sequence,
        "consumer_sequence": read.consumer_sequence,
        "timestamp_ns": read.timestamp_ns,
        "pending": read.pending,
    }
    ends = payload_end + 2
    if not is_good.all():
        columns = {name: column[is_good] for name, column in columns.items()}
        starts, ends = starts[is_good], ends[is_good]
    return _Candidates(buffer, starts, ends, Cuts, columns)


def _every(buffer: Bytes, kind: np.dtype[Any]) -> Any:
    """What begins at each byte of the buffer, as values of this kind."""
    return np.ndarray((len(buffer) - kind.itemsize + 1,), kind, buffer, strides=(1,))


_MSG = np.frombuffer(b"MSG ", "<u4")[0]
_TAIL = re.compile(rb"(\d{1,19})\.(\d{1,19})\.(\d{1,19})\.(\d{1,19})\.(\d{1,19}) (?:(\d{1,8}) )?(\d{1,8})\Z")
_TAIL_BYTES_MAX = 5 * (NUMBER_DIGITS_MAX + 1) + 2 * (SIZE_DIGITS_MAX + 1)
_LAYOUTS_MAX = 4


class _Layout:
    """The end of a line whose numbers have certain widths, as a row of bytes to lay on other lines.

    Xored with `pattern`, what all deliveries share becomes zero and digits become their values: `limits` says how large
    each byte may be then. `words` says of each number which eight digits to read where, the highest first.
    """

    def __init__(self, between: bytes, tail: re.Match[bytes]) -> None:
        numbers = re.sub(rb"\d", b"0", tail[0])
        self.width = len(between) + len(numbers)
        self.pattern = np.frombuffer(between + numbers, np.uint8)
        self.limits = np.frombuffer(bytes(len(between)) + bytes(9 * (one == ord("0")) for one in numbers), np.uint8)
        self.has_head = tail[6] is not None
        moved = len(between) - tail.start()
        spans = [tail.span(group) for group in range(2, 8) if tail[group] is not None]
        self.words = [
            [
                (end + moved, min(_WORD, end - first))
                for end in range(last - (last - first - 1) // _WORD * _WORD, last + 1, _WORD)
            ]
            for first, last in spans
        ]

    def values(self, window: Bytes) -> list[Ints]:
        """The numbers of lines on which the pattern was laid."""
        places = [place for places in self.words for place in places]
        digits = np.empty((len(places), len(window)), np.uint64)
        for row, (end, count) in zip(digits, places, strict=True):
            row[:] = np.ndarray((len(window),), "<u8", window, offset=end - _WORD, strides=(self.width,))
            if count < _WORD:
                row &= _u8(2**64 - 2 ** (8 * (_WORD - count)))
        joined = iter(_joined_digits(digits).view(np.int64))
        values = []
        for places in self.words:
            value = next(joined)
            for _ in places[1:]:
                value = value * 10**_WORD + next(joined)
            values.append(value)
        return values


class _Tails:
    """The numbers at the end of each line, and where what all deliveries share before them begins (`at`).

    Lines of one buffer mostly have numbers of the same widths. So the layout of one line is laid on all of them, and
    all digits of all numbers are turned into values together. Lines of other widths get some turns of their own; what
    is left is read number by number.
    """

    def __init__(self, buffer: Bytes, line_ends: Ints, is_headed: Bits, between: bytes) -> None:
        self._buffer = buffer
        self._line_ends = line_ends
        self._is_headed = is_headed
        self._between = between
        count = len(line_ends)
        self.is_good = np.zeros(count, np.bool_)
        self._columns = np.zeros((7, count), np.int64)
        self.at, self.sequence, self.consumer_sequence, self.timestamp_ns, self.pending, self.head, self.size = (
            self._columns
        )
        rows = np.arange(count)
        for _ in range(_LAYOUTS_MAX):
            if len(rows):
                rows = self._read_alike(rows)
        if len(rows):
            self._read_each(rows)
        self.is_good &= (self._columns >= 0).all(axis=0) & (self.head <= self.size)

    def _read_alike(self, rows: Ints) -> Ints:
        """Read the lines that look like the first of these rows; the others are handed back."""
        end = int(self._line_ends[rows[0]])
        first = _TAIL.search(self._buffer[max(0, end - _TAIL_BYTES_MAX) : end].tobytes())
        if first is None:
            return rows
        layout = _Layout(self._between, first)
        is_like = (self._line_ends[rows] >= layout.width) & (self._is_headed[rows] == layout.has_head)
        tried = rows[is_like]
        if not len(tried):
            return rows
        window = _every(self._buffer, np.dtype((np.void, layout.width)))[self._line_ends[tried] - layout.width]
        window = window.view(np.uint8).reshape(-1, layout.width) ^ layout.pattern
        is_same = window <= layout.limits
        if not is_same.all():
            are_same = is_same.all(axis=1)
            is_like[is_like] = are_same
            tried, window = tried[are_same], window[are_same]
        if not len(tried):
            return rows
        done: Any = tried if len(tried) < len(self._line_ends) else slice(None)
        names = (1, 2, 3, 4, 5, 6) if layout.has_head else (1, 2, 3, 4, 6)
        for name, value in zip(names, layout.values(window), strict=True):
            self._columns[name, done] = value
        self._columns[0, done] = self._line_ends[done] - layout.width
        self.is_good[done] = True
        others: Ints = rows[~is_like]
        return others

    def _read_each(self, rows: Ints) -> None:
        buffer, line_ends = self._buffer, self._line_ends[rows]
        size, at, is_good = _number_before(buffer, line_ends, SIZE_DIGITS_MAX)
        head, at, is_good = _head_before(buffer, at, self._is_headed[rows], is_good)
        at, is_good = _expect(buffer, at, _BLANK, is_good)
        found = []
        for place in range(5):
            value, at, good = _number_before(buffer, at, NUMBER_DIGITS_MAX)
            found.append(value)
            is_good &= good
            if place < 4:
                at, is_good = _expect(buffer, at, _DOT, is_good)
        pending, timestamp_ns, consumer_sequence, sequence, _ = found
        is_good &= _has_before(buffer, at, self._between)
        at = at - len(self._between)
        self._columns[:, rows] = (at, sequence, consumer_sequence, timestamp_ns, pending, head, size)
        self.is_good[rows] = is_good


def _joined_digits(word: Any) -> Any:
    """Eight digits, the lowest in the highest byte, as one number each, in place: pairs, then fours, then eights."""
    for factor, shift, mask in _JOINTS:
        lower = word >> shift
        word *= factor
        word += lower
        word &= mask
    return word


_JOINTS = (
    (_u8(10), _u8(8), _u8(0x00FF00FF00FF00FF)),
    (_u8(100), _u8(16), _u8(0x0000FFFF0000FFFF)),
    (_u8(10_000), _u8(32), _u8(0x00000000FFFFFFFF)),
)


def _number_before(buffer: Bytes, end: Ints, digits_max: int) -> tuple[Ints, Ints, Bits]:
    """The decimal number that ends before `end`: its value, where it begins, and whether there is one that fits."""
    value, digits = _eight_before(buffer, end)
    scale = 10**_WORD
    rows = np.flatnonzero(digits == _WORD)
    while len(rows) and digits_max > _WORD and scale < 10**NUMBER_DIGITS_MAX:
        higher, more = _eight_before(buffer, end[rows] - digits[rows])
        value[rows] += higher * np.int64(scale)
        digits[rows] += more
        rows = rows[more == _WORD]
        scale *= 10**_WORD
    return value, end - digits, (digits > 0) & (digits <= digits_max) & (value >= 0)


def _eight_before(buffer: Bytes, end: Ints) -> tuple[Ints, Ints]:
    """Value and count of the digits that end before `end`, eight at most, by arithmetic on words of eight bytes.

    The byte nearest to `end` is the highest of its word. Bytes below the lowest digit are cleared, so that they count
    as leading zeros; then pairs, fours and eights of digits are joined.
    """
    words = np.ndarray((len(buffer) - _WORD + 1,), np.dtype("<u8"), buffer, strides=(1,))
    word = words[np.maximum(end - _WORD, 0)] ^ _ZEROS
    odd = (word | ((word & ~_HIGH_BITS) + _SIXES)) & _HIGH_NIBBLES  # without its high bit no byte can carry
    odd |= odd << _u8(1)
    odd |= odd << _u8(2)
    other = (odd & _HIGH_BITS).view(np.uint64)
    for shift in (1, 2, 4, 8, 16, 32):
        other |= other >> _u8(shift)
    cleared = ((other & _LOW_BITS) * _LOW_BITS) >> _u8(56)
    return _joined_digits(word & ~other).astype(np.int64), _WORD - cleared.astype(np.int64)


def _head_before(buffer: Bytes, at: Ints, is_headed: Bits, is_good: Bits) -> tuple[Ints, Ints, Bits]:
    """The length of the headers, on the lines that have them."""
    head = np.zeros(len(at), np.int64)
    rows = np.flatnonzero(is_headed)
    if len(rows):
        stop, good = _expect(buffer, at[rows], _BLANK, is_good[rows])
        head[rows], at[rows], found = _number_before(buffer, stop, SIZE_DIGITS_MAX)
        is_good[rows] = good & found
    return head, at, is_good


def _expect(buffer: Bytes, at: Ints, byte: int, is_good: Bits) -> tuple[Ints, Bits]:
    """Step back over one byte that must be this one."""
    before = np.maximum(at - 1, 0)
    return before, is_good & (buffer[before] == byte)


def _has_before(buffer: Bytes, end: Ints, wanted: bytes) -> Bits:
    """Whether exactly these bytes stand before each position, compared eight at a time."""
    is_there: Bits = end >= len(wanted)
    first = np.where(is_there, end - len(wanted), 0)
    width = min(_WORD, len(wanted))
    kind = np.dtype(f"<u{width}") if width in (4, 8) else np.dtype(np.uint8)
    words = np.ndarray((len(buffer) - kind.itemsize + 1,), kind, buffer, strides=(1,))
    for offset in [*range(0, len(wanted) - kind.itemsize, kind.itemsize), len(wanted) - kind.itemsize]:
        word = np.frombuffer(wanted, kind, count=1, offset=offset)[0]
        is_there &= words[np.minimum(first + offset, len(words) - 1)] == word
    return is_there


def _has_crlf(buffer: Bytes, at: Ints) -> Bits:
    is_there: Bits = at + 2 <= len(buffer)
    safe = np.where(is_there, at, 0)
    is_there &= (buffer[safe] == _CR) & (buffer[safe + 1] == _LF)
    return is_there


def _are_tokens(buffer: Bytes, start: Ints, end: Ints, is_good: Bits) -> Bits:
    """Whether a subject is free of blanks and control characters, which would make it several words."""
    rows = np.flatnonzero(is_good)
    result = np.zeros(len(is_good), np.bool_)
    if not len(rows):
        return result
    start, end = start[rows], end[rows]
    if (end - start).max() < _WINDOW and int(start[-1]) + _WINDOW <= len(buffer):
        window = _every(buffer, np.dtype((np.void, _WINDOW)))[start].view(np.uint8)
        blanks = np.packbits(window <= _BLANK, bitorder="little").view("<u8")
        result[rows] = blanks & ((_u8(1) << (end - start).astype(np.uint64)) - _u8(1)) == 0
    else:
        edges = np.column_stack((start, end)).ravel()  # in order: lines do not overlap
        result[rows] = np.minimum.reduceat(buffer, edges)[::2] > _BLANK
    return result
