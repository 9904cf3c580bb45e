"""Publishing once beyond the duplicate window: look for the id in the target stream, publish only if it is missing.

    another caller at the same time    both find nothing, and the server drops the second within the duplicate window
    a caller after the window          finds the message

The look proves something only while the stream still holds what it once stored. Where it may not, the call is refused:
on work queues and interest streams, with limits per subject, times to live, rollups or subject transforms, and once the
stream has removed messages, by age or size, that are younger than the id may be.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from oncewire._ground.errors import NotFound, Refused
from oncewire._ground.jetstream.lookup import find_ids
from oncewire._ground.jetstream.publish import Outgoing, PubAck
from oncewire._ground.jetstream.reader import Start

if TYPE_CHECKING:
    from oncewire._ground.jetstream.client import Client

HALF: Final = 0.5
"""The part of the duplicate window within which a look and the publish after it must end."""
PLAIN_HINT: Final = (
    "Nothing was stored. Publish without once: agents that read the stream drop repeats by their ledger."
)
SLOW_HINT: Final = "Nothing was stored. Give a shorter timeout_s, or the stream a longer duplicate_window."
REMOVED_HINT: Final = (
    "Nothing was stored. If you know how old the id can be, say so: once=timedelta(hours=1), or `--once --id-age 1h`."
)
Info = dict[str, Any]


async def find_published(client: Client, message: Outgoing, once: bool | timedelta, timeout_s: float) -> PubAck | None:
    """Where the message's id is stored, None when it was never stored. Raises Refused when that cannot be known."""
    id_age = once if isinstance(once, timedelta) else None
    if id_age is not None and id_age <= timedelta():
        raise Refused(f"an id cannot be {id_age} old", hint="Give once=True, or an age above zero.")
    if not message.msg_id:
        raise Refused("publishing once needs an id", hint="Give msg_id (`--id`), or publish an envelope.")
    names = (await client.api("STREAM.NAMES", {"subject": message.subject})).get("streams") or []
    if len(names) != 1:
        raise NotFound(
            f"no stream captures {message.subject}",
            hint="Declare one and run `oncewire topology apply`, or fix the subject.",
        )
    (stream,) = names
    info = await client.api(f"STREAM.INFO.{stream}")
    look_s = info["config"].get("duplicate_window", 0) / 1e9 * HALF - timeout_s
    _refuse(message, stream, why_hidden(info["config"]), PLAIN_HINT)
    _refuse(message, stream, why_slow(look_s, timeout_s), SLOW_HINT)
    start = first_look(info, id_age)
    while True:
        begun = time.monotonic()
        acks = await find_ids(client, stream, message.subject, {message.msg_id}, start)
        if acks:
            return acks[message.msg_id]
        start = Start(sequence=info["state"]["last_seq"] + 1)
        info = await client.api(
            f"STREAM.INFO.{stream}"
        )  # afterwards: what it has removed, it may have removed meanwhile
        if time.monotonic() - begun < look_s:
            break
    _refuse(message, stream, why_removed(info, id_age), REMOVED_HINT)
    return None


def why_hidden(config: Info) -> str:
    """Why a message may leave a stream of this kind although its age and size would let it stay."""
    if config.get("retention", "limits") != "limits":
        return f"messages leave it when they are processed (retention {config['retention']})"
    if config.get("max_msgs_per_subject", -1) > 0:
        return f"it keeps {config['max_msgs_per_subject']} messages per subject"
    if config.get("allow_msg_ttl"):
        return "messages may have a time to live of their own"
    if config.get("allow_rollup_hdrs"):
        return "a rollup may replace the messages of a subject"
    if config.get("subject_transform"):
        return "it stores messages under other subjects"
    return ""


def why_slow(look_s: float, timeout_s: float) -> str:
    if look_s > 0:
        return ""
    return f"half of its duplicate window is shorter than the publish may take ({timeout_s:g} s)"


def why_removed(info: Info, id_age: timedelta | None) -> str:
    """Why the id may have been among what the stream has removed from its front, by age, size or a purge."""
    state = info["state"]
    first_ever = max(1, info["config"].get("first_seq", 0))
    if state["first_seq"] <= first_ever:
        return ""
    held_since = _time(state["first_ts"] if state["messages"] else state["last_ts"])
    if id_age is not None and held_since <= _now(info) - id_age:
        return ""
    return f"it has removed its messages from before {held_since:%Y-%m-%d %H:%M:%S} UTC"


def first_look(info: Info, id_age: timedelta | None) -> Start:
    if id_age is None:
        return Start(sequence=1)
    return Start(time=(_now(info) - id_age).isoformat().replace("+00:00", "Z"))


def _refuse(message: Outgoing, stream: str, why: str, hint: str) -> None:
    if why:
        raise Refused(f"whether {stream} ever stored id {message.msg_id} cannot be known: {why}", hint=hint)


def _now(info: Info) -> datetime:
    """The server's clock, which has also stamped its messages."""
    return _time(info["ts"])


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(UTC)
