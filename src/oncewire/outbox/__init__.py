"""What PostgreSQL committed reaches JetStream, in order and once.

`enqueue` writes a message in your own transaction; a relay publishes every committed one.

    enqueueing, drivers in the user's transaction, on the user's connection
    rules               what a relay decides; pure
    conversations       claim, publish, mark                publish  the way into the stream
    messages            the same for the general outbox     wake     being woken by writers
    relay               the loops around them               purge, inspect  what people do with it
    sql/                tables, functions, named queries
"""

from typing import TYPE_CHECKING

from oncewire._ground.lazy import exports

if TYPE_CHECKING:
    from oncewire.outbox.enqueueing import (
        Enqueued,
        NewMessage,
        enqueue,
        enqueue_async,
        enqueue_many,
        enqueue_many_async,
        enqueue_message,
        enqueue_message_async,
    )
    from oncewire.outbox.relay import Relay, RelayOptions, options_of, relaying

__all__ = [
    "Enqueued",
    "NewMessage",
    "Relay",
    "RelayOptions",
    "enqueue",
    "enqueue_async",
    "enqueue_many",
    "enqueue_many_async",
    "enqueue_message",
    "enqueue_message_async",
    "options_of",
    "relaying",
]

_ENQUEUE = "oncewire.outbox.enqueueing"
_RELAY = "oncewire.outbox.relay"

__getattr__ = exports(
    __name__,
    {
        "Enqueued": _ENQUEUE,
        "NewMessage": _ENQUEUE,
        "Relay": _RELAY,
        "RelayOptions": _RELAY,
        "enqueue": _ENQUEUE,
        "enqueue_async": _ENQUEUE,
        "enqueue_many": _ENQUEUE,
        "enqueue_many_async": _ENQUEUE,
        "enqueue_message": _ENQUEUE,
        "enqueue_message_async": _ENQUEUE,
        "options_of": _RELAY,
        "relaying": _RELAY,
    },
)
