"""The way to NATS: one client for publishing, pulling, requests, direct reads, key-value and the control plane."""

from typing import TYPE_CHECKING

from oncewire._ground.lazy import exports

if TYPE_CHECKING:
    from oncewire._ground.jetstream.client import Client, connect
    from oncewire._ground.jetstream.fast import Ingested
    from oncewire._ground.jetstream.keyvalue import Entry, KeyValue
    from oncewire._ground.jetstream.options import Options, State, options_from
    from oncewire._ground.jetstream.protocol import Message
    from oncewire._ground.jetstream.publish import Outgoing, PubAck
    from oncewire._ground.jetstream.pull import Delivery, Pull, parse_reply
    from oncewire._ground.jetstream.reader import Reader, Start
    from oncewire._ground.jetstream.stored import StoredMessage
    from oncewire._ground.jetstream.wire import ServerInfo

__all__ = [
    "Client",
    "Delivery",
    "Entry",
    "Ingested",
    "KeyValue",
    "Message",
    "Options",
    "Outgoing",
    "PubAck",
    "Pull",
    "Reader",
    "ServerInfo",
    "Start",
    "State",
    "StoredMessage",
    "connect",
    "options_from",
    "parse_reply",
]

__getattr__ = exports(
    __name__,
    {
        "Client": "oncewire._ground.jetstream.client",
        "Delivery": "oncewire._ground.jetstream.pull",
        "Entry": "oncewire._ground.jetstream.keyvalue",
        "Ingested": "oncewire._ground.jetstream.fast",
        "KeyValue": "oncewire._ground.jetstream.keyvalue",
        "Message": "oncewire._ground.jetstream.protocol",
        "Options": "oncewire._ground.jetstream.options",
        "Outgoing": "oncewire._ground.jetstream.publish",
        "PubAck": "oncewire._ground.jetstream.publish",
        "Pull": "oncewire._ground.jetstream.pull",
        "Reader": "oncewire._ground.jetstream.reader",
        "ServerInfo": "oncewire._ground.jetstream.wire",
        "Start": "oncewire._ground.jetstream.reader",
        "State": "oncewire._ground.jetstream.options",
        "StoredMessage": "oncewire._ground.jetstream.stored",
        "connect": "oncewire._ground.jetstream.client",
        "options_from": "oncewire._ground.jetstream.options",
        "parse_reply": "oncewire._ground.jetstream.pull",
    },
)
