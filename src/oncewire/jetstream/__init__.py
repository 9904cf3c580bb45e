"""The way to NATS: one client for publishing, pulling, requests, direct reads, key-value and the control plane."""

from typing import TYPE_CHECKING

from oncewire.lazy import exports

if TYPE_CHECKING:
    from oncewire.jetstream.client import Client, connect
    from oncewire.jetstream.fast import Ingested
    from oncewire.jetstream.keyvalue import Entry, KeyValue
    from oncewire.jetstream.options import Options, State, options_from
    from oncewire.jetstream.protocol import Message
    from oncewire.jetstream.publish import Outgoing, PubAck
    from oncewire.jetstream.pull import Delivery, Pull, parse_reply
    from oncewire.jetstream.reader import Reader, Start
    from oncewire.jetstream.stored import StoredMessage
    from oncewire.jetstream.wire import ServerInfo

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
        "Client": "oncewire.jetstream.client",
        "Delivery": "oncewire.jetstream.pull",
        "Entry": "oncewire.jetstream.keyvalue",
        "Ingested": "oncewire.jetstream.fast",
        "KeyValue": "oncewire.jetstream.keyvalue",
        "Message": "oncewire.jetstream.protocol",
        "Options": "oncewire.jetstream.options",
        "Outgoing": "oncewire.jetstream.publish",
        "PubAck": "oncewire.jetstream.publish",
        "Pull": "oncewire.jetstream.pull",
        "Reader": "oncewire.jetstream.reader",
        "ServerInfo": "oncewire.jetstream.wire",
        "Start": "oncewire.jetstream.reader",
        "State": "oncewire.jetstream.options",
        "StoredMessage": "oncewire.jetstream.stored",
        "connect": "oncewire.jetstream.client",
        "options_from": "oncewire.jetstream.options",
        "parse_reply": "oncewire.jetstream.pull",
    },
)
