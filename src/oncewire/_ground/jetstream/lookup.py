"""Which of these message ids stand in a stream: for those who must know what the duplicate window has forgotten."""

from __future__ import annotations

from collections.abc import Set
from typing import TYPE_CHECKING

from oncewire._ground.jetstream import protocol
from oncewire._ground.jetstream.publish import PubAck
from oncewire._ground.jetstream.pull import parse_reply
from oncewire._ground.jetstream.reader import Start

if TYPE_CHECKING:
    from oncewire._ground.jetstream.client import Client

FETCH_S = 2.0


async def find_ids(client: Client, stream: str, subject: str, ids: Set[str], start: int) -> dict[str, PubAck]:
    """One reading without bodies, from a sequence to the present end; ends early when all are found."""
    end = (await client.api(f"STREAM.INFO.{stream}"))["state"]["last_seq"]
    found: dict[str, PubAck] = {}
    if start > end:
        return found
    async with client.read(stream, subjects=[subject], start=Start(sequence=start), headers_only=True) as reader:
        while len(found) < len(ids):
            messages = await reader.fetch(timeout_s=FETCH_S)
            for message in messages:
                id_ = message.headers.get(protocol.MSG_ID, "")
                if id_ in ids:
                    found[id_] = PubAck(stream, parse_reply(message.reply).sequence, is_duplicate=True)
            if not messages or parse_reply(messages[-1].reply).pending == 0:
                break
    return found
