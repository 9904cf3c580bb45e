"""Frames of many messages that are alike, as in most batches: written at a third of the usual cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from oncewire import native
from oncewire.contracts.headers import is_plain
from oncewire.jetstream import protocol

if TYPE_CHECKING:
    from oncewire.jetstream.publish import Outgoing


_NAMES_BYTES = len("NATS/1.0\r\nNats-Msg-Id: \r\ntraceparent: \r\n\r\n")


class Plain(NamedTuple):
    """All frames, in order, some in each piece, and the size of the longest message with its headers."""

    pieces: list[bytes]
    longest: int


def plain_frames(
    messages: Sequence[Outgoing], extras: list[str], replies: list[str], step: int = 1_000
) -> Plain | None:
    """What `encode_header` and `encode_pub` write for messages of one subject that carry an id and a trace and nothing
    else, `step` of them in a piece; `extras` are header lines of our own, `replies` say where an answer goes ('' for
    none). None: there is another among them, or there is none.
    """
    if not messages:
        return None
    subject = messages[0].subject
    if native.frames is not None:
        found = native.frames(messages, type(messages[0]), protocol.encode_subject(subject), extras, replies, step)
        if found is not None:
            return Plain(*found)
    names = "".join([one.msg_id + one.traceparent for one in messages])
    if not is_plain(names) or [one for one in messages if not _is_plain(one, subject)]:
        return None
    target = protocol.encode_subject(subject).decode()
    frames: list[bytes] = []
    longest = 0
    for message, extra, reply in zip(messages, extras, replies, strict=True):
        id_, trace, payload = message.msg_id, message.traceparent, message.payload
        head = _NAMES_BYTES + len(id_) + len(trace) + len(extra)
        size = head + len(payload)
        if size > longest:
            longest = size
        frames += (
            f"HPUB {target} {reply} {head} {size}\r\n"
            f"NATS/1.0\r\nNats-Msg-Id: {id_}\r\ntraceparent: {trace}\r\n{extra}\r\n".encode(),
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
