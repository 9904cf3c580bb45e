"""Many messages at once: cut into runs, and the frames of similar ones, written at a third of the usual cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from oncewire._ground import native
from oncewire._ground.contracts.headers import is_plain
from oncewire._ground.jetstream import protocol

if TYPE_CHECKING:
    from oncewire._ground.jetstream.publish import Outgoing


_NAMES_BYTES = len("NATS/1.0\r\nNats-Msg-Id: \r\ntraceparent: \r\n\r\n")


class Plain(NamedTuple):
    """All frames, in order, some in each piece, and the size of the longest message with its headers."""

    pieces: list[bytes]
    longest: int


class Numbered(NamedTuple):
    """A text around a message's number in its batch: before it, and behind it in the first message, in those between,
    and in the last, which may be the only one."""

    before: str
    in_first: str
    between: str
    in_last: str

    def texts(self, first: int, count: int) -> list[str]:
        behind = [self.between] * count
        if count:
            behind[0] = self.in_first
            behind[-1] = self.in_last
        return [f"{self.before}{number}{text}" for number, text in enumerate(behind, start=first)]


def plain_frames(
    messages: Sequence[Outgoing], *, first: int, extra: Numbered | None, reply: Numbered | None, step: int = 1_000
) -> Plain | None:
    """What `encode_header` and `encode_pub` write for messages of one subject that carry an id and a trace and nothing
    else, numbered from `first` on, `step` of them in a piece; `extra` are header lines of our own, `reply` says where
    an answer goes. None: there is another among them, or there is none.
    """
    if not messages:
        return None
    subject, count = messages[0].subject, len(messages)
    if native.frames is not None:
        target = protocol.encode_subject(subject)
        found = native.frames(messages, type(messages[0]), target, first, extra, reply, step)
        if found is not None:
            return Plain(*found)
    names = "".join([one.msg_id + one.traceparent for one in messages])
    if not is_plain(names) or [one for one in messages if not _is_plain(one, subject)]:
        return None
    target_text = protocol.encode_subject(subject).decode()
    extras = extra.texts(first, count) if extra is not None else [""] * count
    replies = reply.texts(first, count) if reply is not None else [""] * count
    frames: list[bytes] = []
    longest = 0
    for message, lines, answer in zip(messages, extras, replies, strict=True):
        id_, trace, payload = message.msg_id, message.traceparent, message.payload
        head = _NAMES_BYTES + len(id_) + len(trace) + len(lines)
        size = head + len(payload)
        if size > longest:
            longest = size
        frames += (
            f"HPUB {target_text} {answer} {head} {size}\r\n"
            f"NATS/1.0\r\nNats-Msg-Id: {id_}\r\ntraceparent: {trace}\r\n{lines}\r\n".encode(),
            payload,
            protocol.CRLF,
        )
    size = 3 * step
    return Plain([b"".join(frames[at : at + size]) for at in range(0, len(frames), size)], longest)


def _is_plain(message: Outgoing, subject: str) -> bool:
    return (
        message.subject == subject
        and not message.headers
        and bool(message.msg_id and message.traceparent)
        and not message.expected_stream
        and message.expected_last_sequence is None
        and message.expected_last_subject_sequence is None
    )


def cut(messages: Sequence[Outgoing], count_max: int, bytes_max: int) -> list[Sequence[Outgoing]]:
    """Runs of bounded count and bytes, in order."""
    try:
        sizes = [len(message.payload) for message in messages]
    except (TypeError, AttributeError):
        return [[message] for message in messages]  # one is no message: it is refused alone
    if len(messages) <= count_max and sum(sizes) <= bytes_max:
        return [messages] if messages else []
    parts: list[Sequence[Outgoing]] = []
    part: list[Outgoing] = []
    total = 0
    for message, size in zip(messages, sizes, strict=True):
        if part and (len(part) >= count_max or total + size > bytes_max):
            parts.append(part)
            part, total = [], 0
        part.append(message)
        total += size
    return [*parts, part] if part else parts
