"""Which message ids are stored in a stream: for callers that must know what the duplicate window has forgotten."""

from __future__ import annotations

from collections.abc import Set
from typing import TYPE_CHECKING

from oncewire._ground.errors import TimedOut
from oncewire._ground.jetstream import protocol
from oncewire._ground.jetstream.publish import PubAck
from oncewire._ground.jetstream.pull import parse_reply
from oncewire._ground.jetstream.reader import Start

if TYPE_CHECKING:
    from oncewire._ground.jetstream.client import Client

SILENCE_S = 10.0


async def find_ids(client: Client, stream: str, subject: str, ids: Set[str], start: Start) -> dict[str, PubAck]:
    """One reading without bodies, from `start` to the present end; ends early when all are found.

    Raises TimedOut when the server stops delivering before the end: what was not read is not known to be missing.
    """
    end = (await client.api(f"STREAM.INFO.{stream}"))["state"]["last_seq"]
    acks: dict[str, PubAck] = {}
    if start.sequence > end:
        return acks
    async with client.read(stream, subjects=[subject], start=start, headers_only=True) as reader:
        pending = reader.pending
        while pending and len(acks) < len(ids):
            messages = await reader.fetch(timeout_s=SILENCE_S)
            if not messages:
                if not reader.pending:  # its consumer was replaced, and the rest has left the stream meanwhile
                    break
                raise TimedOut(f"{stream} delivered nothing for {SILENCE_S:.0f} s while it was searched for ids")
            for message in messages:
                id_ = message.headers.get(protocol.MSG_ID, "")
                if id_ in ids:
                    acks[id_] = PubAck(stream, parse_reply(message.reply).sequence, is_duplicate=True)
            pending = parse_reply(messages[-1].reply).pending
    return acks
